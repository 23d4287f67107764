//! The uses of a filesystem that remain after one of its mounts was unmounted: other mounts, mounts in other mount
//! namespaces, and detached mounts in which a process works. The server continues to serve them, so `umount` makes it
//! commit.
//!
//! Other mounts are of two kinds. The server knows the mounts that `ubtrfs mount` made. Each of them is unmounted by
//! itself, so the filesystem stays in use as wanted. Any other mount is a bind mount, which keeps a filesystem in use
//! that should have been closed.
//!
//! - R1. Only a file of the unmounted filesystem is opened, and only if this user may control its server. Before opening,
//!   the file's device number is read without asking any server.
//! - R2. A mount is unmounted only if it has been a mount of the filesystem since before the first unmount. A device
//!   number alone does not identify a filesystem, because Linux gives it to another filesystem after the last unmount.

use std::fs::DirEntry;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::net::sockopt::socket_peercred;
use ubtrfs_control::{Channel, Peers, Request, Response, join};
use ubtrfs_format::print::escaped;

use crate::mount::{self, MountError};
use crate::mount_table::{self, MountInfo};
use crate::other_user::{self, MountPoint};

/// A mount before it is unmounted.
#[derive(Debug)]
pub(crate) struct Unmounted {
    pub(crate) found: MountInfo,
    /// Its number, as the server knows it.
    key: u64,
}

impl Unmounted {
    pub(crate) fn new(found: MountInfo) -> Self {
        Self { key: key_of(&found), found }
    }
}

/// A copy of a mount that is on no directory. Requests through it keep no mount point busy, so other processes can unmount
/// theirs at the same time.
#[derive(Debug)]
pub(crate) struct DetachedCopy(OwnedFd);

