//! `ubtrfs replace start`, `status` and `cancel`: replacing a device by a new one, printed as btrfs-progs prints it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use serde_json::json;
use ubtrfs_control::replace::{Last, ReplaceProgress, ReplaceReportMessage, Request, Response, StartReplace};
use ubtrfs_control::resolve::PathBytes;
use ubtrfs_control::{Channel, CommandFailure, ImageWork, Request as AnyRequest, Response as AnyResponse};
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_format::print::{escaped, insert_name};
use ubtrfs_format::superblock::Superblock;

use super::background::{self, BackgroundStart, Detached};
use super::device::{devids_of, new_device, none_missing, superblock_of, tell_of_discard, unexpected};
use super::offline::text::day_time_text;
use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, with_channel};
use super::served::{until_closed, with_running, with_served};
use crate::common::{Shown, print_json, print_out};
use crate::job::with_progress_in_bytes;
use crate::progs::{failed_call, is_progs};

/// Replace a device by a new one
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Start(ReplaceStartArgs),
    Status(ReplaceStatusArgs),
    Cancel(CancelArgs),
}

/// Copy a device to a new one, which then takes its place
///
/// Bad content of the old device is copied from other devices; if the old device is missing, everything is. Writers go on
/// meanwhile. Afterwards the old device holds no btrfs. On a mount the work goes on in the background; on an image that is
/// not mounted it ends with the command. A replacement of the same device that was interrupted goes on. Exit status: 0 if
/// nothing is lost, 1 after a failure, 3 if some data has no good copy.
#[derive(clap::Args)]
struct ReplaceStartArgs {
    /// Wait until the device is replaced
    #[arg(short = 'B')]
    wait: bool,
    /// Overwrite a filesystem or other known content on the new device
    #[arg(short, long)]
    force: bool,
    /// Read the old device only where no other copy is good
    #[arg(short = 'r')]
    avoid_source: bool,
    /// Do not discard the content of the new device first
    #[arg(short = 'K', long)]
    nodiscard: bool,
    /// If another replacement or a balance is running, wait for its end. The command always waits for other changes of devices
    #[arg(long)]
    enqueue: bool,
    /// Print the result as JSON (with -B)
    #[arg(long)]
    json: bool,
    /// This process is in the background
    #[arg(long, hide = true)]
    detached: bool,
    /// The old device by path or device id, or "missing"
    #[arg(value_name = "DEVICE|DEVID|missing")]
    old: PathBuf,
    /// The new device or image file, at least as large
    #[arg(value_name = "NEW")]
    new: PathBuf,
    /// A directory in the mount, or an image that is not mounted
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show how far the replacement is, until it ends, or what became of the last one
#[derive(clap::Args)]
struct ReplaceStatusArgs {
    /// Print once, and do not wait for the end
    #[arg(short = '1')]
    once: bool,
    /// Print JSON, once
    #[arg(long)]
    json: bool,
    /// A directory in the mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// End the replacement that is running; the old device stays
///
/// Exit status: 0 if it was cancelled, 1 after a failure, 2 if none is running.
#[derive(clap::Args)]
struct CancelArgs {
    /// A directory in the mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// The exit status if some data has no good copy.
const UNCORRECTABLE: u8 = 3;
/// The exit status of `cancel` if nothing is running.
const NOT_RUNNING: u8 = 2;
/// How often a queued replacement looks whether the running one has ended.
const QUEUE_WAIT: Duration = Duration::from_millis(100);

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Start(args) => start(&args),
        Command::Status(args) => status(args),
        Command::Cancel(args) => cancel(args),
    }
}

fn start(args: &ReplaceStartArgs) -> anyhow::Result<ExitCode> {
    let target = args.path.clone().or_image().or_its_mount();
    if matches!(target, CommandTarget::Mounted(_)) && !args.wait && !args.detached {
        return start_in_background(args, &target);
    }
    let goes_to_new = is_target_of(&args.new, &target);
    let mut options = args.image.clone();
    if goes_to_new {
        options.options.extend(device_option(&args.new));
    }
    let detached = args.detached.then(|| Detached::new(format!("replacement of a device of {}", target.filesystem())));
    let report = with_served(&target, &options, ImageWork::Replacement, |channel| {
        let must_wait = || anyhow::Ok(is_running(&ask(channel, &target)?) || super::balance::runs(channel)?);
        while args.enqueue && matches!(target, CommandTarget::Mounted(_)) && must_wait()? {
            std::thread::sleep(QUEUE_WAIT);
        }
        let devids = devids_of(channel, &target, std::slice::from_ref(&args.old), none_missing)?;
        let devid = *devids.first().context("one device was named")?;
        if is_begun(&ask(channel, &target)?, devid) {
            if matches!(target, CommandTarget::Image(_)) && !goes_to_new {
                bail!(
                    "the replacement of {} in {target} that was interrupted goes to another device than {}; name that one, or \
                     end the replacement with: ubtrfs replace cancel {}",
                    args.old.shown(),
                    args.new.shown(),
                    target.filesystem()
                );
            }
            return resume(args, &target, channel, detached.as_ref());
        }
        let (new, size_bytes) = new_device(&args.new, &target, args.force, args.nodiscard)?;
        let request =
            AnyRequest::Replace(Request::Start(StartReplace { devid, new, avoids_source: args.avoid_source }));
        let done = with_progress_in_bytes("copying the device", |job| {
            Detached::run_if(detached.as_ref(), job, || channel.call_with(request, &[], job))
        });
        let (old, new) = (args.old.shown(), args.new.shown());
        let failed = |failure: CommandFailure| {
            let call = || format!("ioctl(DEV_REPLACE_START) failed on \"{}\"", target.filesystem());
            let text = || anyhow!("cannot replace {old} by {new} in {target}: {failure}");
            failed_call(&failure, &[Errno::ROFS], call).unwrap_or_else(text)
        };
        match done.map_err(failed)? {
            AnyResponse::Replace(Response::Done(report)) => {
                tell_of_discard(&args.new, size_bytes, args.nodiscard || args.json || args.detached)?;
                Ok(report)
            }
            _ => Err(unexpected(&target)),
        }
    })?;
    if args.json {
        print_json(&json!({
            "corrected_errors": report.corrected_errors,
            "uncorrectable_errors": report.uncorrectable_errors,
            "lost_block_bytes": report.lost_block_bytes,
            "lost_files": report.lost_files.iter().map(lost_file).collect::<Vec<_>>(),
        }))?;
    } else {
        print_out(&text_of(args, &report))?;
    }
    let is_whole = report.uncorrectable_errors == 0 || is_progs();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(UNCORRECTABLE) })
}

