//! The uses of a filesystem that remain after one of its mounts was unmounted: bind mounts, mounts in other mount
//! namespaces, and detached mounts in which a process works. The server goes on for them, so `umount` makes it commit.
//!
//! - R1. Only a file of the unmounted filesystem is opened, and only if this user may control its server. Before opening,
//!   the file's device number is read without asking any server.
//! - R2. A mount is unmounted only if it has been a mount of the filesystem since before the first unmount. A device
//!   number alone does not identify a filesystem, because Linux gives it to another one after the last unmount.

use std::fs::DirEntry;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::net::sockopt::socket_peercred;
use ubtrfs_control::Channel;
use ubtrfs_format::print::escaped;

use crate::mount::{self, MountError};
use crate::mount_table::{self, MountInfo};
use crate::other_user::MountPoint;

/// A use of the filesystem that remains.
#[derive(Debug)]
pub(crate) struct Remaining {
    /// The text that tells about the use.
    text: String,
    /// The text that tells how to end the use.
    remedy: String,
    /// Paths of files of the filesystem, through which its server can be asked to commit.
    ways: Vec<PathBuf>,
    device: Option<u64>,
}

impl Remaining {
    /// The mounts in this mount namespace that remain after `unmounted`; `None` if there are none. `before` are the mounts
    /// that [`others`] returned before the unmount; `is_ours` tells whether a newer mount belongs to the same server.
    pub(crate) fn here(
        unmounted: &MountInfo,
        before: &[MountInfo],
        is_ours: impl Fn(&MountInfo) -> bool,
    ) -> Option<Self> {
        let was_there = |mount: &MountInfo| before.iter().any(|known| known.id == mount.id);
        let mut left = others(unmounted);
        left.retain(|mount| was_there(mount) || is_ours(mount));
        let at = left.first()?.dir.display().to_string();
        let more = if left.len() > 1 { format!(" and {} more directories", left.len() - 1) } else { String::new() };
        let text = format!("its filesystem is still mounted on {at}{more}");
        let remedy = format!("unmount it there, too, with: ubtrfs umount {at}");
        let ways = left.into_iter().map(|mount| mount.dir).collect();
        Some(Self { text, remedy, ways, device: unmounted.device_number() })
    }

    /// A process that still uses the filesystem of `unmounted`: in another mount namespace, or in a mount that was
    /// detached. Only processes that the user may look at are found. `server` is the connection to the server.
    pub(crate) fn elsewhere(unmounted: &MountInfo, server: &UnixStream) -> Option<Self> {
        let device = unmounted.device_number();
        let server = socket_peercred(server).ok()?.pid.as_raw_nonzero().get();
        let found = mount_table::user_in_other_namespace(unmounted).map(|user| {
            let text = format!("{} still has it mounted in another mount namespace", user.process);
            (text, user.way, "that mount ends, too")
        });
        let found = found.or_else(|| {
            let user = user_of_detached(device?, server)?;
            let text = format!("{} still uses it in a mount that was detached", user.process);
            Some((text, user.way, "that process ends"))
        });
        let (text, way, end) = found?;
        let remedy = format!("the last commit follows when {end}, or with: kill {server}");
        Some(Self { text, remedy, ways: vec![way], device })
    }

    /// Makes the server with this control socket commit, and returns what `umount` has to say. If `foreign` is true, the
    /// mount belongs to another user, and is not entered.
    pub(crate) fn commit(self, dir: &str, name: &[u8], foreign: bool) -> MountError {
        let committed = match foreign {
            true => Err("another user's mount is not entered".to_owned()),
            false => self.commit_by_any_way(name),
        };
        let committed = match committed {
            Ok(()) => "everything written so far is on disk".to_owned(),
            Err(reason) => format!("its last changes are not committed ({reason})"),
        };
        MountError::InUseElsewhere { dir: dir.to_owned(), used: self.text, committed, remedy: self.remedy }
    }

