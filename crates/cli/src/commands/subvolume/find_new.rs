//! `ubtrfs subvolume find-new`, as btrfs-progs prints it.

use std::os::fd::AsFd;

use anyhow::bail;
use ubtrfs_control::{Request, Response, send};

use super::problem::explain;
use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, with_channel};
use crate::commands::send::relay::call_with_output;
use crate::commands::send::subvolume;
use crate::job::with_progress;

/// List the extents of a subvolume that are not older than a generation
#[derive(clap::Args)]
pub(super) struct Args {
    /// The subvolume
    #[arg(value_name = "SUBVOL|IMAGE:/SUBVOL")]
    target: Target,
    /// The generation
    generation: u64,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    with_channel(&args.target, &args.image, Use::Read, |channel| {
        let info = subvolume(channel, &args.target)?;
        let request = Request::Send(send::Request::FindNew { subvolume: info.id.0, generation: args.generation });
        let stdout = std::io::stdout();
        match with_progress("searching", |job| call_with_output(channel, request, stdout.as_fd(), job)) {
            Ok(Response::Send(_)) => Ok(()),
            Ok(_) => bail!("the server gave another answer than asked for"),
            Err(failure) => Err(explain("search", &args.target, failure)),
        }
    })
}
