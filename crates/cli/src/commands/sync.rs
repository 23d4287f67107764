//! `ubtrfs sync DIR` (also `ubtrfs filesystem sync DIR`): returns when everything written so far is durable.
//!
//! Except on mounts of type `fuseblk`, sync(2) and syncfs(2) do not reach a FUSE server, so this command asks the
//! server.

use std::process::ExitCode;

use anyhow::anyhow;

use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, with_channel};
use crate::common::full_host_advice;

/// Commit everything written to a filesystem, and return when it is durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Any path in a mount, or an image that is not mounted
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let target = args.path.or_image();
    with_channel(&target, &ImageOptions::default(), ImageUse::Write, |channel| {
        channel.sync().map_err(|failure| {
            let advice = full_host_advice(&failure.text);
            anyhow!("not everything below {target} is durable: {failure}{advice}")
        })
    })?;
    Ok(ExitCode::SUCCESS)
}
