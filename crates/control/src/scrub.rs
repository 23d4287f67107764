//! Scrub: checking everything that devices have, and repairing what is bad.
//!
//! | command                        | needs                                          |
//! |--------------------------------|------------------------------------------------|
//! | start, cancel, limit           | CAP_SYS_ADMIN, or the user who mounted         |
//! | status                         | the same, as in Linux                          |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_device::IoPriority;
use ubtrfs_format::DevId;
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{Damage, ScrubCounts, ScrubEnd, ScrubReport, ScrubStart};

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};

/// A command on the scrub of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Scrubs devices, and answers when all are done: [`Response::Done`].
    Start(StartScrub),
    /// Ends the running scrub, and waits until it has ended: [`Response::Cancelled`].
    Cancel,
    /// Describes the running scrub: [`Response::Status`].
    Status,
    /// Sets the highest rate of the running scrub: [`Response::Limited`].
    Limit {
        /// The device; `None` means all.
        devid: Option<u64>,
        /// Bytes per second; 0 means no limit.
        bytes_per_sec: u64,
    },
}

/// The devices that a scrub goes through.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartScrub {
    /// Device ids, and where the scrub begins on each; all devices from their start if it is empty.
    pub devices: Vec<(u64, u64)>,
    /// Whether bad copies are left as they are.
    pub read_only: bool,
    /// The highest rate of each device in bytes per second; 0 means no limit.
    pub limit: u64,
    /// The class and the level of the I/O priority, with the numbers of `ioprio_set(2)`; `None` leaves it as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_priority: Option<(u8, u8)>,
}

/// The result of a command on the scrub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The scrub has ended.
    Done(ScrubReportMessage),
    /// The running scrub; no devices if none runs.
    Status(Vec<ScrubProgress>),
    /// The scrub has ended as requested.
    Cancelled,
    /// The rate is set.
    Limited,
}

/// The counts of a device, with btrfs's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Pieces of data extents.
    pub data_extents_scrubbed: u64,
    /// Tree blocks.
    pub tree_extents_scrubbed: u64,
    /// Bytes of data.
    pub data_bytes_scrubbed: u64,
    /// Bytes of tree blocks.
    pub tree_bytes_scrubbed: u64,
    /// Sectors that could not be read.
    pub read_errors: u64,
    /// Sectors of data that contradict their checksums.
    pub csum_errors: u64,
    /// Sectors of tree blocks with a wrong checksum, address or generation, as Linux counts them.
    pub verify_errors: u64,
    /// Sectors without checksums.
    pub no_csum: u64,
    /// Always 0; Linux counts none either.
    pub csum_discards: u64,
    /// Superblocks that are bad or old.
    pub super_errors: u64,
    /// Always 0: a scrub allocates nothing that could fail.
    pub malloc_errors: u64,
    /// Errors without a good copy.
    pub uncorrectable_errors: u64,
    /// Errors with a good copy, from which they were repaired if that was allowed.
    pub corrected_errors: u64,
    /// Up to this offset of the device, everything has been checked.
    pub last_physical: u64,
}

/// A device of a running scrub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubProgress {
    /// The device id.
    pub devid: u64,
    /// The counts so far.
    pub counts: Counts,
    /// The highest rate in bytes per second; 0 means no limit.
    pub limit: u64,
    /// The end of the scrub of this device; `None` while it runs. A device may end long before the others.
    #[serde(default)]
    pub end: Option<ScrubOutcome>,
}

/// How the scrub of a device ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScrubOutcome {
    /// Everything was checked.
    Finished,
    /// It was cancelled.
    Cancelled,
    /// It stopped for this reason.
    Failed(String),
}

/// The result of a scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReportMessage {
    /// The devices.
    pub devices: Vec<Scrubbed>,
    /// Files with bad data, each once; at most [`ubtrfs_fs::FILES_MAX`].
    pub files: Vec<DamagedFile>,
    /// Bytes of bad tree blocks that have a good copy.
    pub repaired_blocks: u64,
    /// Bytes of bad tree blocks without a good copy.
    pub lost_blocks: u64,
}

/// The end of the scrub of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scrubbed {
    /// The device id.
    pub devid: u64,
    /// The counts.
    pub counts: Counts,
    /// Whether the scrub was cancelled.
    pub is_cancelled: bool,
    /// The reason if the scrub stopped before its end.
    pub failure: Option<String>,
}

