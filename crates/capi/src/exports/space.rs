//! Space by kind and device; label; trim

use std::ffi::{c_char, c_int};

use ubtrfs::bindings;
use ubtrfs::manage::{DeviceUsage, GroupUsage, MemberState, SpaceUsage};

use crate::border::{Address, ErrorPlace, OwnedAddress, ResultPlace, Text};
use crate::exports::filesystem::UbtrfsFs;
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::answer;
use crate::handles::Handle;
use crate::memory::{KeptTexts, give_struct};

/// All block groups of one type and profile.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsGroupUsage {
    /// The type: "data", "metadata", "system" or "data+metadata".
    pub kind: Address<c_char>,
    /// The profile, such as "raid1".
    pub profile: Address<c_char>,
    /// Type and profile as on disk.
    pub flags: u64,
    /// Bytes in the block groups. Each copy on the devices takes as many.
    pub total_bytes: u64,
    /// Bytes of extents.
    pub used_bytes: u64,
}

/// The space of the block groups of one type and profile on a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDeviceShare {
    /// The type, as in `ubtrfs_group_usage`.
    pub kind: Address<c_char>,
    /// The profile.
    pub profile: Address<c_char>,
    /// Type and profile as on disk.
    pub flags: u64,
    /// The number of stripes of each of the block groups.
    pub nr_stripes: u64,
    /// Bytes on the device.
    pub bytes: u64,
}

/// The device has everything that was committed.
pub const UBTRFS_MEMBER_IN_SYNC: u32 = 1;
/// The device has everything up to `generation` for sure, and is being brought up to date.
pub const UBTRFS_MEMBER_LATE: u32 = 2;
/// The device has everything up to `generation`, but missed later commits.
pub const UBTRFS_MEMBER_STALE: u32 = 3;
/// The device was not given.
pub const UBTRFS_MEMBER_MISSING: u32 = 4;
/// The device failed while the filesystem was open, and is not used any more.
pub const UBTRFS_MEMBER_FAILED: u32 = 5;

/// A device of a filesystem.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDeviceUsage {
    /// Its id.
    pub devid: u64,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its path or name; null if it is missing.
    pub path: Address<c_char>,
    /// `UBTRFS_MEMBER_...`.
    pub state: u32,
    /// 1 if it is a device of a seed, which is only read, otherwise 0.
    pub is_seed: u32,
    /// The generation for `UBTRFS_MEMBER_LATE` and `UBTRFS_MEMBER_STALE`, otherwise 0.
    pub generation: u64,
    /// Bytes that the filesystem uses, allocated or not.
    pub total_bytes: u64,
    /// Bytes of the device past `total_bytes`.
    pub slack_bytes: u64,
    /// Bytes that are allocated to block groups.
    pub allocated_bytes: u64,
    /// What is allocated, by type and profile; or null.
    pub shares: Address<UbtrfsDeviceShare>,
    /// The number of `shares`.
    pub nr_shares: usize,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// The space of a filesystem by type and profile of block groups, and by device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsSpaceReport {
    /// Block groups by type and profile.
    pub groups: Address<UbtrfsGroupUsage>,
    /// The number of `groups`.
    pub nr_groups: usize,
    /// The devices in the order of their ids, also missing ones.
    pub devices: Address<UbtrfsDeviceUsage>,
    /// The number of `devices`.
    pub nr_devices: usize,
    /// The bytes of metadata that are kept for emergencies.
    pub reserve_bytes: u64,
    /// How much of `reserve_bytes` is in use.
    pub reserve_used_bytes: u64,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// Describes how the space is used. Free `space` with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_space(
    fs: Handle<UbtrfsFs>,
    space: ResultPlace<OwnedAddress<UbtrfsSpaceReport>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        space.set(OwnedAddress::NULL);
        space.needed("the place for the space")?;
        space.set(shown(&fs.get()?.space_usage()));
        Ok(())
    })
}

/// Sets the label: at most 255 bytes. An empty label removes the old one.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_set_label(fs: Handle<UbtrfsFs>, label: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.set_label(label.bytes("label")?)?))
}

/// Tells the devices which space is free. Free ranges of fewer than `min_bytes` are left out. `bytes`, which may be null,
/// gets the number of bytes that the devices were told. Fails with EOPNOTSUPP if no device takes discards. `job` may be
/// null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_trim(
    fs: Handle<UbtrfsFs>,
    min_bytes: u64,
    job: Handle<UbtrfsJob>,
    bytes: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        bytes.set(fs.get()?.trim(min_bytes, &*job_of(job)?)?);
        Ok(())
    })
}

fn shown(found: &SpaceUsage) -> OwnedAddress<UbtrfsSpaceReport> {
    let mut texts = KeptTexts::default();
    let groups: Vec<UbtrfsGroupUsage> = found.groups.iter().map(|group| group_usage(group, &mut texts)).collect();
    let mut shares = Vec::new();
    let mut devices = Vec::new();
    for device in &found.devices {
        let list = shares_of(device, &mut texts);
        devices.push(device_usage(device, &list, &mut texts));
        shares.push(list);
    }
    let report = UbtrfsSpaceReport {
        groups: Address::of_list(&groups),
        nr_groups: groups.len(),
        devices: Address::of_list(&devices),
        nr_devices: devices.len(),
        reserve_bytes: found.global_reserve.0,
        reserve_used_bytes: found.global_reserve.1,
        more: [0; 4],
    };
    give_struct(report, (groups, devices, shares, texts))
}

fn group_usage(group: &GroupUsage, texts: &mut KeptTexts) -> UbtrfsGroupUsage {
    let (kind, profile) = bindings::group_names(group.flags);
    UbtrfsGroupUsage {
        kind: texts.keep(kind),
        profile: texts.keep(profile),
        flags: group.flags.bits(),
        total_bytes: group.total,
        used_bytes: group.used,
    }
}

fn shares_of(device: &DeviceUsage, texts: &mut KeptTexts) -> Vec<UbtrfsDeviceShare> {
    let shares = device.groups.iter().map(|share| {
        let (kind, profile) = bindings::group_names(share.flags);
        UbtrfsDeviceShare {
            kind: texts.keep(kind),
            profile: texts.keep(profile),
            flags: share.flags.bits(),
            nr_stripes: share.nr_stripes as u64,
            bytes: share.bytes,
        }
    });
    shares.collect()
}

fn device_usage(device: &DeviceUsage, shares: &[UbtrfsDeviceShare], texts: &mut KeptTexts) -> UbtrfsDeviceUsage {
    UbtrfsDeviceUsage {
        devid: device.devid.0,
        uuid: device.uuid.into_bytes(),
        path: texts.keep_optional(device.path.as_deref()),
        state: match device.state {
            MemberState::InSync => UBTRFS_MEMBER_IN_SYNC,
            MemberState::Late(_) => UBTRFS_MEMBER_LATE,
            MemberState::Stale(_) => UBTRFS_MEMBER_STALE,
            MemberState::Missing => UBTRFS_MEMBER_MISSING,
            MemberState::Kicked => UBTRFS_MEMBER_FAILED,
        },
        is_seed: device.is_seed.into(),
        generation: device.state.behind_at().map_or(0, |generation| generation.0),
        total_bytes: device.total,
        slack_bytes: device.slack,
        allocated_bytes: device.allocated,
        shares: Address::of_list(shares),
        nr_shares: shares.len(),
        more: [0; 4],
    }
}
