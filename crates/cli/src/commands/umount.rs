//! `ubtrfs umount DIR`: unmounts and returns when the last commit is durable.

use std::path::PathBuf;
use std::process::ExitCode;

/// Unmount and wait until the last commit is durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The mount point
    pub(crate) dir: PathBuf,
}

pub(crate) fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("umount is not wired yet")
}
