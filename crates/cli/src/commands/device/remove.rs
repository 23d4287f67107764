//! `ubtrfs device remove DEVICE|DEVID|missing... PATH|IMAGE`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use serde_json::json;
use ubtrfs_control::device::{Request, Response};
use ubtrfs_control::{Channel, CommandFailure, ImageId, ImageWork, filesystem, open_image};

use super::{call_filesystem, filesystem_of, unexpected};
use crate::commands::filesystem::warn_of_profiles_in;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::CommandTarget;
use crate::commands::served::{until_closed, with_running, with_served};
use crate::common::{Shown, print_json, print_out};
use crate::job::with_progress_in_bytes;
use crate::progs::{failed_call, is_progs};

/// Remove devices from a filesystem
///
/// Everything on the devices moves to the other devices first, and none of it to one that is removed as well. In the end
/// the devices hold no btrfs any more.
#[derive(clap::Args)]
#[command(visible_alias = "delete")]
pub(super) struct RemoveArgs {
    /// The devices, by path or device id, then a directory in the mount, or an image that is not mounted. "missing" is the
    /// first missing device, for which -o degraded is needed; "cancel" ends the removals that are running
    #[arg(value_name = "DEVICE", required = true, num_args = 2..)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    image: ImageOptions,
    /// Accepted for compatibility with btrfs-progs; the command always waits for other changes of devices
    #[arg(long)]
    enqueue: bool,
    /// Print the ids of the removed devices as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &RemoveArgs) -> anyhow::Result<ExitCode> {
    let (devices, target) = filesystem_of(&args.paths)?;
    if devices.iter().any(|device| device.as_os_str() == "cancel") {
        if devices.len() > 1 {
            bail!("cancel ends all removals; give it alone");
        }
        return cancel(&target, &args.image).map(|()| ExitCode::SUCCESS);
    }
    let removed = with_served(&target, &args.image, ImageWork::Removal, |channel| {
        let devids = devids_of(channel, &target, &devices, |target| match is_progs() {
            true => "error removing device 'missing': no missing devices found to remove".to_owned(),
            false => none_missing(target),
        })?;
        for (index, devid) in devids.iter().enumerate() {
            if devids.iter().take(index).any(|other| other == devid) {
                bail!("device {devid} is given twice; nothing was removed");
            }
        }
        let request = ubtrfs_control::Request::Device(Request::Remove { devids: devids.clone() });
        let done = with_progress_in_bytes("moving what is on the device", |job| channel.call_with(request, &[], job));
        let names = devices.iter().map(|device| device.shown()).collect::<Vec<_>>().join(", ");
        let failed = |failure: CommandFailure| {
            // The server does not know the path.
            let is_no_space = failure.errno() == Errno::NOSPC;
            let options =
                args.image.options.iter().map(|options| format!(" -o {}", options.shown())).collect::<String>();
            let place = if is_no_space { format!("{options} {}", target.filesystem()) } else { String::new() };
            let text = || anyhow!("cannot remove {names} from {target}: {failure}{place}");
            failed_call(&failure, &[Errno::NOENT], || format!("error removing devid {names}")).unwrap_or_else(text)
        };
        match done.map_err(failed)? {
            ubtrfs_control::Response::Device(Response::Removed) => Ok(devids),
            _ => Err(unexpected(&target)),
        }
    })?;
    match args.json {
        true => print_json(&json!({ "removed": removed })),
        false if is_progs() => Ok(()),
        false => print_out(&removed.iter().map(|devid| format!("device {devid} was removed\n")).collect::<String>()),
    }?;
    warn_of_profiles_in(&target, &args.image);
    Ok(ExitCode::SUCCESS)
}

/// The error if no device is missing.
pub(crate) fn none_missing(target: &CommandTarget) -> String {
    format!("no further device of {target} is missing")
}

/// The ids of the devices that the user named. `none_missing` makes the error if no device is missing.
pub(crate) fn devids_of(
    channel: &Channel<'_>,
    target: &CommandTarget,
    named: &[PathBuf],
    none_missing: fn(&CommandTarget) -> String,
) -> anyhow::Result<Vec<u64>> {
    let filesystem::Response::Usage(usage) = call_filesystem(channel, target, filesystem::Request::Usage)? else {
        return Err(unexpected(target));
    };
    // A device that failed is as good as missing, and btrfs-progs calls it so.
    let (missing, failed): (Vec<_>, Vec<_>) =
        usage.devices.iter().filter(|device| device.state().is_absent()).partition(|device| device.path.is_none());
    let mut missing = missing.into_iter().chain(failed).map(|device| device.devid);
    let mut devids = Vec::new();
    for name in named {
        let by_number = name.to_str().and_then(|text| text.parse::<u64>().ok());
        devids.push(match by_number {
            Some(devid) => devid,
            None if name.as_os_str() == "missing" => missing.next().with_context(|| none_missing(target))?,
            None => {
                let is_it = |device: &&filesystem::DeviceInfo| {
                    device.path.as_deref().is_some_and(|path| is_same_device(Path::new(path), name))
                };
                let found = usage.devices.iter().find(is_it).map(|device| device.devid);
                found.with_context(|| {
                    format!("{} is no device of {target}; list the devices with: ubtrfs filesystem show", name.shown())
                })?
            }
        });
    }
    Ok(devids)
}

/// Whether two paths lead to one device, also by different names.
pub(super) fn is_same_device(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| open_image(path, false).and_then(ImageId::of).ok();
    one == other || id(one).is_some_and(|one| id(other) == Some(one))
}

/// Cancels the removals that run on a mount, or in the process that has the image open.
fn cancel(target: &CommandTarget, options: &ImageOptions) -> anyhow::Result<()> {
    with_running(target, options, ImageUse::Write, |channel| {
        until_closed(channel, target, || {
            let done = channel.call(ubtrfs_control::Request::Device(Request::CancelRemoval), &[]);
            done.map_err(|failure| anyhow!("cannot cancel the removal of devices of {target}: {failure}"))
        })
    })
}
