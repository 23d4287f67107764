//! `ubtrfs balance start|status|pause|resume|cancel`: with the options and filters of btrfs-progs.

use std::cell::Cell;
use std::ffi::OsString;
use std::num::NonZeroU64;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use ubtrfs_control::balance::{BalanceReportMessage, BalanceStatusMessage, Filters, Request, Response, StartBalance};
use ubtrfs_control::{Channel, CommandFailure, ImageWork, Request as AnyRequest, Response as AnyResponse};
use ubtrfs_transaction::Job;

use super::background::Detached;
use super::filesystem::warn_of_profiles_in;
use super::offline::{ImageOptions, ImageUse};
use super::place::CommandTarget;
use super::served::{until_closed, with_running, with_served};
use crate::common::{is_broken_pipe, parse_size, print_err, print_error, print_json, print_out, warn};
use crate::job::with_progress_in_bytes;
use crate::progs::is_progs;

/// Move block groups: compact, convert or drain them
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Start(Box<BalanceStartArgs>),
    Status(BalanceStatusArgs),
    /// Pause a running balance; `resume` continues it
    Pause(BalancePlainArgs),
    /// Continue a paused or interrupted balance
    Resume(ResumeArgs),
    /// End a running or paused balance; block groups that were moved stay moved
    Cancel(BalancePlainArgs),
}

