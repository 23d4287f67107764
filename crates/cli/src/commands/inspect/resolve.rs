//! `ubtrfs inspect logical-resolve`, `inode-resolve`, `subvolid-resolve`, `rootid`.
//!
//! Paths of files in a mount are printed as programs can open them. Files in subvolumes that the mount does not show
//! are named on standard error. Paths in an image, and paths of subvolumes, start at the top level.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use rustix::io::Errno;
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::resolve::{InodeUse, PathBytes, RESULTS_MAX, Request, Response};
use ubtrfs_fuse::holding_mount;

use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse, LongImageOptions};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::common::{parse_size, print_err, print_out, warn};
use crate::progs::is_progs;

/// Print the paths of all files that use the data at an address
#[derive(clap::Args)]
pub(super) struct LogicalArgs {
    /// Print the inodes instead of their paths
    #[arg(short = 'P')]
    inodes: bool,
    /// Space for the results in bytes, up to 16M: 24 bytes for each use of the data; by default enough for 4096 uses
    #[arg(short = 's', value_name = "BUFSIZE", value_parser = parse_buffer)]
    max: Option<u32>,
    /// Print the files that use any part of the extent at the address, not only this address
    #[arg(short = 'o', long = "ignore-offset")]
    whole_extent: bool,
    /// Accepted for compatibility with btrfs-progs
    #[arg(short, long)]
    verbose: bool,
    /// The logical address in bytes, decimal or with 0x, as error messages and `inspect dump-tree` print it
    #[arg(value_name = "LOGICAL", value_parser = parse_number)]
    bytenr: u64,
    /// A path in a mount or in an image
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: CommandTarget,
    #[command(flatten)]
    image: LongImageOptions,
}

/// Parses a number, decimal or hexadecimal with `0x`.
fn parse_number(text: &str) -> Result<u64, String> {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    // `from_str_radix` accepts a sign.
    let parsed = match hex.filter(|digits| !digits.starts_with('+')) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is not a number; write it decimal, or hexadecimal with 0x"))
}

/// Returns the number of results that a buffer of this size takes: a head of 16 bytes and 24 bytes for each result, as
/// in the ioctl that btrfs-progs uses.
fn parse_buffer(text: &str) -> Result<u32, String> {
    let size = parse_size(text)?.min(16 << 20);
    let max = u32::try_from(size.saturating_sub(16) / 24).unwrap_or(u32::MAX);
    if max == 0 { Err(format!("{text} bytes are too few for one result; give at least 40")) } else { Ok(max) }
}

