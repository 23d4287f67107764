//! Filesystems on block devices that are not mounted, as their superblocks describe them.
//!
//! - U1. Nothing is locked, and no tree is read, so that no other program is held up.

use std::collections::BTreeMap;
use std::path::Path;

use ubtrfs_control::filesystem::{DeviceInfo, FilesystemInfo, FilesystemUsage};
use ubtrfs_device::{FileDevice, block_devices};
use ubtrfs_format::check_superblock;
use ubtrfs_format::superblock::Superblock;
use uuid::Uuid;

use super::usage::Described;
use crate::commands::committed::first_superblock;

/// The filesystems on block devices that neither are `known` nor mounted by Linux.
pub(super) fn unmounted(known: &[Uuid]) -> Vec<Described> {
    let mut found: BTreeMap<Uuid, (Superblock, BTreeMap<u64, DeviceInfo>)> = BTreeMap::new();
    for path in block_devices() {
        let (Some(superblock), Some(name)) = (superblock_of(&path), path.to_str()) else { continue };
        let fsid = superblock.fsid;
        if known.contains(&fsid) || Path::new("/sys/fs/btrfs").join(fsid.to_string()).exists() {
            continue;
        }
        let device = DeviceInfo::of(&superblock.dev_item, name.to_owned());
        let (newest, devices) = found.entry(fsid).or_insert_with(|| (superblock.clone(), BTreeMap::new()));
        if superblock.generation > newest.generation {
            *newest = superblock;
        }
        devices.entry(device.devid).or_insert(device);
    }
    found.into_values().map(|(newest, devices)| described(&newest, devices.into_values().collect())).collect()
}

fn superblock_of(path: &Path) -> Option<Superblock> {
    let device = FileDevice::open_beside_writer(path).ok()?;
    let raw = first_superblock(&device);
    let superblock = Superblock::decode(&raw).ok()?;
    check_superblock(&superblock, &raw).is_ok().then_some(superblock)
}

fn described(superblock: &Superblock, devices: Vec<DeviceInfo>) -> Described {
    let info = FilesystemInfo::of(superblock, devices.last().map_or(0, |device| device.devid));
    let (global_reserve, global_reserve_used, available) = (0, 0, 0);
    let usage = FilesystemUsage { groups: Vec::new(), global_reserve, global_reserve_used, devices, available };
    Described { info, usage, used: superblock.bytes_used, is_mounted: false }
}
