//! Subvolumes of a mounted filesystem: control through extended attributes that are not on disk, and the client that
//! uses them.
//!
//! | attribute                    | on           | get                                   | set                          |
//! |------------------------------|--------------|---------------------------------------|------------------------------|
//! | `ubtrfs.subvolume`           | anything     | `1` (its root directory) or `0`, record |                            |
//! | `ubtrfs.subvolumes.ID`       | anything     | records from this id on, a page       |                              |
//! | `ubtrfs.subvolume.create`    | a directory  |                                       | `UMASK NAME`                 |
//! | `ubtrfs.subvolume.snapshot`  | a directory  |                                       | `SOURCE-ID ro\|rw NAME`      |
//! | `ubtrfs.subvolume.delete`    | a directory  |                                       | `NAME`                       |
//! | `ubtrfs.subvolume.read_only` | its root     |                                       | `0` or `1`                   |
//! | `ubtrfs.subvolume.default`   | its root     | id of the default subvolume           | nothing; or an id            |
//! | `ubtrfs.subvolume.settled`   | anything     | waits until the kernel forgot changed names |                        |
//!
//! A record is `ID PARENT DIRID FLAGS GENERATION`, then `CTRANSID OTRANSID STRANSID RTRANSID`, their times, each as
//! `SEC NSEC`, then `UUID PARENT-UUID RECEIVED-UUID PATH`, all separated by spaces, and a zero byte. Numbers are
//! decimal, but the umask is octal. The path is bytes, and starts at the top level.
//!
//! - V1. Names never contain a zero byte, so a record ends at its first one.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{IFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use ubtrfs_format::item::{RootFlags, Timespec};
use ubtrfs_format::{Generation, Ino, RootId};
use ubtrfs_fs::SubvolumeInfo;

use crate::control::TAKES_NO_CHANGES;
use crate::mount::{MountError, failed_in_mount, has_server_ended};

pub(crate) const SUBVOLUME_XATTR: &str = "ubtrfs.subvolume";
/// Prefix of a subvolume id.
pub(crate) const LIST_PREFIX: &str = "ubtrfs.subvolumes.";
pub(crate) const CREATE_XATTR: &str = "ubtrfs.subvolume.create";
pub(crate) const SNAPSHOT_XATTR: &str = "ubtrfs.subvolume.snapshot";
pub(crate) const DELETE_XATTR: &str = "ubtrfs.subvolume.delete";
pub(crate) const READ_ONLY_XATTR: &str = "ubtrfs.subvolume.read_only";
pub(crate) const DEFAULT_XATTR: &str = "ubtrfs.subvolume.default";
pub(crate) const SETTLED_XATTR: &str = "ubtrfs.subvolume.settled";

/// Longest page of records; the kernel allows 64 KiB.
pub(crate) const PAGE_LEN: usize = 60 << 10;

/// An open file or directory of a mounted filesystem, for its subvolumes.
#[derive(Debug)]
pub struct MountedPath {
    file: OwnedFd,
    is_root: bool,
    info: SubvolumeInfo,
}

impl MountedPath {
    /// Opens a path; `None` if it is not in a mount of ubtrfs.
    pub fn open(path: &Path) -> Result<Option<Self>, MountError> {
        Self::open_in_mount(path).map_err(|source| match has_server_ended(&source) {
            true => failed_in_mount(path, source),
            false => MountError::Open { path: path.display().to_string(), source },
        })
    }

