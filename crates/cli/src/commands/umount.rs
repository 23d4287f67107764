//! `ubtrfs umount DIR`: unmounts and returns when the last commit is durable.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::common::{full_host_advice, print_error};

/// Unmount, and return when the last commit is durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The mount points
    #[arg(required = true)]
    dirs: Vec<PathBuf>,
    /// Detach the mount at once even if it is in use, and wait until it is no longer used
    #[arg(short, long)]
    lazy: bool,
    /// This process asks the server of another user's mount
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
        if let Err(error) = ubtrfs_fuse::unmount_with_helper(dir, args.lazy, &helper) {
            let advice = full_host_advice(&error.to_string());
            status = print_error(&anyhow::anyhow!("{error}{advice}"));
        }
    }
    Ok(status)
}

/// The command of the process that asks the server of another user's mount.
fn helper(dir: &Path) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["umount", "--ask", "--"]).arg(dir);
    Ok(command)
}