/// Whether the new device is that of an interrupted replacement of the image's filesystem.
fn is_target_of(new: &Path, target: &CommandTarget) -> bool {
    let CommandTarget::Image(at) = target else { return false };
    let own = superblock_of(new).ok().filter(Superblock::is_replacement_target);
    own.is_some_and(|own| superblock_of(&at.image).is_ok_and(|superblock| superblock.fsid == own.fsid))
}

/// The mount option that names a device; `None` if no option can hold the path.
fn device_option(path: &Path) -> Option<String> {
    let path = std::fs::canonicalize(path).ok()?;
    path.to_str().filter(|path| !path.contains(',')).map(|path| format!("device={path}"))
}

/// Whether the replacement of this device was begun before.
fn is_begun(now: &Response, of: u64) -> bool {
    match now {
        Response::Running(running) => running.devid == of,
        Response::Last(Some(last)) => last.devid == of && is_unfinished(last),
        _ => false,
    }
}

fn is_running(now: &Response) -> bool {
    matches!(now, Response::Running(_))
}

fn is_unfinished(last: &Last) -> bool {
    matches!(last.state, DevReplaceItem::STARTED | DevReplaceItem::SUSPENDED)
}

/// Waits for the end of the replacement that the opening of an image has resumed.
fn resume(
    args: &ReplaceStartArgs,
    target: &CommandTarget,
    channel: &Channel<'_>,
    detached: Option<&Detached>,
) -> anyhow::Result<ReplaceReportMessage> {
    if matches!(target, CommandTarget::Mounted(_)) {
        let name = target.filesystem();
        bail!("a device is being replaced already; see: ubtrfs replace status {name}");
    }
    let done = with_progress_in_bytes("copying the device", |job| {
        Detached::run_if(detached, job, || channel.call_with(AnyRequest::Replace(Request::Resume), &[], job))
    });
    let old = args.old.shown();
    match done.map_err(|failure| anyhow!("cannot go on with the replacement of {old} in {target}: {failure}"))? {
        AnyResponse::Replace(Response::Done(report)) => Ok(report),
        _ => Err(unexpected(target)),
    }
}

fn lost_file((path, bytes): &(PathBytes, u64)) -> serde_json::Value {
    let mut value = json!({ "lost_bytes": bytes });
    insert_name(&mut value, "path", &path.0);
    value
}

/// The result as text, for a user of `ubtrfs`.
fn text_of(args: &ReplaceStartArgs, report: &ReplaceReportMessage) -> String {
    let mut text = match is_progs() {
        true => String::new(),
        false => format!("{} has taken the place of {}\n", args.new.shown(), args.old.shown()),
    };
    for (path, bytes) in &report.lost_files {
        text += &format!("{}: {bytes} bytes have no good copy\n", escaped(&path.0));
    }
    if report.lost_block_bytes > 0 {
        text += &format!("{} bytes of tree blocks have no good copy; see: ubtrfs check\n", report.lost_block_bytes);
    }
    text
}

