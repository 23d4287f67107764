//! The balance item: an unfinished balance, key `(BALANCE TEMPORARY_ITEM 0)` in the root tree.

use bitflags::bitflags;

use crate::disk_struct;
use crate::profile::Profile;

bitflags! {
    /// Bits that say which filters of [`BalanceArgs`] apply.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BalanceFilters: u64 {
        /// `profiles`
        const PROFILES = 1 << 0;
        /// Block groups of which less than `usage` percent is used. `usage` is the 64-bit number whose low half is the
        /// field `usage_min` and whose high half is the field `usage_max`.
        const USAGE = 1 << 1;
        /// `devid`
        const DEVID = 1 << 2;
        /// `pstart..pend`
        const DRANGE = 1 << 3;
        /// `vstart..vend`
        const VRANGE = 1 << 4;
        /// At most `limit` block groups. `limit` is the 64-bit number whose low half is the field `limit_min` and whose
        /// high half is the field `limit_max`.
        const LIMIT = 1 << 5;
        /// `limit_min..limit_max`
        const LIMIT_RANGE = 1 << 6;
        /// `stripes_min..stripes_max`
        const STRIPES_RANGE = 1 << 7;
        /// The profile becomes `target`.
        const CONVERT = 1 << 8;
        /// With `CONVERT`: block groups that already have the profile `target` are skipped.
        const SOFT = 1 << 9;
        /// `usage_min..usage_max`
        const USAGE_RANGE = 1 << 10;
    }
}

bitflags! {
    /// The flags of a balance. Most of them select the types of the block groups to balance.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BalanceFlags: u64 {
        /// Data block groups.
        const DATA = 1 << 0;
        /// System block groups.
        const SYSTEM = 1 << 1;
        /// Metadata block groups.
        const METADATA = 1 << 2;
        /// A conversion may reduce the number of copies of metadata.
        const FORCE = 1 << 3;
    }
}

disk_struct! {
    /// The filters for one type of block groups.
    BalanceArgs {
        /// Profiles, with [`BalanceArgs::SINGLE`] for single.
        profiles: u64,
        /// Minimum usage in percent, or the low half of `usage`; see [`BalanceFilters::USAGE`].
        usage_min: u32,
        /// Maximum usage in percent, or the high half of `usage`.
        usage_max: u32,
        /// A device.
        devid: u64,
        /// Start of the range of device addresses.
        pstart: u64,
        /// End of the range of device addresses.
        pend: u64,
        /// Start of the range of logical addresses.
        vstart: u64,
        /// End of the range of logical addresses.
        vend: u64,
        /// Profile to convert to, in the same form as `profiles`.
        target: u64,
        /// Bits of [`BalanceFilters`].
        flags: u64,
        /// Minimum number of block groups, or the low half of `limit`.
        limit_min: u32,
        /// Maximum number of block groups, or the high half of `limit`.
        limit_max: u32,
        /// Minimum number of stripes.
        stripes_min: u32,
        /// Maximum number of stripes.
        stripes_max: u32,
        /// Unused.
        unused: [u64; 6],
    }
}

disk_struct! {
    /// The balance item.
    BalanceItem {
        /// [`BalanceFlags`].
        flags: u64,
        /// For data.
        data: BalanceArgs,
        /// For metadata.
        metadata: BalanceArgs,
        /// For system.
        system: BalanceArgs,
        /// Unused.
        unused: [u64; 4],
    }
}

impl BalanceArgs {
    /// Stands for the profile single, which has no bit in the flags of a block group.
    pub const SINGLE: u64 = 1 << 48;

    /// The bit that stands for a profile in `profiles` and `target`.
    pub fn profile_bit(profile: &Profile) -> u64 {
        if profile.flag.is_empty() { Self::SINGLE } else { profile.flag.bits() }
    }

    /// No filters.
    pub const NONE: Self = Self {
        profiles: 0,
        usage_min: 0,
        usage_max: 0,
        devid: 0,
        pstart: 0,
        pend: 0,
        vstart: 0,
        vend: 0,
        target: 0,
        flags: 0,
        limit_min: 0,
        limit_max: 0,
        stripes_min: 0,
        stripes_max: 0,
        unused: [0; 6],
    };

    /// The filters in force. Unknown bits are ignored, as in Linux.
    pub fn filters(&self) -> BalanceFilters {
        BalanceFilters::from_bits_truncate(self.flags)
    }
}
