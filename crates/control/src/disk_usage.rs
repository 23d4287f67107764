//! The bytes that files use, and how many of these bytes are shared: `filesystem du`.
//!
//! | command     | needs                                                                        |
//! |-------------|------------------------------------------------------------------------------|
//! | a file      | nothing but the file                                                         |
//! | a directory with everything below it | the right to read each file and each directory; others are not counted |
//!
//! The numbers are those of btrfs-progs. An extent counts with its length in the file, and is shared if several files,
//! subvolumes, or places in one file use it. Inline data and data that is not on disk yet are not counted.
//!
//! The server walks, and writes what it finds to the request's stream: a line of JSON for each file and directory, and
//! lines with the shared ranges. The client adds everything up ([`collect`]).
//!
//! - U1. A file with several names below the directory is counted once.
//! - U2. The server holds a few hundred KiB for a request, however many files there are: its position in the open
//!   directories, and what it has not written yet. Everything that grows with the number of files is in the client.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, BufRead, BufWriter, Write};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::Logical;
use ubtrfs_format::item::Compression;
use ubtrfs_fs::{Error, FileExtentKind, InodeId};

use crate::access::can_read;
use crate::dir_part::{check_depth, part_of};
use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};
use crate::stream::StreamOutput;

/// Counts the bytes of a file, or of all files below a directory. [`collect`] reads the stream of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Request {
    /// The file or directory.
    pub of: FileNr,
    /// Whether the stream has the names of files and directories.
    pub names: bool,
}

/// The end of a count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The number of files and directories that the caller may not read. They are not counted.
    pub unreadable: u64,
}

/// A line of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum UsageLine {
    /// A file or directory. A directory comes before its content.
    Entry {
        /// The number of directories above it, up to the directory of the request.
        depth: u32,
        /// The name in the directory that holds it.
        #[serde(with = "crate::bytes", default, skip_serializing_if = "Vec::is_empty")]
        name: Vec<u8>,
        total: u64,
        exclusive: u64,
        /// The subvolume and inode number of a file with several names.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        link: Option<(u64, u64)>,
    },
    /// Ranges on disk that are shared: start and end of each.
    Shared(Vec<(u64, u64)>),
}

/// The bytes of a file or of all files below a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Files and directories below the directory; each directory comes before its content.
    pub names: Vec<NamedEntry>,
    /// Bytes of all files.
    pub total: u64,
    /// The part of `total` that is not shared.
    pub exclusive: u64,
    /// Bytes on disk in shared extents that the files use. A byte that several of the files use is counted once.
    pub set_shared: u64,
}

/// A file or directory by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedEntry {
    /// The name in the directory that holds it.
    pub name: Vec<u8>,
    /// The index of the directory that holds it, in [`DiskUsage::names`]; `None` for the directory of the request.
    pub parent: Option<u32>,
    /// Bytes of the file, or of all files below the directory.
    pub total: u64,
    /// The part of `total` that is not shared.
    pub exclusive: u64,
}

/// Adds up the stream of a count. The result has names if the request asked for them.
///
/// # Errors
///
/// Fails if reading fails, or if the stream is not understood.
pub fn collect(mut stream: impl BufRead, names: bool) -> io::Result<DiskUsage> {
    let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
    let mut usage = DiskUsage::default();
    let (mut seen, mut shared) = (HashSet::new(), BTreeMap::new());
    // The index of the last entry of each depth below the directory of the request.
    let mut open: Vec<u32> = Vec::new();
    let mut text = Vec::new();
    loop {
        text.clear();
        if stream.read_until(b'\n', &mut text)? == 0 {
            break;
        }
        let line = serde_json::from_slice(&text).map_err(|_| wrong("the server's answer is not understood"))?;
        let (depth, name, total, exclusive, link) = match line {
            UsageLine::Shared(ranges) => {
                ranges.into_iter().for_each(|(start, end)| add_range(&mut shared, start, end));
                continue;
            }
            UsageLine::Entry { depth, name, total, exclusive, link } => (depth as usize, name, total, exclusive, link),
        };
        // U1
        if link.is_some_and(|link| !seen.insert(link)) {
            continue;
        }
        usage.total = usage.total.saturating_add(total);
        usage.exclusive = usage.exclusive.saturating_add(exclusive);
        let Some(above) = depth.checked_sub(1).filter(|_| names) else { continue };
        let parent = match above.checked_sub(1) {
            None => None,
            Some(above) => Some(*open.get(above).ok_or_else(|| wrong("an entry has no directory"))?),
        };
        let index = u32::try_from(usage.names.len()).map_err(|_| wrong("too many files for one list"))?;
        open.truncate(above);
        open.push(index);
        usage.names.push(NamedEntry { name, parent, total, exclusive });
    }
    // Each directory comes before its content. So in reverse order, the sums of a directory's children are complete
    // before they are added to the directory.
    for index in (0..usage.names.len()).rev() {
        let NamedEntry { parent, total, exclusive, .. } = usage.names[index];
        if let Some(parent) = parent.and_then(|parent| usage.names.get_mut(parent as usize)) {
            parent.total = parent.total.saturating_add(total);
            parent.exclusive = parent.exclusive.saturating_add(exclusive);
        }
    }
    usage.set_shared = shared.iter().map(|(start, end): (&u64, &u64)| end.saturating_sub(*start)).sum();
    Ok(usage)
}

