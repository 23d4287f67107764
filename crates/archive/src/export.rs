//! Writes a directory or file as a tar archive.
//!
//! Files that cannot be read are reported and left out. If blocks of a file turn out to be unreadable after
//! its header was written, only these blocks become zeros. In spite of unreadable files or blocks, the archive is
//! well-formed.
//!
//! Names never lead out of the directory in which the archive is unpacked. Names are relative to the exported path, as
//! `tar -C PATH -c .` writes them, and sorted, so that equal trees give equal archives.

use std::collections::HashMap;
use std::io::{self, Write};

use anyhow::Context;
use ubtrfs_fs::{Attr, Fs, InodeId, mode, rdev_parts};

use crate::tar::write::ArchiveWriter;
use crate::tar::{ArchiveMember, MemberKind};
use crate::walk::{COPY_LEN, VisitedDirs, check_name, child_path, data_ranges, printable, read_names};
use crate::{ArchiveMessage, Watch};

/// Options of [`export()`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportOptions {
    /// Keep holes of files as holes (pax sparse format 1.0).
    pub sparse: bool,
    /// Omit extended attributes and ACLs.
    pub no_xattrs: bool,
}

/// The result of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportReport {
    /// Bytes of file data in the archive.
    pub bytes: u64,
    /// Files that are missing in the archive or incomplete; each was reported as [`ArchiveMessage::Failed`].
    pub failed: u64,
}

/// Writes a file, or a directory with everything below it, as a tar archive. In the archive, a file is called `name`,
/// and a directory is called `.`.
///
/// # Errors
/// `out` cannot be written, or the file or directory `start` cannot be read.
pub fn export<W: Write>(
    fs: &Fs,
    start: &Attr,
    name: &[u8],
    out: W,
    options: &ExportOptions,
    watch: Watch<'_>,
) -> anyhow::Result<(W, ExportReport)> {
    let writer = ArchiveWriter::new(io::BufWriter::with_capacity(COPY_LEN, out));
    let (report, out_failed) = (ExportReport::default(), false);
    let mut export =
        Export { fs, options, watch, writer, first_names: HashMap::new(), buf: Vec::new(), report, out_failed };
    if start.is_dir() {
        export.dir(start)?;
    } else {
        export.member(start, name.to_vec())?;
    }
    let out = export.writer.finish()?;
    Ok((out.into_inner().map_err(io::IntoInnerError::into_error)?, export.report))
}

struct Export<'a, W: Write> {
    fs: &'a Fs,
    options: &'a ExportOptions,
    watch: Watch<'a>,
    writer: ArchiveWriter<W>,
    /// For each file with several names, the path under which it was first written. Its other names become hard links
    /// to this path.
    first_names: HashMap<InodeId, Vec<u8>>,
    buf: Vec<u8>,
    report: ExportReport,
    /// Whether writing to the archive failed.
    out_failed: bool,
}

