//! How `filesystem show`, `filesystem usage` and `device usage` show a device: its name, its state, and its JSON. Under the
//! name `btrfs`, a device that failed is shown as a missing one: btrfs-progs knows no other state.

use serde_json::{Value, json};
use ubtrfs_control::filesystem::{DeviceInfo, DeviceState};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::escaped;

use super::usage::{names, unallocated};
use crate::progs::is_progs;

/// The path, or `missing`.
pub(super) fn name(device: &DeviceInfo) -> String {
    match &device.path {
        Some(path) if !(is_progs() && device.state().is_absent()) => escaped(path.as_bytes()),
        _ => "missing".to_owned(),
    }
}

/// The path with the state, if the device is there and not in sync.
pub(super) fn name_with_state(device: &DeviceInfo) -> String {
    match device.state() {
        DeviceState::InSync | DeviceState::Missing => name(device),
        _ if is_progs() => name(device),
        state => format!("{} ({})", name(device), state_text(state)),
    }
}

pub(super) fn state_text(state: DeviceState) -> &'static str {
    match state {
        DeviceState::InSync => "in sync",
        DeviceState::Updating => "being updated",
        DeviceState::Behind => "missed changes",
        DeviceState::Missing => "missing",
        DeviceState::Failed => "failed",
    }
}

/// The device extents by type and profile, with the name of each kind. As in btrfs-progs, the name of a profile that stripes
/// ends in the number of stripes.
pub(super) fn shares(device: &DeviceInfo, flags: u64) -> Vec<(String, u64)> {
    let (kind, profile) = names(flags);
    let stripes = BlockGroupFlags::RAID0
        .union(BlockGroupFlags::RAID10)
        .union(BlockGroupFlags::RAID5)
        .union(BlockGroupFlags::RAID6);
    if !BlockGroupFlags::from_bits_retain(flags).intersects(stripes) || device.shares.is_empty() {
        return vec![(format!("{kind},{profile}"), super::usage::bytes_of(device, flags))];
    }
    let own = device.shares.iter().filter(|(other, ..)| *other == flags);
    own.map(|(_, nr_stripes, bytes)| (format!("{kind},{profile}/{nr_stripes}"), *bytes)).collect()
}

/// A device in JSON, with the same names in all commands.
pub(super) fn json_of(device: &DeviceInfo) -> Value {
    let group = |(flags, nr_stripes, bytes): &(u64, usize, u64)| {
        let (kind, profile) = names(*flags);
        json!({ "type": kind, "profile": profile, "stripes": nr_stripes, "allocated": bytes })
    };
    let groups = device.groups.as_ref().map(|_| device.shares.iter().map(group).collect::<Vec<_>>());
    json!({
        "devid": device.devid, "uuid": device.uuid, "path": device.path, "state": device.state(), "size": device.total,
        "slack": device.slack, "allocated": device.allocated, "unallocated": unallocated(device),
        "is_seed": device.is_seed, "groups": groups,
    })
}