/// Move the block groups that the filters select; all block groups without -d, -m and -s
#[derive(clap::Args)]
#[command(after_help = FILTERS_HELP)]
struct BalanceStartArgs {
    /// Data block groups [short: -d[FILTERS]]
    #[arg(long, value_name = "FILTERS", num_args = 0..=1, require_equals = true, default_missing_value = "", overrides_with = "data", value_parser = parse_filters)]
    data: Option<Filters>,
    /// Metadata block groups, and system block groups if -s is not given [short: -m[FILTERS]]
    #[arg(long, value_name = "FILTERS", num_args = 0..=1, require_equals = true, default_missing_value = "", overrides_with = "metadata", value_parser = parse_filters)]
    metadata: Option<Filters>,
    /// System block groups [short: -s[FILTERS]]
    #[arg(long, value_name = "FILTERS", num_args = 0..=1, require_equals = true, default_missing_value = "", overrides_with = "system", value_parser = parse_filters)]
    system: Option<Filters>,
    /// Allow -s, and a conversion that reduces the number of copies of metadata
    #[arg(short, long)]
    force: bool,
    /// Accepted for compatibility with btrfs-progs; a full balance starts without a delay
    #[arg(long)]
    full_balance: bool,
    /// Return when the balance has begun; it continues in a process of its own
    #[arg(long, visible_alias = "bg")]
    background: bool,
    /// This process is in the background
    #[arg(long, hide = true)]
    detached: bool,
    /// Wait until another balance has ended
    #[arg(long)]
    enqueue: bool,
    /// Print the filters first
    #[arg(short, long)]
    verbose: bool,
    /// Print only warnings and errors
    #[arg(short, long)]
    quiet: bool,
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show a running or paused balance; the exit status is 1 if there is one, and 2 after an error
#[derive(clap::Args)]
struct BalanceStatusArgs {
    /// Show the filters
    #[arg(short, long)]
    verbose: bool,
    /// Print JSON: an object, or null if there is no balance
    #[arg(long)]
    json: bool,
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

// This struct has no doc comment, because it would replace the help of the commands that use the struct.
#[derive(clap::Args)]
struct BalancePlainArgs {
    /// A mount, any path in it, or an image
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

// This struct has no doc comment, because it would replace the help of the command.
#[derive(clap::Args)]
struct ResumeArgs {
    /// Print only warnings and errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    of: BalancePlainArgs,
}

const FILTERS_HELP: &str = "\
Filters, separated by commas; a range is A..B, ..B, A.. or, for usage and limit, B:
  profiles=single|dup|...  block groups of these profiles
  usage=PERCENT            less used than this; 0 means empty
  devid=ID                 on this device
  drange=RANGE             in this range of bytes of that device
  vrange=RANGE             in this range of logical addresses
  stripes=RANGE            of that many stripes
  limit=RANGE              only so many of them
  convert=PROFILE          change their profile; soft leaves those that have it";

/// Turns `-dFILTERS` into `--data=FILTERS`, which the argument parser can distinguish from a path.
pub(crate) fn with_long_filters(args: Vec<OsString>) -> Vec<OsString> {
    if args.get(1).is_none_or(|command| command != "balance") {
        return args;
    }
    let long = |arg: OsString| {
        let Some(text) = arg.to_str() else { return arg };
        let kinds = [("-d", "--data"), ("-m", "--metadata"), ("-s", "--system")];
        let found = kinds.iter().find_map(|(short, long)| Some((long, text.strip_prefix(short)?)));
        found.map_or_else(|| arg.clone(), |(long, filters)| format!("{long}={filters}").into())
    };
    args.into_iter().map(long).collect()
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Start(args) => start(*args),
        Command::Resume(args) => resume(args).or_else(without_balance),
        Command::Pause(args) => stop(&args, Request::Pause),
        Command::Cancel(args) => stop(&args, Request::Cancel),
        Command::Status(args) => {
            let shown = status(args);
            // As in btrfs-progs, the exit status is 1 if there is a balance, and 2 after an error.
            Ok(shown.unwrap_or_else(|error| {
                let status = print_error(&error);
                if is_broken_pipe(&error) { status } else { ExitCode::from(CANNOT_SHOW) }
            }))
        }
    }
}

/// Shows the balance. The exit status is 1 if there is one.
fn status(args: BalanceStatusArgs) -> anyhow::Result<ExitCode> {
    let path = args.path.or_image();
    let status = with_running(&path, &args.image, ImageUse::Read, |channel| {
        let told = call(channel, Request::Status);
        match told.with_context(|| format!("cannot show the balance of {}", path.filesystem()))? {
            Response::Status(status) => Ok(status),
            other => bail!("unexpected answer of the server: {other:?}"),
        }
    })?;
    if args.json {
        let value = status.as_ref().map_or(Value::Null, status_json);
        print_json(&value)?;
        return Ok(if status.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
    }
    let Some(status) = status else {
        print_out(&format!("No balance found on '{}'\n", path.filesystem()))?;
        return Ok(ExitCode::SUCCESS);
    };
    print_out(&shown(&path.filesystem(), &status, args.verbose))?;
    Ok(ExitCode::FAILURE)
}

fn start(args: BalanceStartArgs) -> anyhow::Result<ExitCode> {
    let BalanceStartArgs {
        data,
        metadata,
        system,
        force,
        background,
        detached,
        enqueue,
        verbose,
        quiet,
        path,
        image,
        ..
    } = args;
    if system.is_some() && !force {
        bail!(
            "-s works on system block groups, which are needed to open the filesystem; if you want that, give --force"
        );
    }
    let all = data.is_none() && metadata.is_none() && system.is_none();
    let every = || all.then(Filters::default);
    let start = StartBalance {
        data: data.or_else(every),
        // As in btrfs-progs, the metadata filters apply to system block groups too if -s is not given.
        system: system.or_else(|| metadata.clone()).or_else(every),
        metadata: metadata.or_else(every),
        force,
    };
    // A process in the background must not print this: its first output tells that the balance has begun.
    if verbose && !detached {
        let kinds = [("DATA", &start.data), ("METADATA", &start.metadata), ("SYSTEM", &start.system)];
        let lines = kinds.iter().filter_map(|(kind, filters)| Some(filters_line(kind, filters.as_ref()?)));
        print_out(&lines.collect::<String>())?;
    }
    if background {
        return super::background::start();
    }
    let path = path.or_image();
    let detached = detached.then(|| Detached::new(format!("balance of {}", path.filesystem())));
    if enqueue && let CommandTarget::Image(at) = &path {
        // The process that balances an image ends with its balance.
        while Channel::open_image(&at.image, true).is_some() {
            if let Some(detached) = &detached {
                detached.report_begin();
            }
            std::thread::sleep(QUEUE_WAIT);
        }
    }
    let is_interrupted = Cell::new(false);
    let report = with_served(&path, &image, ImageWork::Balance, |channel| {
        let request = Request::Start(Box::new(start));
        let response = with_progress_in_bytes("balance", |job| {
            loop {
                match call_in_job(channel, request.clone(), detached.as_ref(), job) {
                    Err(error) if enqueue && is_running(channel, &error)? => {
                        // The filters were accepted, so the caller need not wait for the other balance.
                        if let Some(detached) = &detached {
                            detached.report_begin();
                        }
                        wait_in_queue(job)?;
                    }
                    result => {
                        is_interrupted.set(job.progress().is_cancelled);
                        return result;
                    }
                }
            }
        });
        done(response.map_err(|error| ended(error, "start a", &path))?)
    });
    match report {
        Err(error) if !is_interrupted.get() => stopped(error, ExitCode::SUCCESS),
        Err(error) => Err(error),
        Ok(report) => tell(&report, quiet),
    }
}

/// The end of a command whose balance did not end by itself. As in btrfs-progs, a pause or cancellation on request is no
/// error of `btrfs balance start`.
fn stopped(error: anyhow::Error, status: ExitCode) -> anyhow::Result<ExitCode> {
    match error.downcast_ref::<CommandFailure>().filter(|failure| is_progs() && failure.errno() == Errno::CANCELED) {
        Some(failure) => {
            let how = if failure.text.contains("was paused") { "paused" } else { "canceled" };
            print_err(&format!("balance {how} by user"));
            Ok(status)
        }
        None => Err(error),
    }
}

/// Whether a balance cannot start because another balance or a replacement is running. A paused balance does not end by
/// itself, so it is not worth waiting for.
fn is_running(channel: &Channel<'_>, error: &anyhow::Error) -> anyhow::Result<bool> {
    if error.downcast_ref::<CommandFailure>().is_none_or(|failure| failure.errno() != Errno::INPROGRESS) {
        return Ok(false);
    }
    Ok(status_of(channel)?.is_none_or(|status| status.state != "paused"))
}

/// Whether a balance is running, so that it ends by itself.
pub(super) fn runs(channel: &Channel<'_>) -> anyhow::Result<bool> {
    Ok(status_of(channel)?.is_some_and(|status| status.state != "paused"))
}

fn status_of(channel: &Channel<'_>) -> anyhow::Result<Option<BalanceStatusMessage>> {
    match call(channel, Request::Status)? {
        Response::Status(status) => Ok(status),
        other => bail!("unexpected answer of the server: {other:?}"),
    }
}

fn resume(args: ResumeArgs) -> anyhow::Result<ExitCode> {
    let (path, image) = (args.of.path.or_image(), &args.of.image);
    let is_interrupted = Cell::new(false);
    let report = with_served(&path, image, ImageWork::Balance, |channel| {
        let resumed = with_progress_in_bytes("balance", |job| {
            let resumed = call_in_job(channel, Request::Resume, None, job);
            is_interrupted.set(job.progress().is_cancelled);
            resumed
        });
        done(resumed.map_err(|error| ended(error, "resume the", &path))?)
    });
    match report {
        Err(error) if !is_interrupted.get() => stopped(error, ExitCode::from(RESUME_STOPPED)),
        Err(error) => Err(error),
        Ok(report) => tell(&report, args.quiet),
    }
}

/// The message about a balance that was not started, or was paused or cancelled later.
fn ended(error: anyhow::Error, verb: &str, path: &CommandTarget) -> anyhow::Error {
    let is_stopped = error.downcast_ref::<CommandFailure>().is_some_and(|failure| failure.errno() == Errno::CANCELED);
    error.context(match is_stopped {
        true => path.filesystem(),
        false => format!("cannot {verb} balance of {}", path.filesystem()),
    })
}

/// As in btrfs-progs, the exit status is 2 if there is no balance to pause, resume or cancel.
fn without_balance(error: anyhow::Error) -> anyhow::Result<ExitCode> {
    if error.downcast_ref::<CommandFailure>().is_none_or(|failure| failure.errno() != Errno::NOTCONN) {
        return Err(error);
    }
    print_error(&error);
    Ok(ExitCode::from(NO_BALANCE))
}

/// Pauses or cancels a balance. As in btrfs-progs, a warning about several profiles follows, also after a failure.
fn stop(args: &BalancePlainArgs, request: Request) -> anyhow::Result<ExitCode> {
    let path = args.path.clone().or_image();
    let stopped = with_running(&path, &args.image, ImageUse::Write, |channel| {
        until_closed(channel, &path, || {
            let verb = if request == Request::Pause { "pause" } else { "cancel" };
            call_long(channel, request).with_context(|| format!("cannot {verb} the balance of {}", path.filesystem()))
        })
    });
    let status = stopped.map(|_| ExitCode::SUCCESS).or_else(without_balance)?;
    warn_of_profiles_in(&path, &args.image);
    Ok(status)
}

fn call(channel: &Channel<'_>, request: Request) -> anyhow::Result<Response> {
    response(channel.call(AnyRequest::Balance(request), &[]))
}

/// Runs a command that takes long.
fn call_long(channel: &Channel<'_>, request: Request) -> anyhow::Result<Response> {
    with_progress_in_bytes("balance", |job| call_in_job(channel, request, None, job))
}

/// Runs a command that takes long as a part of `job`. With `detached`, this process is in the background.
fn call_in_job(
    channel: &Channel<'_>,
    request: Request,
    detached: Option<&Detached>,
    job: &Job,
) -> anyhow::Result<Response> {
    response(Detached::run_if(detached, job, || channel.call_with(AnyRequest::Balance(request), &[], job)))
}

/// Waits before the next attempt to start a balance. Fails if the job was cancelled.
fn wait_in_queue(job: &Job) -> anyhow::Result<()> {
    let end = Instant::now() + QUEUE_WAIT;
    while Instant::now() < end {
        if job.progress().is_cancelled {
            bail!("cancelled while waiting for another balance");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn response(done: Result<AnyResponse, CommandFailure>) -> anyhow::Result<Response> {
    match done {
        Ok(AnyResponse::Balance(response)) => Ok(response),
        Ok(other) => Err(anyhow!("unexpected answer of the server: {other:?}")),
        Err(failure) => Err(anyhow::Error::from(failure)),
    }
}

fn done(response: Response) -> anyhow::Result<BalanceReportMessage> {
    match response {
        Response::Done(report) => Ok(report),
        other => bail!("unexpected answer of the server: {other:?}"),
    }
}

/// Prints the result of a balance. The exit status is 1 if a block group could not be moved.
fn tell(report: &BalanceReportMessage, quiet: bool) -> anyhow::Result<ExitCode> {
    let BalanceReportMessage { completed, migrated, considered, without_space, failures, .. } = report;
    let as_they_are =
        if *migrated > 0 { format!(", {migrated} of them with unchanged logical addresses") } else { String::new() };
    if !quiet {
        print_out(&format!("Done, had to relocate {completed} out of {considered} chunks{as_they_are}\n"))?;
    }
    for unmoved in failures {
        let files =
            if unmoved.files.is_empty() { String::new() } else { format!(", used by {}", unmoved.files.join(", ")) };
        warn(&format!(
            "the extent at {} was not moved, so its block group stays{files}: {}",
            unmoved.bytenr, unmoved.reason
        ));
    }
    if *without_space > 0 {
        warn(&format!("{}; {}", without_room(*without_space), ubtrfs_control::balance::MAKE_ROOM));
    }
    Ok(if failures.is_empty() && *without_space == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The message about block groups that could not be moved, for one or more of them.
fn without_room(nr_groups: u64) -> String {
    match nr_groups {
        1 => "1 block group stays, because there is no space left to move it to".to_owned(),
        _ => format!("{nr_groups} block groups stay, because there is no space left to move them to"),
    }
}

fn shown(filesystem: &str, status: &BalanceStatusMessage, verbose: bool) -> String {
    let BalanceStatusMessage { state, expected, considered, completed, filters } = status;
    // Before the block groups were counted, everything is left.
    let left = (expected.saturating_sub(*completed) * 100).checked_div(*expected).unwrap_or(100);
    let mut text = format!("Balance on '{filesystem}' is {state}\n");
    text += &format!("{completed} out of about {expected} chunks balanced ({considered} considered), {left}% left\n");
    if verbose {
        for (kind, filters) in filters {
            text += &filters_line(&kind.to_uppercase(), filters);
        }
    }
    text
}

fn status_json(status: &BalanceStatusMessage) -> Value {
    let filters = status.filters.iter().map(|(kind, filters)| (kind.clone(), json!(filters)));
    json!({
        "state": status.state,
        "expected": status.expected,
        "considered": status.considered,
        "completed": status.completed,
        "filters": filters.collect::<Map<String, Value>>(),
    })
}

fn filters_line(kind: &str, filters: &Filters) -> String {
    format!("  {kind}: {}\n", filters_text(filters))
}

fn filters_text(filters: &Filters) -> String {
    let mut words = Vec::new();
    let range = |(start, end): (u64, u64)| format!("{start}..{end}");
    let small = |(start, end): (u32, u32)| range((start.into(), end.into()));
    if !filters.profiles.is_empty() {
        words.push(format!("profiles={}", filters.profiles.join("|")));
    }
    words.extend(filters.usage.map(|usage| format!("usage={}", small(usage))));
    words.extend(filters.devid.map(|devid| format!("devid={devid}")));
    words.extend(filters.drange.map(|drange| format!("drange={}", range(drange))));
    words.extend(filters.vrange.map(|vrange| format!("vrange={}", range(vrange))));
    words.extend(filters.limit.map(|limit| format!("limit={}", small(limit))));
    words.extend(filters.stripes.map(|stripes| format!("stripes={}", small(stripes))));
    words.extend(filters.convert.as_ref().map(|profile| format!("convert={profile}")));
    words.extend(filters.soft.then(|| "soft".to_owned()));
    if words.is_empty() { "all".to_owned() } else { words.join(",") }
}

fn parse_filters(text: &str) -> Result<Filters, String> {
    let mut filters = Filters::default();
    for filter in text.split(',').filter(|filter| !filter.is_empty()) {
        let (name, value) = filter.split_once('=').map_or((filter, None), |(name, value)| (name, Some(value)));
        let needed = || value.filter(|value| !value.is_empty()).ok_or_else(|| format!("filter {name} needs a value"));
        match name {
            "profiles" => filters.profiles = needed()?.split('|').map(str::to_owned).collect(),
            "usage" => {
                let (start, end) = small_range(name, needed()?, true)?;
                if start > 100 || (end > 100 && end < u32::MAX) {
                    return Err(format!(
                        "filter usage needs percentages from 0 to 100, not '{}'",
                        value.unwrap_or_default()
                    ));
                }
                filters.usage = Some((start, end));
            }
            "devid" => {
                let wrong =
                    |_| format!("filter devid needs the number of a device, not '{}'", value.unwrap_or_default());
                let devid: NonZeroU64 = needed()?.parse().map_err(wrong)?;
                filters.devid = Some(devid.get());
            }
            "drange" => filters.drange = Some(range(name, needed()?, false)?),
            "vrange" => filters.vrange = Some(range(name, needed()?, false)?),
            "limit" => filters.limit = Some(small_range(name, needed()?, true)?),
            "stripes" => filters.stripes = Some(small_range(name, needed()?, false)?),
            "convert" => filters.convert = Some(needed()?.to_owned()),
            "soft" if value.is_none() => filters.soft = true,
            _ => {
                return Err(format!(
                    "unknown filter '{filter}'; use profiles, usage, devid, drange, vrange, stripes, limit, convert or soft"
                ));
            }
        }
    }
    if filters.drange.is_some() && filters.devid.is_none() {
        return Err("filter drange needs devid".to_owned());
    }
    if filters.soft && filters.convert.is_none() {
        return Err("filter soft needs convert".to_owned());
    }
    Ok(filters)
}

/// Parses a range `A..B`; a missing number leaves that side open. With `single`, a lone number is the end
/// of a range from 0.
fn range(name: &str, text: &str, single: bool) -> Result<(u64, u64), String> {
    let number = |text: &str, missing: u64| match text {
        "" => Ok(missing),
        _ if !matches!(name, "drange" | "vrange") => {
            text.parse().map_err(|_| format!("filter {name}: '{text}' is not a {}", number_of(name)))
        }
        _ => parse_size(text).map_err(|error| format!("filter {name}: {error}")),
    };
    match text.split_once("..") {
        Some(("", "")) => Err(format!("filter {name} needs a number")),
        Some((start, end)) => Ok((number(start, 0)?, number(end, u64::MAX)?)),
        None if single => Ok((0, number(text, 0)?)),
        None => Err(format!("filter {name} needs a range, such as {text}..{text}")),
    }
}

/// The kind of number that a filter takes.
fn number_of(name: &str) -> &'static str {
    if name == "usage" { "percentage from 0 to 100" } else { "number" }
}

fn small_range(name: &str, text: &str, single: bool) -> Result<(u32, u32), String> {
    let (start, end) = range(name, text, single)?;
    let end = if end == u64::MAX { u64::from(u32::MAX) } else { end };
    let small = |number: u64| u32::try_from(number).map_err(|_| format!("filter {name}: {number} is too large"));
    Ok((small(start)?, small(end)?))
}

/// Time between two attempts to start a balance that waits for another one.
const QUEUE_WAIT: Duration = Duration::from_millis(500);
/// Exit status of `btrfs balance resume` if the balance is paused or cancelled meanwhile.
const RESUME_STOPPED: u8 = 255;
/// Exit status of a command that pauses, resumes or cancels a balance, if there is no balance.
const NO_BALANCE: u8 = 2;
/// Exit status of `balance status` after an error, because 1 means that there is a balance.
pub(crate) const CANNOT_SHOW: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read_as_btrfs_progs_reads_them() {
        let filters =
            parse_filters("usage=50,limit=2..,profiles=single|dup,devid=1,drange=1M..2M,convert=dup,soft").unwrap();
        assert_eq!((filters.usage, filters.limit), (Some((0, 50)), Some((2, u32::MAX))));
        assert_eq!((filters.drange, filters.devid), (Some((1 << 20, 2 << 20)), Some(1)));
        assert_eq!(
            filters_text(&filters),
            "profiles=single|dup,usage=0..50,devid=1,drange=1048576..2097152,limit=2..4294967295,convert=dup,soft"
        );
        assert_eq!(parse_filters("").unwrap(), Filters::default());
        for wrong in [
            "usag=5",
            "usage",
            "usage=x",
            "usage=",
            "limit=..",
            "usage=101",
            "usage=5..101",
            "drange=1..2",
            "soft",
            "vrange=5",
            "soft=1,convert=dup",
        ] {
            assert!(parse_filters(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_block_group_without_room_is_told_in_the_singular() {
        assert!(without_room(1).starts_with("1 block group stays, ") && without_room(1).ends_with("move it to"));
        assert!(without_room(2).starts_with("2 block groups stay, ") && without_room(2).ends_with("move them to"));
    }

    #[test]
    fn short_options_take_filters_without_a_space() {
        let given = ["ubtrfs", "balance", "start", "-dusage=5", "-m", "-f", "/mnt"].map(OsString::from).to_vec();
        let expected =
            ["ubtrfs", "balance", "start", "--data=usage=5", "--metadata=", "-f", "/mnt"].map(OsString::from);
        assert_eq!(with_long_filters(given), expected);
        let other = ["ubtrfs", "ls", "-d"].map(OsString::from).to_vec();
        assert_eq!(with_long_filters(other.clone()), other);
    }
}
