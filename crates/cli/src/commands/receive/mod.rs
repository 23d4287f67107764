//! `ubtrfs receive`: receives the subvolumes of a send stream into a mount or an image; `--dump` prints a stream.
//!
//! Names, meanings and messages of the options are those of `btrfs receive`.

mod dump;

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::receive::{Request, Response};
use ubtrfs_format::print::{insert_name, json_line};
use ubtrfs_fs::Job;

use super::offline::text::printable;
use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, with_channel};
use crate::common::{Shown, format_size, print_err, print_out, warn};
use crate::job::with_progress_by;

/// Receive subvolumes from a send stream
#[derive(clap::Args)]
#[command(
    after_help = "Each subvolume is read-only when it is complete. If the receive fails or is interrupted, the incomplete \
                        one is deleted; with --keep it stays, marked by the attribute trusted.ubtrfs.incomplete, and the same \
                        command with the same stream continues it. With --verify, data that the stream wrote is read from the \
                        devices again and compared by checksum, and sizes, owners, modes and times are compared; cloned and \
                        compressed data is read, which verifies its checksums on disk. If anything differs, the receive fails. With --clone, \
                        data of the stream that is equal in the sent subvolume is shared with it, if that subvolume is on this \
                        filesystem and read-only."
)]
pub(crate) struct Args {
    /// Directory in a mount or an image that receives the subvolumes
    #[arg(value_name = "DIR|IMAGE[:/DIR]", required_unless_present = "dump")]
    dir: Option<CommandTarget>,
    /// Read the stream from FILE instead of standard input
    #[arg(short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Stop after the first end command of the stream, and leave the rest of the input unread
    #[arg(short = 'e')]
    only_first: bool,
    /// Accepted for compatibility; paths are always confined to the directory
    #[arg(short = 'C', long)]
    chroot: bool,
    /// Stop after N failed commands; 0 for no limit
    #[arg(short = 'E', long, value_name = "N", default_value_t = 1)]
    max_errors: u64,
    /// Accepted for compatibility; the mount point of the filesystem is not needed
    #[arg(short = 'm', value_name = "ROOTMOUNT")]
    root_mount: Option<PathBuf>,
    /// Decompress compressed data instead of storing it as it is
    #[arg(long)]
    force_decompress: bool,
    /// Keep an incomplete subvolume, and continue a subvolume that was kept
    #[arg(long)]
    keep: bool,
    /// Before a subvolume is marked as complete, read its content again and compare it with the stream
    #[arg(long)]
    verify: bool,
    /// Share data with the sent subvolume if it is on this filesystem
    #[arg(long)]
    clone: bool,
    /// Print the commands of the stream instead of receiving it
    #[arg(long, conflicts_with_all = ["keep", "json", "verify", "clone"])]
    dump: bool,
    /// Also print the numbers of commands and bytes, the time and the rate, to standard error
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Print only errors
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Print the received subvolumes as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let file = match &args.file {
        Some(path) => Some(File::open(path).with_context(|| format!("cannot open {}", path.shown()))?),
        None => None,
    };
    let stdin = io::stdin();
    if file.is_none() && stdin.is_terminal() {
        bail!("a send stream does not come from a terminal; give it with -f FILE, or by a pipe from send");
    }
    let stream = file.as_ref().map_or(stdin.as_fd(), AsFd::as_fd);
    if args.dump {
        dump::run(stream, args.only_first)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(dir) = args.dir.clone() else { bail!("name a directory in a mount or an image") };
    let dir = dir.or_image();
    let began = Instant::now();
    let done = with_channel(&dir, &args.image, ImageUse::Write, |channel| {
        let cannot = |failure: &dyn std::fmt::Display| anyhow!("cannot receive into {dir}: {failure}");
        let into = channel.open(dir.path()).map_err(|failure| cannot(&failure))?;
        let request = ubtrfs_control::Request::Receive(Request {
            dir: 0,
            only_first: args.only_first,
            max_errors: args.max_errors,
            keep: args.keep,
            force_decompress: args.force_decompress,
            verify: args.verify,
            shares: args.clone,
            replaces: false,
            total_bytes: size_of_file(stream),
        });
        let bar = if args.quiet {
            indicatif::ProgressBar::hidden()
        } else {
            crate::common::progress_bytes(size_of_file(stream), "receiving")
        };
        let receive = |job: &Job| channel.call_with_input(request, &[&into], stream, args.only_first, job);
        match with_progress_by(bar, "receiving", receive) {
            Ok(ubtrfs_control::Response::Receive(done)) => Ok(done),
            Ok(_) => Err(cannot(&ubtrfs_control::unexpected())),
            Err(failure) => Err(cannot(&failure)),
        }
    })?;
    report(args, &done, began)
}

fn report(args: &Args, done: &Response, began: Instant) -> anyhow::Result<ExitCode> {
    if args.json {
        let subvolume = |subvolume: &ubtrfs_control::receive::ReceivedDescription| {
            let mut value = json!({
                "id": subvolume.id,
                "received_uuid": subvolume.uuid,
                "snapshot": subvolume.is_snapshot,
                "resumed_commands": subvolume.nr_resumed,
            });
            insert_name(&mut value, "path", &subvolume.path);
            value
        };
        let value = json!({
            "subvolumes": done.subvolumes.iter().map(subvolume).collect::<Vec<_>>(),
            "commands": done.commands,
            "bytes": done.bytes,
            "stored_encoded": done.stored_encoded,
            "shared_bytes": done.bytes_shared,
            "files_without_verity": done.without_verity,
            "verified_inodes": done.verified_inodes,
            "verified_bytes": done.verified_bytes,
            "compared_bytes": done.compared_bytes,
            "failed_commands": done.nr_errors,
        });
        print_out(&format!("{}\n", json_line(&value)))?;
    } else if !args.quiet {
        for subvolume in &done.subvolumes {
            // As in btrfs-progs, the path of a received snapshot is printed to standard output, and the path of any
            // other received subvolume to standard error.
            let path = printable(&subvolume.path);
            match subvolume.is_snapshot {
                true => print_out(&format!("At snapshot {path}\n"))?,
                false => print_err(&format!("At subvol {path}")),
            }
        }
    }
    if args.verbose > 0 {
        let seconds = began.elapsed().as_secs_f64().max(0.001);
        print_err(&format!(
            "{} commands, {} in {seconds:.2} s ({}/s), {} compressed extents stored as they are",
            done.commands,
            format_size(done.bytes),
            format_size((done.bytes as f64 / seconds) as u64),
            done.stored_encoded,
        ));
    }
    if args.verbose > 0 && args.clone {
        print_err(&format!("shared {} with the sent subvolumes", format_size(done.bytes_shared)));
    }
    if args.verbose > 0 && args.verify {
        print_err(&format!(
            "verified {} files and directories: {} read, {} of them compared with the stream",
            done.verified_inodes,
            format_size(done.verified_bytes),
            format_size(done.compared_bytes),
        ));
    }
    if done.without_verity > 0 && !args.quiet {
        warn(&format!(
            "{} files were received without fs-verity, which ubtrfs cannot enable; later changes of them will not be detected",
            done.without_verity
        ));
    }
    for error in &done.errors {
        warn(error);
    }
    if done.nr_errors > 0 {
        bail!("{} commands failed; the received subvolumes differ from the sent ones", done.nr_errors);
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes from the current position of a regular file to its end; `None` for other types of files.
fn size_of_file(stream: BorrowedFd<'_>) -> Option<u64> {
    let stat = rustix::fs::fstat(stream).ok()?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return None;
    }
    let at = rustix::fs::tell(stream).ok()?;
    u64::try_from(stat.st_size).ok()?.checked_sub(at)
}