/// A file or directory that is not written to the stream yet.
struct Pending {
    depth: u32,
    name: Vec<u8>,
    total: u64,
    exclusive: u64,
    link: Option<(u64, u64)>,
}

/// A part of an extent that a file uses. `file` is the file's index in [`UsageWalk::pending`].
struct FileExtentUse {
    file: usize,
    len_bytes: u64,
    /// The logical address of the part. (For a compressed extent, the address of the extent.)
    at: u64,
    extent: (Logical, u64),
}

pub(crate) fn execute(context: &CommandContext<'_>, request: &Request) -> Result<Response> {
    let id = context.inode(request.of)?;
    let out = BufWriter::with_capacity(BUFFER, StreamOutput::of(context)?);
    if context.fs.read_only().is_none() {
        // Write out dirty data, because only data on disk has extents that can be counted.
        context.fs.sync()?;
    }
    let mut walk = UsageWalk {
        context,
        out,
        has_names: request.names,
        pending: Vec::new(),
        pending_bytes: 0,
        uses: Vec::new(),
        unreadable: 0,
    };
    walk.visit(id)?;
    walk.write_pending()?;
    walk.out.flush().map_err(lost)?;
    Ok(Response { unreadable: walk.unreadable })
}

struct UsageWalk<'c, 'a> {
    context: &'c CommandContext<'a>,
    out: BufWriter<StreamOutput<'c>>,
    has_names: bool,
    /// Files and directories that are not written yet; each directory comes before its content.
    pending: Vec<Pending>,
    pending_bytes: usize,
    /// Uses of extents that are not counted yet.
    uses: Vec<FileExtentUse>,
    unreadable: u64,
}

impl UsageWalk<'_, '_> {
    /// Visits everything below a file or directory.
    fn visit(&mut self, top: InodeId) -> Result<()> {
        if !self.context.fs.getattr(top)?.is_dir() {
            return self.file(top, 0, Vec::new());
        }
        if !self.may_read(top)? {
            return Ok(());
        }
        self.push(0, Vec::new(), None)?;
        // The open directories, each with the cookie to continue from; `None` after the last entry.
        let mut open = vec![(top, Some(0))];
        while let Some((dir, cookie)) = open.last_mut() {
            let Some(from) = *cookie else {
                open.pop();
                continue;
            };
            self.context.job.check().map_err(Error::from)?;
            let part = part_of(self.context.fs, *dir, from)?;
            *cookie = part.next;
            let depth = u32::try_from(open.len()).unwrap_or(u32::MAX);
            for (id, name) in part.files {
                if self.may_read(id)? {
                    self.file(id, depth, name)?;
                }
            }
            let Some((id, name)) = part.dir else { continue };
            if !self.may_read(id)? {
                continue;
            }
            check_depth(open.len())?;
            self.push(depth, name, None)?;
            open.push((id, Some(0)));
        }
        Ok(())
    }

    /// Whether the caller may read a file or directory. Counts those that the caller may not read.
    fn may_read(&mut self, id: InodeId) -> Result<bool> {
        let may_read = match can_read(self.context.fs, self.context.caller, id) {
            // It was removed during the walk.
            Err(Error::NotFound | Error::Stale) => return Ok(false),
            may_read => may_read?,
        };
        self.unreadable += u64::from(!may_read);
        Ok(may_read)
    }

