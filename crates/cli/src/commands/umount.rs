//! `ubtrfs umount DIR`: unmounts and returns when the last commit is durable.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ubtrfs_control::{Channel, InMountOfOther, Request, Response, Way, balance, find_file, replace, scrub};
use ubtrfs_fuse::MountError;

use super::place::await_server;
use crate::common::{Shown, full_host_advice, print_error};

/// Unmount, and return when the last commit is durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The mount points
    #[arg(required = true)]
    dirs: Vec<PathBuf>,
    /// Detach the mount at once even if it is in use, and wait until it is no longer used
    #[arg(short, long)]
    lazy: bool,
    /// This process asks a server which may not answer
    #[arg(long, hide = true)]
    ask: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    for dir in &args.dirs {
        if args.ask {
            ubtrfs_fuse::tell_control_name(dir);
            continue;
        }
        if let Err(error) = await_server(dir) {
            status = print_error(&error);
            continue;
        }
        if let Err(error) = ubtrfs_fuse::unmount_with_helper(dir, args.lazy, &helper) {
            let work = matches!(error, MountError::Busy(_)).then(|| advice_about_work(dir)).flatten();
            let advice = work.unwrap_or_else(|| full_host_advice(&error.to_string()).to_owned());
            status = print_error(&anyhow::anyhow!("{error}{advice}"));
        }
    }
    Ok(status)
}

/// The advice for a mount that is busy because of a balance, a replacement or a scrub; `None` if none runs, or if the user may not
/// know.
fn advice_about_work(dir: &Path) -> Option<String> {
    // The server of another user's mount may never answer.
    if !matches!(find_file(dir, InMountOfOther::Refuse), Ok(Way::To(_))) {
        return None;
    }
    let channel = Channel::mount(dir).ok()?;
    match channel.call(Request::Balance(balance::Request::Status), &[]).ok()? {
        Response::Balance(balance::Response::Status(Some(status))) if status.state != "paused" => {
            return Some(format!(
                "; a balance is {}, end it with: ubtrfs balance cancel {}",
                status.state,
                dir.shown()
            ));
        }
        _ => {}
    }
    let replacement = channel.call(Request::Replace(replace::Request::Status), &[]).ok()?;
    if matches!(replacement, Response::Replace(replace::Response::Running(_))) {
        let dir = dir.shown();
        return Some(format!(
            "; a device is being replaced, see: ubtrfs replace status {dir}; to end that: ubtrfs replace cancel {dir}"
        ));
    }
    match channel.call(Request::Scrub(scrub::Request::Status), &[]).ok()? {
        Response::Scrub(scrub::Response::Status(running)) if !running.is_empty() => {
            Some(format!("; a scrub is running, end it with: ubtrfs scrub cancel {}", dir.shown()))
        }
        _ => None,
    }
}

/// The command of the process that asks a server which may not answer.
pub(super) fn helper(dir: &Path) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["umount", "--ask", "--"]).arg(dir);
    Ok(command)
}