impl DetachedCopy {
    /// Copies the mount at this path. `None` if this process may not, or before Linux 5.2.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(CWD, path, flags | OpenTreeFlags::AT_SYMLINK_NOFOLLOW).ok().map(Self)
    }

    /// A path that leads to its root directory while this value lives.
    pub(crate) fn way(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// The numbers of all other mounts of the filesystem, as its server knows them.
pub(crate) fn keys_of_others(mount: &MountInfo) -> Vec<u64> {
    others(mount).iter().map(key_of).collect()
}

/// The number of a mount, as its server knows it. No other mount ever has it, unlike its number in the table of mounts,
/// since Linux 6.8.
fn key_of(mount: &MountInfo) -> u64 {
    mount_table::unique_id(&mount.dir).unwrap_or(mount.id)
}

/// A use of the filesystem that remains.
#[derive(Debug)]
pub(crate) struct Remaining {
    /// The text that tells about the use.
    text: String,
    /// The text that tells how to end the use.
    remedy: String,
    /// Paths of files of the filesystem, through which its server can be asked to commit, with their device numbers.
    ways: Vec<(PathBuf, Option<u64>)>,
    /// The numbers that the mounts in this mount namespace have in the table of mounts.
    ids: Vec<u64>,
    /// The numbers by which the server knows these mounts.
    keys: Vec<u64>,
    /// The number of the mount that was unmounted.
    unmounted: u64,
}

impl Remaining {
    /// The mounts in this mount namespace that remain after `unmounted`; `None` if there are none. `before` are the mounts
    /// that [`keys_of_others`] returned before the unmount; `is_ours` tells whether a newer mount belongs to the same server.
    pub(crate) fn here(unmounted: &Unmounted, before: &[u64], is_ours: impl Fn(&MountInfo) -> bool) -> Option<Self> {
        let was_there = |mount: &MountInfo| before.contains(&key_of(mount));
        let mut left = others(&unmounted.found);
        left.retain(|mount| was_there(mount) || is_ours(mount));
        // A submount ends with the mount, unless it is also mounted elsewhere.
        left.extend(of_same_source(&unmounted.found).into_iter().filter(&is_ours));
        let at = left.first()?.dir.display().to_string();
        let more = if left.len() > 1 { format!(" and {} more directories", left.len() - 1) } else { String::new() };
        let text = format!("its filesystem is still mounted on {at}{more}");
        let remedy = format!("unmount it there, too, with: ubtrfs umount {at}");
        let (ids, keys) = left.iter().map(|mount| (mount.id, key_of(mount))).unzip();
        let ways = left.into_iter().map(|mount| (mount.dir.clone(), mount.device_number())).collect();
        Some(Self { text, remedy, ways, ids, keys, unmounted: unmounted.key })
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
        Some(Self { text, remedy, ways: vec![(way, device)], ids: Vec::new(), keys: Vec::new(), unmounted: 0 })
    }

    /// Whether one of the mounts is still there. Other processes may unmount them at the same time.
    pub(crate) fn is_mounted(&self) -> bool {
        mount_table::mounts().iter().any(|mount| self.ids.contains(&mount.id) && self.keys.contains(&key_of(mount)))
    }

    /// Makes the server with this control socket commit, through a copy of the unmounted mount if there is one. If `foreign`
    /// is true, the mount belongs to another user, and is not entered.
    ///
    /// # Errors
    /// The commit fails. Or `ubtrfs mount` did not make the unmounted mount, or made no mount that remains.
    pub(crate) fn commit(
        &self,
        dir: &str,
        name: &[u8],
        foreign: bool,
        copy: Option<(&DetachedCopy, Peers)>,
    ) -> Result<(), MountError> {
        let through_copy = copy.and_then(|(copy, peers)| Channel::through_copy(&copy.0, name, peers).ok());
        let committed = match through_copy {
            _ if foreign => Err(NotCommitted::NotYet("another user's mount is not entered".to_owned())),
            Some(channel) => commit_through(&channel),
            None => self.commit_by_any_way(name),
        };
        let committed = match committed {
            Ok(mounts) if mounts.contains(&self.unmounted) && self.keys.iter().any(|key| mounts.contains(key)) => {
                return Ok(());
            }
            Ok(_) => "everything written so far is on disk".to_owned(),
            Err(NotCommitted::NotYet(reason)) => format!("its last changes are not committed ({reason})"),
            Err(NotCommitted::ReadOnly(reason)) => {
                let reason = format!("{reason}; {}", self.text);
                return Err(MountError::NotDurable { dir: dir.to_owned(), reason });
            }
        };
        let (used, remedy) = (self.text.clone(), self.remedy.clone());
        Err(MountError::InUseElsewhere { dir: dir.to_owned(), used, committed, remedy })
    }

    fn commit_by_any_way(&self, name: &[u8]) -> Result<Vec<u64>, NotCommitted> {
        let mut outcome = Err(NotCommitted::NotYet("no way into the filesystem is left".to_owned()));
        for (way, device) in &self.ways {
            match commit_by(way, *device, name) {
                Err(error @ NotCommitted::NotYet(_)) => outcome = Err(error),
                asked => return asked,
            }
        }
        outcome
    }
}

/// All other mounts of the filesystem in this mount namespace.
fn others(mount: &MountInfo) -> Vec<MountInfo> {
    let is_other = |other: &MountInfo| other.kind == mount.kind && other.id != mount.id;
    mount_table::mounts_of_device(&mount.device).into_iter().filter(is_other).collect()
}

/// The mounts of the same image that are other filesystems for the kernel, as submounts and their bind mounts are. A source
/// that is no path does not tell which image it is.
fn of_same_source(mount: &MountInfo) -> Vec<MountInfo> {
    if !Path::new(&mount.source).is_absolute() {
        return Vec::new();
    }
    let is_other =
        |other: &MountInfo| other.kind == mount.kind && other.source == mount.source && other.device != mount.device;
    mount_table::mounts().into_iter().filter(is_other).collect()
}

/// Whether a submount, or another mount of the same image, lies in a mount.
pub(crate) fn has_mounts_inside(mount: &MountInfo) -> bool {
    of_same_source(mount).iter().any(|other| other.dir.starts_with(&mount.dir))
}

/// The directory of the last mount in this one, or in those in it. No other mount lies in that one.
pub(crate) fn last_inside(mount: &MountInfo) -> Option<String> {
    let mut inside = vec![mount.id];
    let mut last = None;
    // A mount comes after the one that it lies in.
    for other in mount_table::mounts().into_iter().filter(|other| other.id != mount.id) {
        if inside.contains(&other.parent) {
            inside.push(other.id);
            last = Some(other.dir);
        }
    }
    last.map(|dir| other_user::harmless(&dir.display().to_string()))
}

/// Unmounts all mounts of the filesystem with this number in this mount namespace, if one of them has a number in `keys`, the
/// numbers of mounts of this filesystem (R2). `dir` is only named in errors.
///
/// # Errors
/// No mount has such a number; a mount is busy (all others are unmounted then); or no mount could be unmounted.
pub(crate) fn unmount_all(dir: &Path, device: u64, keys: &[u64], lazy: bool) -> Result<(), MountError> {
    let shown = || dir.display().to_string();
    let has_device = |mount: &MountInfo| mount.is_of_ubtrfs() && mount.device_number() == Some(device);
    let mounts: Vec<MountInfo> = mount_table::mounts().into_iter().filter(has_device).collect();
    let (mut is_ours, mut is_covered) = (false, false);
    for mount in &mounts {
        match MountPoint::open(mount) {
            Ok(point) => is_ours |= keys.contains(&mount_table::unique_id(&point.path()).unwrap_or(mount.id)),
            Err(_) => is_covered = true,
        }
    }
    match is_ours {
        true => unmount_each(&mounts, lazy, mount::is_root()).unwrap_or_else(|| Err(MountError::NotMounted(shown()))),
        false if is_covered => Err(MountError::Busy(shown())),
        false => Err(MountError::NotMounted(shown())),
    }
}

/// Unmounts these mounts of one filesystem. Returns `None` if there are no mounts, and the error of a busy mount if a
/// mount is busy. A mount that cannot be unmounted for another reason stays mounted. That is an error only if no mount
/// could be unmounted. `by_descriptor` tells whether this process unmounts itself, so that it can name a mount by an
/// opened directory.
pub(crate) fn unmount_each(mounts: &[MountInfo], lazy: bool, by_descriptor: bool) -> Option<Result<(), MountError>> {
    let (mut outcome, mut busy) = (None, None);
    // The last mount is the topmost one, if several are on one directory, and lies below those that it hides.
    for mount in mounts.iter().rev() {
        let done = match MountPoint::open(mount) {
            Ok(point) => mount::unmount(&if by_descriptor { point.path() } else { mount.dir.clone() }, lazy),
            // Another mount covers it.
            Err(_) => Err(MountError::Busy(mount.dir.display().to_string())),
        };
        match done {
            Ok(()) => outcome = Some(Ok(())),
            Err(MountError::Busy(_)) => busy = Some(MountError::Busy(mount.dir.display().to_string())),
            Err(MountError::NotMounted(_)) => {}
            Err(error) => {
                tracing::warn!("the filesystem stays mounted on {}: {error}", mount.dir.display());
                if outcome.is_none() {
                    outcome = Some(Err(error));
                }
            }
        }
    }
    busy.map(Err).or(outcome)
}

/// Why the server has not committed.
enum NotCommitted {
    /// The server was not asked, or something failed that a later commit may do.
    NotYet(String),
    /// The filesystem has turned read-only: no commit follows.
    ReadOnly(String),
}

/// Works like [`commit_through`], through a file of the filesystem (R1).
fn commit_by(way: &Path, device: Option<u64>, name: &[u8]) -> Result<Vec<u64>, NotCommitted> {
    let not_yet = |text: String| NotCommitted::NotYet(text);
    let covered = || not_yet(format!("another filesystem is mounted over {}", way.display()));
    if device_of(way).map_err(|error| not_yet(format!("{}: {error}", way.display())))? != device {
        return Err(covered());
    }
    let channel = Channel::mount(way).map_err(|error| not_yet(format!("{}: {error}", way.display())))?;
    if !channel.is_at(name) {
        return Err(covered());
    }
    commit_through(&channel)
}

/// Makes the kernel hand over its pages, and the server commit. Returns the mounts that the server knows.
fn commit_through(channel: &Channel<'_>) -> Result<Vec<u64>, NotCommitted> {
    channel.sync().map_err(|failure| match failure.errno() {
        Errno::ROFS => NotCommitted::ReadOnly(failure.to_string()),
        _ => NotCommitted::NotYet(failure.to_string()),
    })?;
    Ok(match channel.call(Request::Join(join::Request::Mounts), &[]) {
        Ok(Response::Join(join::Response::Mounts(mounts))) => mounts,
        _ => Vec::new(),
    })
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

/// Whether the process whose directory in /proc is `process` is another `umount` of this program. It may hold a
/// [`DetachedCopy`], and ends soon.
fn is_other_umount(process: &Path) -> bool {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let is_umount = line.split(|byte| *byte == 0).take(2).any(|word| word.windows(6).any(|part| part == b"umount"));
    is_umount
        && std::fs::read_link(process.join("exe"))
            .is_ok_and(|exe| Some(exe) == std::fs::read_link("/proc/self/exe").ok())
}

/// A process that works in a directory of the filesystem or has a file of it open, other than the server, this process
/// and others that unmount.
fn user_of_detached(device: u64, server: i32) -> Option<User> {
    let own = std::process::id();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if pid == own || i32::try_from(pid) == Ok(server) {
            continue;
        }
        let path = process.path();
        if is_other_umount(&path) {
            continue;
        }
        let open = std::fs::read_dir(path.join("fd")).into_iter().flatten().flatten();
        let mut ways =
            [path.join("cwd"), path.join("root")].into_iter().chain(open.map(|entry: DirEntry| entry.path()));
        if let Some(way) = ways.find(|way| matches!(device_of(way), Ok(Some(found)) if found == device)) {
            return Some(User::new(pid, &path, way));
        }
    }
    None
}
