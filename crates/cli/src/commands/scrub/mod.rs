//! `ubtrfs scrub start|status|cancel|resume|limit`: with the options, texts and exit statuses of btrfs-progs.
//!
//! ```text
//! start --background, a mount--> this program with --detached --request--> server
//!       \--otherwise-----------> request in this process
//! ```
//!
//! The process that waits for the scrub keeps its record ([`record`]), so a server in a sandbox writes no files.

mod record;
mod result;
mod shown;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use rustix::io::Errno;
use serde_json::{Value, json};
use ubtrfs_control::filesystem::DeviceState;
use ubtrfs_control::scrub::{Counts, Request, Response, ScrubOutcome, ScrubProgress, ScrubReportMessage, StartScrub};
use ubtrfs_control::{Channel, CommandFailure, ImageWork, Request as AnyRequest, Response as AnyResponse, filesystem};
use ubtrfs_format::Profile;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::escaped;
use ubtrfs_transaction::Job;
use uuid::Uuid;

use self::record::{DeviceScrubRecord, ScrubRecord};
use self::result::{tell, tell_absent};
use self::shown::{ScrubPhase, ShownScrub};
use super::background::{self, BackgroundStart, Detached};
use super::offline::{ImageOptions, ImageUse, is_forbidden};
use super::place::{CommandTarget, with_channel};
use super::served::{until_closed, with_running, with_served};
use crate::common::{Shown as _, parse_size, print_err, print_error, print_json, print_out, warn};
use crate::job::with_progress_in_bytes;
use crate::progs::{is_progs, program};
use crate::units::Units;

/// Verify everything on the devices, and repair it from good copies
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Start(ScrubStartArgs),
    Cancel(ScrubPlainArgs),
    Resume(ScrubStartArgs),
    Status(ScrubStatusArgs),
    Limit(ScrubLimitArgs),
}

