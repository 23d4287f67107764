//! `ubtrfs mount DEVICE DIR`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Mount a btrfs image or device through FUSE
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Image file or block device
    pub(crate) device: PathBuf,
    /// Mount point, an empty directory
    pub(crate) dir: PathBuf,
}

pub(crate) fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("mount is not wired yet")
}

/// Rewrites the ways mount(8) calls us (I3 of `main`) to `ubtrfs mount ...`.
pub(crate) fn as_mount_helper(args: Vec<OsString>, _commands: &[String]) -> Vec<OsString> {
    args
}
