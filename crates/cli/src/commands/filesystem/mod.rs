//! `ubtrfs filesystem ...`: commands on a whole filesystem, named as in btrfs-progs, for a mount or an image.

mod defragment;
mod du;
mod label;
mod ranges;
mod resize;
mod shown_device;
mod trim;
mod unmounted;
mod usage;
mod usage_table;

use std::process::ExitCode;

pub(crate) use defragment::with_method;
pub(crate) use resize::shrink_image;
pub(crate) use usage::{DeviceUsageArgs, device_usage, names, warn_of_profiles_in};

use anyhow::{Context, bail};
use ubtrfs_control::filesystem::{Request, Response};
use ubtrfs_control::{Channel, Request as Command};

use super::place::CommandTarget;

/// Commands on a whole filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Sub,
}

#[derive(clap::Subcommand)]
enum Sub {
    Sync(super::sync::Args),
    Df(usage::DfArgs),
    Usage(usage::UsageArgs),
    Du(du::Args),
    Show(usage::ShowArgs),
    Label(label::Args),
    Resize(resize::Args),
    Trim(trim::Args),
    #[command(visible_alias = "defrag")]
    Defragment(defragment::Args),
    Fiemap(ranges::FiemapArgs),
    Clone(ranges::CloneArgs),
    Dedupe(ranges::DedupeArgs),
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Sub::Sync(args) => return super::sync::run(args),
        Sub::Resize(args) => return resize::run(&args),
        Sub::Trim(args) => trim::run(&args),
        Sub::Defragment(args) => return defragment::run(&args),
        Sub::Du(args) => return du::run(&args),
        Sub::Usage(args) => return usage::usage(&args),
        Sub::Show(args) => return usage::show(&args),
        Sub::Df(args) => usage::df(&args),
        Sub::Label(args) => label::run(&args),
        Sub::Fiemap(args) => ranges::fiemap(&args),
        Sub::Clone(args) => ranges::clone(&args),
        Sub::Dedupe(args) => ranges::dedupe(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a command; `what` names the command's purpose in errors.
fn call(channel: &Channel<'_>, target: &CommandTarget, what: &str, request: Request) -> anyhow::Result<Response> {
    match channel.call(Command::Filesystem(request), &[]) {
        Ok(ubtrfs_control::Response::Filesystem(response)) => Ok(response),
        Ok(_) => bail!("the server of {target} answered something else"),
        Err(failure) => Err(failure).with_context(|| format!("cannot {what} {}", target.filesystem())),
    }
}

/// Returns identity, features and sizes of the filesystem.
fn info(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<ubtrfs_control::filesystem::FilesystemInfo> {
    match call(channel, target, "read the superblock of", Request::Info)? {
        Response::Info(info) => Ok(info),
        _ => bail!("the server of {target} answered something else"),
    }
}
