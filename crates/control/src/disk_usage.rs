//! The bytes that files use, and how many of these bytes are shared: `filesystem du`.
//!
//! | command     | needs                                                                        |
//! |-------------|------------------------------------------------------------------------------|
//! | a file      | nothing but the file                                                         |
//! | a directory with everything below it | the right to read each file and each directory; others are not counted |
//!
//! The numbers are those of btrfs-progs. An extent counts with its length in the file, and is shared if several files,
//! subvolumes, or places in one file use it. Inline data and data that is not on disk yet are not counted.
//! - U1. A file with several names below the directory is counted once.

use std::collections::{BTreeMap, HashSet};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileType};
use ubtrfs_fs::{Error, ExtentKind, InodeId};

use crate::access::can_read;
use crate::execute::{Context, FileNr};
use crate::failure::{Failure, Result};

/// Counts the bytes of a file, or of all files below a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Request {
    /// The file or directory.
    pub of: FileNr,
    /// Whether to list everything below the directory.
    pub lists: bool,
    /// Whether the list consists of names ([`Response::names`]) instead of paths, whose length grows with the square of
    /// the depth.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_name: bool,
}

/// The bytes of a file or of all files below a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// Files and directories below the directory; each directory comes after its content.
    pub entries: Vec<Entry>,
    /// With `by_name`, files and directories below the directory; each directory comes before its content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<NamedEntry>,
    /// Bytes of all files.
    pub total: u64,
    /// The number of files and directories that the caller may not read. They are not counted.
    #[serde(default)]
    pub unreadable: u64,
    /// The part of `total` that is not shared.
    pub exclusive: u64,
    /// Bytes on disk in shared extents that the files use. A byte that several of the files use is counted once.
    pub set_shared: u64,
}

/// A file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The path below the directory of the request.
    #[serde(with = "crate::bytes")]
    pub path: Vec<u8>,
    /// Bytes of the file, or of all files below the directory.
    pub total: u64,
    /// The part of `total` that is not shared.
    pub exclusive: u64,
}

/// A file or directory by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedEntry {
    /// The name in the directory that holds it.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
    /// The index of the directory that holds it, in [`Response::names`]; `None` for the directory of the request.
    pub parent: Option<u32>,
    /// As in [`Entry`].
    pub total: u64,
    /// As in [`Entry`].
    pub exclusive: u64,
}

/// A file or directory of the walk (not a tree block), with the bytes counted for it so far.
struct Node {
    name: Vec<u8>,
    parent: Option<usize>,
    total: u64,
    exclusive: u64,
}

/// A part of an extent that a file uses. `node` is the file's index in [`Walk::nodes`].
struct Use {
    node: usize,
    len_bytes: u64,
    /// The logical address of the part. (For a compressed extent, the address of the extent.)
    at: u64,
    extent: (Logical, u64),
}

pub(crate) fn execute(context: &Context<'_>, request: &Request) -> Result<Response> {
    let id = context.inode(request.of)?;
    if context.fs.read_only().is_none() {
        // Write out dirty data, because only data on disk has extents that can be counted.
        context.fs.sync()?;
    }
    let mut walk = Walk {
        context,
        nodes: Vec::new(),
        uses: Vec::new(),
        seen: HashSet::new(),
        unreadable: 0,
        shared: BTreeMap::new(),
    };
    walk.visit(id)?;
    walk.settle()?;
    // In `nodes`, each directory comes before its content. So in reverse order, the sums of a directory's children are
    // complete before they are added to the directory.
    for index in (1..walk.nodes.len()).rev() {
        let Node { parent, total, exclusive, .. } = walk.nodes[index];
        if let Some(parent) = parent.and_then(|parent| walk.nodes.get_mut(parent)) {
            parent.total = parent.total.saturating_add(total);
            parent.exclusive = parent.exclusive.saturating_add(exclusive);
        }
    }
    let set_shared = walk.set_shared();
    let Some(top) = walk.nodes.first() else { return Ok(Response::default()) };
    let (total, exclusive, unreadable) = (top.total, top.exclusive, walk.unreadable);
    let mut response = Response { total, exclusive, set_shared, unreadable, ..Response::default() };
    match (request.lists, request.by_name) {
        (false, _) => {}
        (_, true) => response.names = walk.names()?,
        (_, false) => response.entries = entries(walk.names()?),
    }
    Ok(response)
}

struct Walk<'c, 'a> {
    context: &'c Context<'a>,
    /// The visited files and directories; each directory comes before its content.
    nodes: Vec<Node>,
    /// Uses of extents that are not counted yet.
    uses: Vec<Use>,
    /// Files that were visited (U1).
    seen: HashSet<InodeId>,
    unreadable: u64,
    /// The ranges on disk of shared extents: maps the start of each range to its end.
    shared: BTreeMap<u64, u64>,
}