    fn open_in_mount(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let value = match get(&file, SUBVOLUME_XATTR) {
            Ok(value) => value,
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let (root, record) = value.split_first_chunk::<2>().ok_or_else(garbled)?;
        let info = decode_page(record)?.pop().ok_or_else(garbled)?;
        Ok(Some(Self { file, is_root: root == b"1 ", info }))
    }

    /// Whether it is the root directory of a subvolume.
    pub fn is_subvolume(&self) -> bool {
        self.is_root
    }

    /// The subvolume that contains it, as of the opening.
    pub fn subvolume(&self) -> &SubvolumeInfo {
        &self.info
    }

    /// Whether both paths are in one mounted filesystem.
    pub fn is_same_mount(&self, other: &Self) -> io::Result<bool> {
        Ok(rustix::fs::fstat(&self.file)?.st_dev == rustix::fs::fstat(&other.file)?.st_dev)
    }

    /// All subvolumes in order of id, the top level first.
    pub fn list(&self) -> io::Result<Vec<SubvolumeInfo>> {
        let mut list = Vec::new();
        let mut next = 0;
        loop {
            let page = decode_page(&get(&self.file, &format!("{LIST_PREFIX}{next}"))?)?;
            let Some(last) = page.last() else { return Ok(list) };
            next = last.id.0.checked_add(1).filter(|after| *after > next).ok_or_else(garbled)?;
            list.extend(page);
        }
    }

    /// The default subvolume.
    pub fn default_subvolume(&self) -> io::Result<RootId> {
        parse_id(&get(&self.file, DEFAULT_XATTR)?).ok_or_else(garbled)
    }

    /// Whether its flags forbid changing names in it and deleting it (chattr +i, +a).
    pub fn is_immutable_or_append_only(&self) -> bool {
        let held = IFlags::IMMUTABLE | IFlags::APPEND;
        rustix::fs::ioctl_getflags(&self.file).is_ok_and(|flags| flags.intersects(held))
    }

    /// Makes an empty subvolume at a name of this directory.
    pub fn create(&self, name: &[u8]) -> io::Result<()> {
        let umask = rustix::process::umask(Mode::from_raw_mode(0o077));
        rustix::process::umask(umask);
        self.set(CREATE_XATTR, &create_value(umask.as_raw_mode(), name))
    }

    /// Makes a snapshot of `source` at a name of this directory, with everything written so far.
    pub fn snapshot(&self, source: &Self, read_only: bool, name: &[u8]) -> io::Result<()> {
        rustix::fs::syncfs(&source.file).map_err(|errno| self.explained(errno))?;
        self.set(SNAPSHOT_XATTR, &snapshot_value(source.info.id, read_only, name))
    }

    /// Deletes the subvolume at a name of this directory.
    pub fn delete(&self, name: &[u8]) -> io::Result<()> {
        self.set(DELETE_XATTR, name)
    }

    /// Makes this subvolume read-only or writable.
    pub fn set_read_only(&self, read_only: bool) -> io::Result<()> {
        if read_only {
            // Later, the server would refuse the kernel's dirty pages.
            rustix::fs::syncfs(&self.file).map_err(|errno| self.explained(errno))?;
        }
        self.set(READ_ONLY_XATTR, if read_only { b"1" } else { b"0" })
    }

    /// Makes a subvolume of this filesystem the default one.
    pub fn set_default(&self, id: RootId) -> io::Result<()> {
        self.set(DEFAULT_XATTR, id.0.to_string().as_bytes())
    }

    /// Makes an error from an error number; a failure of the whole filesystem gets the server's explanation.
    fn explained(&self, errno: Errno) -> io::Error {
        let error = io::Error::from(errno);
        let reason = matches!(errno, Errno::ROFS | Errno::IO).then(|| crate::session::why(&self.file)).flatten();
        match reason {
            // Only the subvolume may be read-only.
            Some(reason) if errno == Errno::ROFS && !reason.starts_with(TAKES_NO_CHANGES) => error,
            Some(reason) => io::Error::new(error.kind(), reason),
            None => error,
        }
    }

    /// Sets an attribute, and waits until the kernel shows the changed names.
    fn set(&self, name: &str, value: &[u8]) -> io::Result<()> {
        rustix::fs::fsetxattr(&self.file, name, value, XattrFlags::empty()).map_err(|errno| self.explained(errno))?;
        // The change is done, whatever this read returns.
        let _ = get(&self.file, SETTLED_XATTR);
        Ok(())
    }
}

fn get(file: &OwnedFd, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; 64 << 10];
    let len = rustix::fs::fgetxattr(file, name, &mut value)?;
    value.truncate(len);
    Ok(value)
}

fn garbled() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the server's answer is not understood; is it of another version?")
}

/// Encodes a record.
pub(crate) fn encode(info: &SubvolumeInfo) -> Vec<u8> {
    let parent = info.parent.map_or(0, |parent| parent.0);
    let mut numbers = vec![info.id.0, parent, info.dirid.0, info.flags.bits(), info.generation.0];
    numbers.extend([info.ctransid.0, info.otransid.0, info.stransid.0, info.rtransid.0]);
    let mut words: Vec<String> = numbers.iter().map(u64::to_string).collect();
    for time in [info.ctime, info.otime, info.stime, info.rtime] {
        words.extend([time.sec.to_string(), time.nsec.to_string()]);
    }
    words.extend([info.uuid, info.parent_uuid, info.received_uuid].map(|uuid| uuid.to_string()));
    debug_assert_eq!(words.len() + 1, RECORD_FIELDS);
    let mut record = words.join(" ").into_bytes();
    record.push(b' ');
    record.extend(&info.path);
    record.push(0);
    record
}