/// A file with bad data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedFile {
    /// A path from the top level, escaped for messages; or the subvolume and inode number of a file without one.
    pub path: String,
    /// Bad bytes on devices that have a good copy.
    pub repaired_bytes: u64,
    /// Bad bytes without a good copy.
    pub lost_bytes: u64,
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Start(_) | Self::Cancel)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Self::Start(start) if !start.read_only)
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    match request {
        Request::Start(start) => scrub(context, &start).map(Response::Done),
        Request::Cancel => Ok(context.fs.cancel_scrub().map(|()| Response::Cancelled)?),
        Request::Status => {
            let running = context.fs.scrub_status().into_iter().map(|status| ScrubProgress {
                devid: status.devid.0,
                counts: status.counts.into(),
                limit: status.limit,
                end: status.end.map(ScrubOutcome::from),
            });
            Ok(Response::Status(running.collect()))
        }
        Request::Limit { devid, bytes_per_sec } => {
            Ok(context.fs.limit_scrub(devid.map(DevId), bytes_per_sec).map(|()| Response::Limited)?)
        }
    }
}

fn scrub(context: &CommandContext<'_>, start: &StartScrub) -> Result<ScrubReportMessage> {
    let fs = context.fs;
    let usable: Vec<u64> = {
        let devices = fs.space_usage().devices;
        devices.iter().filter(|device| device.state.is_usable()).map(|device| device.devid.0).collect()
    };
    let chosen = match start.devices.as_slice() {
        [] => usable.iter().map(|&devid| (devid, 0)).collect(),
        chosen => chosen.to_vec(),
    };
    if let Some((unknown, _)) = chosen.iter().find(|(devid, _)| !usable.contains(devid)) {
        let text = format!(
            "there is no device {unknown}, or it is missing or failed; list the devices with: ubtrfs filesystem show"
        );
        return Err(CommandFailure::new(Errno::NODEV, text));
    }
    let no_priority = || CommandFailure::new(Errno::INVAL, "there is no such class or level of I/O priorities");
    let of_numbers = |(class, level)| IoPriority::new(class, level).ok_or_else(no_priority);
    let io_priority = start.io_priority.map(of_numbers).transpose()?;
    let starts: Vec<ScrubStart> = chosen
        .iter()
        .map(|&(devid, from)| ScrubStart { devid: DevId(devid), start: from, limit: start.limit, io_priority })
        .collect();
    Ok(report(fs.scrub(&starts, !start.read_only, context.job)?))
}

fn report(report: ScrubReport) -> ScrubReportMessage {
    let devices = report.devices.into_iter().map(|device| Scrubbed {
        devid: device.devid.0,
        counts: device.counts.into(),
        is_cancelled: device.is_cancelled(),
        failure: device.result.as_ref().err().filter(|_| !device.is_cancelled()).map(ToString::to_string),
    });
    let files = report.files.into_iter().map(|(id, path, Damage { repaired_bytes, lost_bytes })| DamagedFile {
        path: path.map_or_else(|| format!("inode {} of subvolume {}", id.ino.0, id.root.0), |path| escaped(&path)),
        repaired_bytes,
        lost_bytes,
    });
    ScrubReportMessage {
        devices: devices.collect(),
        files: files.collect(),
        repaired_blocks: report.blocks.repaired_bytes,
        lost_blocks: report.blocks.lost_bytes,
    }
}

impl From<ScrubEnd> for ScrubOutcome {
    fn from(end: ScrubEnd) -> Self {
        match end {
            ScrubEnd::Finished => Self::Finished,
            ScrubEnd::Cancelled => Self::Cancelled,
            ScrubEnd::Failed(reason) => Self::Failed(reason),
        }
    }
}

impl From<ScrubCounts> for Counts {
    fn from(counts: ScrubCounts) -> Self {
        Self {
            data_extents_scrubbed: counts.data_extents_scrubbed,
            tree_extents_scrubbed: counts.tree_extents_scrubbed,
            data_bytes_scrubbed: counts.data_bytes_scrubbed,
            tree_bytes_scrubbed: counts.tree_bytes_scrubbed,
            read_errors: counts.read_errors,
            csum_errors: counts.csum_errors,
            verify_errors: counts.verify_errors,
            no_csum: counts.no_csum,
            csum_discards: 0,
            super_errors: counts.super_errors,
            malloc_errors: 0,
            uncorrectable_errors: counts.uncorrectable_errors,
            corrected_errors: counts.corrected_errors,
            last_physical: counts.last_physical,
        }
    }
}
