//! `ubtrfs filesystem resize [DEVID:][+|-]SIZE|max|cancel PATH|IMAGE`

use std::fs::File;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::device::{NewSize, Request, Response};
use ubtrfs_control::{Channel, ImageWork, open_image};
use ubtrfs_format::DevId;

use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, is_btrfs};
use crate::commands::served::{until_closed, with_running, with_served};
use crate::common::{Shown, parse_size, print_out};
use crate::job::with_progress_in_bytes;

/// Change how much of its device a filesystem uses
#[derive(clap::Args)]
#[command(
    after_help = "An image file grows as needed if it is not mounted. A mounted one must be made larger first: truncate -s \
                        SIZE IMAGE. After the filesystem shrank, unmount it and truncate the image to the new size: truncate -s SIZE IMAGE."
)]
pub(crate) struct Args {
    /// New size of device DEVID (default 1): a size such as 10G, a change such as +1G or -1G, or max; cancel ends the
    /// resize that is running
    #[arg(value_name = "[DEVID:][+|-]SIZE|[DEVID:]max|cancel", allow_hyphen_values = true)]
    size: String,
    /// A directory in a mount, or an image that is not mounted
    #[arg(value_name = "PATH|IMAGE")]
    path: Target,
    /// Accepted for compatibility with btrfs-progs; a resize always waits for block groups that a balance moves
    #[arg(long)]
    enqueue: bool,
    /// Print the sizes as JSON
    #[arg(long)]
    json: bool,
}

fn parse(text: &str) -> anyhow::Result<(u64, NewSize)> {
    let (devid, size) = match text.split_once(':') {
        Some((devid, size)) => {
            (devid.parse().map_err(|_| anyhow!("'{devid}' is not a device id; see: ubtrfs filesystem show"))?, size)
        }
        None => (1, text),
    };
    let bytes = |text: &str| parse_size(text).map_err(|error| anyhow!("{error}; examples: 10G, +512M, -1G, max"));
    let size = match size {
        "max" => NewSize::Max,
        _ => match (size.strip_prefix('+'), size.strip_prefix('-')) {
            (Some(more), _) => NewSize::Add(bytes(more)?),
            (_, Some(less)) => NewSize::Sub(bytes(less)?),
            _ => NewSize::To(bytes(size)?),
        },
    };
    Ok((devid, size))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.size == "cancel" {
        return cancel(&filesystem(args)?).map(|()| ExitCode::SUCCESS);
    }
    let (devid, to) = parse(&args.size)?;
    let target = filesystem(args)?;
    with_served(&target, &ImageOptions::default(), ImageWork::Resize, |channel| {
        // Make the image file larger if necessary. The image is open and locked, so no other program changes it
        // meanwhile.
        if let (Target::Image(at), Some(bytes)) = (&target, wanted(channel, devid, to)) {
            let image = &at.image;
            let cannot = || format!("cannot make {} larger", image.shown());
            // By now, another file may have the image's name.
            let file = File::from(open_image(image, true).with_context(cannot)?);
            if !is_btrfs(&file) {
                return Err(anyhow!("another file took its name")).with_context(cannot);
            }
            let metadata = file.metadata().with_context(cannot)?;
            if metadata.is_file() && metadata.len() < bytes {
                file.set_len(bytes).with_context(cannot)?;
            }
        }
        let request = ubtrfs_control::Request::Device(Request::Resize { devid, to });
        let done =
            with_progress_in_bytes("moving what lies behind the new end", |job| channel.call_with(request, &[], job));
        let done = done.map_err(|failure| anyhow!("cannot resize {}: {failure}", target.filesystem()))?;
        let ubtrfs_control::Response::Device(Response::Resized { before, now }) = done else {
            bail!("the server of {target} gave an unexpected answer; unmount and mount with this ubtrfs");
        };
        print_out(&match args.json {
            true => format!("{}\n", json!({ "devid": devid, "before_bytes": before, "now_bytes": now })),
            false => format!("device {devid}: {before} -> {now} bytes\n"),
        })
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The filesystem to resize. As in btrfs-progs, a path in a mount must be a directory, because a file could be meant as
/// an image.
fn filesystem(args: &Args) -> anyhow::Result<Target> {
    let target = args.path.clone().or_image();
    target.await_server()?;
    if let Target::Mounted(path) = &target
        && std::fs::metadata(path).is_ok_and(|meta| !meta.is_dir())
    {
        let mount = ubtrfs_fuse::holding_mount(path).map_or_else(|| "its directory".to_owned(), |(dir, _)| dir.shown());
        bail!("{target} is a file in a mount and no image; to resize the mount, give {mount}");
    }
    Ok(target)
}

/// Cancels the resize that is running on a mount, or in the process that has the image open.
fn cancel(target: &Target) -> anyhow::Result<()> {
    with_running(target, &ImageOptions::default(), Use::Write, |channel| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        assert_eq!(parse("10G").unwrap(), (1, NewSize::To(10 << 30)));
        assert_eq!(parse("2:+1M").unwrap(), (2, NewSize::Add(1 << 20)));
        assert_eq!(parse("-4096").unwrap(), (1, NewSize::Sub(4096)));
        assert_eq!(parse("1:max").unwrap(), (1, NewSize::Max));
        for wrong in ["", "x:1G", "1:", "ten", "--1G", "+", "max:1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let error = parse("abc").unwrap_err().to_string();
        assert_eq!(error.matches("abc").count(), 1, "{error}");
    }
}
