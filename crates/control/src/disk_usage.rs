//! The bytes that files use, and how many of these bytes are shared: `filesystem du`.
//!
//! | command     | needs                                                                        |
//! |-------------|------------------------------------------------------------------------------|
//! | a file      | nothing but the file                                                         |
//! | a directory with everything below it | the rights of an administrator ([`Context::require_admin`]) |
//!
//! The numbers are those of btrfs-progs. An extent counts with its length in the file, and is shared if several files,
//! subvolumes, or places in one file use it. Inline data and data that is not on disk yet are not counted.
//! - U1. A file with several names below the directory is counted once.

use std::collections::{BTreeMap, HashSet};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileType};
use ubtrfs_fs::{Error, ExtentKind, InodeId, SharedExtents};

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
}

/// The bytes of a file or of all files below a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// Files and directories below the directory; each directory comes after its content.
    pub entries: Vec<Entry>,
    /// Bytes of all files.
    pub total: u64,
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

/// A file or directory of the walk (not a tree block), with the bytes counted for it so far.
struct Node {
    path: Vec<u8>,
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
    if context.fs.getattr(id)?.is_dir() {
        context.require_admin()?;
    }
    if context.fs.read_only().is_none() {
        // Write out dirty data, because only data on disk has extents that can be counted.
        context.fs.sync()?;
    }
    let mut walk = Walk {
        context,
        nodes: Vec::new(),
        uses: Vec::new(),
        seen: HashSet::new(),
        known: SharedExtents::default(),
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
    let (total, exclusive) = (top.total, top.exclusive);
    let entries = if request.lists { walk.entries()? } else { Vec::new() };
    Ok(Response { entries, total, exclusive, set_shared })
}

struct Walk<'c, 'a> {
    context: &'c Context<'a>,
    /// The visited files and directories; each directory comes before its content.
    nodes: Vec<Node>,
    /// Uses of extents that are not counted yet.
    uses: Vec<Use>,
    /// Files that were visited (U1).
    seen: HashSet<InodeId>,
    known: SharedExtents,
    /// The ranges on disk of shared extents: maps the start of each range to its end.
    shared: BTreeMap<u64, u64>,
}

impl Walk<'_, '_> {
    /// Visits everything below a file or directory.
    fn visit(&mut self, top: InodeId) -> Result<()> {
        self.nodes.push(Node { path: Vec::new(), parent: None, total: 0, exclusive: 0 });
        if !self.context.fs.getattr(top)?.is_dir() {
            return self.file(top, 0);
        }
        let mut open = vec![(0, self.entries_of(top)?.into_iter())];
        while let Some((node, entries)) = open.last_mut() {
            let Some((id, is_dir, name)) = entries.next() else {
                open.pop();
                continue;
            };
            if !is_dir && !self.seen.insert(id) {
                continue;
            }
            let parent = *node;
            let mut path = self.nodes[parent].path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(name);
            self.nodes.push(Node { path, parent: Some(parent), total: 0, exclusive: 0 });
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
        let shared = self.context.fs.extents_are_shared(&mut self.known, &extents)?;
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

    /// Returns everything below the top; each directory comes after its content.
    fn entries(&self) -> Result<Vec<Entry>> {
        if self.nodes.len() > ENTRIES_MAX {
            return Err(Failure::new(Errno::TOOBIG, "too many files for one list; use -s to print only the sums"));
        }
        let mut below: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some(parent) = node.parent {
                below[parent].push(index);
            }
        }
        let mut entries = Vec::with_capacity(self.nodes.len());
        // Build the list in reverse order: each directory before its content. The list is reversed at the end.
        let mut open = below[0].clone();
        while let Some(index) = open.pop() {
            let Node { path, total, exclusive, .. } = &self.nodes[index];
            entries.push(Entry { path: path.clone(), total: *total, exclusive: *exclusive });
            open.extend(&below[index]);
        }
        entries.reverse();
        Ok(entries)
    }
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
    fn ranges_that_touch_are_counted_once() {
        let mut ranges = BTreeMap::new();
        for (start, end) in [(10, 20), (30, 40), (15, 18), (20, 25), (0, 5), (24, 31), (50, 60), (0, 70)] {
            add_range(&mut ranges, start, end);
        }
        assert_eq!(ranges, BTreeMap::from([(0, 70)]));
    }
}
