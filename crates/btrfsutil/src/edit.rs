//! Making and deleting subvolumes and snapshots, on the btrfs of Linux and in mounts of ubtrfs.
//!
//! The server of a mount looks up the source of a snapshot and the quota groups to join in the process that calls the
//! ioctl. If it cannot, for example because the process is in another pid namespace, it answers EINVAL for a source and
//! EOPNOTSUPP for quota groups. Then the control socket of the mount makes the subvolume.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use rustix::io::Errno;
use ubtrfs_control::subvolume::Request;
use ubtrfs_control::{Channel, CommandFailure, OpenedFile};

use crate::failure::{Result, UtilError, UtilFailure};
use crate::ioctl::{self, ARGS_LEN, NAME, NAME_V2, SUBVOL_QGROUP_INHERIT, SUBVOL_RDONLY, put, put_name};
use crate::iterator::{SubvolumeWalk, WalkOrder};
use crate::path::split;
use crate::place::OpenPlace;
use crate::qgroup::QgroupsToJoin;
use crate::subvolume::flush;

/// The kind of a new snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotKind {
    pub(crate) read_only: bool,
    /// Whether the subvolumes below the source get snapshots too, below the new one.
    pub(crate) recursive: bool,
}

impl SnapshotKind {
    /// Reads the flags of C programs. A read-only snapshot has no snapshots below it, because they would change it.
    pub(crate) fn of_flags(flags: i32) -> Result<Self> {
        let (recursive, read_only) = (flags & 1 != 0, flags & 2 != 0);
        match flags & !3 == 0 && !(recursive && read_only) {
            true => Ok(Self { read_only, recursive }),
            false => Err(UtilFailure::invalid()),
        }
    }
}

/// Creates an empty subvolume in a directory.
pub(crate) fn create(dir: OpenPlace<'_>, name: &[u8], qgroups: Option<&QgroupsToJoin>) -> Result<()> {
    let by_channel = |channel: &Channel<'_>, qgroups: Vec<u64>| {
        let dir = opened(channel, dir)?;
        let request = Request::Create { dir: 0, name: name.to_vec(), umask: umask(), qgroups, limits: None };
        channel.subvolume(request, &[&dir]).map(drop)
    };
    make(dir, ioctl::SUBVOL_CREATE_V2, (-1, 0), name, qgroups, by_channel)
}

/// Makes a snapshot in a directory.
pub(crate) fn snapshot(
    source: OpenPlace<'_>,
    dir: OpenPlace<'_>,
    name: &[u8],
    kind: SnapshotKind,
    qgroups: Option<&QgroupsToJoin>,
) -> Result<()> {
    // The snapshot contains everything written so far.
    flush(source);
    let by_channel = |channel: &Channel<'_>, qgroups: Vec<u64>| {
        let (source, dir) = (opened(channel, source)?, opened(channel, dir)?);
        let request = Request::Snapshot { source: 0, dir: 1, name: name.to_vec(), read_only: kind.read_only, qgroups };
        channel.subvolume(request, &[&source, &dir]).map(drop)
    };
    let descriptor = source.fd().map_or(-1, |fd| i64::from(fd.as_raw_fd()));
    let flags = if kind.read_only { SUBVOL_RDONLY } else { 0 };
    make(dir, ioctl::SNAP_CREATE_V2, (descriptor, flags), name, qgroups, by_channel)?;
    if kind.recursive {
        let made = dir.open(name)?;
        snapshot_below(source, OpenPlace::of(&made))?;
    }
    Ok(())
}

/// Makes a snapshot of each subvolume below the source, in place of the empty directory that the new snapshot has there.
fn snapshot_below(source: OpenPlace<'_>, made: OpenPlace<'_>) -> Result<()> {
    let mut walk = SubvolumeWalk::new(source, 0, WalkOrder::Pre)?;
    while let Some(found) = walk.next(source, false)? {
        made.remove_dir(&found.path)?;
        let below = source.open(&found.path)?;
        let (dir, name) = split(&found.path);
        let dir = made.open_dir(dir)?;
        let kind = SnapshotKind { read_only: false, recursive: false };
        snapshot(OpenPlace::of(&below), OpenPlace::of(&dir), name, kind, None)?;
    }
    Ok(())
}