/// Starts this program again for a replacement that goes on when this process ends. What is wrong with the arguments is
/// told before.
fn start_in_background(args: &ReplaceStartArgs, target: &CommandTarget) -> anyhow::Result<ExitCode> {
    let size_bytes = with_channel(target, &args.image, ImageUse::Read, |channel| {
        devids_of(channel, target, std::slice::from_ref(&args.old), none_missing)?;
        new_device(&args.new, target, args.force, args.nodiscard).map(|(_, size_bytes)| size_bytes)
    })?;
    let mut again: Vec<OsString> = ["replace", "start", "--detached"].map(OsString::from).to_vec();
    again.extend(args.force.then(|| "-f".into()));
    again.extend(args.avoid_source.then(|| "-r".into()));
    again.extend(args.nodiscard.then(|| "-K".into()));
    again.extend(args.enqueue.then(|| "--enqueue".into()));
    again.push("--".into());
    again.extend([args.old.clone(), args.new.clone()].map(PathBuf::into_os_string));
    again.push(std::ffi::OsStr::from_bytes(&args.path.bytes()).to_owned());
    Ok(match background::start_with(again)? {
        BackgroundStart::Begun(_) => {
            tell_of_discard(&args.new, size_bytes, args.nodiscard)?;
            ExitCode::SUCCESS
        }
        BackgroundStart::Ended(_, status) => ExitCode::from(status),
    })
}

fn status(args: ReplaceStatusArgs) -> anyhow::Result<ExitCode> {
    let target = args.path.or_image().or_its_mount();
    loop {
        let now = with_running(&target, &args.image, ImageUse::Read, |channel| ask(channel, &target))?;
        let is_running = is_running(&now);
        if args.json {
            print_json(&json_of(&now))?;
        } else {
            print_out(&format!("{}\n", describe(&now)))?;
        }
        if args.once || args.json || !is_running {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn ask(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Response> {
    match channel.call(AnyRequest::Replace(Request::Status), &[]) {
        Ok(AnyResponse::Replace(response @ (Response::Running(_) | Response::Last(_)))) => Ok(response),
        Ok(_) => Err(unexpected(target)),
        Err(failure) => bail!("cannot ask {target} about a replacement: {failure}"),
    }
}

/// The state as btrfs-progs prints it.
fn describe(response: &Response) -> String {
    let errors = |write: u64, lost: u64| format!("{write} write errs, {lost} uncorr. read errs");
    match response {
        Response::Running(running) => {
            format!("{:.1}% done, {}", percent(running), errors(0, running.uncorrectable_errors))
        }
        Response::Last(Some(last)) => {
            let errors = errors(last.write_errors, last.uncorrectable_errors);
            let at = format!("{:.1}", last.progress_1000 as f64 / 10.0);
            let (started, stopped) = (time(last.started), time(last.stopped));
            match last.state {
                DevReplaceItem::FINISHED => format!("Started on {started}, finished on {stopped}, {errors}"),
                DevReplaceItem::CANCELED => format!("Started on {started}, canceled on {stopped} at {at}%, {errors}"),
                // Without its new device, an interrupted one is suspended when the filesystem is opened.
                DevReplaceItem::SUSPENDED if last.stopped > 0 => {
                    format!("Started on {started}, suspended on {stopped} at {at}%, {errors}")
                }
                _ => format!("Started on {started}, interrupted at {at}%, {errors}"),
            }
        }
        _ => "Never started".to_owned(),
    }
}

fn json_of(response: &Response) -> serde_json::Value {
    match response {
        Response::Running(running) => json!({
            "state": "running",
            "devid": running.devid,
            "done_bytes": running.done_bytes,
            "total_bytes": running.total_bytes,
            "uncorrectable_errors": running.uncorrectable_errors,
        }),
        Response::Last(Some(last)) => json!({
            "state": state_name(last),
            "devid": last.devid,
            "started": last.started,
            "stopped": last.stopped,
            "write_errors": last.write_errors,
            "uncorrectable_errors": last.uncorrectable_errors,
        }),
        _ => json!({ "state": "never started" }),
    }
}

fn state_name(last: &Last) -> &'static str {
    match last.state {
        DevReplaceItem::FINISHED => "finished",
        DevReplaceItem::CANCELED => "canceled",
        DevReplaceItem::SUSPENDED => "suspended",
        _ => "started",
    }
}

fn percent(running: &ReplaceProgress) -> f64 {
    match running.total_bytes {
        0 => 0.0,
        total => running.done_bytes as f64 / total as f64 * 100.0,
    }
}

/// A time as btrfs-progs prints it here.
fn time(seconds: u64) -> String {
    day_time_text(i64::try_from(seconds).unwrap_or(i64::MAX))
}

fn cancel(args: CancelArgs) -> anyhow::Result<ExitCode> {
    let target = args.path.or_image().or_its_mount();
    let is_running = with_running(&target, &args.image, ImageUse::Read, |channel| {
        let now = ask(channel, &target)?;
        Ok(match &now {
            Response::Last(Some(last)) => is_unfinished(last),
            now => matches!(now, Response::Running(_)),
        })
    })?;
    if !is_running {
        let name = target.filesystem();
        crate::common::print_error(&anyhow!(
            "no device of {name} is being replaced; see: ubtrfs replace status {name}"
        ));
        return Ok(ExitCode::from(NOT_RUNNING));
    }
    with_running(&target, &args.image, ImageUse::Write, |channel| {
        until_closed(channel, &target, || {
            let done = channel.call(AnyRequest::Replace(Request::Cancel), &[]);
            done.map_err(|failure| anyhow!("cannot cancel the replacement of a device of {target}: {failure}"))
        })
    })?;
    Ok(ExitCode::SUCCESS)
}