/// Begin a scrub; `resume` goes on where the last one was cancelled or interrupted
///
/// A scrub of a mount goes on in the background. A scrub of an image that is not mounted ends with the command. Exit
/// status: 0 if nothing is lost, 1 after a failure, 2 if there is nothing to resume, 3 if there are errors without a good
/// copy, 4 if there are none, but a device is missing or failed and was not scrubbed.
#[derive(clap::Args)]
struct ScrubStartArgs {
    /// Wait until the scrub has ended, and print its result
    #[arg(short = 'B')]
    wait: bool,
    /// Print the result of each device (with -B)
    #[arg(short = 'd')]
    by_device: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Find bad copies, but leave them as they are
    #[arg(short = 'r')]
    read_only: bool,
    /// Print all counts (with -B)
    #[arg(short = 'R')]
    raw_counts: bool,
    /// Begin although the record of the last scrub is damaged or says that it runs
    #[arg(short, long)]
    force: bool,
    /// The class of the I/O priority: 1 real time, 2 best effort, 3 idle (see ionice); by default, the priority stays as it
    /// is
    #[arg(short = 'c', value_name = "CLASS", value_parser = clap::value_parser!(u8).range(0..=3))]
    ioprio_class: Option<u8>,
    /// The level in the class of -c, or else in the class idle: from 0, the first, to 7
    #[arg(short = 'n', value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=7))]
    ioprio_level: Option<u8>,
    /// Read at most so many bytes a second from each device
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", hide_default_value = true)]
    limit: u64,
    /// Print the result as JSON (with -B)
    #[arg(long)]
    json: bool,
    /// This process is in the background
    #[arg(long, hide = true)]
    detached: bool,
    /// A mount, any path in it, an image, or one device
    #[arg(value_name = "PATH|DEVICE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// End a running scrub; `resume` goes on where it stops
///
/// Exit status: 0 if it was cancelled, 1 after a failure, 2 if no scrub runs.
#[derive(clap::Args)]
struct ScrubPlainArgs {
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH|DEVICE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show the running scrub, or the result of the last one
#[derive(clap::Args)]
struct ScrubStatusArgs {
    /// Show each device
    #[arg(short = 'd')]
    by_device: bool,
    /// Show all counts
    #[arg(short = 'R')]
    raw_counts: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    units: Units,
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH|DEVICE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show or set how many bytes a second a running scrub reads from each device
#[derive(clap::Args)]
struct ScrubLimitArgs {
    /// All devices
    #[arg(short, long, conflicts_with = "devid")]
    all: bool,
    /// One device
    #[arg(short, long, value_name = "DEVID")]
    devid: Option<u64>,
    /// The new limit; 0 means none
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<u64>,
    /// Print sizes in bytes
    #[arg(long)]
    raw: bool,
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

impl ScrubStartArgs {
    /// The class and the level of the I/O priority, if one of them is given. The defaults are those of btrfs-progs.
    fn io_priority(&self) -> Option<(u8, u8)> {
        const IDLE: u8 = 3;
        let is_given = self.ioprio_class.is_some() || self.ioprio_level.is_some();
        is_given.then(|| (self.ioprio_class.unwrap_or(IDLE), self.ioprio_level.unwrap_or(0)))
    }
}

/// A filesystem as a scrub sees it.
struct ScrubbedFilesystem {
    fsid: Uuid,
    devices: Vec<ScrubDevice>,
    /// Bytes of all extents, each copy counted.
    used: u64,
}

/// A scrub that is about to begin: its record, and the devices with the offsets at which it begins.
struct BegunScrub {
    record: ScrubRecord,
    /// The record of the scrub before.
    before: ScrubRecord,
    starts: Vec<(u64, u64)>,
}

struct ScrubDevice {
    devid: u64,
    path: Option<String>,
    state: DeviceState,
    is_seed: bool,
    /// Bytes in device extents.
    allocated: u64,
    /// Bytes to scrub: the part of the device extents that extents use, if all stripes of a profile are equally full.
    used: u64,
}

impl ScrubDevice {
    /// Its identity, for JSON.
    fn json(&self) -> Value {
        json!({ "devid": self.devid, "path": self.path, "state": self.state })
    }
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Start(args) => start(args, false),
        Command::Resume(args) => start(args, true),
        Command::Cancel(args) => cancel(args),
        Command::Status(args) => status(args),
        Command::Limit(args) => limit(args),
    }
}

fn start(args: ScrubStartArgs, resumes: bool) -> anyhow::Result<ExitCode> {
    let device = args.path.clone();
    let path = args.path.clone().or_image().or_its_mount();
    let is_mounted = matches!(path, CommandTarget::Mounted(_));
    if is_mounted && !args.wait && !args.detached {
        return start_in_background(&args, &path, resumes);
    }
    let detached = args.detached.then(|| Detached::new(format!("scrub of {}", path.filesystem())));
    let work = |channel: &Channel<'_>| {
        let filesystem = ScrubbedFilesystem::of(channel)?;
        let begun = begin(channel, &filesystem, &args, &device, resumes)?;
        let Some(begun) = begun else {
            return nothing_to_resume(&args, &path, &filesystem);
        };
        let request = StartScrub {
            devices: begun.starts.clone(),
            read_only: args.read_only,
            limit: args.limit,
            io_priority: args.io_priority(),
        };
        let done = scrub(channel, &filesystem, begun, request, detached.as_ref());
        match done.map_err(|error| not_started(error, &path))? {
            Some((record, report)) => {
                let one = filesystem.device_named(channel, &device);
                tell(&args, &path, &filesystem.without_others(one), &record, &report)
            }
            None => Ok(ExitCode::FAILURE),
        }
    };
    match args.read_only {
        true => with_channel(&path, &args.image, ImageUse::Read, work),
        false => with_served(&path, &args.image, ImageWork::Scrub, work).map_err(|error| {
            match is_forbidden(&error) && !is_progs() {
                true => anyhow::anyhow!("{error}; or only look for errors, with -r"),
                false => error,
            }
        }),
    }
}

/// Starts this program again for a scrub that goes on when this process ends.
fn start_in_background(args: &ScrubStartArgs, path: &CommandTarget, resumes: bool) -> anyhow::Result<ExitCode> {
    let (filesystem, begun) = with_channel(path, &args.image, ImageUse::Read, |channel| {
        let filesystem = ScrubbedFilesystem::of(channel)?;
        let begun = begin(channel, &filesystem, args, &args.path, resumes)?;
        let one = filesystem.device_named(channel, &args.path);
        Ok((filesystem.without_others(one), begun))
    })?;
    if begun.is_none() {
        return nothing_to_resume(args, path, &filesystem);
    }
    if !is_progs() {
        tell_absent(path, &filesystem);
    }
    let verb = if resumes { "resume" } else { "start" };
    let mut again: Vec<OsString> = ["scrub", verb, "--detached"].map(OsString::from).to_vec();
    again.extend(args.read_only.then(|| "-r".into()));
    again.extend(args.force.then(|| "-f".into()));
    if let Some((class, level)) = args.io_priority() {
        again.extend([format!("-c{class}"), format!("-n{level}")].map(OsString::from));
    }
    again.extend((args.limit > 0).then(|| format!("--limit={}", args.limit).into()));
    again.push("--".into());
    again.push(std::os::unix::ffi::OsStringExt::from_vec(args.path.bytes()));
    let pid = match background::start_with(again)? {
        BackgroundStart::Begun(pid) => pid,
        // A small filesystem is scrubbed before this process looks.
        BackgroundStart::Ended(pid, 0 | UNCORRECTABLE | NOT_ALL) => pid,
        BackgroundStart::Ended(_, status) => return Ok(ExitCode::from(status)),
    };
    if !args.quiet {
        let (what, place) = (if resumes { "resumed" } else { "started" }, path.filesystem());
        print_out(&format!("scrub {what} on {place}, fsid {} (pid={pid})\n", filesystem.fsid))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A process in the background must not print this: its first output tells that the scrub has begun.
fn nothing_to_resume(
    args: &ScrubStartArgs,
    path: &CommandTarget,
    filesystem: &ScrubbedFilesystem,
) -> anyhow::Result<ExitCode> {
    if !args.quiet && !args.detached {
        print_out(&format!("scrub: nothing to resume for {}, fsid {}\n", path.filesystem(), filesystem.fsid))?;
    }
    Ok(ExitCode::from(NOTHING_TO_RESUME))
}

/// The record of a new scrub, and where it begins on each device. `None` if there is nothing to resume.
fn begin(
    channel: &Channel<'_>,
    filesystem: &ScrubbedFilesystem,
    args: &ScrubStartArgs,
    device: &CommandTarget,
    resumes: bool,
) -> anyhow::Result<Option<BegunScrub>> {
    let fsid = filesystem.fsid;
    let kept = match record::read(fsid) {
        Ok(record) => record,
        Err(_) if args.force && !resumes => ScrubRecord::default(),
        // There is no place for a record.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => ScrubRecord::default(),
        Err(error) => {
            let file = record::path_of(fsid).map(|path| path.shown()).unwrap_or_default();
            bail!("cannot read the record of the last scrub, {file}: {error}; begin a new scrub with -f");
        }
    };
    if !running(channel)?.is_empty() {
        bail!(
            "a scrub of this filesystem is running; see: {0} scrub status PATH, or end it with: {0} scrub cancel PATH",
            program()
        );
    }
    let now = now();
    let one = filesystem.device_named(channel, device);
    let mut record = kept.clone();
    let mut starts = Vec::new();
    for device in filesystem.devices.iter().filter(|device| one.is_none_or(|one| one == device.devid)) {
        if device.state.is_absent() {
            if one.is_some() {
                let name = filesystem.name_of(device.devid);
                bail!("device {name} is missing or failed; list the devices with: {} filesystem show", program());
            }
            // As btrfs-progs does.
            let absent = DeviceScrubRecord { started: now, is_cancelled: true, ..DeviceScrubRecord::default() };
            record.devices.extend(is_progs().then_some((device.devid, absent)));
            continue;
        }
        let entry = record.devices.entry(device.devid).or_default();
        if resumes && !entry.can_resume() {
            continue;
        }
        let from = if resumes { entry.resume_at() } else { 0 };
        *entry = match resumes {
            true => DeviceScrubRecord { resumed: now, is_cancelled: false, is_finished: false, ..*entry },
            false => DeviceScrubRecord { started: now, ..DeviceScrubRecord::default() },
        };
        starts.push((device.devid, from));
    }
    Ok((!starts.is_empty()).then_some(BegunScrub { record, before: kept, starts }))
}

/// Scrubs, and keeps the record up to date meanwhile. `None` if the scrub was interrupted by a signal.
fn scrub(
    channel: &Channel<'_>,
    filesystem: &ScrubbedFilesystem,
    begun: BegunScrub,
    start: StartScrub,
    detached: Option<&Detached>,
) -> anyhow::Result<Option<(ScrubRecord, ScrubReportMessage)>> {
    let began = std::time::Instant::now();
    let mut record = begun.record;
    let base: BTreeMap<u64, DeviceScrubRecord> =
        start.devices.iter().filter_map(|(devid, _)| Some((*devid, *record.devices.get(devid)?))).collect();
    keep(filesystem.fsid, &record);
    let is_done = AtomicBool::new(false);
    let updated = |devid: u64, counts: &Counts| {
        let before = base.get(&devid).copied().unwrap_or_default();
        let duration = before.duration.saturating_add(began.elapsed().as_secs());
        DeviceScrubRecord { duration, ..before.plus(counts) }
    };
    let response = with_progress_in_bytes("scrub", |job| {
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut record = record.clone();
                while !waited(&is_done) {
                    for running in running(channel).unwrap_or_default() {
                        // The time of a device that has ended does not go on.
                        let is_ended = |known: &DeviceScrubRecord| known.is_finished || known.is_cancelled;
                        if !record.devices.get(&running.devid).is_some_and(is_ended) {
                            let entry = ended(updated(running.devid, &running.counts), running.end.as_ref());
                            record.devices.insert(running.devid, entry);
                        }
                    }
                    keep(filesystem.fsid, &record);
                }
            });
            let done = call_in_job(channel, Request::Start(start), detached, job);
            is_done.store(true, Ordering::Release);
            done
        })
    });
    let report = match response {
        Ok(Response::Done(report)) => report,
        Ok(other) => bail!("unexpected answer of the server: {other:?}"),
        Err(error) => {
            let is_cancelled = errno_of(&error) == Some(Errno::CANCELED);
            if !is_cancelled {
                // The record of a scrub that did not begin stays as it was.
                keep(filesystem.fsid, &begun.before);
                return Err(error);
            }
            for (devid, before) in &base {
                let counts = Counts { last_physical: before.counts.last_physical, ..Counts::default() };
                record.devices.insert(*devid, DeviceScrubRecord { is_cancelled: true, ..updated(*devid, &counts) });
            }
            keep(filesystem.fsid, &record);
            print_err("scrub: cancelled");
            return Ok(None);
        }
    };
    for device in &report.devices {
        let is_finished = device.failure.is_none() && !device.is_cancelled;
        let entry = updated(device.devid, &device.counts);
        let entry = DeviceScrubRecord { is_cancelled: !is_finished, is_finished, ..entry };
        record.devices.insert(device.devid, entry);
    }
    keep(filesystem.fsid, &record);
    Ok(Some((record, report)))
}

