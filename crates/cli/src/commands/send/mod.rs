//! `ubtrfs send`: writes read-only subvolumes as a stream, whole or as the difference to a parent; `--diff` prints the
//! changes between two snapshots.
//!
//! Names, meanings and messages of the options are those of `btrfs send`.

mod diff;

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use ubtrfs_archive::host_file::{directory_of_new, find_target};
use ubtrfs_control::{Channel, CommandFailure, Request as AnyRequest, reopen, send};
use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::SubvolumeInfo;

use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, open, with_channel};
use crate::common::{OUTPUT_LOST, Shown, format_size, print_err, reader_gone};
use crate::job::with_progress_by;

/// Send read-only subvolumes as a stream
#[derive(clap::Args)]
#[command(
    after_help = "The receiver must have the parent and the clone sources exactly as they are here. With clone sources \
                        and without a parent, the best of them becomes the parent."
)]
pub(crate) struct Args {
    /// Read-only subvolumes, all in one mount or one image
    #[arg(value_name = "SUBVOL|IMAGE:/SUBVOL", required = true)]
    subvolumes: Vec<CommandTarget>,
    /// Send only what differs from this read-only subvolume
    #[arg(short, value_name = "PARENT")]
    parent: Option<CommandTarget>,
    /// A read-only subvolume whose data the receiver may clone; can be given several times
    #[arg(short, value_name = "CLONE_SRC")]
    clone_sources: Vec<CommandTarget>,
    /// Write the stream to FILE instead of standard output
    #[arg(short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Write one header and one end command for all subvolumes, instead of both for each subvolume
    #[arg(short = 'e')]
    joined: bool,
    /// Version of the stream: 1, 2, or 0 for the highest [default: 1, or 2 with --compressed-data]
    #[arg(long, value_name = "N")]
    proto: Option<u32>,
    /// Send compressed data as it is, instead of decompressing it; needs version 2
    #[arg(long)]
    compressed_data: bool,
    /// Send changed ranges without their data
    #[arg(long)]
    no_data: bool,
    /// Print the changes between two snapshots instead of sending a stream
    #[arg(long, conflicts_with_all = ["parent", "clone_sources", "joined", "proto", "compressed_data", "no_data"])]
    diff: bool,
    /// With --diff: print JSON, one object a line
    #[arg(long, requires = "diff")]
    json: bool,
    /// Also print the size of the stream, the time and the rate, to standard error
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Print only errors
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Some(first) = args.subvolumes.first() else { bail!("name a subvolume") };
    let others = args.subvolumes.iter().chain(&args.parent).chain(&args.clone_sources);
    if let Some(other) = others.clone().find(|other| !first.shares_filesystem_with(other)) {
        bail!("{first} and {other} are not in the same filesystem; name paths in one mount or one image");
    }
    if args.diff {
        return diff::run(args);
    }
    let version = match (args.proto, args.compressed_data) {
        (None, false) => 1,
        (None, true) | (Some(0), _) => HIGHEST,
        (Some(1), true) => bail!("--compressed-data needs version 2 of the stream; leave out --proto 1"),
        (Some(version), _) => version,
    };
    if version > HIGHEST {
        bail!("version {version} of the send stream is not known; choose 1 or 2");
    }
    if args.file.is_none() && ubtrfs_device::stdout_was_closed() {
        bail!("{OUTPUT_LOST}: it is closed");
    }
    let stdout = io::stdout();
    if args.file.is_none() && stdout.is_terminal() {
        bail!("a send stream is not for a terminal; give -f FILE, or a pipe");
    }
    let began = Instant::now();
    let bytes = with_channel(first, &args.image, ImageUse::Read, |channel| {
        let list = |targets: &[CommandTarget]| -> anyhow::Result<Vec<SubvolumeInfo>> {
            targets.iter().map(|target| snapshot(channel, target)).collect()
        };
        let (subvolumes, clone_sources) = (list(&args.subvolumes)?, list(&args.clone_sources)?);
        let parent = args.parent.as_ref().map(|parent| snapshot(channel, parent)).transpose()?;
        let ids = |list: &[SubvolumeInfo]| list.iter().map(|info| info.id.0).collect();
        let request = send::Request::Send(send::Send {
            subvolumes: ids(&subvolumes),
            parent: parent.map(|parent| parent.id.0),
            clone_sources: ids(&clone_sources),
            version,
            compressed_data: args.compressed_data,
            no_data: args.no_data,
            joined: args.joined,
        });
        if !args.quiet {
            args.subvolumes.iter().for_each(|target| print_err(&format!("At subvol {target}")));
        }
        // The file is created after all checks, so that a wrong argument does not create it.
        let file = args.file.as_deref().map(open_output).transpose()?;
        let replaces =
            file.as_ref().is_some_and(|file| file.metadata().is_ok_and(|meta| meta.is_file() && meta.len() > 0));
        let output = file.as_ref().map_or(stdout.as_fd(), AsFd::as_fd);
        let bar =
            if args.quiet { indicatif::ProgressBar::hidden() } else { crate::common::progress_bytes(None, "sending") };
        let done = with_progress_by(bar, "sending", |job| {
            channel.call_with_output(AnyRequest::Send(request), &[], output, replaces, job)
        });
        if args.file.is_none() && done.as_ref().is_err_and(|failure| failure.errno() == Errno::PIPE) {
            return Err(reader_gone());
        }
        answer(done, &args.subvolumes)
    })?;
    if args.verbose > 0 {
        let seconds = began.elapsed().as_secs_f64().max(0.001);
        let rate = format_size((bytes as f64 / seconds) as u64);
        print_err(&format!("{} in {seconds:.2} s ({rate}/s)", format_size(bytes)));
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a file for a stream. The old content of the file is replaced when the stream begins.
fn open_output(path: &Path) -> anyhow::Result<File> {
    let cannot = || format!("cannot create {}", path.shown());
    if let Some(found) = find_target(path)? {
        return reopen(&found, path, File::options().write(true)).with_context(cannot);
    }
    let (dir, name) = directory_of_new(path)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(&*dir, name, flags, Mode::from_raw_mode(0o666));
    Ok(File::from(made.with_context(cannot)?))
}

/// Converts the answer of a send into the number of bytes written, or into an error that names the subvolumes.
fn answer(done: Result<ubtrfs_control::Response, CommandFailure>, targets: &[CommandTarget]) -> anyhow::Result<u64> {
    let names = || targets.iter().map(CommandTarget::to_string).collect::<Vec<_>>().join(", ");
    match done {
        Ok(ubtrfs_control::Response::Send(done)) => Ok(done.bytes),
        Ok(_) => Err(anyhow!("cannot send {}: {}", names(), ubtrfs_control::unexpected())),
        Err(failure) => Err(anyhow!("cannot send {}: {failure}", names())),
    }
}

/// Describes a subvolume. Fails unless the subvolume is read-only.
pub(crate) fn snapshot(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<SubvolumeInfo> {
    let info = subvolume(channel, target)?;
    if !info.flags.contains(RootFlags::RDONLY) {
        bail!(
            "{target} is not read-only; send a read-only snapshot of it, made with: ubtrfs subvolume snapshot -r {target} \
             SNAPSHOT"
        );
    }
    Ok(info)
}

/// Describes a subvolume. Fails if the path is not the root directory of a subvolume.
pub(crate) fn subvolume(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<SubvolumeInfo> {
    let file = open(channel, target)?;
    match channel.subvolume_of(&file).with_context(|| format!("cannot read {target}"))? {
        (info, true) => Ok(info),
        _ => Err(anyhow!("{target} is not a subvolume; list them with: ubtrfs subvolume list {}", target.filesystem())),
    }
}

const HIGHEST: u32 = 2;
