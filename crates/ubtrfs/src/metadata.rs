//! Attributes of files, as in stat(2).

use std::time::{Duration, SystemTime};

use ubtrfs_format::item::{FileType, Timespec};
use ubtrfs_fs::{Attr, SetAttr, SetTime, mode};

/// The kind of a file.
///
/// ```
/// use ubtrfs::FileKind;
///
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.symlink("target", "/link")?;
/// let name = match fs.symlink_metadata("/link")?.kind() {
///     Some(FileKind::File) => "file",
///     Some(FileKind::Dir) => "directory",
///     Some(FileKind::Symlink) => "symbolic link",
///     Some(FileKind::BlockDevice | FileKind::CharDevice) => "device file",
///     Some(FileKind::Fifo | FileKind::Socket) => "FIFO or socket",
///     None => "invalid",
/// };
/// assert_eq!(name, "symbolic link");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory, which may be the root directory of a subvolume.
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

/// The attributes of a file.
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.write("/data", [7; 10_000])?;
/// fs.sync()?;
/// let metadata = fs.metadata("/data")?;
/// assert!(metadata.is_file() && !metadata.is_dir() && !metadata.is_symlink());
/// assert_eq!(metadata.kind(), Some(ubtrfs::FileKind::File));
/// assert_eq!(metadata.len(), 10_000);
/// // Three blocks of 4096 bytes, in units of 512 bytes.
/// assert_eq!(metadata.blocks(), 24);
/// assert_eq!((metadata.mode(), metadata.permissions()), (0o100644, 0o644));
/// assert_eq!((metadata.uid(), metadata.gid(), metadata.nlink()), (0, 0, 1));
/// // The first inode number after the root directory's, in the top-level subvolume.
/// assert_eq!((metadata.ino(), metadata.subvolume_id()), (257, 5));
/// assert_eq!(metadata.device_number(), (0, 0));
/// assert!(metadata.created() <= metadata.modified() && metadata.modified() <= metadata.changed());
/// assert!(metadata.accessed().is_some());
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

    /// The kind of file; `None` if the mode on disk has an invalid kind.
    pub fn kind(&self) -> Option<FileKind> {
        self.attr.file_type().and_then(FileKind::of)
    }

    /// Whether the file is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == Some(FileKind::File)
    }

    /// Whether the file is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == Some(FileKind::Dir)
    }

    /// Whether the file is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.kind() == Some(FileKind::Symlink)
    }

    /// The size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "as std::fs::Metadata")]
    pub fn len(&self) -> u64 {
        self.attr.size
    }

    /// The space that the file occupies, in units of 512 bytes.
    pub fn blocks(&self) -> u64 {
        self.attr.blocks
    }

    /// The mode: the permissions and the bits of the kind of file, as `st_mode` of stat(2).
    pub fn mode(&self) -> u32 {
        self.attr.mode
    }

    /// The permission bits with set-user-id, set-group-id and sticky bit: 12 bits.
    pub fn permissions(&self) -> u32 {
        self.attr.mode & mode::PERMISSIONS
    }

    /// The user id of the owner.
    pub fn uid(&self) -> u32 {
        self.attr.uid
    }

    /// The group id.
    pub fn gid(&self) -> u32 {
        self.attr.gid
    }

    /// The number of names; 1 for every directory.
    pub fn nlink(&self) -> u32 {
        self.attr.nlink
    }

    /// The inode number, which is unique in its subvolume only.
    pub fn ino(&self) -> u64 {
        self.attr.id.ino.0
    }

    /// The id of the file's subvolume.
    pub fn subvolume_id(&self) -> u64 {
        self.attr.id.root.0
    }

    /// The major and minor number of a device file; (0, 0) for other files.
    pub fn device_number(&self) -> (u32, u32) {
        ubtrfs_fs::rdev_parts(self.attr.rdev)
    }

    /// The time of the last access; `None` if [`SystemTime`] cannot represent the time on disk.
    pub fn accessed(&self) -> Option<SystemTime> {
        system_time(self.attr.atime)
    }

    /// The time of the last change of the content; `None` if [`SystemTime`] cannot represent the time on disk.
    pub fn modified(&self) -> Option<SystemTime> {
        system_time(self.attr.mtime)
    }

    /// The time of the last change of the attributes; `None` if [`SystemTime`] cannot represent the time on disk.
    pub fn changed(&self) -> Option<SystemTime> {
        system_time(self.attr.ctime)
    }

    /// The time of creation; `None` if [`SystemTime`] cannot represent the time on disk.
    pub fn created(&self) -> Option<SystemTime> {
        system_time(self.attr.otime)
    }
}

/// Times to set with [`Filesystem::set_times`](crate::Filesystem::set_times) or
/// [`File::set_times`](crate::File::set_times). Times that are not given stay unchanged. A change of times sets the
/// time of the last change of attributes to the current time.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use ubtrfs::FileTimes;
///
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.write("/f", "")?;
/// let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
/// let times = FileTimes::new().set_created(at(1)).set_modified(at(2)).set_accessed(at(3));
/// fs.set_times("/f", times)?;
/// let metadata = fs.metadata("/f")?;
/// assert_eq!(metadata.created(), Some(at(1)));
/// assert_eq!(metadata.modified(), Some(at(2)));
/// assert_eq!(metadata.accessed(), Some(at(3)));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTimes {
    accessed: Option<SystemTime>,
    modified: Option<SystemTime>,
    created: Option<SystemTime>,
}

impl FileTimes {
    /// Makes a value that leaves all times unchanged.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the time of the last access.
    #[must_use]
    pub fn set_accessed(self, time: SystemTime) -> Self {
        Self { accessed: Some(time), ..self }
    }

    /// Sets the time of the last change of the content.
    #[must_use]
    pub fn set_modified(self, time: SystemTime) -> Self {
        Self { modified: Some(time), ..self }
    }

    /// Sets the time of creation, which Linux cannot change.
    #[must_use]
    pub fn set_created(self, time: SystemTime) -> Self {
        Self { created: Some(time), ..self }
    }

    pub(crate) fn attributes(self) -> SetAttr {
        let at = |time: Option<SystemTime>| time.map(|time| SetTime::At(time.into()));
        SetAttr {
            atime: at(self.accessed),
            mtime: at(self.modified),
            otime: self.created.map(Timespec::from),
            ..SetAttr::default()
        }
    }
}

/// Converts a time on disk: seconds since 1970 (negative before 1970), plus nanoseconds.
pub(crate) fn system_time(time: Timespec) -> Option<SystemTime> {
    let seconds = Duration::from_secs(time.sec.unsigned_abs());
    let at = if time.sec < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(seconds)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(seconds)
    };
    at?.checked_add(Duration::from_nanos(u64::from(time.nsec)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_both_ways_also_before_1970() {
        for (sec, nsec) in [(0, 0), (1, 5), (-1, 0), (-1, 999_999_999), (-2, 1), (1 << 40, 7), (-(1 << 40), 7)] {
            let time = Timespec { sec, nsec };
            assert_eq!(Timespec::from(system_time(time).unwrap()), time);
        }
    }

    #[test]
    fn wild_times_from_disk_do_not_panic() {
        for sec in [i64::MIN, i64::MAX] {
            let _ = system_time(Timespec { sec, nsec: u32::MAX });
        }
    }
}
