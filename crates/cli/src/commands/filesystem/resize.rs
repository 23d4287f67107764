//! `ubtrfs filesystem resize [DEVID:][+|-]SIZE|max|min|cancel PATH|IMAGE`

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use serde_json::json;
use ubtrfs_control::device::{NewSize, Request, Response};
use ubtrfs_control::{Channel, CommandFailure, ImageWork, filesystem, open_image};
use ubtrfs_device::{Access, Device, is_url};
use ubtrfs_format::DevId;
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_volumes::DEVICE_RESERVED;

use super::call;
use crate::commands::device::{superblock_of, unexpected};
use crate::commands::offline::{ImageOptions, ImageUse, members_of, open_device};
use crate::commands::place::CommandTarget;
use crate::commands::served::{until_closed, with_running, with_served};
use crate::common::{Shown, format_size, parse_size, print_out};
use crate::job::with_progress_in_bytes;
use crate::progs::is_progs;

/// Change how much of its device a filesystem uses
#[derive(clap::Args)]
#[command(
    after_help = "An image file grows as needed if it is not mounted. A mounted one must be made larger first: truncate -s \
                        SIZE IMAGE. An image file keeps its length when the filesystem shrinks, unless --truncate is given; after \
                        a mounted filesystem shrank, unmount it and repeat the command with --truncate on the image."
)]
pub(crate) struct Args {
    /// New size of device DEVID (default 1): a size such as 10G, a change such as +1G or -1G, max, or min, at most
    /// what `inspect min-dev-size` prints; cancel ends the resize that is running
    #[arg(value_name = "[DEVID:][+|-]SIZE|[DEVID:]max|[DEVID:]min|cancel", allow_hyphen_values = true)]
    size: String,
    /// Shorten the image file to the new size; not for mounts and block devices
    #[arg(long)]
    truncate: bool,
    /// A directory in a mount, or an image that is not mounted
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    /// Accepted for compatibility with btrfs-progs; a resize always waits for block groups that a balance moves
    #[arg(long)]
    enqueue: bool,
    /// Print the sizes as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// The wanted size of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WantedSize {
    Size(NewSize),
    /// The smallest size that can be reached.
    Min,
}

