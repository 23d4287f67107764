//! The profiles of chunks: how many copies and parities a chunk has, and how its bytes are divided into stripes.
//!
//! This table is the only place with these facts. Where a byte of a chunk lies on the devices is decided by
//! `volumes::profile`, from these facts.
//!
//! Source: the on-disk format documentation ("Chunk item", "Block group profiles"), the manual page mkfs.btrfs(8), and
//! chunks that Linux made.
//!
//! Invariants:
//! - I1. Each combination of profile bits that a chunk may have occurs in [`Profile::ALL`] exactly once.
//! - I2. `ncopies`, `dev_stripes`, `devs_min` and `devs_increment` are at least 1.

use crate::item::{BlockGroupFlags, ChunkItem};

/// The facts of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The profile's bit; empty for single.
    pub flag: BlockGroupFlags,
    /// Name, as in the output of btrfs-progs. Commands also accept it in lower case ([`Profile::named`]).
    pub name: &'static str,
    /// Value of `sub_stripes` in the chunk item: the stripes that hold the same data, in a chunk that is striped too.
    pub sub_stripes: u16,
    /// Stripes of a chunk on each of its devices.
    pub dev_stripes: u16,
    /// Maximum number of devices of a chunk; 0 for as many as there are.
    pub devs_max: u16,
    /// Minimum number of devices of a chunk.
    pub devs_min: u16,
    /// Number of lost devices with which all bytes of a chunk can still be read.
    pub tolerated_failures: u16,
    /// The number of devices of a chunk is a multiple of this number.
    pub devs_increment: u16,
    /// Copies of each byte.
    pub ncopies: u16,
    /// Stripes that hold parity.
    pub nparity: u16,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 9] = [
        Self::new(BlockGroupFlags::empty(), "single", [1, 1, 1, 1, 0, 1, 1, 0]),
        Self::new(BlockGroupFlags::DUP, "DUP", [1, 2, 1, 1, 0, 1, 2, 0]),
        Self::new(BlockGroupFlags::RAID0, "RAID0", [1, 1, 0, 1, 0, 1, 1, 0]),
        Self::new(BlockGroupFlags::RAID1, "RAID1", [1, 1, 2, 2, 1, 2, 2, 0]),
        Self::new(BlockGroupFlags::RAID1C3, "RAID1C3", [1, 1, 3, 3, 2, 3, 3, 0]),
        Self::new(BlockGroupFlags::RAID1C4, "RAID1C4", [1, 1, 4, 4, 3, 4, 4, 0]),
        Self::new(BlockGroupFlags::RAID10, "RAID10", [2, 1, 0, 2, 1, 2, 2, 0]),
        Self::new(BlockGroupFlags::RAID5, "RAID5", [1, 1, 0, 2, 1, 1, 1, 1]),
        Self::new(BlockGroupFlags::RAID6, "RAID6", [1, 1, 0, 3, 2, 1, 1, 2]),
    ];

    /// `facts` are the fields from `sub_stripes` on, in their order.
    const fn new(flag: BlockGroupFlags, name: &'static str, facts: [u16; 8]) -> Self {
        let [sub_stripes, dev_stripes, devs_max, devs_min, tolerated_failures, devs_increment, ncopies, nparity] =
            facts;
        Self {
            flag,
            name,
            sub_stripes,
            dev_stripes,
            devs_max,
            devs_min,
            tolerated_failures,
            devs_increment,
            ncopies,
            nparity,
        }
    }

    /// The profile of a chunk or block group with these flags; type bits do not count. `None` if several profile bits
    /// are set, which no valid chunk has.
    pub fn of(flags: BlockGroupFlags) -> Option<&'static Self> {
        let wanted = flags.intersection(BlockGroupFlags::PROFILES);
        Self::ALL.iter().find(|profile| profile.flag == wanted)
    }

    /// The profile with this name, in upper or lower case.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|profile| profile.name.eq_ignore_ascii_case(name))
    }

    /// The name of the profile of these flags, or `unknown` if several profile bits are set.
    pub fn name_of(flags: BlockGroupFlags) -> &'static str {
        Self::of(flags).map_or("unknown", |profile| profile.name)
    }

    /// Copies of each byte of a chunk with these flags, for sums over the space of devices. 1 for invalid flags.
    pub fn copies_of(flags: BlockGroupFlags) -> u64 {
        Self::of(flags).map_or(1, |profile| profile.ncopies.into())
    }

    /// Whether a chunk's bytes are divided over as many stripes as it has, in elements of 64 KiB. In other chunks, each
    /// stripe has all bytes.
    pub fn is_striped(&self) -> bool {
        self.devs_max == 0
    }

    /// Whether a chunk has stripes with parity.
    pub fn has_parity(&self) -> bool {
        self.nparity > 0
    }

    /// Whether all stripes of a chunk can lie on one device without loss of a promised tolerance.
    pub fn fits_one_device(&self) -> bool {
        self.devs_max == 1
    }

    /// Minimum number of stripes of a chunk.
    pub fn stripes_min(&self) -> u16 {
        self.devs_min.saturating_mul(self.dev_stripes)
    }

    /// Maximum number of stripes of a chunk.
    pub fn stripes_max(&self) -> u16 {
        if self.is_striped() { u16::MAX } else { self.devs_max.saturating_mul(self.dev_stripes) }
    }

    /// Whether a chunk can have this number of stripes.
    pub fn allows_stripes(&self, nr_stripes: usize) -> bool {
        let is_within = usize::from(self.stripes_min()) <= nr_stripes && nr_stripes <= usize::from(self.stripes_max());
        is_within && nr_stripes.is_multiple_of(usize::from(self.devs_increment))
    }

    /// The number of stripes of a chunk that hold different data, out of `nr_stripes`. At least 1.
    pub fn data_stripes(&self, nr_stripes: u64) -> u64 {
        let with_copies = nr_stripes.saturating_sub(self.nparity.into());
        with_copies.checked_div(self.ncopies.into()).unwrap_or(1).max(1)
    }

    /// The number of stripes of a chunk on `nr_devices` devices, or `None` if they are too few.
    pub fn stripes_on(&self, nr_devices: u16) -> Option<u16> {
        let rounded = nr_devices.saturating_sub(nr_devices.checked_rem(self.devs_increment).unwrap_or(0));
        let used = if self.devs_max == 0 { rounded } else { rounded.min(self.devs_max) };
        (used >= self.devs_min).then_some(used.saturating_mul(self.dev_stripes))
    }

    /// Length of each stripe on its device, which is the length of its `DEV_EXTENT`, for a chunk of `length` bytes with
    /// `nr_stripes` stripes.
    ///
    /// Linux makes chunks of whole rows of 64 KiB elements, so the division leaves no rest. For any other length, the
    /// result is what Linux requires of the `DEV_EXTENT`: the quotient, rounded down.
    pub fn stripe_len(&self, length: u64, nr_stripes: u64) -> u64 {
        length.checked_div(self.data_stripes(nr_stripes)).unwrap_or(length)
    }

    /// Whether a chunk of this length consists of whole rows, one 64 KiB element on each stripe. Always true without
    /// striping.
    pub fn has_whole_rows(&self, length: u64, nr_stripes: u64) -> bool {
        let row = ChunkItem::STRIPE_LEN.saturating_mul(self.data_stripes(nr_stripes));
        !self.is_striped() || length.is_multiple_of(row)
    }
}