    fn commit_by_any_way(&self, name: &[u8]) -> Result<(), String> {
        let mut outcome = Err("no way into the filesystem is left".to_owned());
        for way in &self.ways {
            match commit_by(way, self.device, name) {
                Ok(()) => return Ok(()),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }
}

/// All other mounts of the filesystem in this mount namespace.
pub(crate) fn others(mount: &MountInfo) -> Vec<MountInfo> {
    let is_other = |other: &MountInfo| other.kind == mount.kind && other.id != mount.id;
    mount_table::mounts_of_device(&mount.device).into_iter().filter(is_other).collect()
}

/// Unmounts `dir`, and then all other mounts of its filesystem in this mount namespace (R2). Of these, busy mounts are
/// detached. A mount that cannot be unmounted stays.
pub(crate) fn unmount_all(dir: &Path, lazy: bool) -> Result<(), MountError> {
    let found = mount_table::find_mount(dir).filter(MountInfo::is_of_ubtrfs);
    let before = found.as_ref().map(others).unwrap_or_default();
    mount::unmount(dir, lazy)?;
    // The last mount is the topmost one, if several are on one directory.
    unmount_others(&before, mount::is_root());
    Ok(())
}

/// Unmounts mounts of a filesystem that [`others`] found (R2). Busy mounts are detached. A mount that cannot be unmounted
/// stays. `by_descriptor` tells whether this process unmounts itself, so that it can name a mount by an opened directory.
pub(crate) fn unmount_others(before: &[MountInfo], by_descriptor: bool) {
    // The last mount is the topmost one, if several are on one directory.
    for other in before.iter().rev() {
        // Fails if another mount is on the directory by now.
        let Ok(point) = MountPoint::open(other) else { continue };
        let path = if by_descriptor { point.path() } else { other.dir.clone() };
        if mount::unmount(&path, false).is_err()
            && let Err(error) = mount::unmount(&path, true)
        {
            tracing::warn!("the filesystem stays mounted on {}: {error}", other.dir.display());
        }
    }
}

/// Makes the kernel hand over its pages, and the server commit, through a file of the filesystem (R1).
fn commit_by(way: &Path, device: Option<u64>, name: &[u8]) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", way.display());
    if device_of(way).map_err(failed)? != device {
        return Err(format!("another filesystem is mounted over {}", way.display()));
    }
    let channel = Channel::mount(way).map_err(|error| format!("{}: {error}", way.display()))?;
    if !channel.is_at(name) {
        return Err(format!("another filesystem is mounted over {}", way.display()));
    }
    channel.sync().map_err(|failure| failure.to_string())
}

/// The device number of a file, without a question to the server of a FUSE mount.
fn device_of(path: &Path) -> io::Result<Option<u64>> {
    let stat = statx(CWD, path, AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(Some(makedev(stat.stx_dev_major, stat.stx_dev_minor)))
}

/// A process that uses the filesystem.
#[derive(Debug)]
pub(crate) struct User {
    /// The process, as "process 12 (name)".
    pub(crate) process: String,
    /// The path of a file of the filesystem.
    pub(crate) way: PathBuf,
}

impl User {
    /// The user whose directory in /proc is `process`.
    pub(crate) fn new(pid: u32, process: &Path, way: PathBuf) -> Self {
        let name = std::fs::read(process.join("comm")).unwrap_or_default();
        Self { process: format!("process {pid} ({})", escaped(name.trim_ascii_end())), way }
    }
}

/// A process other than the server and this one that works in a directory of the filesystem or has a file of it open.
fn user_of_detached(device: u64, server: i32) -> Option<User> {
    let own = std::process::id();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if pid == own || i32::try_from(pid) == Ok(server) {
            continue;
        }
        let path = process.path();
        let open = std::fs::read_dir(path.join("fd")).into_iter().flatten().flatten();
        let mut ways =
            [path.join("cwd"), path.join("root")].into_iter().chain(open.map(|entry: DirEntry| entry.path()));
        if let Some(way) = ways.find(|way| matches!(device_of(way), Ok(Some(found)) if found == device)) {
            return Some(User::new(pid, &path, way));
        }
    }
    None
}
