//! Linux's own btrfs: `btrfs` on one of its paths runs the `btrfs` of btrfs-progs, if it is installed.
//!
//! I1. Only paths on a mount of Linux's btrfs are passed on. A file with a btrfs in it is an image, wherever it lies.
//! I2. A program that was started this way passes nothing on again, so two links to this program cannot start each
//!     other for ever.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use ubtrfs_format::print::escaped;

use crate::commands::place::holds_btrfs;
use crate::common::Shown;

/// `f_type` of Linux's btrfs in statfs(2), as statfs(2) lists it.
const BTRFS_MAGIC: u64 = 0x9123_683E;

/// Set for a program that this program started (I2).
const PASSED_ON: &str = "UBTRFS_PASSED_ON";

/// Where btrfs-progs may be installed, beside the folders of PATH. A package that takes over the name moves the
/// original to `btrfs.distrib` (dpkg-divert(1)).
const FOLDERS: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
const NAMES: [&str; 2] = ["btrfs", "btrfs.distrib"];

/// Replaces this process by Linux's `btrfs` with `args` if an operand is a path in a mount of Linux's btrfs. Returns an
/// error if there is no such program, and `None` if the command line is for this program.
pub(super) fn run_instead(operands: &[OsString], args: &[OsString]) -> Option<anyhow::Error> {
    let path = operands.iter().find(|operand| is_linux(Path::new(operand)))?;
    run(path, args).err()
}

/// The output on stdout and the status of Linux's `btrfs` with `args`. `None` if it is not installed, or if it started this
/// program (I2).
pub(super) fn output(args: &[OsString]) -> anyhow::Result<Option<(String, ExitCode)>> {
    let own = std::env::current_exe().and_then(|exe| exe.canonicalize()).context("cannot find this program")?;
    let Some(program) = find(&own).filter(|_| std::env::var_os(PASSED_ON).is_none()) else { return Ok(None) };
    let mut command = Command::new(&program);
    command.arg0("btrfs").args(args).env(PASSED_ON, "1").stdin(Stdio::null()).stderr(Stdio::inherit());
    let done = command.output().with_context(|| format!("cannot run {}", program.shown()))?;
    let status = done.status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from);
    // A label may have any bytes.
    let line = |line: &[u8]| std::str::from_utf8(line).map_or_else(|_| escaped(line), str::to_owned);
    Ok(Some((done.stdout.split(|byte| *byte == b'\n').map(line).collect::<Vec<_>>().join("\n"), status)))
}

fn run(path: &OsStr, args: &[OsString]) -> anyhow::Result<Infallible> {
    let hint = "install btrfs-progs";
    if std::env::var_os(PASSED_ON).is_some() {
        bail!("{} is on Linux's btrfs, and no other program called btrfs is found; {hint}", path.shown());
    }
    let own = std::env::current_exe().and_then(|exe| exe.canonicalize()).context("cannot find this program")?;
    let program = find(&own)
        .with_context(|| format!("{} is on Linux's btrfs, which ubtrfs does not serve; {hint}", path.shown()))?;
    let error = Command::new(&program).arg0("btrfs").args(args).env(PASSED_ON, "1").exec();
    Err(error).with_context(|| format!("cannot run {}", program.shown()))
}

/// Finds a program called `btrfs` that is not this program.
fn find(own: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(FOLDERS.iter().map(PathBuf::from));
    let candidates = folders.filter(|dir| dir.is_absolute()).flat_map(|dir| NAMES.map(|name| dir.join(name)));
    candidates.into_iter().find(|file| file.canonicalize().is_ok_and(|real| real.is_file() && real != own))
}

/// Whether a path is in a mount of Linux's btrfs: itself, or the directory in which it would be made.
fn is_linux(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() || bytes.starts_with(b"-") {
        return false;
    }
    let Ok(metadata) = std::fs::metadata(path) else {
        let dir = path.parent().map(|dir| if dir.as_os_str().is_empty() { Path::new(".") } else { dir });
        // A word such as `max` is no path.
        return bytes.contains(&b'/') && dir.is_some_and(|dir| dir.is_dir() && has_magic(dir));
    };
    let is_image = !metadata.is_dir() && holds_btrfs(path);
    !is_image && has_magic(path)
}

fn has_magic(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| kind == BTRFS_MAGIC))
}
