//! `ubtrfs subvolume find-new`: prints extents that are not older than a generation, in the format of btrfs-progs.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::thread;

use anyhow::{Context, bail};
use ubtrfs_control::{Request, Response, send};
use ubtrfs_format::print::escaped_line;

use super::problem::explain;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::commands::send::subvolume;
use crate::common::{OUTPUT_LOST, stdout};
use crate::job::with_progress;

/// List the extents that were written to a subvolume in a generation or later
#[derive(clap::Args)]
pub(super) struct Args {
    /// The subvolume
    #[arg(value_name = "SUBVOL|IMAGE:/SUBVOL")]
    target: CommandTarget,
    /// The oldest generation to list; `subvolume show` prints a subvolume's current one
    generation: u64,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    with_channel(&args.target, &args.image, ImageUse::Read, |channel| {
        let info = subvolume(channel, &args.target)?;
        let request = Request::Send(send::Request::FindNew { subvolume: info.id.0, generation: args.generation });
        let (from, to) = io::pipe()?;
        let print = move || {
            let mut out = io::BufWriter::new(stdout());
            // The server may be a stranger, and the lines go to a terminal.
            BufReader::new(from).split(b'\n').try_for_each(|line| writeln!(out, "{}", escaped_line(&line?)))?;
            out.flush()
        };
        let found = thread::scope(|scope| {
            // If standard output fails, the pipe breaks, and the search ends.
            let printer = scope.spawn(print);
            let found =
                with_progress("searching", |job| channel.call_with_output(request, &[], to.as_fd(), false, job));
            drop(to);
            match printer.join() {
                Ok(printed) => printed.map(|()| found).context(OUTPUT_LOST),
                Err(_) => bail!("printing failed: this is a bug of ubtrfs"),
            }
        })?;
        match found {
            Ok(Response::Send(_)) => Ok(()),
            Ok(_) => bail!("unexpected answer of the server; unmount and mount with this ubtrfs"),
            Err(failure) => Err(explain("search", &args.target, failure)),
        }
    })
}
