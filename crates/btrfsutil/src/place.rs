//! [`OpenPlace`]: an open file on a filesystem, and what kind of filesystem it is.
//!
//! - P1. A mount of ubtrfs counts as btrfs. `statfs` shows the type of FUSE for it, so an extended attribute that only
//!   its server has tells it apart.
//! - P2. In a mount of ubtrfs, inode numbers contain the subvolume's id, because a FUSE mount has one device number. So
//!   the root directory of a nested subvolume has a number other than 256. `node.rs` of crate `fuse` has the table.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, fstatfs, openat, statfs, unlinkat};
use rustix::io::Errno;
use ubtrfs_control::Channel;

use crate::failure::{Result, UtilError};
use crate::ioctl;

/// What serves a filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilesystemKind {
    /// The btrfs of Linux.
    Linux,
    /// A mount of ubtrfs.
    Ubtrfs,
    /// A filesystem that is not btrfs.
    Other,
}

/// A file descriptor of the caller or of this library. `None` is a number that no descriptor can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenPlace<'a>(Option<BorrowedFd<'a>>);

impl<'a> OpenPlace<'a> {
    pub(crate) fn new(fd: Option<BorrowedFd<'a>>) -> Self {
        Self(fd)
    }

    pub(crate) fn of(fd: &'a impl AsFd) -> Self {
        Self(Some(fd.as_fd()))
    }

    pub(crate) fn fd(self) -> std::result::Result<BorrowedFd<'a>, Errno> {
        self.0.ok_or(Errno::BADF)
    }

    /// Calls an ioctl; see [`ioctl::call`].
    pub(crate) fn call(self, number: u32, argument: &mut [u8]) -> std::result::Result<i32, Errno> {
        ioctl::call(self.fd()?, number, argument)
    }

    /// Opens a file relative to this directory, for ioctls.
    pub(crate) fn open(self, path: &[u8]) -> Result<OwnedFd> {
        self.open_with(path, OFlags::empty())
    }

    /// Opens a directory relative to this directory.
    pub(crate) fn open_dir(self, path: &[u8]) -> Result<OwnedFd> {
        self.open_with(path, OFlags::DIRECTORY)
    }

    fn open_with(self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        // The kernel looks at the path first.
        let fd = if path.is_empty() { Err(Errno::NOENT) } else { self.fd() };
        let opened = fd.and_then(|fd| openat(fd, path, flags | OPEN, Mode::empty()));
        opened.map_err(|errno| UtilError::OpenFailed.with(errno))
    }

    /// Removes an empty directory.
    pub(crate) fn remove_dir(self, path: &[u8]) -> Result<()> {
        let removed = self.fd().and_then(|fd| unlinkat(fd, path, AtFlags::REMOVEDIR));
        removed.map_err(|errno| UtilError::RmdirFailed.with(errno))
    }

    /// Tells what serves the file.
    pub(crate) fn kind(self) -> Result<FilesystemKind> {
        let failed = |errno| UtilError::StatfsFailed.with(errno);
        let fd = self.fd().map_err(failed)?;
        let found = fstatfs(fd).map_err(failed)?;
        Ok(kind_of(found.f_type, || Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd())).into()))
    }

    /// Fails unless the file is the root directory of a subvolume.
    pub(crate) fn check_subvolume(self) -> Result<()> {
        let kind = self.kind()?;
        check_subvolume(kind, || fstat(self.fd()?), || Ok(has_flags(self)))
    }

    /// Whether the file is in a mount of ubtrfs.
    pub(crate) fn is_ubtrfs(self) -> bool {
        self.kind() == Ok(FilesystemKind::Ubtrfs)
    }
}

/// Opens a path of the host for ioctls.
pub(crate) fn open(path: &CStr) -> Result<OwnedFd> {
    openat(CWD, path, OPEN, Mode::empty()).map_err(|errno| UtilError::OpenFailed.with(errno))
}

/// Opens a directory of the host.
pub(crate) fn open_dir(path: &[u8]) -> Result<OwnedFd> {
    openat(CWD, path, OFlags::DIRECTORY | OPEN, Mode::empty()).map_err(|errno| UtilError::OpenFailed.with(errno))
}

/// Fails unless a path is the root directory of a subvolume. On Linux, the path need not be readable.
pub(crate) fn check_subvolume_path(path: &CStr) -> Result<()> {
    let found = statfs(path).map_err(|errno| UtilError::StatfsFailed.with(errno))?;
    let kind = kind_of(found.f_type, || Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())).into());
    check_subvolume(kind, || rustix::fs::stat(path), || open(path).map(|fd| has_flags(OpenPlace::of(&fd))))
}

fn check_subvolume(
    kind: FilesystemKind,
    stat: impl FnOnce() -> std::result::Result<Stat, Errno>,
    has_flags: impl FnOnce() -> Result<bool>,
) -> Result<()> {
    if kind == FilesystemKind::Other {
        return Err(UtilError::NotBtrfs.with(Errno::INVAL));
    }
    let stat = stat().map_err(|errno| UtilError::StatFailed.with(errno))?;
    let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let is_root = match kind {
        _ if !is_dir => false,
        FilesystemKind::Ubtrfs => has_root_number(stat.st_ino).map_or_else(has_flags, Ok)?,
        _ => stat.st_ino == ROOT_INO,
    };
    if is_root { Ok(()) } else { Err(UtilError::NotSubvolume.with(Errno::INVAL)) }
}

/// Whether an inode number in a mount of ubtrfs is that of a subvolume's root directory (P2); `None` if the number does
/// not tell.
fn has_root_number(st_ino: u64) -> Option<bool> {
    let low = |bits: u32| st_ino & ((1 << bits) - 1);
    match st_ino >> 62 {
        0 => Some(low(40) == ROOT_INO),
        1 => Some(low(30) == ROOT_INO),
        // The empty directory that a snapshot has in place of a subvolume.
        3 => Some(false),
        // A hash.
        _ => None,
    }
}

/// Whether the directory is the root of a subvolume, by the ioctl that works only there.
fn has_flags(dir: OpenPlace<'_>) -> bool {
    dir.call(ioctl::SUBVOL_GETFLAGS, &mut [0; 8]).is_ok()
}

/// `path` is only needed for a FUSE mount (P1).
fn kind_of(magic: i64, path: impl FnOnce() -> Box<Path>) -> FilesystemKind {
    match magic {
        BTRFS_MAGIC => FilesystemKind::Linux,
        FUSE_MAGIC if Channel::mount(&path()).is_ok() => FilesystemKind::Ubtrfs,
        _ => FilesystemKind::Other,
    }
}

/// Unlike the original, an open never waits for the other end of a FIFO, and programs that the caller starts do not get
/// the descriptors.
const OPEN: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
/// The inode number of a subvolume's root directory.
const ROOT_INO: u64 = 256;
const BTRFS_MAGIC: i64 = 0x9123_683e;
const FUSE_MAGIC: i64 = 0x6573_5546;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_numbers_of_a_mount_tell_root_directories() {
        for (st_ino, is_root) in [
            (256, Some(true)),
            (257, Some(false)),
            (300 << 40 | 256, Some(true)),
            (300 << 40 | 257, Some(false)),
            (1 << 62 | 5_000_000 << 30 | 256, Some(true)),
            (1 << 62 | 5_000_000 << 30 | 255, Some(false)),
            (3 << 62 | 256 << 31 | 256, Some(false)),
            (1 << 63 | 256, None),
        ] {
            assert_eq!(has_root_number(st_ino), is_root, "{st_ino:x}");
        }
    }
}
