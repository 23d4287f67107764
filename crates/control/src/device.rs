//! Commands on devices.
//!
//! | command     | needs                                                                 |
//! |-------------|-----------------------------------------------------------------------|
//! | resize      | the rights of an administrator ([`Context::require_admin`])           |
//! | min_size    | the rights of an administrator                                        |
//! | cancel_resize, reset_stats | the rights of an administrator                         |
//! | stats       | nothing but a file of the filesystem                                  |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::DevStatsItem;
use ubtrfs_format::print::escaped;
use ubtrfs_format::{DevId, Logical};
use ubtrfs_fs::{Error, ExtentUse, InodeId};

use crate::execute::Context;
use crate::failure::{Failure, Result};

/// A command on devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Sets how much of a device the filesystem uses: [`Response::Resized`].
    Resize {
        /// The device.
        devid: u64,
        /// The new size.
        to: NewSize,
    },
    /// Returns the smallest size to which a device can be shrunk by moving whole block groups: [`Response::MinSize`].
    MinSize {
        /// The device.
        devid: u64,
    },
    /// Cancels the running resize, and waits until it has ended.
    CancelResize,
    /// Returns the error counters of all devices: [`Response::Stats`].
    Stats,
    /// Sets the error counters of all devices to 0, and returns the counters before: [`Response::Stats`].
    ResetStats,
}

/// The error counters of a device, which are kept in the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The device id.
    pub devid: u64,
    /// The path; `None` if the device is missing.
    pub path: Option<String>,
    /// Failed writes.
    pub write_io_errs: u64,
    /// Failed reads.
    pub read_io_errs: u64,
    /// Failed flushes.
    pub flush_io_errs: u64,
    /// Blocks with a wrong checksum or wrong content.
    pub corruption_errs: u64,
    /// Blocks of another generation than expected.
    pub generation_errs: u64,
}

/// A new size in bytes, absolute or relative to the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NewSize {
    /// The size of the device.
    Max,
    /// Exactly this size.
    To(u64),
    /// The current size plus this many bytes.
    Add(u64),
    /// The current size minus this many bytes.
    Sub(u64),
}

/// The result of a command on devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The device has the requested size.
    Resized {
        /// Bytes that the filesystem used before the resize.
        before: u64,
        /// Bytes that the filesystem uses after the resize.
        now: u64,
    },
    /// The smallest size of the device, in bytes.
    MinSize(u64),
    /// The resize was cancelled.
    Cancelled,
    /// The error counters of all devices.
    Stats(Vec<Stats>),
}

impl NewSize {
    /// The new size in bytes. `now` is the size in use, `has` the size of the device. `None` if the result is below 0
    /// or above `u64::MAX`.
    fn bytes(self, now: u64, has: u64) -> Option<u64> {
        match self {
            Self::Max => Some(has),
            Self::To(bytes) => Some(bytes),
            Self::Add(bytes) => now.checked_add(bytes),
            Self::Sub(bytes) => now.checked_sub(bytes),
        }
    }
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Resize { .. } | Self::CancelResize)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Self::Resize { .. } | Self::CancelResize | Self::ResetStats)
    }
}

pub(crate) fn execute(context: &Context<'_>, request: Request) -> Result<Response> {
    if request != Request::Stats {
        context.require_admin()?;
    }
    let devid = match request {
        Request::Resize { devid, .. } | Request::MinSize { devid } => devid,
        Request::CancelResize => return Ok(context.fs.cancel_resize().map(|()| Response::Cancelled)?),
        Request::Stats => return Ok(Response::Stats(stats(context, context.fs.device_stats()))),
        Request::ResetStats => return Ok(Response::Stats(stats(context, context.fs.reset_device_stats()?))),
    };
    let devid = DevId(devid);
    if !context.fs.space_usage().devices.iter().any(|device| device.devid == devid) {
        let text = format!("there is no device {devid}; list the devices with: ubtrfs filesystem show");
        return Err(Failure::new(Errno::NODEV, text));
    }
    let Request::Resize { to, .. } = request else {
        return Ok(Response::MinSize(context.fs.min_device_size(devid)?));
    };
    let (before, has) = context.fs.device_size(devid)?;
    let wanted = to.bytes(before, has).ok_or_else(|| {
        Failure::new(Errno::INVAL, format!("device {devid} has {before} bytes; the requested change is out of range"))
    })?;
    context.fs.resize_device(devid, wanted, context.job).map_err(|error| match error {
        Error::Engine(EngineError::NoSpace) => Failure::new(
            Errno::NOSPC,
            "no space left below the new end; give a larger size (see: ubtrfs inspect min-dev-size), or remove files first",
        ),
        Error::Engine(EngineError::Cancelled) => {
            let text = "it was cancelled; the size is unchanged, and block groups moved so far keep their new place";
            Failure::new(Errno::from_raw_os_error(Error::Engine(EngineError::Cancelled).errno()), text)
        }
        Error::Engine(error @ EngineError::Refused { .. }) if wanted < before => {
            Failure::new(Errno::INVAL, format!("{error} (see: ubtrfs inspect min-dev-size)"))
        }
        Error::Engine(EngineError::Corrupt(corrupt)) => {
            let files = corrupt.bytenr.map_or_else(String::new, |bytenr| used_by(context, bytenr));
            Failure::new(Errno::from_raw_os_error(EngineError::Corrupt(corrupt.clone()).errno()), format!("{corrupt}{files}"))
        }
        other => other.into(),
    })?;
    let (now, _) = context.fs.device_size(devid)?;
    Ok(Response::Resized { before, now })
}

/// The paths of some files that use data at this address, as the end of a message about it. Empty if there are none.
fn used_by(context: &Context<'_>, bytenr: Logical) -> String {
    let uses =
        context.fs.uses_of_address(bytenr, false, NAMED_MAX).ok().flatten().map_or_else(Vec::new, |(_, uses)| uses);
    let path = |found: &ExtentUse| context.fs.path_of(InodeId { root: found.root, ino: found.ino }).ok();
    let paths: Vec<String> = uses.iter().filter_map(path).map(|path| escaped(&path)).collect();
    if paths.is_empty() { String::new() } else { format!("; it is used by {}", paths.join(", ")) }
}

/// How many files a message about damaged data names.
const NAMED_MAX: usize = 10;

fn stats(context: &Context<'_>, counters: Vec<(DevId, DevStatsItem)>) -> Vec<Stats> {
    let devices = context.fs.space_usage().devices;
    let path = |devid: DevId| devices.iter().find(|device| device.devid == devid)?.path.clone();
    let of = |(devid, item): (DevId, DevStatsItem)| {
        let [write_io_errs, read_io_errs, flush_io_errs, corruption_errs, generation_errs] = item.values;
        Stats {
            devid: devid.0,
            path: path(devid),
            write_io_errs,
            read_io_errs,
            flush_io_errs,
            corruption_errs,
            generation_errs,
        }
    };
    counters.into_iter().map(of).collect()
}