fn parse(text: &str) -> anyhow::Result<(u64, WantedSize)> {
    let (devid, size) = match text.split_once(':') {
        Some((devid, size)) => {
            (devid.parse().map_err(|_| anyhow!("'{devid}' is not a device id; see: ubtrfs filesystem show"))?, size)
        }
        None => (1, text),
    };
    if size == "min" {
        return Ok((devid, WantedSize::Min));
    }
    let bytes = |text: &str| parse_size(text).map_err(|error| anyhow!("{error}; examples: 10G, +512M, -1G, max, min"));
    let size = match size {
        "max" => NewSize::Max,
        _ => match (size.strip_prefix('+'), size.strip_prefix('-')) {
            (Some(more), _) => NewSize::Add(bytes(more)?),
            (_, Some(less)) => NewSize::Sub(bytes(less)?),
            _ => NewSize::To(bytes(size)?),
        },
    };
    Ok((devid, WantedSize::Size(size)))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.size == "cancel" {
        return cancel(&filesystem(args)?, &args.image).map(|()| ExitCode::SUCCESS);
    }
    let (devid, to) = parse(&args.size)?;
    let target = filesystem(args)?;
    if let (true, CommandTarget::Mounted(_)) = (args.truncate, &target) {
        bail!("{target} is in a mount; resize it without --truncate, unmount it, and repeat the command on the image");
    }
    let (member, now) = with_served(&target, &args.image, ImageWork::Resize, |channel| {
        let member = member_path(channel, &target, &args.image, devid)?;
        if args.truncate {
            refuse_block_device(member.as_deref())?;
        }
        if is_progs() {
            print_out(&announcement(channel, &target, devid, &args.size, to)?)?;
        }
        let (before, now) = match to {
            WantedSize::Size(size) => {
                enlarge_file(channel, member.as_deref(), devid, size)?;
                resize(channel, &target, devid, size)?
            }
            WantedSize::Min => shrink_to_least(channel, &target, devid)?,
        };
        print_out(&match args.json {
            _ if is_progs() => String::new(),
            true => format!("{}\n", json!({ "devid": devid, "before_bytes": before, "now_bytes": now })),
            false => format!("device {devid}: {before} -> {now} bytes\n"),
        })?;
        Ok((member, now))
    })?;
    if let Some(member) = member.filter(|_| args.truncate) {
        truncate(&member, devid, now)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the filesystem of an image as small as it can be, and shortens an image file to its size.
pub(crate) fn shrink_image(image: &Path) -> anyhow::Result<()> {
    let target = CommandTarget::Mounted(image.to_owned()).or_image();
    let shrink = |channel: &Channel<'_>| shrink_to_least(channel, &target, 1);
    let (_, now) = with_served(&target, &ImageOptions::default(), ImageWork::Resize, shrink)?;
    match std::fs::metadata(image).is_ok_and(|meta| meta.is_file()) {
        true => truncate(image, 1, now),
        false => Ok(()),
    }
}

/// The sentence of btrfs-progs before a resize.
fn announcement(
    channel: &Channel<'_>,
    target: &CommandTarget,
    devid: u64,
    text: &str,
    to: WantedSize,
) -> anyhow::Result<String> {
    let Some(device) = device(channel, target, devid)? else { return Ok(String::new()) };
    let size = match to {
        WantedSize::Size(NewSize::To(bytes)) => format_size(bytes),
        WantedSize::Size(NewSize::Add(bytes)) => format_size(device.total.saturating_add(bytes)),
        WantedSize::Size(NewSize::Sub(bytes)) => format_size(device.total.saturating_sub(bytes)),
        _ => text.rsplit(':').next().unwrap_or(text).to_owned(),
    };
    let path = device.path.as_deref().unwrap_or("missing").shown();
    Ok(format!("Resize device id {devid} ({path}) from {} to {size}\n", format_size(device.total)))
}

/// The file or block device of a member of an image that is not mounted. `None` in a mount, for an export of an NBD server,
/// and for a member that is missing or of a seed: it cannot be resized.
fn member_path(
    channel: &Channel<'_>,
    target: &CommandTarget,
    options: &ImageOptions,
    devid: u64,
) -> anyhow::Result<Option<PathBuf>> {
    let (CommandTarget::Image(at), Channel::Image { fs, .. }) = (target, channel) else { return Ok(None) };
    let device = device(channel, target, devid)?;
    if device.is_none_or(|device| device.is_seed || device.path.is_none()) {
        return Ok(None);
    }
    let fsid = fs.superblock().fsid;
    let is_it = |path: &PathBuf| superblock_of(path).is_ok_and(|own| own.fsid == fsid && own.dev_item.devid.0 == devid);
    Ok(members_of(&at.image, options)?.into_iter().filter(|path| !is_url(path)).find(is_it))
}

/// Makes the file of a member larger if the new size needs it. The member is open and locked, so no other program changes
/// it meanwhile.
fn enlarge_file(channel: &Channel<'_>, member: Option<&Path>, devid: u64, to: NewSize) -> anyhow::Result<()> {
    let (Channel::Image { fs, .. }, Some(path), Some(bytes)) = (channel, member, wanted(channel, devid, to)) else {
        return Ok(());
    };
    let cannot = || format!("cannot make {} larger", path.shown());
    // By now, another file may have the name.
    let file = File::from(open_image(path, true).with_context(cannot)?);
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    file.read_exact_at(&mut raw, SUPERBLOCK_OFFSETS[0]).with_context(cannot)?;
    let own = Superblock::decode(&raw).with_context(cannot)?;
    if (own.magic, own.fsid, own.dev_item.devid.0) != (MAGIC, fs.superblock().fsid, devid) {
        return Err(anyhow!("another file took its name")).with_context(cannot);
    }
    let metadata = file.metadata().with_context(cannot)?;
    if metadata.is_file() && metadata.len() < bytes {
        file.set_len(bytes).with_context(cannot)?;
    }
    Ok(())
}

/// How the space of the filesystem is used.
fn usage(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<filesystem::FilesystemUsage> {
    match call(channel, target, "resize", filesystem::Request::Usage)? {
        filesystem::Response::Usage(usage) => Ok(usage),
        _ => Err(unexpected(target)),
    }
}

/// The space of a device; `None` if the filesystem does not have the device.
fn device(channel: &Channel<'_>, target: &CommandTarget, devid: u64) -> anyhow::Result<Option<filesystem::DeviceInfo>> {
    Ok(usage(channel, target)?.devices.into_iter().find(|device| device.devid == devid))
}

/// Resizes a device, and returns its size before and now.
fn resize(channel: &Channel<'_>, target: &CommandTarget, devid: u64, to: NewSize) -> anyhow::Result<(u64, u64)> {
    try_resize(channel, target, devid, to)?
        .map_err(|failure| anyhow!("cannot resize {}: {failure}", target.filesystem()))
}

/// Works like [`resize`], and returns the failure of the resize apart from other errors.
fn try_resize(
    channel: &Channel<'_>,
    target: &CommandTarget,
    devid: u64,
    to: NewSize,
) -> anyhow::Result<Result<(u64, u64), CommandFailure>> {
    let request = ubtrfs_control::Request::Device(Request::Resize { devid, to });
    let done =
        with_progress_in_bytes("moving what lies behind the new end", |job| channel.call_with(request, &[], job));
    match done {
        Ok(ubtrfs_control::Response::Device(Response::Resized { before, now })) => Ok(Ok((before, now))),
        Ok(_) => Err(unexpected(target)),
        Err(failure) => Ok(Err(failure)),
    }
}

/// Shrinks a device until nothing makes it smaller, and returns its size before and now. The first step moves whole block
/// groups. Further steps try the size that the block groups need if they lie one after the other. For that, extents move
/// into the free space of other block groups. Such a step may fail, but the block groups that it emptied are gone. The last
/// steps halve the free space inside of block groups: new block groups of a smaller device are smaller, too.
fn shrink_to_least(channel: &Channel<'_>, target: &CommandTarget, devid: u64) -> anyhow::Result<(u64, u64)> {
    let cannot = |failure| anyhow!("cannot resize {}: {failure}", target.filesystem());
    let least = || match channel.call(ubtrfs_control::Request::Device(Request::MinSize { devid }), &[]) {
        Ok(ubtrfs_control::Response::Device(Response::MinSize(bytes))) => Ok(bytes),
        Ok(_) => Err(unexpected(target)),
        Err(failure) => Err(cannot(failure)),
    };
    let packed = || {
        let device = device(channel, target, devid)?;
        Ok::<_, anyhow::Error>(device.map_or(u64::MAX, |device| device.allocated.saturating_add(DEVICE_RESERVED)))
    };
    let to_least = |now: u64| match least()? {
        bytes if bytes < now => Ok::<_, anyhow::Error>(resize(channel, target, devid, NewSize::To(bytes))?.1),
        _ => Ok(now),
    };
    let (before, mut now) = resize(channel, target, devid, NewSize::To(least()?))?;
    for _ in 0..ROUNDS_MAX {
        let last = now;
        let wanted = packed()?;
        if wanted < now {
            match try_resize(channel, target, devid, NewSize::To(wanted))? {
                Ok((_, reached)) => now = reached,
                Err(failure) if matches!(failure.errno(), Errno::NOSPC | Errno::INVAL) => {}
                Err(failure) => return Err(cannot(failure)),
            }
        }
        now = to_least(now)?;
        if now == last {
            break;
        }
    }
    let mut refused = needed(channel, target, devid)?;
    for _ in 0..HALVINGS_MAX {
        let gain = now.saturating_sub(refused);
        if gain <= GAIN_MIN.max(now / 20) {
            break;
        }
        let wanted = (refused + gain / 2).next_multiple_of(SECTOR_MAX);
        match try_resize(channel, target, devid, NewSize::To(wanted))? {
            Ok((_, reached)) => now = reached,
            Err(failure) if matches!(failure.errno(), Errno::NOSPC | Errno::INVAL) => refused = wanted,
            Err(failure) => return Err(cannot(failure)),
        }
        // A step that failed may have emptied block groups, so the device may be smaller now.
        now = to_least(now)?;
    }
    Ok((before, now))
}

/// The size of a device whose block groups have no free space.
fn needed(channel: &Channel<'_>, target: &CommandTarget, devid: u64) -> anyhow::Result<u64> {
    let usage = usage(channel, target)?;
    let used_of = |(flags, bytes): &(u64, u64)| {
        let group = usage.groups.iter().find(|group| group.flags == *flags && group.total > 0);
        let used = group.map(|group| u128::from(*bytes) * u128::from(group.used) / u128::from(group.total));
        used.and_then(|used| u64::try_from(used).ok()).unwrap_or(*bytes)
    };
    let device = usage.devices.iter().find(|device| device.devid == devid);
    let groups = device.and_then(|device| device.groups.as_deref());
    Ok(groups.map_or(u64::MAX, |groups| groups.iter().map(used_of).sum::<u64>().saturating_add(DEVICE_RESERVED)))
}

/// Fails if a member cannot be truncated.
fn refuse_block_device(member: Option<&Path>) -> anyhow::Result<()> {
    match member {
        Some(path) if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) => {
            bail!("{} is not a file, so it cannot be truncated; omit --truncate", path.shown())
        }
        _ => Ok(()),
    }
}

/// Shortens an image file to the size of its filesystem. The image was closed after the resize, so another process may
/// have resized it again; then the file stays as it is.
fn truncate(image: &Path, devid: u64, now: u64) -> anyhow::Result<()> {
    let cannot = || format!("cannot truncate {}", image.shown());
    let mut file = open_device(image, Access::ReadWrite).with_context(cannot)?;
    let device = superblock_in(&file).with_context(cannot)?.dev_item;
    if (device.devid.0, device.total_bytes) != (devid, now) {
        bail!("{}: it is not device {devid} with {now} bytes any more; nothing was truncated", cannot());
    }
    if file.file().is_some_and(|file| !file.is_block_device()) && file.len_bytes() > now {
        file.resize(now).with_context(cannot)?;
    }
    Ok(())
}

/// The primary superblock of a device that is open.
fn superblock_in(device: &dyn Device) -> anyhow::Result<Superblock> {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    device.read_at(SUPERBLOCK_OFFSETS[0], &mut raw)?;
    Ok(Superblock::decode(&raw)?)
}

/// The filesystem to resize. As in btrfs-progs, a path in a mount must be a directory, because a file could be meant as
/// an image.
fn filesystem(args: &Args) -> anyhow::Result<CommandTarget> {
    let target = args.path.clone().or_image();
    target.await_server()?;
    if let CommandTarget::Mounted(path) = &target
        && std::fs::metadata(path).is_ok_and(|meta| !meta.is_dir())
    {
        let mount = ubtrfs_fuse::holding_mount(path).map_or_else(|| "its directory".to_owned(), |(dir, _)| dir.shown());
        bail!("{target} is a file in a mount and no image; to resize the mount, give {mount}");
    }
    Ok(target)
}

/// Cancels the resize that is running on a mount, or in the process that has the image open.
fn cancel(target: &CommandTarget, options: &ImageOptions) -> anyhow::Result<()> {
    with_running(target, options, ImageUse::Write, |channel| {
        until_closed(channel, target, || {
            let done = channel.call(ubtrfs_control::Request::Device(Request::CancelResize), &[]);
            done.map_err(|failure| anyhow!("cannot cancel the resize of {target}: {failure}"))
        })
    })
}

/// The new size in bytes if the channel leads to an image; `None` if the device is missing or the size is out of range,
/// which the command reports.
fn wanted(channel: &Channel<'_>, devid: u64, to: NewSize) -> Option<u64> {
    let Channel::Image { fs, .. } = channel else { return None };
    let (now, _) = fs.device_size(DevId(devid)).ok()?;
    match to {
        NewSize::To(bytes) => Some(bytes),
        NewSize::Add(bytes) => now.checked_add(bytes).filter(|bytes| i64::try_from(*bytes).is_ok()),
        NewSize::Max | NewSize::Sub(_) => None,
    }
}

/// The most times that `min` shrinks again after moves made room.
const ROUNDS_MAX: usize = 8;
/// The most times that `min` halves the free space in block groups.
const HALVINGS_MAX: usize = 5;
/// Less free space, in bytes, is not worth the moves.
const GAIN_MIN: u64 = 8 << 20;
/// The largest sector; sizes are multiples of sectors.
const SECTOR_MAX: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        for (text, devid, size) in [
            ("10G", 1, NewSize::To(10 << 30)),
            ("2:+1M", 2, NewSize::Add(1 << 20)),
            ("-4096", 1, NewSize::Sub(4096)),
            ("1:max", 1, NewSize::Max),
        ] {
            assert_eq!(parse(text).unwrap(), (devid, WantedSize::Size(size)));
        }
        assert_eq!(parse("3:min").unwrap(), (3, WantedSize::Min));
        for wrong in ["", "x:1G", "1:", "ten", "--1G", "+", "max:1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let error = parse("abc").unwrap_err().to_string();
        assert_eq!(error.matches("abc").count(), 1, "{error}");
    }
}
