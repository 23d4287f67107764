//! `ubtrfs device stats [--json] PATH|IMAGE`: the error counters of devices, printed as btrfs-progs prints them.

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use serde_json::{Value, json};
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::device::{Request, Response, Stats};

use super::offline::Use;
use super::place::{FilesystemArgs, with_channel};
use crate::common::print_out;

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
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Command::Stats(args) = args.command;
    let target = args.of.path.or_image();
    let stats = with_channel(&target, &args.of.image, Use::Read, |channel| {
        let done = channel.call(ubtrfs_control::Request::Device(Request::Stats), &[]);
        match done.map_err(|failure| anyhow!("cannot read the error counters of {target}: {failure}"))? {
            AnyResponse::Device(Response::Stats(stats)) => Ok(stats),
            _ => bail!("the server of {target} gave an unexpected answer; unmount and mount with this ubtrfs"),
        }
    })?;
    print_out(&match args.json {
        true => format!("{:#}\n", stats.iter().map(|stats| json!(stats)).collect::<Value>()),
        false => stats.iter().map(text).collect(),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn text(stats: &Stats) -> String {
    let device = stats.path.clone().unwrap_or_else(|| format!("devid:{}", stats.devid));
    let counters = [
        ("write_io_errs", stats.write_io_errs),
        ("read_io_errs", stats.read_io_errs),
        ("flush_io_errs", stats.flush_io_errs),
        ("corruption_errs", stats.corruption_errs),
        ("generation_errs", stats.generation_errs),
    ];
    counters.iter().map(|(name, count)| format!("[{device}].{name:<16} {count}\n")).collect()
}
