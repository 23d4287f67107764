//! Commands on devices.
//!
//! | command     | needs                                                                 |
//! |-------------|-----------------------------------------------------------------------|
//! | resize      | the rights of an administrator ([`CommandContext::require_admin`])    |
//! | min_size    | the rights of an administrator                                        |
//! | add, remove | the rights of an administrator. The server opens a new device with its own rights |
//! | cancel_resize, cancel_removal, reset_stats | the rights of an administrator          |
//! | stats       | nothing but a file of the filesystem                                  |

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_device::{Device, has_relative_path, is_url};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::DevStatsItem;
use ubtrfs_format::print::escaped;
use ubtrfs_format::{DevId, Logical};
use ubtrfs_fs::{Error, ExtentUse, InodeId};
use ubtrfs_transaction::{Job, detect};
use uuid::Uuid;

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};
use crate::open_image::ImageId;
use crate::resolve::PathBytes;

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
    /// Adds a device, and deletes its content: [`Response::Added`]. On a seed, which stays as it is, makes a filesystem with this
    /// device: [`Response::Sprouted`].
    Add(NewDevice),
    /// Moves everything on these devices to the others, and removes them: [`Response::Removed`].
    Remove {
        /// The devices.
        devids: Vec<u64>,
    },
    /// Cancels the running removals, and waits until they have ended.
    CancelRemoval,
    /// Returns the error counters of all devices: [`Response::Stats`].
    Stats,
    /// Sets the error counters of all devices, or of one, to 0, and returns the counters before: [`Response::Stats`].
    ResetStats {
        /// The only device.
        devid: Option<u64>,
    },
}

/// A device that is to join the filesystem, or to take the place of another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewDevice {
    /// The absolute path, or the URL of an NBD export.
    pub path: PathBytes,
    /// The identity of the file that the client found there; `None` for an export.
    pub id: Option<ImageId>,
    /// Whether a device with known content is taken.
    #[serde(default)]
    pub force: bool,
    /// Whether the device is not told that its content is not needed.
    #[serde(default)]
    pub keeps_blocks: bool,
}

/// The error counters of a device, which are kept in the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStats {
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
    /// The resizes or removals were cancelled.
    Cancelled,
    /// The device is a part of the filesystem.
    Added {
        /// Its device id.
        devid: u64,
    },
    /// The device is the first one of a new filesystem on the seed.
    Sprouted {
        /// Its device id.
        devid: u64,
        /// The UUID of the new filesystem.
        fsid: Uuid,
        /// Whether the mounts of the seed show it now. They stay read-only until they are mounted again with `remount,rw`.
        is_shown: bool,
        /// Why the mounts of the seed do not show it.
        problem: Option<String>,
    },
    /// The devices are no part of the filesystem any more.
    Removed,
    /// The error counters of all devices.
    Stats(Vec<DeviceStats>),
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
        matches!(
            self,
            Self::Resize { .. } | Self::CancelResize | Self::Add(_) | Self::Remove { .. } | Self::CancelRemoval
        )
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        self.is_long() || matches!(self, Self::ResetStats { .. })
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    if request != Request::Stats {
        context.require_admin()?;
    }
    match request {
        Request::Resize { devid, to } => resize(context, known(context, devid)?, to),
        Request::MinSize { devid } => Ok(Response::MinSize(context.fs.min_device_size(known(context, devid)?)?)),
        Request::CancelResize => Ok(context.fs.cancel_resize().map(|()| Response::Cancelled)?),
        Request::Add(new) => add(context, &new),
        Request::Remove { devids } => remove(context, &devids),
        Request::CancelRemoval => Ok(context.fs.cancel_removal().map(|()| Response::Cancelled)?),
        Request::Stats => Ok(Response::Stats(stats(context, context.fs.device_stats()))),
        Request::ResetStats { devid } => {
            let of = devid.map(|devid| known(context, devid)).transpose()?;
            Ok(Response::Stats(stats(context, context.fs.reset_device_stats(of)?)))
        }
    }
}