/// Print all paths of an inode of a subvolume
#[derive(clap::Args)]
pub(super) struct InodeArgs {
    /// Accepted for compatibility with btrfs-progs
    #[arg(short, long)]
    verbose: bool,
    /// The inode number
    #[arg(value_name = "INODE", value_parser = parse_number)]
    ino: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the path of a subvolume
#[derive(clap::Args)]
pub(super) struct SubvolidArgs {
    /// The id of the subvolume
    #[arg(value_name = "ID", value_parser = parse_number)]
    id: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the id of the subvolume that holds a file
#[derive(clap::Args)]
pub(super) struct PathArgs {
    /// A path in a mount or in an image
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn logical(args: LogicalArgs) -> anyhow::Result<ExitCode> {
    let LogicalArgs { inodes, whole_extent, max, bytenr, path, image, verbose: _ } = args;
    let of = PathArgs { path, image: image.into() };
    let target = of.path.clone().or_image();
    let what = format!("find the files of address {bytenr} in");
    if inodes {
        // One more than wanted shows whether there are more.
        let max = max.map_or(RESULTS_MAX, |max| max as usize);
        let asked = u32::try_from(max.saturating_add(1)).ok();
        let request = Request::LogicalInodes { bytenr, whole_extent, max: asked };
        let Response::Inodes(mut uses) = ask(&of, &target, &what, request)? else {
            return Err(other_answer(&target));
        };
        let has_more = uses.len() > max;
        uses.truncate(max);
        if is_progs() {
            // Linux lists the newest subvolume first, and each file from its end.
            uses.reverse();
        }
        let line = |one: &InodeUse| format!("inode {} offset {} root {}\n", one.ino, one.offset, one.root);
        print_out(&uses.iter().map(line).collect::<String>())?;
        if has_more {
            warn_of_more();
        }
        return Ok(ExitCode::SUCCESS);
    }
    print_files(&target, ask(&of, &target, &what, Request::Logical { bytenr, whole_extent, max })?)
}

fn warn_of_more() {
    warn("more files may use this data; to find them, give a larger -s BUFSIZE, up to 16M");
}

pub(super) fn inode(args: InodeArgs) -> anyhow::Result<ExitCode> {
    let target = args.of.path.clone().or_image();
    let what = format!("find inode {} in", args.ino);
    print_files(&target, ask(&args.of, &target, &what, Request::Inode { of: 0, ino: args.ino })?)
}

pub(super) fn subvolid(args: SubvolidArgs) -> anyhow::Result<ExitCode> {
    let target = args.of.path.clone().or_image();
    let what = format!("find subvolume {} in", args.id);
    let Response::Paths { paths, .. } = ask(&args.of, &target, &what, Request::Subvolume { id: args.id })? else {
        return Err(other_answer(&target));
    };
    // Paths are printed without a leading slash, as by btrfs-progs.
    let lines: String = paths.iter().map(|path| format!("{}\n", printable(&path.0))).collect();
    print_out(&lines)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn rootid(args: PathArgs) -> anyhow::Result<ExitCode> {
    let target = args.path.clone().or_image_elsewhere();
    let Response::Id(id) = ask(&args, &target, "read", Request::RootId { of: 0 })? else {
        return Err(other_answer(&target));
    };
    print_out(&format!("{id}\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn ask(of: &PathArgs, target: &CommandTarget, what: &str, request: Request) -> anyhow::Result<Response> {
    let answer = with_channel(target, &of.image, ImageUse::Read, |channel| {
        let file = open(channel, target)?;
        let missing = match &request {
            Request::Inode { .. } => "the subvolume has no such inode",
            Request::Subvolume { .. } => "there is no such subvolume; list them with: ubtrfs subvolume list",
            _ => "no data extent contains this address",
        };
        match channel.call(ubtrfs_control::Request::Resolve(request), &[&file]) {
            Err(failure) if failure.errno() == Errno::NOENT => Err(anyhow!("cannot {what} {target}: {missing}")),
            answer => answer.with_context(|| format!("cannot {what} {target}")),
        }
    })?;
    match answer {
        AnyResponse::Resolve(answer) => Ok(answer),
        _ => Err(other_answer(target)),
    }
}

fn other_answer(target: &CommandTarget) -> anyhow::Error {
    anyhow!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs")
}

fn print_files(target: &CommandTarget, answer: Response) -> anyhow::Result<ExitCode> {
    let Response::Paths { paths, shown, is_cut } = answer else { return Err(other_answer(target)) };
    if is_cut {
        warn_of_more();
    }
    let CommandTarget::Mounted(place) = target else { return print_from_top(&paths) };
    let (dir, root) =
        holding_mount(place).with_context(|| format!("{target}: /proc/self/mountinfo does not list its mount"))?;
    let mut lines = String::new();
    for path in &paths {
        match in_mount(&path.0, &shown.0, &dir, &root) {
            Some(path) => lines += &format!("{}\n", printable(path.as_os_str().as_bytes())),
            None => {
                print_err(&format!("{}: not in this mount; its path from the top level is shown", printable(&path.0)))
            }
        }
    }
    print_out(&lines)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the path of a file from the host's root; `None` if the mount on `dir` does not show the file. `path` (of the
/// file) and `shown` (of the mounted subvolume's root) start at the top level. `root` is the directory below `shown`
/// that is mounted on `dir`; it differs from `/` only for a bind mount.
fn in_mount(path: &[u8], shown: &[u8], dir: &Path, root: &Path) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(path)).strip_prefix(OsStr::from_bytes(shown)).ok()?;
    Some(dir.join(Path::new("/").join(path).strip_prefix(root).ok()?))
}

fn print_from_top(paths: &[PathBytes]) -> anyhow::Result<ExitCode> {
    let lines: String = paths.iter().map(|path| format!("/{}\n", printable(&path.0))).collect();
    print_out(&lines)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_start_where_the_filesystem_is_mounted() {
        let found = |path: &str, shown: &str, root: &str| {
            in_mount(path.as_bytes(), shown.as_bytes(), Path::new("/mnt"), Path::new(root))
        };
        assert_eq!(found("v/d/f", "", "/"), Some("/mnt/v/d/f".into()));
        assert_eq!(found("v/d/f", "v", "/"), Some("/mnt/d/f".into()));
        assert_eq!(found("v/d/f", "v", "/d"), Some("/mnt/f".into()));
        assert_eq!(found("w/f", "v", "/"), None);
        assert_eq!(found("vw/f", "v", "/"), None);
        assert_eq!(found("v/e/f", "v", "/d"), None);
    }
}
