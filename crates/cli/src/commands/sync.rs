//! `ubtrfs sync DIR` (also `ubtrfs filesystem sync DIR`): returns when everything written so far is durable.

use std::path::PathBuf;
use std::process::ExitCode;

/// Make everything written to a mounted filesystem durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The mount point, or any path below it
    pub(crate) path: PathBuf,
}

pub(crate) fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("sync is not wired yet")
}
