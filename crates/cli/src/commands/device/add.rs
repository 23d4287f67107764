//! `ubtrfs device add DEVICE... PATH|IMAGE`

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::device::{NewDevice, Request, Response};
use ubtrfs_control::resolve::PathBytes;
use ubtrfs_control::{Channel, ImageId, ImageWork, filesystem};
use ubtrfs_device::{Device, FileDevice, NamedDevice, has_relative_path, is_seed, is_url, loop_file};
use ubtrfs_format::print::{escaped, insert_name};
use ubtrfs_transaction::detect;

use super::remove::is_same_device;
use super::{call_filesystem, filesystem_of, unexpected};
use crate::commands::filesystem::warn_of_profiles_in;
use crate::commands::offline::{ImageOptions, ImageUse, find_device, warn_of_other_clients};
use crate::commands::place::{CommandTarget, find_own, with_channel};
use crate::commands::served::with_served;
use crate::common::{Shown, format_size, print_json, print_out, warn};
use crate::job::with_progress_in_bytes;
use crate::progs::is_progs;

/// Add devices to a filesystem
///
/// Everything on the devices is lost. The new space is used for new block groups; to spread what the filesystem has
/// already, run: ubtrfs balance start PATH
///
/// A seed stays as it is: the device becomes a new filesystem on it, which is mounted by the new device.
#[derive(clap::Args)]
pub(super) struct AddArgs {
    /// The block devices, image files or NBD exports, then a directory in the mount, or an image that is not mounted. A new
    /// image file is made with: truncate -s SIZE FILE
    #[arg(value_name = "DEVICE", required = true, num_args = 2..)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    image: ImageOptions,
    /// Overwrite a filesystem or other known content on the devices
    #[arg(short, long)]
    force: bool,
    /// Do not discard the content of the devices first
    #[arg(short = 'K', long)]
    nodiscard: bool,
    /// Accepted for compatibility with btrfs-progs; the command always waits for other changes of devices
    #[arg(long)]
    enqueue: bool,
    /// Print the new devices as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &AddArgs) -> anyhow::Result<ExitCode> {
    let (devices, target) = filesystem_of(&args.paths)?;
    for (index, device) in devices.iter().enumerate() {
        if devices.iter().take(index).any(|other| is_same_device(other, device)) {
            bail!("{} is given twice", device.shown());
        }
    }
    let work = |channel: &Channel<'_>| {
        if devices.len() > 1 {
            devices.iter().try_for_each(|path| look_at(channel, &target, path, args.force))?;
        }
        let mut added = Vec::new();
        for (index, path) in devices.iter().enumerate() {
            let (value, to_write) = add(args, channel, &target, path)?;
            added.push(value);
            if let Some((next, to_write)) = devices.get(index.saturating_add(1)).zip(to_write) {
                bail!("{} was not added to the seed; {to_write}", next.shown());
            }
        }
        Ok(added)
    };
    // Nothing is written to a seed, so it is opened for reading.
    let added = match &target {
        CommandTarget::Image(at) if is_seed(&at.image) => with_channel(&target, &args.image, ImageUse::Read, work),
        _ => with_served(&target, &args.image, ImageWork::Removal, work),
    }?;
    match args.json {
        true => print_json(&added.into()),
        false => Ok(()),
    }?;
    warn_of_profiles_in(&target, &args.image);
    Ok(ExitCode::SUCCESS)
}

/// The `st_dev` of the filesystem in which a file lies, or the file behind a loop device.
fn holding_filesystem(file: &File) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    match metadata.file_type().is_block_device() {
        true => loop_file(metadata.rdev()).map(|(dev, _)| dev),
        false => Some(metadata.dev()),
    }
}

/// Fails if a device cannot be added, as far as that can be told before another device is added.
fn look_at(channel: &Channel<'_>, target: &CommandTarget, path: &Path, force: bool) -> anyhow::Result<()> {
    new_device(path, target, force, true)?;
    let filesystem::Response::Usage(usage) = call_filesystem(channel, target, filesystem::Request::Usage)? else {
        return Err(unexpected(target));
    };
    let members = usage.devices.iter().filter_map(|device| device.path.as_deref());
    if members.map(Path::new).any(|member| is_same_device(member, path)) {
        bail!("{} is a device of this filesystem already; nothing was added", path.shown());
    }
    let found = find_device(path)?.with_context(|| format!("{} does not exist", path.shown()))?;
    let device = NamedDevice::open_found_beside_writer(found, path)?;
    match detect(&device)? {
        _ if force => {}
        Some(content) => {
            bail!("{} contains {content}; to overwrite it, use -f; nothing was added", path.shown())
        }
        None if device.has_content()? => {
            let kind = if is_url(path) { "an export" } else { "a file" };
            bail!("{} is {kind} with content; to overwrite it, use -f; nothing was added", path.shown())
        }
        None => {}
    }
    Ok(())
}

