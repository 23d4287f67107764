//! Replacing a device.
//!
//! | command        | needs                                                                             |
//! |----------------|-----------------------------------------------------------------------------------|
//! | start, resume, cancel | the rights of an administrator. The server opens the new device with its own rights |
//! | status         | the rights of an administrator, as in Linux                                       |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{ReplaceReport, ReplaceRequest};

use crate::device::{NewDevice, known, moving_failed, open_new, refuse_confined};
use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};
use crate::resolve::PathBytes;

/// A command on the replacement of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Replaces a device, and answers when that is done: [`Response::Done`].
    Start(StartReplace),
    /// Waits until a replacement that was begun before is complete: [`Response::Done`]. A cancelled wait suspends it.
    Resume,
    /// Describes the running replacement, or the last one: [`Response::Running`], [`Response::Last`].
    Status,
    /// Ends the running replacement, and waits until it has ended: [`Response::Cancelled`].
    Cancel,
}

/// A replacement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartReplace {
    /// The device that is replaced.
    pub devid: u64,
    /// The new device, whose content is deleted.
    pub new: NewDevice,
    /// Whether the old device is read only where no other copy is good.
    #[serde(default)]
    pub avoids_source: bool,
}

/// The result of a command on the replacement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The new device is in place.
    Done(ReplaceReportMessage),
    /// A replacement is running.
    Running(ReplaceProgress),
    /// The last replacement; `None` if there was none.
    Last(Option<Last>),
    /// The replacement has ended as requested.
    Cancelled,
}

/// The result of a replacement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplaceReportMessage {
    /// Files with data that has no good copy, and how many bytes; not all if there are very many.
    pub lost_files: Vec<(PathBytes, u64)>,
    /// Bytes of tree blocks without a good copy.
    pub lost_block_bytes: u64,
    /// Sectors that were bad on the old device and came from others.
    pub corrected_errors: u64,
    /// Sectors without a good copy.
    pub uncorrectable_errors: u64,
}

/// A replacement that is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplaceProgress {
    /// The device that is replaced.
    pub devid: u64,
    /// Bytes that are copied.
    pub done_bytes: u64,
    /// Bytes that have to be copied.
    pub total_bytes: u64,
    /// Sectors without a good copy so far.
    pub uncorrectable_errors: u64,
}

/// A replacement that has ended, or that does not run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Last {
    /// One of the states of [`DevReplaceItem`].
    pub state: u64,
    /// The device that was replaced.
    pub devid: u64,
    /// Seconds since 1970.
    pub started: u64,
    /// Seconds since 1970.
    pub stopped: u64,
    /// How far it came on the device, in thousandths.
    pub progress_1000: u64,
    /// Writes to the new device that failed.
    pub write_errors: u64,
    /// Sectors without a good copy.
    pub uncorrectable_errors: u64,
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Start(_) | Self::Resume | Self::Cancel)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        self.is_long()
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    match request {
        Request::Start(start) => replace(context, &start).map(Response::Done),
        Request::Resume => resume(context).map(Response::Done),
        Request::Status => status(context),
        Request::Cancel => Ok(context.fs.cancel_replace().map(|()| Response::Cancelled)?),
    }
}

fn replace(context: &CommandContext<'_>, start: &StartReplace) -> Result<ReplaceReportMessage> {
    let devid = known(context, start.devid)?;
    // Before the content of the new device is discarded.
    context.fs.check_replace_can_begin(devid)?;
    refuse_confined(context, "replace the device in", &["replace", "start", &devid.to_string()], &start.new)?;
    let device = open_new(context, &start.new)?;
    let request = ReplaceRequest { devid, device, avoids_source: start.avoids_source };
    let replaced = context.fs.replace_device(&request, context.job).map_err(|error| {
        let no_space = "no space left for the change of the trees; remove files, then try again";
        let cancelled = match context.fs.suspended_replacement() {
            Some(_) => "it is suspended, and goes on at the next mount",
            None => "it was cancelled; the old device is in its place",
        };
        moving_failed(context, error, no_space, cancelled)
    })?;
    let ReplaceReport { counts, files, lost_block_bytes } = replaced;
    let named = |(id, path, damage): &(ubtrfs_fs::InodeId, Option<Vec<u8>>, ubtrfs_fs::Damage)| {
        let by_number = || format!("inode {} of subvolume {}", id.ino, id.root).into_bytes();
        (PathBytes(path.clone().unwrap_or_else(by_number)), damage.lost_bytes)
    };
    let lost_files: Vec<(PathBytes, u64)> = files.iter().map(named).collect();
    for (path, bytes) in &lost_files {
        tracing::warn!("replace: {bytes} bytes of {} have no good copy", escaped(&path.0));
    }
    let (corrected_errors, uncorrectable_errors) = (counts.corrected_errors, counts.uncorrectable_errors);
    Ok(ReplaceReportMessage { lost_files, lost_block_bytes, corrected_errors, uncorrectable_errors })
}

/// Waits for the end of a replacement that the opening of the filesystem has resumed.
fn resume(context: &CommandContext<'_>) -> Result<ReplaceReportMessage> {
    let mut told = (0, 0);
    while let Some(running) = context.fs.replace_status() {
        let (done, total) = running.done_bytes;
        context.job.add_total(total.saturating_sub(told.1));
        context.job.advance(done.saturating_sub(told.0));
        told = (done, total);
        if context.job.check().is_err() {
            context.fs.suspend_replace();
            return Err(CommandFailure::new(Errno::CANCELED, "it is suspended, and goes on at the next mount"));
        }
        std::thread::sleep(WAIT);
    }
    match context.fs.last_replacement()? {
        Some(item) if item.replace_state == DevReplaceItem::FINISHED => Ok(ReplaceReportMessage {
            uncorrectable_errors: item.num_uncorrectable_read_errors,
            ..ReplaceReportMessage::default()
        }),
        _ if context.fs.suspended_replacement().is_some() => {
            Err(CommandFailure::new(Errno::NXIO, "its new device was not given: name it with -o device=PATH"))
        }
        _ => Err(CommandFailure::new(
            Errno::IO,
            "the new device could not take the place; the old device is in its place",
        )),
    }
}

/// How often the end is looked for.
const WAIT: std::time::Duration = std::time::Duration::from_millis(100);

fn status(context: &CommandContext<'_>) -> Result<Response> {
    if let Some(running) = context.fs.replace_status() {
        let (done_bytes, total_bytes) = running.done_bytes;
        return Ok(Response::Running(ReplaceProgress {
            devid: running.devid.0,
            done_bytes,
            total_bytes,
            uncorrectable_errors: running.counts.uncorrectable_errors,
        }));
    }
    let devices = context.fs.space_usage().devices;
    let total = |devid| devices.iter().find(|device| device.devid == devid).map_or(0, |device| device.total);
    let last = |item: DevReplaceItem| Last {
        state: item.replace_state,
        devid: item.src_devid.0,
        started: item.time_started,
        stopped: item.time_stopped,
        progress_1000: item.cursor_left.checked_div(total(item.src_devid) / 1000).unwrap_or(0).min(1000),
        write_errors: item.num_write_errors,
        uncorrectable_errors: item.num_uncorrectable_read_errors,
    };
    let item = context.fs.last_replacement()?.filter(|item| item.replace_state != 0);
    Ok(Response::Last(item.map(last)))
}
