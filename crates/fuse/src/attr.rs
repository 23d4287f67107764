//! Converts attributes between `fs` and the protocol.

use ubtrfs_format::item::{FileType, InodeFlags, Timespec};
use ubtrfs_fs::{Attr, SetTime, mode};

use crate::protocol::{self, Statx, Time};

/// Converts attributes to the protocol's struct, with `ino` as the inode number.
pub(crate) fn wire_attr(attr: &Attr, ino: u64) -> protocol::FuseAttr {
    // An inode of invalid type is shown as a regular file. That does no harm, because `fs` refuses to read such a file.
    let kind = match attr.mode & mode::TYPE {
        kind @ (mode::DIRECTORY | mode::SYMLINK | mode::CHAR | mode::BLOCK | mode::FIFO | mode::SOCKET) => kind,
        _ => mode::REGULAR,
    };
    let mut wire = protocol::FuseAttr {
        ino,
        size: attr.size,
        blocks: attr.blocks,
        mode: kind | attr.mode & mode::PERMISSIONS,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        ..protocol::FuseAttr::default()
    };
    wire.set_atime(time(attr.atime));
    wire.set_mtime(time(attr.mtime));
    wire.set_ctime(time(attr.ctime));
    wire
}

/// The attributes that only statx(2) shows.
pub(crate) fn wire_statx(attr: &Attr) -> Statx {
    let flags = InodeFlags::from_bits_retain(attr.flags);
    let is_set = |(flag, bit): &(InodeFlags, u64)| if flags.contains(*flag) { *bit } else { 0 };
    Statx {
        btime: time(attr.otime),
        attributes: STATX_ATTRIBUTES.iter().map(is_set).sum(),
        attributes_mask: STATX_ATTRIBUTES.iter().map(|(_, bit)| bit).sum(),
    }
}

/// Flags of inodes, with their bits in `stx_attributes`. The FUSE client of Linux 6.18 accepts these bits, but does not
/// pass them on to programs.
const STATX_ATTRIBUTES: [(InodeFlags, u64); 4] = [
    (InodeFlags::COMPRESS, 0x4),
    (InodeFlags::IMMUTABLE, 0x10),
    (InodeFlags::APPEND, 0x20),
    (InodeFlags::NODUMP, 0x40),
];

/// The type of a directory entry: the upper part of a mode.
pub(crate) fn entry_kind(kind: FileType) -> u32 {
    let mode = match kind {
        FileType::Directory => mode::DIRECTORY,
        FileType::Symlink => mode::SYMLINK,
        FileType::CharDevice => mode::CHAR,
        FileType::BlockDevice => mode::BLOCK,
        FileType::Fifo => mode::FIFO,
        FileType::Socket => mode::SOCKET,
        _ => mode::REGULAR,
    };
    mode >> 12
}

/// Converts a time from the disk, where the fields may have any values.
fn time(time: Timespec) -> Time {
    Time { sec: time.sec, nsec: time.nsec.min(999_999_999) }
}

/// Converts a time that the kernel sent.
pub(crate) fn timespec(time: Time) -> Timespec {
    Timespec { sec: time.sec, nsec: time.nsec }
}

/// The current time.
pub(crate) fn present_time() -> Timespec {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    Timespec { sec: now.tv_sec, nsec: u32::try_from(now.tv_nsec).unwrap_or(0) }
}

/// Converts a time of a setattr request; `None` means the current time.
pub(crate) fn set_time(time: Option<Time>) -> SetTime {
    time.map_or(SetTime::Now, |time| SetTime::At(timespec(time)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_on_disk_may_be_anything() {
        for sec in [i64::MIN, -2, i64::MAX] {
            assert_eq!(time(Timespec { sec, nsec: u32::MAX }), Time { sec, nsec: 999_999_999 });
        }
    }

    #[test]
    fn every_type_of_entry_has_its_number() {
        let kinds = [FileType::Regular, FileType::Directory, FileType::Symlink, FileType::Fifo];
        assert_eq!(kinds.map(entry_kind), [8, 4, 10, 1], "DT_REG, DT_DIR, DT_LNK, DT_FIFO");
    }
}