/// Adds a device and prints a message. Returns the facts about the device. If the device began a new filesystem on a
/// seed, also returns the command that makes this filesystem writable.
fn add(
    args: &AddArgs,
    channel: &Channel<'_>,
    target: &CommandTarget,
    path: &Path,
) -> anyhow::Result<(serde_json::Value, Option<String>)> {
    let (new, size_bytes) = new_device(path, target, args.force, args.nodiscard)?;
    let full = new.path.0.clone();
    let request = Request::Add(new);
    let done = with_progress_in_bytes("discarding what is on the device", |job| {
        channel.call_with(ubtrfs_control::Request::Device(request), &[], job)
    });
    let done = done.map_err(|failure| anyhow!("cannot add {} to {target}: {failure}", path.shown()))?;
    let (devid, sprout) = match done {
        ubtrfs_control::Response::Device(Response::Added { devid }) => (devid, None),
        ubtrfs_control::Response::Device(Response::Sprouted { devid, fsid, is_shown, problem }) => {
            if let Some(problem) = problem {
                warn(&format!("{target} still shows the seed: {}", escaped(problem.as_bytes())));
            }
            (devid, Some((fsid, is_shown)))
        }
        _ => return Err(unexpected(target)),
    };
    let (shown, size) = (path.shown(), format_size(size_bytes));
    let to_write = sprout.map(|(_, is_shown)| match (is_shown, target) {
        // Only root may remount.
        (true, CommandTarget::Mounted(dir)) if ubtrfs_fuse::is_root() => {
            format!("to write, run: mount -i -o remount,rw {}", dir.shown())
        }
        (true, CommandTarget::Mounted(dir)) => {
            let dir = dir.shown();
            format!("to write, run: ubtrfs umount {dir}; ubtrfs mount {shown} {dir}")
        }
        _ => format!("to write, mount it: ubtrfs mount {shown} DIR"),
    });
    let text = match sprout.zip(to_write.as_ref()) {
        None => format!("{shown} is device {devid} now, with {size}\n"),
        Some(((fsid, is_shown), to_write)) => {
            let place = if is_shown { ", which the mount shows now" } else { "" };
            format!(
                "{shown} is device {devid} of the new filesystem {fsid} on the seed{place}, with {size}; {to_write}\n"
            )
        }
    };
    tell_of_discard(path, size_bytes, args.nodiscard)?;
    if !args.json && !is_progs() {
        print_out(&text)?;
    }
    let mut value = json!({ "devid": devid, "size_bytes": size_bytes });
    if let Some((fsid, is_shown)) = sprout {
        value["fsid"] = json!(fsid);
        value["is_shown"] = json!(is_shown);
    }
    insert_name(&mut value, "path", &full);
    Ok((value, to_write))
}

/// Prints what btrfs-progs prints about the discard of a new device's content. Called when the server has taken the
/// device, because it refuses some.
pub(crate) fn tell_of_discard(path: &Path, size_bytes: u64, nodiscard: bool) -> anyhow::Result<()> {
    match is_progs() && !nodiscard {
        true => print_out(&format!("Performing full device TRIM {} ({}) ...\n", path.shown(), format_size(size_bytes))),
        false => Ok(()),
    }
}

/// The description of a new device for a server, and the size of the device. Fails if the device does not exist. Fails for a
/// file of the filesystem itself, because the server would wait for itself.
pub(crate) fn new_device(
    path: &Path,
    target: &CommandTarget,
    force: bool,
    nodiscard: bool,
) -> anyhow::Result<(NewDevice, u64)> {
    if is_url(path) {
        if has_relative_path(path) {
            bail!("{} names a relative path, and another process opens it; give whole paths", path.shown());
        }
        let size_bytes = NamedDevice::open_beside_writer(path)?.len_bytes();
        warn_of_other_clients(path);
        let path = PathBytes(path.as_os_str().as_bytes().to_vec());
        return Ok((NewDevice { path, id: None, force, keeps_blocks: nodiscard }, size_bytes));
    }
    let found = find_own(path)?.with_context(|| {
        format!("{} does not exist; for a new image file, run: truncate -s SIZE {}", path.shown(), path.shown())
    })?;
    if let CommandTarget::Mounted(dir) = target
        && let Ok(dir) = std::fs::metadata(dir)
        && holding_filesystem(&File::from(found.try_clone()?)) == Some(dir.dev())
    {
        bail!("{} lies in the filesystem itself; give a device that lies elsewhere", path.shown());
    }
    let device = FileDevice::open_found_beside_writer(&found, path)?;
    let size_bytes = device.len_bytes();
    let full = std::fs::canonicalize(path).with_context(|| format!("cannot find {}", path.shown()))?;
    let new = NewDevice {
        path: PathBytes(full.as_os_str().as_bytes().to_vec()),
        id: Some(ImageId::of(&found)?),
        force,
        keeps_blocks: nodiscard,
    };
    Ok((new, size_bytes))
}