/// The record of a device with the end of its scrub. As in btrfs-progs, a scrub that failed counts as cancelled.
fn ended(record: DeviceScrubRecord, end: Option<&ScrubOutcome>) -> DeviceScrubRecord {
    let is_finished = end == Some(&ScrubOutcome::Finished);
    DeviceScrubRecord { is_cancelled: end.is_some() && !is_finished, is_finished, ..record }
}

fn status(args: ScrubStatusArgs) -> anyhow::Result<ExitCode> {
    let path = args.path.clone().or_image().or_its_mount();
    let (filesystem, running, one) = with_running(&path, &args.image, ImageUse::Read, |channel| {
        let filesystem = ScrubbedFilesystem::of(channel)?;
        let one = filesystem.device_named(channel, &args.path);
        Ok((filesystem, running(channel)?, one))
    })?;
    let record = record::read(filesystem.fsid).unwrap_or_else(|error| {
        warn(&format!("the record of the last scrub cannot be read: {error}"));
        ScrubRecord::default()
    });
    let now = now();
    let chosen = filesystem.devices.iter().filter(|device| one.is_none_or(|one| one == device.devid));
    let shown: Vec<(u64, ShownScrub)> = chosen
        .map(|device| {
            let kept = record.devices.get(&device.devid).copied().unwrap_or_default();
            let running = running.iter().find(|running| running.devid == device.devid);
            (device.devid, filesystem.shown(device.devid, &kept, running))
        })
        .collect();
    if args.json {
        print_json(&json!({ "uuid": filesystem.fsid, "devices": devices_json(&filesystem, &shown) }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!("UUID:             {}\n", filesystem.fsid);
    if args.by_device {
        for (devid, shown) in &shown {
            let what = match shown.state {
                _ if shown.record.started == 0 => "",
                ScrubPhase::Running => "status",
                _ => "history",
            };
            text += &format!("\nScrub device {} {what}\n", filesystem.name_of(*devid));
            text += &match shown.record.started {
                0 => "\tno stats available\n".to_owned(),
                _ => shown.text(&args.units, args.raw_counts, now),
            };
        }
    } else if let Some(sum) = filesystem.sum(&shown, false) {
        text += &sum.text(&args.units, args.raw_counts, now);
    }
    print_out(&text)?;
    if !is_progs() {
        for running in running.iter().filter(|running| one.is_none_or(|one| one == running.devid)) {
            if let Some(ScrubOutcome::Failed(reason)) = &running.end {
                warn(&format!("the scrub of device {} stopped: {reason}", filesystem.name_of(running.devid)));
            }
        }
        tell_absent(&path, &filesystem.without_others(one));
    }
    Ok(ExitCode::SUCCESS)
}

fn cancel(args: ScrubPlainArgs) -> anyhow::Result<ExitCode> {
    let path = args.path.or_image().or_its_mount();
    let place = path.filesystem();
    let cancelled = with_running(&path, &args.image, ImageUse::Read, |channel| {
        let (filesystem, running) = (ScrubbedFilesystem::of(channel)?, running(channel)?);
        until_closed(channel, &path, || {
            let done = with_progress_in_bytes("scrub", |job| call_in_job(channel, Request::Cancel, None, job));
            done.map(drop)
        })?;
        await_record(filesystem.fsid, &running);
        Ok(())
    });
    match cancelled {
        Ok(()) => {
            print_out("scrub cancelled\n")?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if errno_of(&error) == Some(Errno::NOTCONN) => {
            print_error(&anyhow::anyhow!("scrub cancel failed on {place}: not running"));
            Ok(ExitCode::from(NOT_RUNNING))
        }
        Err(error) => Err(error.context(format!("scrub cancel failed on {place}"))),
    }
}

fn limit(args: ScrubLimitArgs) -> anyhow::Result<ExitCode> {
    let path = args.path.or_image().or_its_mount();
    let units = Units::or_raw(args.raw);
    with_running(&path, &args.image, ImageUse::Read, |channel| {
        let filesystem = ScrubbedFilesystem::of(channel)?;
        if let Some(bytes_per_sec) = args.limit {
            if !args.all && args.devid.is_none() {
                bail!("say for which devices: --all, or --devid DEVID");
            }
            let set = call(channel, Request::Limit { devid: args.devid, bytes_per_sec });
            set.with_context(|| format!("cannot set the limit on {}", path.filesystem()))?;
        }
        let running = running(channel)?;
        let mut text = format!("UUID: {}\n", filesystem.fsid);
        for device in &filesystem.devices {
            let of_device = running.iter().find(|running| running.devid == device.devid && running.end.is_none());
            let limit = of_device.map(|running| running.limit);
            let limit = match limit {
                None => "not running".to_owned(),
                Some(0) => "unlimited".to_owned(),
                Some(limit) => format!("{}/s", units.format(limit)),
            };
            text += &format!("{:>4}  {limit}  {}\n", device.devid, device.path.as_deref().unwrap_or("missing"));
        }
        print_out(&text)?;
        Ok(ExitCode::SUCCESS)
    })
}

impl ScrubbedFilesystem {
    fn of(channel: &Channel<'_>) -> anyhow::Result<Self> {
        let ask = |request| channel.call(AnyRequest::Filesystem(request), &[]).map_err(anyhow::Error::from);
        let (info, usage) = match (ask(filesystem::Request::Info)?, ask(filesystem::Request::Usage)?) {
            (
                AnyResponse::Filesystem(filesystem::Response::Info(info)),
                AnyResponse::Filesystem(filesystem::Response::Usage(usage)),
            ) => (info, usage),
            _ => bail!("the server answered something else"),
        };
        let copies = |group: &filesystem::BlockGroupTotals| {
            group.used.saturating_mul(Profile::copies_of(BlockGroupFlags::from_bits_retain(group.flags)))
        };
        let devices = usage.devices.iter().map(|device| ScrubDevice {
            devid: device.devid,
            path: device.path.clone(),
            state: device.state(),
            is_seed: device.is_seed,
            allocated: device.allocated,
            used: used_on(device, &usage.groups),
        });
        Ok(Self {
            fsid: info.fsid,
            devices: devices.collect(),
            used: usage.groups.iter().map(copies).fold(0, u64::saturating_add),
        })
    }

    /// The device of a mount whose path was given instead of the mount; `None` if all devices are meant, as for an image
    /// that is not mounted. The paths of the devices are only compared as text, because a server of another user may name
    /// any.
    fn device_named(&self, channel: &Channel<'_>, target: &CommandTarget) -> Option<u64> {
        let given = target.path();
        if self.devices.len() < 2 || !channel.is_mount() || given.is_dir() {
            return None;
        }
        let resolved = std::fs::canonicalize(given).ok();
        let is_it = |device: &&ScrubDevice| {
            let other = device.path.as_ref().map(std::path::Path::new);
            other.is_some_and(|other| other == given || Some(other) == resolved.as_deref())
        };
        self.devices.iter().find(is_it).map(|device| device.devid)
    }

    /// This filesystem with one device only, if one was named.
    fn without_others(mut self, one: Option<u64>) -> Self {
        self.devices.retain(|device| one.is_none_or(|one| one == device.devid));
        self
    }

    fn name_of(&self, devid: u64) -> String {
        let path = self.devices.iter().find(|device| device.devid == devid).and_then(|device| device.path.as_ref());
        let missing = || if is_progs() { String::new() } else { "missing".to_owned() };
        format!("{} (id {devid})", path.map_or_else(missing, |path| escaped(path.as_bytes())))
    }

    fn shown(&self, devid: u64, record: &DeviceScrubRecord, running: Option<&ScrubProgress>) -> ShownScrub {
        // btrfs-progs takes the allocated bytes, with which a scrub ends long before 100%.
        let to_scrub = |device: &ScrubDevice| match running {
            Some(_) if !is_progs() => device.used,
            _ => device.allocated,
        };
        let total = self.devices.iter().find(|device| device.devid == devid).map_or(0, to_scrub);
        let mut record = *record;
        let end = running.and_then(|running| running.end.as_ref());
        if let Some(running) = running {
            // The record may be some seconds old.
            let since = if record.resumed > 0 { record.resumed } else { record.started };
            let elapsed = now().saturating_sub(since);
            if record.resumed == 0 {
                record.counts = running.counts;
                if !record.is_finished && !record.is_cancelled {
                    record.duration = elapsed;
                }
            }
            record = ended(record, end);
            record.duration = record.duration.max(1);
        }
        let limit = running.map_or(0, |running| running.limit);
        let is_running = running.is_some() && end.is_none();
        ShownScrub { state: ScrubPhase::of(&record, is_running), record, total, limit }
    }

    /// All devices together. As in btrfs-progs, the amount to scrub is that of the allocated bytes after a scrub, and
    /// that of the used bytes in a status.
    fn sum(&self, shown: &[(u64, ShownScrub)], is_result: bool) -> Option<ShownScrub> {
        let all: Vec<ShownScrub> = shown.iter().map(|(_, shown)| shown.clone()).collect();
        let allocated = all.iter().map(|shown| shown.total).fold(0, u64::saturating_add);
        ShownScrub::sum(&all, if is_result { allocated } else { self.used })
    }
}

/// Bytes on a device that extents use.
fn used_on(device: &filesystem::DeviceInfo, groups: &[filesystem::BlockGroupTotals]) -> u64 {
    let used = |(flags, bytes): &(u64, u64)| {
        let of_kind = groups.iter().filter(|group| group.flags == *flags);
        let sum = of_kind.fold((0u128, 0u128), |(used, total), group| {
            (used.saturating_add(group.used.into()), total.saturating_add(group.total.into()))
        });
        let share = u128::from(*bytes).saturating_mul(sum.0).checked_div(sum.1).unwrap_or(0);
        u64::try_from(share).unwrap_or(u64::MAX)
    };
    device.groups.iter().flatten().map(used).fold(0, u64::saturating_add)
}

fn devices_json(filesystem: &ScrubbedFilesystem, shown: &[(u64, ShownScrub)]) -> Vec<Value> {
    let one = |(devid, shown): &(u64, ShownScrub)| {
        let mut value = shown.json();
        if let Some(device) = filesystem.devices.iter().find(|device| device.devid == *devid) {
            for (name, of_device) in device.json().as_object().into_iter().flatten() {
                value[name] = of_device.clone();
            }
        }
        value
    };
    shown.iter().map(one).collect()
}

/// Keeps a record. A scrub does not fail because its record cannot be kept.
fn keep(fsid: Uuid, record: &ScrubRecord) {
    if let Err(error) = record::write(fsid, record) {
        static TOLD: std::sync::Once = std::sync::Once::new();
        TOLD.call_once(|| warn(&format!("the progress of the scrub cannot be kept for status and resume: {error}")));
    }
}

/// Waits until the process that waits for a scrub has written that it was cancelled, so that a status or a resumption finds
/// it. If that process has ended or keeps its record elsewhere, the wait ends soon.
fn await_record(fsid: Uuid, running: &[ScrubProgress]) {
    let is_ended = |record: &ScrubRecord| {
        let ended = |running: &ScrubProgress| {
            record.devices.get(&running.devid).is_some_and(|device| device.is_cancelled || device.is_finished)
        };
        running.iter().all(ended)
    };
    for _ in 0..RECORD_TICKS {
        if record::read(fsid).is_ok_and(|record| is_ended(&record)) {
            return;
        }
        thread::sleep(TICK);
    }
}

/// Waits until the record should be updated. Returns true if the scrub has ended.
fn waited(is_done: &AtomicBool) -> bool {
    for _ in 0..UPDATE_TICKS {
        if is_done.load(Ordering::Acquire) {
            return true;
        }
        thread::sleep(TICK);
    }
    is_done.load(Ordering::Acquire)
}

fn not_started(error: anyhow::Error, path: &CommandTarget) -> anyhow::Error {
    error.context(format!("cannot scrub {}", path.filesystem()))
}

fn running(channel: &Channel<'_>) -> anyhow::Result<Vec<ScrubProgress>> {
    match call(channel, Request::Status)? {
        Response::Status(running) => Ok(running),
        other => bail!("unexpected answer of the server: {other:?}"),
    }
}

fn call(channel: &Channel<'_>, request: Request) -> anyhow::Result<Response> {
    response(channel.call(AnyRequest::Scrub(request), &[]))
}

fn call_in_job(
    channel: &Channel<'_>,
    request: Request,
    detached: Option<&Detached>,
    job: &Job,
) -> anyhow::Result<Response> {
    response(Detached::run_if(detached, job, || channel.call_with(AnyRequest::Scrub(request), &[], job)))
}

fn response(done: Result<AnyResponse, CommandFailure>) -> anyhow::Result<Response> {
    match done {
        Ok(AnyResponse::Scrub(response)) => Ok(response),
        Ok(other) => bail!("unexpected answer of the server: {other:?}"),
        Err(failure) => Err(failure.into()),
    }
}

fn errno_of(error: &anyhow::Error) -> Option<Errno> {
    error.downcast_ref::<CommandFailure>().map(CommandFailure::errno)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

const NOTHING_TO_RESUME: u8 = 2;
const NOT_RUNNING: u8 = 2;
const UNCORRECTABLE: u8 = 3;
/// A device was not scrubbed, because it is missing or failed.
const NOT_ALL: u8 = 4;
const TICK: Duration = Duration::from_millis(100);
/// The record is updated every 5 seconds, as by btrfs-progs.
const UPDATE_TICKS: u32 = 50;
/// The longest wait for the record of a cancelled scrub.
const RECORD_TICKS: u32 = 20;
