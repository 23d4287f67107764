//! `ubtrfs filesystem defragment [-r] [-c METHOD] PATH|IMAGE:PATH ...`

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use serde_json::json;
use ubtrfs_control::Channel;
use ubtrfs_control::defragment::{DefragmentCompression, DefragmentedFile, Request, Response};

use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::common::{Shown as _, is_broken_pipe, parse_size, print_err, print_error, print_out, warn};
use crate::job::with_progress_in_bytes;
use crate::progs::is_progs;

/// Join the small extents of files, and optionally compress them
#[derive(clap::Args)]
#[command(
    after_help = "Extents shared with snapshots or other files are not rewritten, because copies of them would take space; \
                  --unshare rewrites them too."
)]
pub(crate) struct Args {
    /// Files, and with -r directories, in a mount or an image
    #[arg(value_name = "PATH|IMAGE:PATH", required = true)]
    paths: Vec<CommandTarget>,
    /// Defragment all files below directories, but not the files in other subvolumes
    #[arg(short, long)]
    recursive: bool,
    /// Compress with this method: zlib, lzo or zstd; -c alone means zlib
    #[arg(short, long, value_name = "METHOD", value_enum)]
    compress: Option<MethodName>,
    /// Level of the compression
    #[arg(short = 'L', long, value_name = "N", default_value_t = 0, allow_hyphen_values = true, requires = "compress")]
    level: i32,
    /// Offset of the first byte to defragment in each file
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    start: u64,
    /// Number of bytes to defragment in each file [default: up to the end]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    len: Option<u64>,
    /// Do not rewrite extents of this size or more
    #[arg(short = 't', long, value_name = "SIZE", value_parser = parse_size, default_value = "32M")]
    target_size: u64,
    /// Rewrite shared extents too, which then take more space
    #[arg(long)]
    unshare: bool,
    /// Write the data of each file to disk before the next file is defragmented
    #[arg(short, long)]
    flush: bool,
    /// Print the path of each file
    #[arg(short, long)]
    verbose: bool,
    /// Print the counts as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum MethodName {
    Zlib,
    Lzo,
    Zstd,
}

impl From<MethodName> for DefragmentCompression {
    fn from(name: MethodName) -> Self {
        match name {
            MethodName::Zlib => Self::Zlib,
            MethodName::Lzo => Self::Lzo,
            MethodName::Zstd => Self::Zstd,
        }
    }
}

/// Turns `-c` without a method into `--compress=zlib`, as btrfs-progs reads it.
pub(crate) fn with_method(args: Vec<OsString>) -> Vec<OsString> {
    let is_defragment = matches!(
        args.get(1..3).and_then(|words| Some((words.first()?.to_str()?, words.get(1)?.to_str()?))),
        Some(("filesystem", "defragment" | "defrag"))
    );
    if !is_defragment {
        return args;
    }
    let methods = ["zlib", "lzo", "zstd"];
    let has_method = |at: usize| args.get(at).is_some_and(|next| methods.iter().any(|method| next == method));
    let long = |(at, arg): (usize, &OsString)| match arg.to_str() {
        Some("-c") if !has_method(at + 1) => OsString::from("--compress=zlib"),
        _ => arg.clone(),
    };
    args.iter().enumerate().map(long).collect()
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut all = Response::default();
    for target in &args.paths {
        let done =
            with_channel(target, &ImageOptions::default(), ImageUse::Write, |channel| one(args, channel, target));
        match done.and_then(|done| if args.verbose { list(target, &done).map(|()| done) } else { Ok(done) }) {
            Ok(done) => {
                all.files += done.files;
                all.bytes += done.bytes;
                all.failed += done.failed;
                all.first_failure = all.first_failure.or(done.first_failure);
            }
            Err(error) if is_broken_pipe(&error) => return Err(error),
            Err(error) => status = print_error(&error),
        }
    }
    if args.json {
        let counts = json!({ "files": all.files, "rewritten_bytes": all.bytes, "failed": all.failed });
        print_out(&format!("{counts}\n"))?;
    }
    if let Some(failure) = all.first_failure {
        bail!("{} of {} files could not be defragmented, the first because: {failure}", all.failed, all.files);
    }
    Ok(status)
}

/// Prints the paths of the listed files.
fn list(target: &CommandTarget, done: &Response) -> anyhow::Result<()> {
    let path = |listed: &DefragmentedFile| match listed.path.as_slice() {
        b"" => target.to_string(),
        path => target.child(path).to_string(),
    };
    print_out(&done.listed.iter().map(|listed| path(listed) + "\n").collect::<String>())?;
    let nr_listed = done.listed.len();
    if (nr_listed as u64) < done.files {
        warn(&format!("only the first {nr_listed} of {} files in {target} are listed", done.files));
    }
    Ok(())
}

fn one(args: &Args, channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Response> {
    let cannot = |error: &dyn std::fmt::Display| anyhow!("cannot defragment {target}: {error}");
    let is_dir = channel.is_dir(target.path()).map_err(|failure| cannot(&failure))?;
    if is_dir == Some(true) && !args.recursive && is_progs() {
        // On Linux, the command then works on the extent tree, where nothing is to be gained.
        print_err(&format!("WARNING: directory specified but recursive mode not requested: {}", target.path().shown()));
        return Ok(Response::default());
    }
    if is_dir == Some(true) && !args.recursive {
        return Err(cannot(&"it is a directory; give -r for all files below it"));
    }
    let file = match is_dir {
        Some(true) => channel.open(target.path()),
        _ => channel.open_writable(target.path()),
    };
    let request = Request {
        file: 0,
        start: args.start,
        len_bytes: args.len.unwrap_or(u64::MAX),
        small_bytes: args.target_size,
        compress: args.compress.map(|name| (name.into(), args.level)),
        unshare: args.unshare,
        flush: args.flush,
        lists: args.verbose,
    };
    let file = file.map_err(|failure| cannot(&failure))?;
    let request = ubtrfs_control::Request::Defragment(request);
    match with_progress_in_bytes("defragmenting", |job| channel.call_with(request, &[&file], job)) {
        Ok(ubtrfs_control::Response::Defragment(done)) => Ok(done),
        Ok(_) => Err(cannot(&ubtrfs_control::unexpected())),
        Err(failure) => Err(cannot(&failure)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_method_means_zlib() {
        let of = |args: &str| with_method(args.split(' ').map(OsString::from).collect());
        assert_eq!(of("ubtrfs filesystem defrag -c f")[3], "--compress=zlib");
        assert_eq!(of("ubtrfs filesystem defragment -c zstd f")[3..], ["-c", "zstd", "f"].map(OsString::from));
        assert_eq!(of("ubtrfs filesystem defragment -czstd f")[3], "-czstd");
        assert_eq!(of("ubtrfs ls -c f")[2], "-c");
    }
}