fn decode_page(page: &[u8]) -> io::Result<Vec<SubvolumeInfo>> {
    let records = page.split(|byte| *byte == 0).filter(|record| !record.is_empty());
    records.map(|record| decode(record).ok_or_else(garbled)).collect()
}

/// Decodes a record without its zero byte.
fn decode(record: &[u8]) -> Option<SubvolumeInfo> {
    let mut fields = record.splitn(RECORD_FIELDS, |byte| *byte == b' ');
    let mut words = fields.by_ref().take(RECORD_FIELDS - 1).map(|field| std::str::from_utf8(field).ok());
    let mut text = || words.next().flatten();
    let mut number = || text()?.parse::<u64>().ok();
    let (id, parent) = (RootId(number()?), RootId(number()?));
    let (dirid, flags, generation) = (Ino(number()?), RootFlags::from_bits_retain(number()?), Generation(number()?));
    let mut transid = || number().map(Generation);
    let (ctransid, otransid, stransid, rtransid) = (transid()?, transid()?, transid()?, transid()?);
    let mut time = || Some(Timespec { sec: text()?.parse().ok()?, nsec: text()?.parse().ok()? });
    let (ctime, otime, stime, rtime) = (time()?, time()?, time()?, time()?);
    let mut uuid = || text()?.parse().ok();
    let (uuid, parent_uuid, received_uuid) = (uuid()?, uuid()?, uuid()?);
    Some(SubvolumeInfo {
        id,
        path: fields.next()?.to_vec(),
        parent: Some(parent).filter(|parent| parent.0 != 0),
        dirid,
        flags,
        uuid,
        parent_uuid,
        received_uuid,
        generation,
        otransid,
        ctransid,
        stransid,
        rtransid,
        otime,
        ctime,
        stime,
        rtime,
    })
}

/// Fields of a record, including the path.
const RECORD_FIELDS: usize = 21;

fn create_value(umask: u32, name: &[u8]) -> Vec<u8> {
    [format!("{umask:03o} ").as_bytes(), name].concat()
}

/// Decodes umask and name.
pub(crate) fn parse_create(value: &[u8]) -> Option<(u32, &[u8])> {
    let (umask, name) = split_word(value)?;
    Some((u32::from_str_radix(umask, 8).ok().filter(|umask| *umask <= 0o777)?, name))
}

fn snapshot_value(source: RootId, read_only: bool, name: &[u8]) -> Vec<u8> {
    [format!("{} {} ", source.0, if read_only { "ro" } else { "rw" }).as_bytes(), name].concat()
}

/// Decodes the source, whether the snapshot is read-only, and the name.
pub(crate) fn parse_snapshot(value: &[u8]) -> Option<(RootId, bool, &[u8])> {
    let (source, rest) = split_word(value)?;
    let (how, name) = split_word(rest)?;
    let read_only = match how {
        "ro" => true,
        "rw" => false,
        _ => return None,
    };
    Some((RootId(source.parse().ok()?), read_only, name))
}

/// Decodes an id that is the whole value.
pub(crate) fn parse_id(value: &[u8]) -> Option<RootId> {
    Some(RootId(std::str::from_utf8(value).ok()?.parse().ok()?))
}

fn split_word(value: &[u8]) -> Option<(&str, &[u8])> {
    let at = value.iter().position(|byte| *byte == b' ')?;
    Some((std::str::from_utf8(&value[..at]).ok()?, &value[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subvolumes::example;

    #[test]
    fn records_are_read_back() {
        let info = SubvolumeInfo { path: b"a b/\xff\n".to_vec(), ..example() };
        let top = SubvolumeInfo { id: RootId::FS_TREE, path: Vec::new(), parent: None, ..info.clone() };
        let page = [encode(&top), encode(&info)].concat();
        assert_eq!(decode_page(&page).unwrap(), [top, info]);
        assert!(decode_page(b"").unwrap().is_empty());
        assert!(decode_page(b"5 0 0\0").is_err());
    }

    #[test]
    fn requests_are_read_back() {
        assert_eq!(parse_create(&create_value(0o22, b"a b")), Some((0o22, &b"a b"[..])));
        assert_eq!(parse_snapshot(&snapshot_value(RootId(300), true, b" s")), Some((RootId(300), true, &b" s"[..])));
        assert_eq!(parse_snapshot(&snapshot_value(RootId(5), false, b"s")), Some((RootId(5), false, &b"s"[..])));
        assert_eq!(parse_id(b"257"), Some(RootId(257)));
        for garbage in [&b""[..], b" ", b"x y", b"\xff \xff z", b"900 no s", b"1000 name"] {
            assert!(parse_create(garbage).is_none() && parse_snapshot(garbage).is_none(), "{garbage:?}");
        }
    }
}