impl<W: Write> Export<'_, W> {
    /// Writes a directory and everything below it. The depth is limited by memory, not by the stack.
    fn dir(&mut self, start: &Attr) -> anyhow::Result<()> {
        let mut passed = VisitedDirs::default();
        let mut todo = vec![(start.id, b".".to_vec())];
        while let Some((id, path)) = todo.pop() {
            match self.step(id, &path, &mut passed, &mut todo) {
                Err(error) if self.out_failed || path == b"." => {
                    return Err(error).with_context(|| format!("'{}'", printable(&path)));
                }
                Err(error) => self.failed(&path, error),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Writes a member, and queues the entries of a directory.
    fn step(
        &mut self,
        id: InodeId,
        path: &[u8],
        passed: &mut VisitedDirs,
        todo: &mut Vec<(InodeId, Vec<u8>)>,
    ) -> anyhow::Result<()> {
        let attr = self.fs.getattr(id)?;
        if attr.is_dir() {
            passed.pass(attr.id)?;
        }
        self.member(&attr, path.to_vec())?;
        if attr.is_dir() {
            let mut names = read_names(self.fs, attr.id)?;
            names.retain(|name| {
                let checked = check_name(&name.name);
                checked.map_err(|error| self.failed(&child_path(path, &name.name), error)).is_ok()
            });
            todo.extend(names.into_iter().rev().map(|name| (name.id, child_path(path, &name.name))));
        }
        Ok(())
    }

    /// Reports a file that is missing in the archive or incomplete.
    fn failed(&mut self, path: &[u8], error: anyhow::Error) {
        self.report.failed += 1;
        (self.watch)(ArchiveMessage::Failed(&error.context(format!("cannot export '{}'", printable(path)))));
    }

    /// Writes to the archive.
    fn put(&mut self, write: impl FnOnce(&mut ArchiveWriter<W>) -> io::Result<()>) -> anyhow::Result<()> {
        write(&mut self.writer).map_err(|error| {
            self.out_failed = true;
            error.into()
        })
    }

    fn member(&mut self, attr: &Attr, mut path: Vec<u8>) -> anyhow::Result<()> {
        let kind = match attr.mode & mode::TYPE {
            mode::REGULAR => MemberKind::File,
            mode::DIRECTORY => MemberKind::Dir,
            mode::SYMLINK => MemberKind::Symlink,
            mode::CHAR => MemberKind::CharDevice,
            mode::BLOCK => MemberKind::BlockDevice,
            mode::FIFO => MemberKind::Fifo,
            _ => {
                (self.watch)(ArchiveMessage::Socket(&path));
                return Ok(());
            }
        };
        if kind == MemberKind::Dir && !path.ends_with(b"/") {
            path.push(b'/');
        }
        let (major, minor) = rdev_parts(attr.rdev);
        let is_device = matches!(kind, MemberKind::CharDevice | MemberKind::BlockDevice);
        let mut member = ArchiveMember {
            kind,
            link: Vec::new(),
            mode: attr.mode & mode::PERMISSIONS,
            uid: attr.uid,
            gid: attr.gid,
            mtime: attr.mtime,
            atime: None,
            major: if is_device { major } else { 0 },
            minor: if is_device { minor } else { 0 },
            size: 0,
            sparse: None,
            xattrs: Vec::new(),
            path,
        };
        if kind != MemberKind::Dir
            && attr.nlink > 1
            && let Some(first) = self.first_names.get(&attr.id)
        {
            let again = ArchiveMember { kind: MemberKind::HardLink, link: first.clone(), ..member };
            self.put(|writer| writer.begin(&again))?;
            return self.put(ArchiveWriter::end);
        }
        if kind == MemberKind::Symlink {
            member.link = self.fs.readlink(attr.id)?;
        }
        if !self.options.no_xattrs {
            for name in self.fs.listxattr(attr.id)? {
                let value = self.fs.getxattr(attr.id, &name)?;
                member.xattrs.push((name, value));
            }
            member.xattrs.sort_unstable();
        }
        if kind == MemberKind::File {
            member.size = attr.size;
            return self.file(attr, member);
        }
        self.begin(attr, &member)?;
        self.put(ArchiveWriter::end)
    }

    /// Begins a member. Records the path of a file with several names. If an error occurs before this call, the path is
    /// neither in the archive nor recorded, so the file's other names do not become links to it.
    fn begin(&mut self, attr: &Attr, member: &ArchiveMember) -> anyhow::Result<()> {
        if member.kind != MemberKind::Dir && attr.nlink > 1 {
            self.first_names.insert(attr.id, member.path.clone());
        }
        self.put(|writer| writer.begin(member))
    }

    fn file(&mut self, attr: &Attr, mut member: ArchiveMember) -> anyhow::Result<()> {
        let mut ranges = vec![(0, attr.size)];
        if self.options.sparse && attr.size > 0 {
            let data = data_ranges(self.fs, attr.id, attr.size)?;
            if data != ranges {
                member.sparse = Some(data.clone());
                ranges = data;
            }
        }
        self.begin(attr, &member)?;
        let mut lost = LostRanges::default();
        for (start, len) in ranges {
            let mut buf = std::mem::take(&mut self.buf);
            buf.resize(COPY_LEN, 0);
            let (mut at, end) = (start, start + len);
            while at < end {
                let count = COPY_LEN.min(usize::try_from(end - at).unwrap_or(COPY_LEN));
                let piece = &mut buf[..count];
                read_or_zero(self.fs, attr.id, at, piece, &mut lost);
                self.report.bytes += count as u64;
                (self.watch)(ArchiveMessage::Bytes(self.report.bytes));
                self.put(|writer| writer.data(piece))?;
                at += count as u64;
            }
            self.buf = buf;
        }
        // The header states the full size, so the archive has zeros in place of lost data.
        if let Some((error, text)) = lost.into_error() {
            self.failed(&member.path, error.context(text));
        }
        self.put(ArchiveWriter::end)
    }
}

/// Fills a buffer from a file. Blocks that cannot be read, and bytes past the end, become zeros.
fn read_or_zero(fs: &Fs, id: InodeId, at: u64, buf: &mut [u8], lost: &mut LostRanges) {
    match fs.read_into(id, at, buf) {
        Ok(count) => buf[count..].fill(0),
        Err(error) if buf.len() <= BLOCK_LEN => {
            buf.fill(0);
            lost.note(at, buf.len() as u64, error.into());
        }
        Err(_) => {
            // Split at a file offset that is a multiple of the block size, so that both parts consist of whole blocks.
            let half = (at + buf.len() as u64 / 2).next_multiple_of(BLOCK_LEN as u64) - at;
            let half = usize::try_from(half).unwrap_or(0).clamp(1, buf.len() - 1);
            let (front, back) = buf.split_at_mut(half);
            read_or_zero(fs, id, at, front, lost);
            read_or_zero(fs, id, at + half as u64, back, lost);
        }
    }
}

/// Ranges of a file that could not be read.
#[derive(Default)]
struct LostRanges {
    /// Start and end of the first few ranges, in order.
    ranges: Vec<(u64, u64)>,
    nr_ranges: u64,
    /// End of the last range.
    end: Option<u64>,
    bytes: u64,
    /// The first error.
    error: Option<anyhow::Error>,
}

impl LostRanges {
    fn note(&mut self, at: u64, len: u64, error: anyhow::Error) {
        self.error.get_or_insert(error);
        self.bytes += len;
        if self.end == Some(at) {
            if let Some(last) = self.ranges.last_mut().filter(|last| last.1 == at) {
                last.1 = at + len;
            }
        } else {
            self.nr_ranges += 1;
            if self.ranges.len() < RANGES_SHOWN_MAX {
                self.ranges.push((at, at + len));
            }
        }
        self.end = Some(at + len);
    }

    /// Returns the first error and the zeroed ranges; `None` if everything was read.
    fn into_error(self) -> Option<(anyhow::Error, String)> {
        let ranges: Vec<String> = self.ranges.iter().map(|(start, end)| format!("{start} to {end}")).collect();
        let more = self.nr_ranges - self.ranges.len() as u64;
        let more = if more > 0 { format!(" and {more} more ranges ({} in all)", self.bytes) } else { String::new() };
        Some((self.error?, format!("bytes {}{more} are replaced by zeros", ranges.join(", "))))
    }
}

/// The smallest sector size of btrfs. Each sector has its own checksum, so damage makes whole sectors unreadable.
const BLOCK_LEN: usize = 4096;
/// The largest number of ranges that a message lists.
const RANGES_SHOWN_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_ranges_are_joined_and_counted() {
        let mut lost = LostRanges::default();
        for at in [0, 4096, 16384, 40960, 49152, 65536, 69632, 81920] {
            lost.note(at, 4096, anyhow::anyhow!("at {at}"));
        }
        let (error, text) = lost.into_error().unwrap();
        assert_eq!(error.to_string(), "at 0");
        let expected = "bytes 0 to 8192, 16384 to 20480, 40960 to 45056, 49152 to 53248 and 2 more ranges (32768 in all) are replaced by zeros";
        assert_eq!(text, expected);
        assert!(LostRanges::default().into_error().is_none());
    }
}