    fn file(&mut self, id: InodeId, depth: u32, name: Vec<u8>) -> Result<()> {
        let gone = |error: Error| match error {
            Error::NotFound | Error::Stale => Ok(()),
            error => Err(CommandFailure::from(error)),
        };
        let nlink = match self.context.fs.getattr(id) {
            Ok(attr) => attr.nlink,
            Err(error) => return gone(error),
        };
        self.push(depth, name, (nlink > 1).then_some((id.root.0, id.ino.0)))?;
        let mut from = Some(0);
        while let Some(start) = from {
            let (extents, next) = match self.context.fs.extents_from(id, start, BATCH) {
                Ok(found) => found,
                Err(error) => return gone(error),
            };
            let file = self.pending.len().saturating_sub(1);
            for extent in
                extents.iter().filter(|one| matches!(one.kind, FileExtentKind::Data | FileExtentKind::Prealloc))
            {
                let skipped = if extent.compression == Compression::None { extent.extent_offset } else { 0 };
                self.uses.push(FileExtentUse {
                    file,
                    len_bytes: extent.len_bytes,
                    at: extent.disk_bytenr.0.saturating_add(skipped),
                    extent: (extent.disk_bytenr, extent.disk_len_bytes),
                });
            }
            if self.uses.len() >= BATCH {
                self.settle()?;
                self.context.job.check().map_err(Error::from)?;
            }
            from = next;
        }
        Ok(())
    }

    fn push(&mut self, depth: u32, name: Vec<u8>, link: Option<(u64, u64)>) -> Result<()> {
        let name = if self.has_names { name } else { Vec::new() };
        if self.pending_bytes >= PENDING_BYTES {
            self.write_pending()?;
        }
        self.pending_bytes = self.pending_bytes.saturating_add(name.len()).saturating_add(ENTRY_BYTES);
        self.pending.push(Pending { depth, name, total: 0, exclusive: 0, link });
        Ok(())
    }

    /// Counts everything collected so far, and writes it.
    fn write_pending(&mut self) -> Result<()> {
        self.settle()?;
        self.pending_bytes = 0;
        for Pending { depth, name, total, exclusive, link } in std::mem::take(&mut self.pending) {
            self.write(&UsageLine::Entry { depth, name, total, exclusive, link })?;
        }
        Ok(())
    }

    fn write(&mut self, line: &UsageLine) -> Result<()> {
        let not_sent = |error| CommandFailure::new(Errno::INVAL, format!("it cannot be sent: {error}"));
        let mut text = serde_json::to_vec(line).map_err(not_sent)?;
        text.push(b'\n');
        self.out.write_all(&text).map_err(lost)
    }

    /// Adds the bytes of the collected `uses` to the files that use them, and writes the shared ranges.
    fn settle(&mut self) -> Result<()> {
        let uses = std::mem::take(&mut self.uses);
        let mut extents: Vec<(Logical, u64)> = uses.iter().map(|found| found.extent).collect();
        extents.sort_unstable();
        extents.dedup();
        let shared = self.context.fs.extents_are_shared(&extents)?;
        let shared: HashSet<Logical> =
            extents.into_iter().zip(shared).filter(|(_, shared)| *shared).map(|((bytenr, _), _)| bytenr).collect();
        let mut ranges = BTreeMap::new();
        for FileExtentUse { file, len_bytes, at, extent } in uses {
            let Some(file) = self.pending.get_mut(file) else { continue };
            file.total = file.total.saturating_add(len_bytes);
            if shared.contains(&extent.0) {
                add_range(&mut ranges, at, at.saturating_add(len_bytes));
            } else {
                file.exclusive = file.exclusive.saturating_add(len_bytes);
            }
        }
        if !ranges.is_empty() {
            self.write(&UsageLine::Shared(ranges.into_iter().collect()))?;
        }
        Ok(())
    }
}

fn lost(error: io::Error) -> CommandFailure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => {
            CommandFailure::new(Errno::PIPE, "the reader of the count closed it before its end")
        }
        _ => CommandFailure::from(Error::Output(error)),
    }
}

