//! Attributes of files, as `stat` shows them.

use std::time::{Duration, SystemTime};

use ubtrfs_format::item::{FileType, Timespec};
use ubtrfs_fs::{Attr, mode};

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory, also the root directory of a subvolume.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharDevice,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
}

impl FileKind {
    pub(crate) fn of(file_type: FileType) -> Option<Self> {
        Some(match file_type {
            FileType::Regular => Self::File,
            FileType::Directory => Self::Dir,
            FileType::Symlink => Self::Symlink,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::CharDevice => Self::CharDevice,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            _ => return None,
        })
    }
}

/// Attributes of a file.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.write("/data", [7; 10_000])?;
/// let metadata = fs.metadata("/data")?;
/// assert!(metadata.is_file());
/// assert_eq!(metadata.len(), 10_000);
/// assert_eq!(metadata.permissions(), 0o644);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Metadata {
    attr: Attr,
}

impl Metadata {
    pub(crate) fn new(attr: Attr) -> Self {
        Self { attr }
    }

    /// What kind of file it is; none where the mode on disk is of no kind that exists.
    pub fn kind(&self) -> Option<FileKind> {
        self.attr.file_type().and_then(FileKind::of)
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == Some(FileKind::File)
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == Some(FileKind::Dir)
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.kind() == Some(FileKind::Symlink)
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "as std::fs::Metadata")]
    pub fn len(&self) -> u64 {
        self.attr.size
    }

    /// Space that the file takes, in units of 512 bytes.
    pub fn blocks(&self) -> u64 {
        self.attr.blocks
    }

    /// Permission bits with set-user-id, set-group-id and sticky bit: 12 bits.
    pub fn permissions(&self) -> u32 {
        self.attr.mode & mode::PERMISSIONS
    }

    /// Owner.
    pub fn uid(&self) -> u32 {
        self.attr.uid
    }

    /// Group.
    pub fn gid(&self) -> u32 {
        self.attr.gid
    }

    /// Number of names; 1 for every directory.
    pub fn nlink(&self) -> u32 {
        self.attr.nlink
    }

    /// Inode number in its subvolume; inodes of different subvolumes may have the same one.
    pub fn ino(&self) -> u64 {
        self.attr.id.ino.0
    }

    /// Id of the subvolume that holds the file.
    pub fn subvolume_id(&self) -> u64 {
        self.attr.id.root.0
    }

    /// Major and minor number of a device file.
    pub fn device_number(&self) -> (u32, u32) {
        ubtrfs_fs::rdev_parts(self.attr.rdev)
    }

    /// Time of the last access; none where the time on disk cannot be told.
    pub fn accessed(&self) -> Option<SystemTime> {
        system_time(self.attr.atime)
    }

    /// Time of the last change of the content; none where the time on disk cannot be told.
    pub fn modified(&self) -> Option<SystemTime> {
        system_time(self.attr.mtime)
    }

    /// Time of the last change of the attributes; none where the time on disk cannot be told.
    pub fn changed(&self) -> Option<SystemTime> {
        system_time(self.attr.ctime)
    }

    /// Time of creation; none where the time on disk cannot be told.
    pub fn created(&self) -> Option<SystemTime> {
        system_time(self.attr.otime)
    }
}

/// A time on disk as the system's: seconds since 1970, negative before it, and nanoseconds after those seconds.
pub(crate) fn system_time(time: Timespec) -> Option<SystemTime> {
    let seconds = Duration::from_secs(time.sec.unsigned_abs());
    let at = if time.sec < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(seconds)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(seconds)
    };
    at?.checked_add(Duration::from_nanos(u64::from(time.nsec)))
}

/// The system's time as on disk; times that 64 bits of seconds cannot tell become the nearest that they can.
pub(crate) fn timespec(time: SystemTime) -> Timespec {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => Timespec { sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nsec: after.subsec_nanos() },
        Err(error) => {
            let before = error.duration();
            let whole = i64::try_from(before.as_secs()).map_or(i64::MIN, |secs| -secs);
            match before.subsec_nanos() {
                0 => Timespec { sec: whole, nsec: 0 },
                nanos => Timespec { sec: whole.saturating_sub(1), nsec: 1_000_000_000 - nanos },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_both_ways_also_before_1970() {
        for (sec, nsec) in [(0, 0), (1, 5), (-1, 0), (-1, 999_999_999), (-2, 1), (1 << 40, 7), (-(1 << 40), 7)] {
            let time = Timespec { sec, nsec };
            assert_eq!(timespec(system_time(time).unwrap()), time);
        }
    }

    #[test]
    fn wild_times_from_disk_do_not_panic() {
        for sec in [i64::MIN, i64::MAX] {
            let _ = system_time(Timespec { sec, nsec: u32::MAX });
        }
    }
}
