//! `ubtrfs device stats [-c] [-z] [-T] [--json] PATH|IMAGE`: the error counters of devices, printed as btrfs-progs prints them.

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use serde_json::json;
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::device::{Request, Response, Stats};
use ubtrfs_format::print::escaped;

use super::offline::Use;
use super::place::{FilesystemArgs, with_channel};
use crate::common::{print_json, print_out};

/// Commands on devices
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Stats(StatsArgs),
}

/// Show how many errors each device had since the filesystem was made
///
/// The counters are kept in the filesystem. To find the file at an address that a message names, run: ubtrfs inspect
/// logical-resolve
#[derive(clap::Args)]
struct StatsArgs {
    /// Show the counters, then set them to 0
    #[arg(short = 'z', long)]
    reset: bool,
    /// Exit with status 64 if any counter is not 0
    #[arg(short, long)]
    check: bool,
    /// Print a table with a line for each device
    #[arg(short = 'T', conflicts_with = "json")]
    table: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Command::Stats(args) = args.command;
    let target = args.of.path.or_image();
    let (request, usage, what) = match args.reset {
        true => (Request::ResetStats, Use::Write, "reset"),
        false => (Request::Stats, Use::Read, "read"),
    };
    let stats = with_channel(&target, &args.of.image, usage, |channel| {
        let done = channel.call(ubtrfs_control::Request::Device(request), &[]);
        match done.map_err(|failure| anyhow!("cannot {what} the error counters of {target}: {failure}"))? {
            AnyResponse::Device(Response::Stats(stats)) => Ok(stats),
            _ => bail!("the server of {target} gave an unexpected answer; unmount and mount with this ubtrfs"),
        }
    })?;
    match (args.json, args.table) {
        (true, _) => print_json(&stats.iter().map(|stats| json!(stats)).collect()),
        (_, true) => print_out(&table(&stats)),
        _ => print_out(&stats.iter().map(text).collect::<String>()),
    }?;
    let has_errors = stats.iter().any(|stats| counters(stats).iter().any(|(_, count)| *count > 0));
    Ok(if args.check && has_errors { ExitCode::from(HAS_ERRORS) } else { ExitCode::SUCCESS })
}

/// The exit status of `--check` if a counter is not 0, as in btrfs-progs.
const HAS_ERRORS: u8 = 64;

fn device_of(stats: &Stats) -> String {
    stats.path.as_ref().map_or_else(|| format!("devid:{}", stats.devid), |path| escaped(path.as_bytes()))
}

/// Formats the counters as a table, as btrfs-progs does.
fn table(stats: &[Stats]) -> String {
    let heads = ["Id", "Path", "Write errors", "Read errors", "Flush errors", "Corruption errors", "Generation errors"];
    let cells = |stats: &Stats| {
        let counts = counters(stats).map(|(_, count)| count.to_string());
        [stats.devid.to_string(), device_of(stats)].into_iter().chain(counts).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> = stats.iter().map(cells).collect();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0).max(heads[at].len());
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |words: &[&str]| {
        let pad = |(at, (word, width)): (usize, (&&str, &usize))| match at {
            0 | 2.. if word.chars().next().is_some_and(|first| first.is_ascii_digit()) => format!("{word:>width$}"),
            _ => format!("{word:<width$}"),
        };
        let padded: Vec<String> = words.iter().zip(&widths).enumerate().map(pad).collect();
        format!("{}\n", padded.join(" "))
    };
    let dashes: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    let mut text = line(&heads) + &line(&dashes.iter().map(String::as_str).collect::<Vec<_>>());
    text.extend(rows.iter().map(|row| line(&row.iter().map(String::as_str).collect::<Vec<_>>())));
    text
}

fn text(stats: &Stats) -> String {
    let device = device_of(stats);
    counters(stats).iter().map(|(name, count)| format!("[{device}].{name:<16} {count}\n")).collect()
}

fn counters(stats: &Stats) -> [(&'static str, u64); 5] {
    [
        ("write_io_errs", stats.write_io_errs),
        ("read_io_errs", stats.read_io_errs),
        ("flush_io_errs", stats.flush_io_errs),
        ("corruption_errs", stats.corruption_errs),
        ("generation_errs", stats.generation_errs),
    ]
}
