//! `ubtrfs quota ...`: turns quotas on and off, and rescans. Options are named as in btrfs-progs.

use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::json;
use ubtrfs_control::quota::{QuotaStatusMessage, Request, Response};
use ubtrfs_control::{Channel, Response as AnyResponse};
use ubtrfs_fs::QgroupId;

use super::offline::ImageUse;
use super::place::{CommandTarget, FilesystemArgs, with_channel};
use crate::common::{print_json, print_out};
use crate::job::with_progress;
use crate::progs::is_progs;

/// Turn quotas on and off, and rescan
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Turn quotas on and start a rescan, which continues in the background of a mount
    Enable(EnableArgs),
    /// Turn quotas off, and forget all groups and limits
    Disable(FilesystemArgs),
    /// Start a rescan, which counts everything again
    Rescan(RescanArgs),
    Status(QuotaStatusArgs),
}

#[derive(clap::Args)]
struct EnableArgs {
    /// Charge an extent only to the subvolume that allocated it, which costs no time; existing files are not counted
    #[arg(short, long)]
    simple: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

/// Show whether quotas are on, and whether their numbers are reliable
#[derive(clap::Args)]
struct QuotaStatusArgs {
    /// Print nothing; the exit status is 1 if quotas are off
    #[arg(long)]
    is_enabled: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "is_enabled")]
    json: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

#[derive(clap::Args)]
struct RescanArgs {
    /// Show the progress of a running rescan; do not start a rescan
    #[arg(short, long)]
    status: bool,
    /// Start a rescan, and wait for its end
    #[arg(short, long, conflicts_with = "status")]
    wait: bool,
    /// Wait for the end of a running rescan; do not start a rescan
    #[arg(short = 'W', long, conflicts_with_all = ["status", "wait"])]
    wait_norescan: bool,
    /// Print only errors
    #[arg(short, long, conflicts_with = "status")]
    quiet: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Enable(args) => change(&args.of, "turn quotas on for", Request::Enable { simple: args.simple })?,
        Command::Disable(args) => change(&args, "turn quotas off for", Request::Disable)?,
        Command::Rescan(args) => rescan(&args)?,
        Command::Status(args) => return status(&args),
    }
    Ok(ExitCode::SUCCESS)
}

fn change(args: &FilesystemArgs, what: &str, request: Request) -> anyhow::Result<()> {
    let target = args.path.clone().or_image();
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        let enables = matches!(request, Request::Enable { .. });
        let wants_simple = matches!(request, Request::Enable { simple: true });
        call(channel, &target, what, request)?;
        // As in Linux, enabling quotas that are enabled succeeds, and does not change their kind.
        if enables && status_of(channel, &target)?.is_some_and(|status| status.simple != wants_simple) {
            let kind = if wants_simple { "full" } else { "simple" };
            bail!("{target}: {kind} quotas are on; to change the kind, first run: ubtrfs quota disable {target}");
        }
        // Wait for the rescan in an image, because the rescan would stop when the image is closed.
        if enables && !channel.is_mount() { wait(channel, &target) } else { Ok(()) }
    })
}

/// Runs a command; `what` names the command's purpose in errors.
pub(super) fn call(
    channel: &Channel<'_>,
    target: &CommandTarget,
    what: &str,
    request: Request,
) -> anyhow::Result<Response> {
    let done = channel.call(ubtrfs_control::Request::Quota(request), &[]);
    match done.with_context(|| format!("cannot {what} {}", target.filesystem()))? {
        AnyResponse::Quota(response) => Ok(response),
        _ => bail!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs"),
    }
}

pub(super) fn wait(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<()> {
    let request = ubtrfs_control::Request::Quota(Request::RescanWait);
    let done = with_progress("counting", |job| channel.call_with(request, &[], job));
    done.with_context(|| format!("cannot wait for the rescan of {}", target.filesystem()))?;
    Ok(())
}

pub(super) fn status_of(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Option<QuotaStatusMessage>> {
    match call(channel, target, "read the quotas of", Request::Status)? {
        Response::Status(status) => Ok(status),
        _ => bail!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs"),
    }
}

fn rescan(args: &RescanArgs) -> anyhow::Result<()> {
    let target = args.of.path.clone().or_image();
    let usage = if args.status { ImageUse::Read } else { ImageUse::Write };
    with_channel(&target, &args.of.image, usage, |channel| {
        if args.status {
            let status = status_of(channel, &target)?;
            return print_out(&match status.and_then(|status| status.rescan) {
                Some(at) => format!("rescan operation running (current key {at})\n"),
                None => "no rescan operation in progress\n".to_owned(),
            });
        }
        if !args.wait_norescan {
            // If an image was closed during a rescan, the rescan continues when the image is opened.
            let runs = status_of(channel, &target)?.is_some_and(|status| status.rescan.is_some());
            if !runs || !args.wait && channel.is_mount() {
                call(channel, &target, "start a rescan of", Request::Rescan)?;
            }
        }
        // btrfs-progs says so before it waits.
        if is_progs() && args.wait && !args.quiet {
            print_out("quota rescan started\n")?;
        }
        let waits = args.wait || args.wait_norescan || !channel.is_mount();
        if waits {
            wait(channel, &target)
        } else if args.quiet {
            Ok(())
        } else {
            print_out("quota rescan started\n")
        }
    })
}

fn status(args: &QuotaStatusArgs) -> anyhow::Result<ExitCode> {
    let target = args.of.path.clone().or_image();
    with_channel(&target, &args.of.image, ImageUse::Read, |channel| {
        let status = status_of(channel, &target)?;
        if args.is_enabled {
            return Ok(if status.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let groups = match status {
            Some(_) => super::qgroup::all_groups(channel, &target)?,
            None => Vec::new(),
        };
        let nr_level_0 = groups.iter().filter(|group| QgroupId(group.id).level() == 0).count();
        if args.json {
            let mut value = json!({ "enabled": status.is_some() });
            if let Some(QuotaStatusMessage { consistent, rescan, simple }) = status {
                value["mode"] = if simple { "squota" } else { "qgroup" }.into();
                value["inconsistent"] = (!consistent).into();
                value["rescan"] = rescan.into();
                value["qgroups"] = groups.len().into();
                value["qgroups_level_0"] = nr_level_0.into();
            }
            print_json(&value)?;
            return Ok(ExitCode::SUCCESS);
        }
        let text = |name: &str, value: &str| format!("  {name:<24}{value}\n");
        let mut out = format!("Quotas on {}:\n", target.filesystem());
        out += &text("Enabled:", if status.is_some() { "yes" } else { "no" });
        if let Some(QuotaStatusMessage { consistent, rescan, simple }) = status {
            out += &text("Mode:", if simple { "squota (simple accounting)" } else { "qgroup (full accounting)" });
            out += &text("Inconsistent:", if consistent { "no" } else { "yes" });
            out += &text("Rescan:", &rescan.map_or_else(|| "no".to_owned(), |at| format!("at address {at}")));
            out += &text("Total count:", &groups.len().to_string());
            out += &text("Level 0:", &nr_level_0.to_string());
        }
        print_out(&out)?;
        Ok(ExitCode::SUCCESS)
    })
}