/// Fails if the filesystem does not have this device.
pub(crate) fn known(context: &CommandContext<'_>, devid: u64) -> Result<DevId> {
    let devid = DevId(devid);
    if context.fs.space_usage().devices.iter().any(|device| device.devid == devid) {
        return Ok(devid);
    }
    let text = format!("there is no device {devid}; list the devices with: ubtrfs filesystem show PATH");
    Err(CommandFailure::new(Errno::NODEV, text))
}

fn add(context: &CommandContext<'_>, new: &NewDevice) -> Result<Response> {
    refuse_confined(context, "add the device to", &["device", "add"], new)?;
    let device = open_new(context, new)?;
    if context.fs.is_seed() {
        let (devid, fsid) = context.fs.make_sprout(Arc::clone(&device), context.job)?;
        let shown = context.host.show(&mut || context.fs.open_sprout(Arc::clone(&device)));
        let (is_shown, problem) =
            shown.map_or_else(|error| (false, Some(error.to_string())), |is_shown| (is_shown, None));
        return Ok(Response::Sprouted { devid: devid.0, fsid, is_shown, problem });
    }
    Ok(Response::Added { devid: context.fs.add_device(device, context.job)?.0 })
}

/// Fails if the server can open no new device. The message has the command for the image: its words, the new device, the
/// image.
pub(crate) fn refuse_confined(
    context: &CommandContext<'_>,
    what: &str,
    command: &[&str],
    new: &NewDevice,
) -> Result<()> {
    if !context.host.is_confined() {
        return Ok(());
    }
    let image = context.fs.space_usage().devices.into_iter().find_map(|device| device.path).unwrap_or_default();
    let (command, new) = (command.join(" "), escaped(&new.path.0));
    let text = format!(
        "the server is confined and opens no files; unmount the filesystem, {what} its image with `ubtrfs {command} {new} {image}`, \
         and mount it again"
    );
    Err(CommandFailure::new(Errno::PERM, text))
}

/// Opens a device for the filesystem, and discards its content.
pub(crate) fn open_new(context: &CommandContext<'_>, new: &NewDevice) -> Result<Arc<dyn Device>> {
    let path = Path::new(OsStr::from_bytes(&new.path.0));
    if has_relative_path(path) || is_url(path) != new.id.is_none() {
        return Err(CommandFailure::new(
            Errno::INVAL,
            "the path of a new device must be absolute, also that of a socket",
        ));
    }
    let device = context.host.open_device(path, new.id, new.force)?;
    if !new.force
        && let Some(content) = detect(device.as_ref()).map_err(Error::Engine)?
    {
        let text = format!("{} contains {content}; to overwrite it, use -f", device.describe());
        return Err(CommandFailure::new(Errno::EXIST, text));
    }
    if !new.keeps_blocks && device.can_discard() {
        discard_whole(device.as_ref(), context.job)?;
    }
    Ok(device)
}

/// Tells a device that nothing on it is needed. A device that does not support that is left as it is.
fn discard_whole(device: &dyn Device, job: &Job) -> Result<()> {
    let end = device.len_bytes();
    let mut at = 0;
    while at < end {
        job.check().map_err(Error::Engine)?;
        let len_bytes = end.saturating_sub(at).min(DISCARDED_AT_ONCE);
        if device.discard(at, len_bytes).is_err() {
            return Ok(());
        }
        at = at.saturating_add(len_bytes);
    }
    Ok(())
}

/// The most bytes that are discarded between two tests for a cancellation.
const DISCARDED_AT_ONCE: u64 = 1 << 30;