/// Calls an ioctl that makes a subvolume, or the control socket if the server of a mount asks for that.
fn make(
    dir: OpenPlace<'_>,
    number: u32,
    (descriptor, flags): (i64, u64),
    name: &[u8],
    qgroups: Option<&QgroupsToJoin>,
    by_channel: impl FnOnce(&Channel<'_>, Vec<u64>) -> ubtrfs_control::Result<()>,
) -> Result<()> {
    let mut args = [0; ARGS_LEN];
    put(&mut args, 0, descriptor.cast_unsigned());
    let joined = qgroups.map(QgroupsToJoin::encode);
    put(&mut args, 16, flags | if joined.is_some() { SUBVOL_QGROUP_INHERIT } else { 0 });
    if let Some(joined) = &joined {
        put(&mut args, 24, u64::try_from(joined.len()).unwrap_or(u64::MAX));
        put(&mut args, 32, u64::try_from(joined.as_ptr().addr()).unwrap_or_default());
    }
    put_name(&mut args, NAME_V2, name).map_err(|errno| UtilError::InvalidArgument.with(errno))?;
    let failed = |errno| UtilError::SubvolCreateFailed.with(errno);
    let errno = match dir.call(number, &mut args) {
        Ok(_) => return Ok(()),
        Err(errno) => errno,
    };
    let is_unreached = errno == Errno::OPNOTSUPP || (errno == Errno::INVAL && number == ioctl::SNAP_CREATE_V2);
    if !is_unreached || !dir.is_ubtrfs() {
        return Err(failed(errno));
    }
    let channel = path_of(dir).ok().and_then(|path| Channel::mount(&path).ok()).ok_or_else(|| failed(errno))?;
    let groups = qgroups.map(|qgroups| qgroups.groups.clone()).unwrap_or_default();
    let by = |failure: CommandFailure| failed(if errno == Errno::INVAL { errno } else { failure.errno() });
    by_channel(&channel, groups).map_err(by)
}

/// Opens a file of the caller for commands.
fn opened(channel: &Channel<'_>, place: OpenPlace<'_>) -> ubtrfs_control::Result<OpenedFile> {
    let path = path_of(place).map_err(|errno| CommandFailure::new(errno, "not an open file"))?;
    channel.open(&path)
}

/// The path by which this process can open the file again.
fn path_of(place: OpenPlace<'_>) -> std::result::Result<PathBuf, Errno> {
    place.fd().map(|fd| PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())))
}

/// The umask of this process. The system call would change it for a moment, for all threads.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let found = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    found.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok()).unwrap_or(0o022)
}

/// Deletes a subvolume; with `recursive`, first the subvolumes below it.
pub(crate) fn delete(dir: OpenPlace<'_>, name: &[u8], recursive: bool) -> Result<()> {
    if recursive {
        let top = dir.open(name)?;
        let top = OpenPlace::of(&top);
        let mut walk = SubvolumeWalk::new(top, 0, WalkOrder::Post)?;
        while let Some(found) = walk.next(top, false)? {
            let (below, name) = split(&found.path);
            destroy(OpenPlace::of(&top.open_dir(below)?), name)?;
        }
    }
    destroy(dir, name)
}

fn destroy(dir: OpenPlace<'_>, name: &[u8]) -> Result<()> {
    let mut args = [0; ARGS_LEN];
    put_name(&mut args, NAME, name).map_err(|errno| UtilError::InvalidArgument.with(errno))?;
    let done = dir.call(ioctl::SNAP_DESTROY, &mut args);
    done.map(drop).map_err(|errno| UtilError::SnapDestroyFailed.with(errno))
}
