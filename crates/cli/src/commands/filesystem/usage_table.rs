//! `filesystem usage -T`: space by device as a table, with the columns of btrfs-progs.

use ubtrfs_control::filesystem::{DeviceInfo, FilesystemUsage};

use super::shown_device::name_with_state;
use super::usage::{USAGE_ORDER, bytes_of, names, own_devices, sorted, unallocated};
use crate::columns::columns;
use crate::units::Units;

/// The devices, then the sums.
pub(super) fn table(usage: &FilesystemUsage, units: &Units) -> String {
    let size = |bytes| units.format(bytes);
    let or_dash = |bytes: u64| if bytes == 0 { "-".to_owned() } else { size(bytes) };
    let groups = sorted(&usage.groups, USAGE_ORDER);
    let of_groups = |text: &dyn Fn(u64) -> String| groups.iter().map(|group| text(group.flags)).collect::<Vec<_>>();
    let row = |first: [String; 2], middle: Vec<String>, last: [String; 3]| -> Vec<String> {
        first.into_iter().chain(middle).chain(last).collect()
    };
    let empty = || std::array::from_fn(|_| String::new());
    let kinds = row(["".into(), "".into()], of_groups(&|flags| names(flags).0.to_owned()), empty());
    let heads = row(
        ["Id".into(), "Path".into()],
        of_groups(&|flags| names(flags).1.to_owned()),
        ["Unallocated".into(), "Total".into(), "Slack".into()],
    );
    let devices = own_devices(usage).map(|device| {
        let of = |flags| or_dash(bytes_of(device, flags));
        let free = or_dash(unallocated(device));
        let last = [free, size(device.total), or_dash(device.slack)];
        row([device.devid.to_string(), name_with_state(device)], of_groups(&of), last)
    });
    let devices: Vec<Vec<String>> = devices.collect();
    let sum = |of: &dyn Fn(&DeviceInfo) -> u64| size(own_devices(usage).map(of).fold(0u64, u64::saturating_add));
    let total = row(
        ["".into(), "Total".into()],
        groups.iter().map(|group| size(group.total)).collect(),
        [sum(&unallocated), sum(&|device| device.total), sum(&|device| device.slack)],
    );
    let used = row(["".into(), "Used".into()], groups.iter().map(|group| size(group.used)).collect(), empty());

    columns(&[kinds, heads], &[devices, vec![total, used]])
}
