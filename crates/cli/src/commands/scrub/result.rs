//! The result of a scrub: its texts, its messages and its exit status.

use std::process::ExitCode;

use serde_json::json;
use ubtrfs_control::filesystem::DeviceState;
use ubtrfs_control::scrub::{Counts, ScrubReportMessage};
use ubtrfs_format::print::escaped;

use super::record::ScrubRecord;
use super::shown::{ScrubPhase, ShownScrub};
use super::{NOT_ALL, ScrubDevice, ScrubStartArgs, ScrubbedFilesystem, UNCORRECTABLE, devices_json, now};
use crate::commands::place::CommandTarget;
use crate::common::{print_err, print_error, print_json, print_out, warn};
use crate::progs::is_progs;
use crate::units::Units;

/// Prints the result of a scrub.
pub(super) fn tell(
    args: &ScrubStartArgs,
    path: &CommandTarget,
    filesystem: &ScrubbedFilesystem,
    record: &ScrubRecord,
    report: &ScrubReportMessage,
) -> anyhow::Result<ExitCode> {
    let absent: Vec<&ScrubDevice> = filesystem.devices.iter().filter(|device| device.state.is_absent()).collect();
    // btrfs-progs shows the scrub of a missing device as cancelled.
    let also = absent.iter().filter(|_| is_progs()).map(|device| device.devid);
    let shown: Vec<(u64, ShownScrub)> = report
        .devices
        .iter()
        .map(|device| device.devid)
        .chain(also)
        .filter_map(|devid| Some((devid, filesystem.shown(devid, record.devices.get(&devid)?, None))))
        .collect();
    // Before the sums, which would scroll away.
    if !is_progs() && !args.detached {
        tell_files(report, args.read_only);
    }
    let units = Units::default();
    if args.json {
        print_json(&json!({
            "uuid": filesystem.fsid,
            "devices": devices_json(filesystem, &shown),
            "not_scrubbed": absent.iter().map(|device| device.json()).collect::<Vec<_>>(),
            "files": report.files.iter().map(|file| json!(file)).collect::<Vec<_>>(),
            "repaired_tree_bytes": report.repaired_blocks,
            "lost_tree_bytes": report.lost_blocks,
        }))?;
    } else if !args.quiet && !args.detached {
        let is_cancelled = |shown: &ShownScrub| shown.state == ScrubPhase::Aborted;
        let done = |is_cancelled| if is_cancelled { "canceled" } else { "done" };
        let mut text = String::new();
        if args.by_device {
            for (devid, shown) in &shown {
                text += &format!("\nScrub device {} {}\n", filesystem.name_of(*devid), done(is_cancelled(shown)));
                text += &shown.text(&units, args.raw_counts, now());
            }
        } else if let Some(sum) = filesystem.sum(&shown, true) {
            let done = done(shown.iter().any(|(_, shown)| is_cancelled(shown)));
            text = format!("scrub {done} for {}\n", filesystem.fsid) + &sum.text(&units, args.raw_counts, now());
        }
        print_out(&text)?;
    }
    if !args.detached {
        tell_absent(path, filesystem);
    }
    let mut failed = false;
    for device in &report.devices {
        if let Some(failure) = &device.failure {
            failed = true;
            print_error(&anyhow::anyhow!(
                "the scrub of device {} stopped: {failure}",
                filesystem.name_of(device.devid)
            ));
        }
    }
    if failed || report.devices.iter().any(|device| device.is_cancelled) {
        return Ok(ExitCode::FAILURE);
    }
    let sum_of = |count: fn(&Counts) -> u64| report.devices.iter().map(|device| count(&device.counts)).sum::<u64>();
    if is_progs() && !args.detached && sum_of(|counts| counts.corrected_errors) > 0 {
        print_err("WARNING: errors detected during scrubbing, corrected");
    }
    if report.devices.iter().any(|device| device.counts.uncorrectable_errors > 0) {
        match is_progs() {
            _ if args.detached => {}
            true => print_err("ERROR: there are uncorrectable errors"),
            false => warn("there are errors without a good copy; restore the files from a backup, then scrub again"),
        }
        return Ok(ExitCode::from(UNCORRECTABLE));
    }
    match absent.is_empty() || is_progs() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::from(NOT_ALL)),
    }
}

/// Names each device that is not scrubbed, because it is missing or failed.
pub(super) fn tell_absent(path: &CommandTarget, filesystem: &ScrubbedFilesystem) {
    let place = path.filesystem();
    for device in filesystem.devices.iter().filter(|device| device.state.is_absent()) {
        let devid = device.devid;
        let name = device.path.as_ref().map_or_else(String::new, |path| format!(" ({})", escaped(path.as_bytes())));
        let what = if device.state == DeviceState::Missing { "is missing" } else { "failed" };
        let degraded = if matches!(path, CommandTarget::Image(_)) { "-o degraded " } else { "" };
        match is_progs() {
            true => warn(&format!("device {devid} not present")),
            // A seed device cannot be replaced.
            false if device.is_seed => warn(&format!(
                "device {devid}{name} of the seed {what}, so it was not scrubbed; find it, and name it with -o device=PATH"
            )),
            false => warn(&format!(
                "device {devid}{name} {what}, so it was not scrubbed; unless it comes back, replace it: ubtrfs replace start \
                 {degraded}{devid} NEW {place}"
            )),
        }
    }
}

/// Names each damaged file once.
fn tell_files(report: &ScrubReportMessage, read_only: bool) {
    let mended = match read_only {
        true => "are bad in one copy, and another is good; scrub without -r to repair them",
        false => "were bad in one copy, and were repaired from another",
    };
    for file in &report.files {
        if file.lost_bytes > 0 {
            warn(&format!("{}: {} bytes have no good copy", file.path, file.lost_bytes));
        }
        if file.repaired_bytes > 0 {
            warn(&format!("{}: {} bytes {mended}", file.path, file.repaired_bytes));
        }
    }
    if report.lost_blocks > 0 {
        warn(&format!("{} bytes of tree blocks have no good copy", report.lost_blocks));
    }
    if report.repaired_blocks > 0 {
        warn(&format!("{} bytes of tree blocks {mended}", report.repaired_blocks));
    }
}
