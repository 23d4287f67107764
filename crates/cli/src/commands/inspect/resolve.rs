//! `ubtrfs inspect logical-resolve`, `inode-resolve`, `subvolid-resolve`, `rootid`.
//!
//! Paths of files in a mount are printed as programs can open them. Files in subvolumes that the mount does not show
//! are named on standard error. Paths in an image, and paths of subvolumes, start at the top level.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::resolve::{InodeUse, PathBytes, Request, Response};
use ubtrfs_fuse::holding_mount;

use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, open, with_channel};
use crate::common::{print_err, print_out};

/// Print the paths of all files that use the data at an address
#[derive(clap::Args)]
pub(super) struct LogicalArgs {
    /// Print the inodes instead of their paths
    #[arg(short = 'P')]
    inodes: bool,
    /// Accepted for compatibility with btrfs-progs; all files are found
    #[arg(short = 's', value_name = "SIZE", hide = true)]
    _buffer: Option<String>,
    /// Print the files that use any part of the extent at the address, not only this address
    #[arg(long = "ignore-offset")]
    whole_extent: bool,
    /// The logical address in bytes, as error messages and `inspect dump-tree` print it
    #[arg(value_name = "LOGICAL")]
    bytenr: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print all paths of an inode of a subvolume
#[derive(clap::Args)]
pub(super) struct InodeArgs {
    /// The inode number
    #[arg(value_name = "INODE")]
    ino: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the path of a subvolume
#[derive(clap::Args)]
pub(super) struct SubvolidArgs {
    /// The id of the subvolume
    #[arg(value_name = "ID")]
    id: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the id of the subvolume that holds a file
#[derive(clap::Args)]
pub(super) struct PathArgs {
    /// A path in a mount or in an image
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn logical(args: LogicalArgs) -> anyhow::Result<ExitCode> {
    let LogicalArgs { inodes, whole_extent, bytenr, of, .. } = args;
    let target = of.path.clone().or_image();
    let what = format!("find the files of address {bytenr} in");
    if inodes {
        let Response::Inodes(uses) = ask(&of, &target, &what, Request::LogicalInodes { bytenr, whole_extent })? else {
            return Err(other_answer(&target));
        };
        let line = |one: &InodeUse| format!("inode {} offset {} root {}\n", one.ino, one.offset, one.root);
        print_out(&uses.iter().map(line).collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    print_files(&target, ask(&of, &target, &what, Request::Logical { bytenr, whole_extent })?)
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

fn ask(of: &PathArgs, target: &Target, what: &str, request: Request) -> anyhow::Result<Response> {
    let answer = with_channel(target, &of.image, Use::Read, |channel| {
        let file = open(channel, target)?;
        let answer = channel.call(ubtrfs_control::Request::Resolve(request), &[&file]);
        answer.with_context(|| format!("cannot {what} {target}"))
    })?;
    match answer {
        AnyResponse::Resolve(answer) => Ok(answer),
        _ => Err(other_answer(target)),
    }
}

fn other_answer(target: &Target) -> anyhow::Error {
    anyhow!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs")
}

fn print_files(target: &Target, answer: Response) -> anyhow::Result<ExitCode> {
    let Response::Paths { paths, shown } = answer else { return Err(other_answer(target)) };
    let Target::Mounted(place) = target else { return print_from_top(&paths) };
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