impl Walk<'_, '_> {
    /// Visits everything below a file or directory.
    fn visit(&mut self, top: InodeId) -> Result<()> {
        self.nodes.push(Node { name: Vec::new(), parent: None, total: 0, exclusive: 0 });
        if !self.context.fs.getattr(top)?.is_dir() {
            return self.file(top, 0);
        }
        if !self.may_read(top)? {
            return Ok(());
        }
        let mut open = vec![(0, self.entries_of(top)?.into_iter())];
        while let Some((node, entries)) = open.last_mut() {
            let Some((id, is_dir, name)) = entries.next() else {
                open.pop();
                continue;
            };
            if (!is_dir && !self.seen.insert(id)) || !self.may_read(id)? {
                continue;
            }
            let parent = *node;
            self.nodes.push(Node { name, parent: Some(parent), total: 0, exclusive: 0 });
            let index = self.nodes.len() - 1;
            if is_dir {
                self.context.job.check().map_err(Error::from)?;
                open.push((index, self.entries_of(id)?.into_iter()));
            } else {
                self.file(id, index)?;
            }
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

    /// The directories and regular files in a directory. The root directories of nested subvolumes are included.
    fn entries_of(&self, dir: InodeId) -> Result<Vec<(InodeId, bool, Vec<u8>)>> {
        let mut found = Vec::new();
        let listed = self.context.fs.readdir(dir, 0, &mut |entry| {
            let is_dir = entry.file_type == FileType::Directory;
            if entry.name != b"." && entry.name != b".." && (is_dir || entry.file_type == FileType::Regular) {
                found.push((entry.id, is_dir, entry.name.to_vec()));
            }
            true
        });
        match listed {
            // The directory was removed during the walk.
            Err(Error::NotFound) => Ok(Vec::new()),
            listed => listed.map(|_| found).map_err(Failure::from),
        }
    }

    fn file(&mut self, id: InodeId, node: usize) -> Result<()> {
        let extents = match self.context.fs.extents(id) {
            Ok(extents) => extents,
            Err(Error::NotFound) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for extent in extents {
            if !matches!(extent.kind, ExtentKind::Data | ExtentKind::Prealloc) {
                continue;
            }
            let skipped = if extent.compression == Compression::None { extent.extent_offset } else { 0 };
            self.uses.push(Use {
                node,
                len_bytes: extent.len_bytes,
                at: extent.disk_bytenr.0.saturating_add(skipped),
                extent: (extent.disk_bytenr, extent.disk_len_bytes),
            });
        }
        if self.uses.len() >= BATCH { self.settle() } else { Ok(()) }
    }

    /// Adds the bytes of the collected `uses` to the files that use them, and to the shared ranges.
    fn settle(&mut self) -> Result<()> {
        let uses = std::mem::take(&mut self.uses);
        let mut extents: Vec<(Logical, u64)> = uses.iter().map(|found| found.extent).collect();
        extents.sort_unstable();
        extents.dedup();
        let shared = self.context.fs.extents_are_shared(&extents)?;
        let shared: HashSet<Logical> =
            extents.into_iter().zip(shared).filter(|(_, shared)| *shared).map(|((bytenr, _), _)| bytenr).collect();
        for Use { node, len_bytes, at, extent } in uses {
            let node = &mut self.nodes[node];
            node.total = node.total.saturating_add(len_bytes);
            if shared.contains(&extent.0) {
                add_range(&mut self.shared, at, at.saturating_add(len_bytes));
            } else {
                node.exclusive = node.exclusive.saturating_add(len_bytes);
            }
        }
        Ok(())
    }

    fn set_shared(&self) -> u64 {
        self.shared.iter().map(|(start, end)| end.saturating_sub(*start)).sum()
    }

    /// Returns everything below the top; each directory comes before its content.
    fn names(&self) -> Result<Vec<NamedEntry>> {
        if self.nodes.len() > ENTRIES_MAX {
            return Err(Failure::new(Errno::TOOBIG, "too many files for one list; use -s to print only the sums"));
        }
        // The top has index 0 and no entry.
        let entry = |Node { name, parent, total, exclusive }: &Node| NamedEntry {
            name: name.clone(),
            parent: parent.and_then(|parent| u32::try_from(parent.checked_sub(1)?).ok()),
            total: *total,
            exclusive: *exclusive,
        };
        Ok(self.nodes.iter().skip(1).map(entry).collect())
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

fn entries(names: Vec<NamedEntry>) -> Vec<Entry> {
    let mut entries = Vec::with_capacity(names.len());
    let visit = |path: &[u8], entry: &NamedEntry| {
        entries.push(Entry { path: path.to_vec(), total: entry.total, exclusive: entry.exclusive });
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(()) = visit_paths(&names, visit);
    entries
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
const BATCH: usize = 4096;
/// The largest number of entries in a list. An answer with this many entries has about 40 MB.
const ENTRIES_MAX: usize = 300_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_visited_after_their_content() {
        let entry = |(name, parent): &(&str, Option<u32>)| NamedEntry {
            name: name.as_bytes().to_vec(),
            parent: *parent,
            total: 0,
            exclusive: 0,
        };
        // The last two are not below an earlier entry.
        let names = [("d", None), ("a", Some(0)), ("e", Some(0)), ("b", Some(2)), ("f", None), ("x", Some(9))];
        let paths: Vec<Vec<u8>> =
            entries(names.iter().map(entry).collect()).into_iter().map(|entry| entry.path).collect();
        assert_eq!(paths, [&b"d/a"[..], b"d/e/b", b"d/e", b"d", b"f", b"x"]);
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