/// Visits names in the order of btrfs-progs: each directory after its content. `visit` gets the path of each entry below
/// the directory of the request.
///
/// # Errors
/// An error of `visit`.
pub fn visit_paths<E>(
    names: &[NamedEntry],
    mut visit: impl FnMut(&[u8], &NamedEntry) -> Result<(), E>,
) -> Result<(), E> {
    let mut tops = Vec::new();
    let mut below: Vec<Vec<usize>> = vec![Vec::new(); names.len()];
    for (index, entry) in names.iter().enumerate() {
        match entry.parent.and_then(|parent| below.get_mut(parent as usize)) {
            Some(siblings) => siblings.push(index),
            None => tops.push(index),
        }
    }
    let mut path = Vec::new();
    // The directories that are open: their entries that are left, their index, and the length of the path outside of
    // them.
    let mut open = vec![(tops.into_iter(), None, 0)];
    while let Some((left, index, outside)) = open.last_mut() {
        let Some(next) = left.next() else {
            if let Some(index) = *index {
                visit(&path, &names[index])?;
            }
            path.truncate(*outside);
            open.pop();
            continue;
        };
        let outside = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend(&names[next].name);
        open.push((std::mem::take(&mut below[next]).into_iter(), Some(next), outside));
    }
    Ok(())
}

/// Adds a range to a set of ranges, and merges it with the ranges that it touches.
fn add_range(ranges: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) {
    while let Some((&from, &to)) = ranges.range(..=end).next_back()
        && to >= start
    {
        ranges.remove(&from);
        (start, end) = (start.min(from), end.max(to));
    }
    ranges.insert(start, end);
}

/// The number of uses that are counted at once.
const BATCH: usize = 1024;
/// Bytes of files and directories that wait to be counted and written.
const PENDING_BYTES: usize = 64 << 10;
/// Estimated bytes of a waiting file or directory without its name.
const ENTRY_BYTES: usize = 96;
/// Bytes that are written at once.
const BUFFER: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[NamedEntry]) -> Vec<(Vec<u8>, u64)> {
        let mut paths = Vec::new();
        let add = |path: &[u8], entry: &NamedEntry| {
            paths.push((path.to_vec(), entry.total));
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(()) = visit_paths(names, add);
        paths
    }

    fn line(depth: u32, name: &str, total: u64, link: Option<(u64, u64)>) -> UsageLine {
        UsageLine::Entry { depth, name: name.as_bytes().to_vec(), total, exclusive: total, link }
    }

    fn stream(lines: &[UsageLine]) -> Vec<u8> {
        let text = |line: &UsageLine| [serde_json::to_vec(line).unwrap(), vec![b'\n']].concat();
        lines.iter().flat_map(text).collect()
    }

    #[test]
    fn directories_are_visited_after_their_content() {
        let lines = [
            line(0, "", 0, None),
            line(1, "d", 0, None),
            line(2, "a", 1, None),
            line(2, "e", 0, None),
            line(3, "b", 2, None),
            line(1, "f", 4, None),
        ];
        let usage = collect(&stream(&lines)[..], true).unwrap();
        let expected: [(&[u8], u64); 5] = [(b"d/a", 1), (b"d/e/b", 2), (b"d/e", 2), (b"d", 3), (b"f", 4)];
        assert_eq!(paths(&usage.names), expected.map(|(path, total)| (path.to_vec(), total)));
        assert_eq!((usage.total, usage.exclusive), (7, 7));
        let sums = collect(&stream(&lines)[..], false).unwrap();
        assert_eq!((sums.names.len(), sums.total), (0, 7));
    }

    #[test]
    fn files_with_several_names_and_shared_ranges_count_once() {
        let link = Some((5, 257));
        let lines = [
            line(0, "", 0, None),
            line(1, "a", 10, link),
            UsageLine::Shared(vec![(0, 10), (30, 40)]),
            line(1, "b", 10, link),
            UsageLine::Shared(vec![(5, 15)]),
            line(1, "c", 1, Some((256, 257))),
        ];
        let usage = collect(&stream(&lines)[..], true).unwrap();
        assert_eq!((usage.total, usage.set_shared), (11, 25), "U1");
        assert_eq!(paths(&usage.names).len(), 2, "U1");
    }

    #[test]
    fn a_stream_that_is_not_understood_is_refused() {
        for wrong in [&b"{"[..], b"[]\n", &stream(&[line(3, "x", 0, None)])] {
            assert_eq!(collect(wrong, true).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn ranges_that_touch_are_counted_once() {
        let mut ranges = BTreeMap::new();
        for (start, end) in [(10, 20), (30, 40), (15, 18), (20, 25), (0, 5), (24, 31), (50, 60), (0, 70)] {
            add_range(&mut ranges, start, end);
        }
        assert_eq!(ranges, BTreeMap::from([(0, 70)]));
    }
}