impl ChunkItem {
    /// Length of each device extent of the chunk ([`Profile::stripe_len`]); the chunk's length if its profile is
    /// invalid.
    pub fn device_extent_len(&self) -> u64 {
        let nr_stripes = u64::try_from(self.stripes.len()).unwrap_or(u64::MAX);
        Profile::of(self.flags).map_or(self.length, |profile| profile.stripe_len(self.length, nr_stripes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K64: u64 = ChunkItem::STRIPE_LEN;

    fn profile(name: &str) -> &'static Profile {
        Profile::named(name).expect("a profile")
    }

    #[test]
    fn every_profile_bit_has_one_row_and_one_name() {
        for bit in BlockGroupFlags::PROFILES.iter().chain([BlockGroupFlags::empty()]) {
            let rows: Vec<&Profile> = Profile::ALL.iter().filter(|profile| profile.flag == bit).collect();
            assert_eq!(rows.len(), 1, "{bit:?}");
            assert_eq!(Profile::of(bit | BlockGroupFlags::DATA), Some(rows[0]));
            assert_eq!(Profile::named(&rows[0].name.to_lowercase()), Some(rows[0]));
        }
        assert_eq!(Profile::of(BlockGroupFlags::RAID1 | BlockGroupFlags::DUP), None);
        assert_eq!(Profile::name_of(BlockGroupFlags::RAID1 | BlockGroupFlags::DUP), "unknown");
        assert_eq!(Profile::named("raid7"), None);
    }

    #[test]
    fn the_facts_of_a_row_agree() {
        for profile in Profile::ALL {
            let Profile { sub_stripes, dev_stripes, devs_max, devs_min, tolerated_failures, .. } = profile;
            let Profile { devs_increment, ncopies, nparity, name, .. } = profile;
            assert!(ncopies > 0 && dev_stripes > 0 && devs_min > 0 && devs_increment > 0, "{name}: I2");
            assert!(devs_max == 0 || devs_min == devs_max, "{name}");
            // With one device fewer than a chunk needs for one more loss, bytes are gone.
            let lost = if dev_stripes > 1 { 0 } else { ncopies - 1 + nparity };
            assert_eq!(tolerated_failures, lost, "{name}");
            assert_eq!(sub_stripes, if profile.is_striped() { ncopies } else { 1 }, "{name}");
            assert!(profile.allows_stripes(profile.stripes_min().into()), "{name}");
            assert_eq!(profile.stripes_on(devs_min), Some(profile.stripes_min()), "{name}");
            assert_eq!(profile.stripes_on(devs_min - 1), None, "{name}");
        }
    }

    #[test]
    fn stripes_divide_the_data_of_a_chunk() {
        let of = |name, nr_stripes, rows| {
            let profile = profile(name);
            let length = rows * K64 * profile.data_stripes(nr_stripes);
            assert!(profile.has_whole_rows(length, nr_stripes));
            (profile.data_stripes(nr_stripes), profile.stripe_len(length, nr_stripes) / K64)
        };
        assert_eq!(of("single", 1, 5), (1, 5));
        assert_eq!(of("dup", 2, 5), (1, 5));
        assert_eq!(of("raid1c4", 4, 5), (1, 5));
        assert_eq!(of("raid0", 3, 5), (3, 5));
        assert_eq!(of("raid10", 6, 5), (3, 5));
        assert_eq!(of("raid5", 4, 5), (3, 5));
        assert_eq!(of("raid6", 4, 5), (2, 5));
        assert!(!profile("raid0").has_whole_rows(3 * K64, 2));
        assert!(profile("raid1").has_whole_rows(4096, 2));
    }

    #[test]
    fn chunks_use_as_many_devices_as_their_profile_can() {
        let on = |name: &str, devices| profile(name).stripes_on(devices);
        assert_eq!([on("raid10", 5), on("raid10", 1)], [Some(4), None]);
        assert_eq!([on("raid1", 5), on("raid1", 1)], [Some(2), None]);
        assert_eq!([on("raid0", 5), on("raid6", 5), on("raid6", 2)], [Some(5), Some(5), None]);
        assert_eq!([on("dup", 5), on("single", 5), on("single", 0)], [Some(2), Some(1), None]);
        assert!(!profile("raid10").allows_stripes(3) && profile("raid10").allows_stripes(4));
        assert!(!profile("raid1").allows_stripes(3) && profile("raid5").allows_stripes(2));
    }
}
