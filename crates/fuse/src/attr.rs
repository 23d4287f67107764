//! Attributes between `fs` and the protocol.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Attr, SetTime, mode};

/// Attributes as the protocol carries them, with `ino` for the inode number.
pub(crate) fn file_attr(attr: &Attr, ino: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: system_time(attr.otime),
        kind: kind(attr.mode),
        perm: u16::try_from(attr.mode & mode::PERMISSIONS).unwrap_or_default(),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        flags: 0,
    }
}

/// The type of file that a mode says; an invalid one shows as a regular file, reading it fails in `fs`.
fn kind(mode: u32) -> FileType {
    match mode & mode::TYPE {
        mode::DIRECTORY => FileType::Directory,
        mode::SYMLINK => FileType::Symlink,
        mode::CHAR => FileType::CharDevice,
        mode::BLOCK => FileType::BlockDevice,
        mode::FIFO => FileType::NamedPipe,
        mode::SOCKET => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

/// The type of a directory entry.
pub(crate) fn entry_kind(kind: ubtrfs_format::item::FileType) -> FileType {
    use ubtrfs_format::item::FileType as Disk;
    match kind {
        Disk::Directory => FileType::Directory,
        Disk::Symlink => FileType::Symlink,
        Disk::CharDevice => FileType::CharDevice,
        Disk::BlockDevice => FileType::BlockDevice,
        Disk::Fifo => FileType::NamedPipe,
        Disk::Socket => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

/// A time on disk, whatever it holds: out of range becomes the epoch.
fn system_time(time: Timespec) -> SystemTime {
    let nanos = Duration::from_nanos(u64::from(time.nsec.min(999_999_999)));
    let whole = Duration::from_secs(time.sec.unsigned_abs());
    let base = if time.sec >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    base.and_then(|base| base.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

/// A time that the kernel sent.
///
/// The protocol carries seconds and nanoseconds; for times before 1970 fuser subtracts both from the epoch, though the
/// nanoseconds count forward. The parts are intact, so they are put together again here.
pub(crate) fn timespec(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timespec { sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nsec: after.subsec_nanos() },
        Err(error) => {
            let before = error.duration();
            let sec = i64::try_from(before.as_secs()).map_or(i64::MIN, |sec| -sec);
            Timespec { sec, nsec: before.subsec_nanos() }
        }
    }
}

/// A time of a setattr request.
pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(timespec(time)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_parts() {
        // What fuser makes of seconds -2, nanoseconds 800,000,000.
        let received = UNIX_EPOCH - Duration::new(2, 800_000_000);
        assert_eq!(timespec(received), Timespec { sec: -2, nsec: 800_000_000 });
        // The first second there is: 2^63 seconds before the epoch; Linux sends no fraction with it.
        let first = UNIX_EPOCH - Duration::new(1 << 63, 0);
        assert_eq!(timespec(first), Timespec { sec: i64::MIN, nsec: 0 });
        let second = UNIX_EPOCH - Duration::new((1 << 63) - 1, 7);
        assert_eq!(timespec(second), Timespec { sec: i64::MIN + 1, nsec: 7 });
        // What fuser makes seconds and nanoseconds of: a true time.
        let sent = system_time(Timespec { sec: -2, nsec: 800_000_000 });
        assert_eq!(sent, UNIX_EPOCH - Duration::new(1, 200_000_000));
    }

    #[test]
    fn times_out_of_range_do_not_panic() {
        for sec in [i64::MIN, i64::MIN + 1, i64::MAX] {
            let _ = system_time(Timespec { sec, nsec: u32::MAX });
        }
    }
}
