//! [`StreamVerifier`]: compares a received subvolume with its stream before it is complete: all data that the stream
//! wrote is read from the devices again, and attributes are compared with the last commands that set them. Of each
//! file, the range from the first to the last byte that the stream wrote is read.
//!
//! - V1. Data is compared by checksum, command by command. Where a later command changes a part of a range, the range
//!   is only read, so that its checksums on disk are verified. When a receive is resumed, only the commands after the
//!   resumption are compared.
//! - V2. Memory is bounded: when the expected state is large, everything so far is compared, and the state begins anew.
//!   Therefore the expected state is correct after every command, not only at the end of a stream.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "ends of ranges are at least their starts, offsets are within the size of a file, and counts are bytes that were read"
)]

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use ubtrfs_format::hash::crc32c_raw;
use ubtrfs_format::item::Timespec;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_stream::StreamCommand;
use ubtrfs_transaction::Job;

use super::error::ReceiveProblem;
use crate::types::{InodeId, mode};
use crate::{Error, Fs, SeekWhence};

/// Totals of the verification of a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files and directories that were compared.
    pub nr_inodes: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Bytes that were read and compared with the stream.
    pub bytes_compared: u64,
}

impl Verified {
    pub(crate) fn add(&mut self, other: &Self) {
        self.nr_inodes += other.nr_inodes;
        self.bytes_read += other.bytes_read;
        self.bytes_compared += other.bytes_compared;
    }
}

/// The state that a stream gives to an inode.
#[derive(Debug, Default)]
struct ExpectedInode {
    /// The path in the last command.
    path: Vec<u8>,
    size: Option<u64>,
    mode: Option<u32>,
    owner: Option<(u64, u64)>,
    times: Option<(Timespec, Timespec)>,
    /// The end and the checksum of each range of data, by the range's offset.
    data: BTreeMap<u64, (u64, u32)>,
    /// From the first to the last byte that the stream wrote.
    written: Range<u64>,
    may_be_gone: bool,
}

/// The expected state of the inodes that a stream changes.
#[derive(Debug)]
pub(crate) struct StreamVerifier {
    inodes: HashMap<Ino, ExpectedInode>,
    nr_ranges: usize,
    path_bytes: usize,
    max_bytes: u64,
}

