//! `ubtrfs umount DIR`: unmounts and returns when the last commit is durable.

use std::path::PathBuf;
use std::process::ExitCode;

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
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    for dir in &args.dirs {
        if let Err(error) = ubtrfs_fuse::unmount(dir, args.lazy) {
            let advice = full_host_advice(&error.to_string());
            status = print_error(&anyhow::anyhow!("{error}{advice}"));
        }
    }
    Ok(status)
}
