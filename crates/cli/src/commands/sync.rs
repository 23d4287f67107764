//! `ubtrfs sync DIR` (also `ubtrfs filesystem sync DIR`): returns when everything written so far is durable.
//!
//! sync(2) and syncfs(2) do not reach a FUSE server; this command does.

use std::path::PathBuf;
use std::process::ExitCode;

/// Make everything written to a mounted filesystem durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The mount point, or any path below it
    path: PathBuf,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    ubtrfs_fuse::sync(&args.path)?;
    Ok(ExitCode::SUCCESS)
}