impl StreamVerifier {
    /// Makes a verifier that is full at about `max_bytes`.
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { inodes: HashMap::new(), nr_ranges: 0, path_bytes: 0, max_bytes }
    }

    /// Whether the expected state takes all memory that it may take (V2).
    pub(crate) fn is_full(&self) -> bool {
        let bytes = self.inodes.len() * INODE_BYTES + self.nr_ranges * RANGE_BYTES + self.path_bytes;
        bytes as u64 >= self.max_bytes
    }

    /// Notes that names in a directory changed, and so the directory's times.
    pub(crate) fn names_changed(&mut self, dir: Ino) {
        if let Some(expected) = self.inodes.get_mut(&dir) {
            expected.times = None;
        }
    }

    /// Notes that an inode lost a name, perhaps its last.
    pub(crate) fn replaced(&mut self, ino: Ino) {
        if let Some(expected) = self.inodes.get_mut(&ino) {
            (expected.may_be_gone, expected.times) = (true, None);
        }
    }

    /// Notes a command that was applied to an inode.
    pub(crate) fn note(&mut self, ino: Ino, command: &StreamCommand<'_>) {
        let expected = self.inodes.entry(ino).or_default();
        let path = match *command {
            StreamCommand::Rename { to, .. } => to,
            _ => command.path().unwrap_or_default(),
        };
        if expected.path != path {
            self.path_bytes = (self.path_bytes + path.len()).saturating_sub(expected.path.len());
            expected.path = path.to_vec();
        }
        let before = expected.data.len();
        match *command {
            StreamCommand::Write { offset, data, .. } => {
                let end = offset.saturating_add(data.len() as u64);
                expected.wrote(offset..end);
                expected.size = expected.size.map(|size| size.max(end));
                if !data.is_empty() {
                    expected.data.insert(offset, (end, crc32c_raw(!0, data)));
                }
            }
            StreamCommand::EncodedWrite { offset, unencoded_file_len: len, .. }
            | StreamCommand::Clone { offset, len, .. } => {
                let end = offset.saturating_add(len);
                expected.wrote(offset..end);
                expected.size = expected.size.map(|size| size.max(end));
            }
            StreamCommand::Fallocate { offset, size, .. } => {
                expected.changed(offset..offset.saturating_add(size));
                // The mode of the fallocate decides whether the size changes, so the size is not compared.
                expected.size = None;
            }
            StreamCommand::Truncate { size, .. } => {
                expected.changed(size..u64::MAX);
                expected.size = Some(size);
            }
            StreamCommand::Chmod { mode, .. } => expected.mode = Some(mode as u32 & mode::PERMISSIONS),
            StreamCommand::Chown { uid, gid, .. } => {
                // A change of the owner may clear mode bits, so the mode is not compared.
                (expected.owner, expected.mode) = (Some((uid, gid)), None);
            }
            // An ACL may change the mode, so the mode is not compared.
            StreamCommand::SetXattr { .. } | StreamCommand::RemoveXattr { .. } => expected.mode = None,
            StreamCommand::Utimes { atime, mtime, .. } => expected.times = Some((atime, mtime)),
            StreamCommand::Unlink { .. } | StreamCommand::Rmdir { .. } => expected.may_be_gone = true,
            _ => {}
        }
        if !matches!(
            command,
            StreamCommand::Utimes { .. } | StreamCommand::Fileattr { .. } | StreamCommand::Rename { .. }
        ) {
            expected.times = None;
        }
        self.nr_ranges = (self.nr_ranges + expected.data.len()).saturating_sub(before);
    }

    /// Reads everything again, after it was written to the devices. Fails at the first difference.
    pub(crate) fn verify(&self, fs: &Fs, root: RootId, job: &Job) -> Result<Verified, ReceiveProblem> {
        // Write back dirty data, so that the comparison reads from the devices.
        fs.flush_tagged(Some(root))?;
        fs.engine.commit().map_err(Error::from)?;
        let mut done = Verified::default();
        let mut inodes: Vec<_> = self.inodes.iter().collect();
        inodes.sort_unstable_by_key(|(ino, _)| **ino);
        let mut buf = vec![0; BUFFER];
        for (ino, expected) in inodes {
            job.check().map_err(Error::from)?;
            let id = InodeId { root, ino: *ino };
            let attr = match fs.getattr(id) {
                Err(Error::NotFound | Error::Stale) if expected.may_be_gone => continue,
                attr => attr?,
            };
            let differs = |what: &'static str| ReceiveProblem::Differs { path: expected.path.clone(), what };
            let check = |is_equal: bool, what| if is_equal { Ok(()) } else { Err(differs(what)) };
            check(expected.size.is_none_or(|size| size == attr.size), "its size")?;
            check(expected.mode.is_none_or(|mode| mode == attr.mode & mode::PERMISSIONS), "its mode")?;
            let owner = (u64::from(attr.uid), u64::from(attr.gid));
            check(expected.owner.is_none_or(|expected| expected == owner), "its owner")?;
            check(expected.times.is_none_or(|times| times == (attr.atime, attr.mtime)), "its times")?;
            done.nr_inodes += 1;
            if attr.mode & mode::TYPE != mode::REGULAR {
                continue;
            }
            let (mut at, end) = (expected.written.start, expected.written.end.min(attr.size));
            while at < end {
                job.check().map_err(Error::from)?;
                if let Some((end, crc)) = expected.data.get(&at) {
                    check(checksum(fs, id, at..*end, &mut buf)? == *crc, "its data")?;
                    done.bytes_compared += end - at;
                    done.bytes_read += end - at;
                    at = *end;
                    continue;
                }
                // Up to the next compared range, data is only read. Holes are skipped.
                let next = expected.data.range(at..).next().map_or(end, |(start, _)| *start);
                let start = fs.seek(id, at, SeekWhence::Data).unwrap_or(next).min(next);
                let hole = fs.seek(id, start, SeekWhence::Hole).ok().filter(|hole| *hole > start).unwrap_or(next);
                let end = next.min(hole).min(start.saturating_add(BUFFER as u64));
                checksum(fs, id, start..end, &mut buf)?;
                done.bytes_read += end - start;
                at = end;
            }
        }
        Ok(done)
    }
}

impl ExpectedInode {
    /// Notes that a command writes a range.
    fn wrote(&mut self, range: Range<u64>) {
        self.changed(range.clone());
        self.written = match self.written.is_empty() {
            true => range,
            false => self.written.start.min(range.start)..self.written.end.max(range.end),
        };
    }

    /// Forgets the data of ranges that a command changes (V1).
    fn changed(&mut self, range: Range<u64>) {
        let before = self.data.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let first = before.map_or(range.start, |(start, _)| *start);
        let gone: Vec<u64> = self.data.range(first..range.end).map(|(start, _)| *start).collect();
        for start in gone {
            self.data.remove(&start);
        }
    }
}

/// The checksum of a range of a file.
fn checksum(fs: &Fs, id: InodeId, range: Range<u64>, buf: &mut [u8]) -> Result<u32, Error> {
    let inode = fs.inode(id)?;
    let (mut at, mut crc) = (range.start, !0);
    while at < range.end {
        let len = usize::try_from(range.end - at).map_or(buf.len(), |left| left.min(buf.len()));
        match fs.read_keeping_atime(&inode, at, &mut buf[..len])? {
            0 => break,
            len => {
                crc = crc32c_raw(crc, &buf[..len]);
                at += len as u64;
            }
        }
    }
    Ok(crc)
}

/// Estimated memory of an inode without its path and ranges, and of a range.
const INODE_BYTES: usize = 400;
const RANGE_BYTES: usize = 56;
const BUFFER: usize = 1 << 20;