fn remove(context: &CommandContext<'_>, devids: &[u64]) -> Result<Response> {
    // As on Linux.
    let unknown = |failure| CommandFailure { errno: Errno::NOENT.raw_os_error(), ..failure };
    let found = devids.iter().map(|devid| known(context, *devid).map_err(unknown));
    let mut devids = found.collect::<Result<Vec<DevId>>>()?;
    devids.sort_unstable();
    devids.dedup();
    if devids.is_empty() {
        return Err(CommandFailure::new(Errno::INVAL, "no device was named"));
    }
    let removed = context.fs.remove_devices(&devids, context.job);
    removed.map_err(|error| {
        let no_space = "no space left on the other devices, where what was moved so far stays; repeat the removal after you added a \
                        device, removed files, or compacted block groups with: ubtrfs balance start -dusage=90 -musage=90";
        let cancelled = "it was cancelled; what was moved so far stays on the other devices";
        moving_failed(context, error, no_space, cancelled)
    })?;
    Ok(Response::Removed)
}

fn resize(context: &CommandContext<'_>, devid: DevId, to: NewSize) -> Result<Response> {
    let (before, has) = context.fs.device_size(devid)?;
    let wanted = to.bytes(before, has).ok_or_else(|| {
        CommandFailure::new(
            Errno::INVAL,
            format!("device {devid} has {before} bytes; the requested change is out of range"),
        )
    })?;
    context.fs.resize_device(devid, wanted, context.job).map_err(|error| match error {
        Error::Engine(error @ EngineError::Refused { .. }) if wanted < before => {
            CommandFailure::new(Errno::INVAL, format!("{error} (see: ubtrfs inspect min-dev-size)"))
        }
        other => {
            let no_space = "no space left below the new end; give a larger size (see: ubtrfs inspect min-dev-size), or remove \
                            files first";
            let cancelled = "it was cancelled; the size is unchanged, and block groups moved so far keep their new place";
            moving_failed(context, other, no_space, cancelled)
        }
    })?;
    let (now, _) = context.fs.device_size(devid)?;
    Ok(Response::Resized { before, now })
}

/// The failure of work that moves block groups or copies a device.
pub(crate) fn moving_failed(
    context: &CommandContext<'_>,
    error: Error,
    no_space: &str,
    cancelled: &str,
) -> CommandFailure {
    let errno = Errno::from_raw_os_error(error.errno());
    match error {
        Error::Engine(EngineError::NoSpace) => CommandFailure::new(errno, no_space),
        Error::Engine(EngineError::Cancelled) => CommandFailure::new(errno, cancelled),
        Error::Engine(EngineError::Corrupt(corrupt)) => {
            let files = corrupt.bytenr.map_or_else(String::new, |bytenr| used_by(context, bytenr));
            CommandFailure::new(errno, format!("{corrupt}{files}"))
        }
        other => other.into(),
    }
}

/// The paths of some files that use data at this address, as the end of a message about it. Empty if there are none.
fn used_by(context: &CommandContext<'_>, bytenr: Logical) -> String {
    let uses =
        context.fs.uses_of_address(bytenr, false, NAMED_MAX).ok().flatten().map_or_else(Vec::new, |(_, uses)| uses);
    let path = |found: &ExtentUse| context.fs.path_of(InodeId { root: found.root, ino: found.ino }).ok();
    let paths: Vec<String> = uses.iter().filter_map(path).map(|path| escaped(&path)).collect();
    if paths.is_empty() { String::new() } else { format!("; it is used by {}", paths.join(", ")) }
}

/// How many files a message about damaged data names.
const NAMED_MAX: usize = 10;

fn stats(context: &CommandContext<'_>, counters: Vec<(DevId, DevStatsItem)>) -> Vec<DeviceStats> {
    let devices = context.fs.space_usage().devices;
    let path = |devid: DevId| devices.iter().find(|device| device.devid == devid)?.path.clone();
    let of = |(devid, item): (DevId, DevStatsItem)| {
        let [write_io_errs, read_io_errs, flush_io_errs, corruption_errs, generation_errs] = item.values;
        DeviceStats {
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
