//! [`InodeChange`]: the changes between two snapshots, in a form for people to read; and the extents that are new since
//! a generation.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::{Compression, DirItem, FileExtentBody, FileType, InodeItem};
use ubtrfs_format::print::escaped;
use ubtrfs_format::{Generation, Ino, Key, KeyType, RootId};
use ubtrfs_transaction::Job;
use ubtrfs_tree::{Diff, Item, ItemChange, Node, NodePtr, NodeSource};

use super::extents::{MappingComparison, extent_at, sector_of_end};
use super::moves::Moves;
use super::tree::{InodeLink, SentTree, is_regular, is_same};
use crate::Fs;
use crate::error::{Error, Result};
use crate::items::file_extent::{ExtentAt, decode_of};

/// A difference of one inode between two snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeChange {
    /// The kind of change.
    pub kind: ChangeKind,
    /// The file type of the inode, in words.
    pub file_type: &'static str,
    /// A path of the inode: in the newer snapshot or, if the inode was removed, in the older one.
    pub path: Vec<u8>,
    /// The inode's former path, if it was renamed.
    pub from: Option<Vec<u8>>,
    /// Changed bytes of a file: offset and end.
    pub ranges: Vec<Range<u64>>,
    /// Changed attributes: `mode`, `owner`, `size`, `flags`, names of extended attributes.
    pub attributes: Vec<Vec<u8>>,
}

/// The kind of a [`InodeChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// The inode is new, or has an additional name.
    Added,
    /// The content or attributes of the inode differ.
    Changed,
    /// The inode has another name.
    Renamed,
    /// The inode was deleted, or lost one of its names.
    Removed,
}

impl ChangeKind {
    /// The kind in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Changed => "changed",
            Self::Renamed => "renamed",
            Self::Removed => "removed",
        }
    }
}

/// The callback that gets each change.
pub(crate) type ChangeCallback<'f> = &'f mut dyn FnMut(InodeChange) -> Result<()>;

/// An inode that both snapshots have.
struct CommonInode {
    ino: u64,
    old: InodeItem,
    new: InodeItem,
    links_changed: bool,
    xattrs: Vec<Vec<u8>>,
    old_extents: Vec<ExtentAt>,
    new_extents: Vec<ExtentAt>,
}

impl Fs {
    /// Passes the changes between two read-only snapshots to `found`, in the order of inode numbers. `job` counts
    /// changes.
    ///
    /// # Errors
    ///
    /// As for [`Fs::send`], and errors of `found`.
    pub fn changes_between(&self, old: RootId, new: RootId, job: &Job, found: ChangeCallback<'_>) -> Result<()> {
        let _sending = self.begin_send([old, new].into_iter(), job)?;
        if self.context.read_only().is_none() {
            self.engine.commit()?;
        }
        let (old, new) = (SentTree::open(self, old)?, SentTree::open(self, new)?);
        let changes = self.engine.with_walk_source(|source| changes(self, &old, &new, source, job, found));
        if !matches!(&changes, Err(Error::Output(_) | Error::Engine(ubtrfs_error::Error::Cancelled))) {
            self.check_unchanged([&old, &new].into_iter())?;
        }
        changes
    }

    /// Passes the lines of `btrfs subvolume find-new` to `line`: one for each extent with a generation of at least
    /// `since` in a subvolume, and last the subvolume's generation. Paths are escaped.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if there is no such subvolume; an error if `job` is cancelled; an error of reading; or an
    /// error of `line`.
    pub fn find_new(
        &self,
        id: RootId,
        since: Generation,
        job: &Job,
        line: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if self.context.read_only().is_none() {
            self.sync()?;
        }
        let mut from = Some(Key::MIN);
        let mut generation = Generation(0);
        while let Some(start) = from {
            job.check()?;
            // The subvolume may be changing, so each page is read between two commits.
            let page =
                self.engine.with_committed_tree(id, |tree| new_extents(self, &SentTree::of(tree), &start, since))?;
            let page = page.ok_or(Error::NotFound)??;
            for text in &page.lines {
                line(text)?;
            }
            (from, generation) = (page.next, page.generation);
        }
        line(format!("transid marker was {generation}\n").as_bytes())
    }
}

/// A page of lines of `find-new`, and the place at which the next page begins.
struct FindNewPage {
    lines: Vec<Vec<u8>>,
    /// The key at which the next page begins.
    next: Option<Key>,
    /// The subvolume's generation.
    generation: Generation,
}

/// Reads a page of extents of generation `since` or later, beginning at the key `start`. Nodes older than `since` are
/// skipped, because they hold no extents of generation `since` or later.
fn new_extents(fs: &Fs, tree: &SentTree, start: &Key, since: Generation) -> Result<FindNewPage> {
    let root = tree.root();
    let mut page = FindNewPage { lines: Vec::new(), next: None, generation: tree.item().generation };
    let enter = |ptr: &NodePtr| -> Result<(Arc<Node>, usize)> {
        let node = read(tree.source(), ptr)?;
        let slot = if node.is_leaf() { node.search(start).unwrap_or_else(|slot| slot) } else { node.child_slot(start) };
        Ok((node, slot))
    };
    let mut stack = vec![enter(&root.node_ptr())?];
    let mut looked_at = 0;
    while let Some((node, slot)) = stack.last_mut() {
        if *slot >= node.nritems() {
            stack.pop();
            continue;
        }
        let at = std::mem::replace(slot, slot.saturating_add(1));
        if !node.is_leaf() {
            let child = node.child_ptr(at, root.tree);
            if child.generation >= since {
                stack.push(enter(&child)?);
            }
            continue;
        }
        looked_at = usize::saturating_add(looked_at, 1);
        if looked_at > PAGE_ITEMS {
            page.next = Some(node.key(at));
            return Ok(page);
        }
        if node.key(at).item_type == KeyType::EXTENT_DATA {
            let item = Item::new(Arc::clone(node), at);
            page.lines.extend(new_extent(fs, tree, &item, since)?);
        }
    }
    Ok(page)
}

/// Maximum number of items in a page, during which no commit runs.
const PAGE_ITEMS: usize = 10_000;

fn read(source: &dyn NodeSource, ptr: &NodePtr) -> Result<Arc<Node>> {
    let node = source.read_node(ptr)?;
    node.verify(ptr)?;
    Ok(node)
}

/// A line of `find-new`; `None` for an old extent.
fn new_extent(fs: &Fs, tree: &SentTree, item: &Item, since: Generation) -> Result<Option<Vec<u8>>> {
    let key = item.key();
    let ExtentAt { extent, .. } = decode_of(tree.id(), &key, item, fs.geometry.sectorsize)?;
    if extent.generation < since {
        return Ok(None);
    }
    let (start, offset) = extent.disk_extent().map_or((0, 0), |at| (at.disk_bytenr.0, at.offset));
    let mut flags = Vec::new();
    if extent.compression != Compression::None {
        flags.push("COMPRESS");
    }
    match extent.body {
        FileExtentBody::Inline(_) => flags.push("INLINE"),
        FileExtentBody::Prealloc(_) => flags.push("PREALLOC"),
        FileExtentBody::Regular(_) => {}
    }
    if flags.is_empty() {
        flags.push("NONE");
    }
    let mut line = String::new();
    let _ = write!(
        line,
        "inode {} file offset {} len {} disk start {start} offset {offset} gen {} flags {} ",
        key.objectid,
        key.offset,
        extent.num_bytes(),
        extent.generation,
        flags.join("|")
    );
    if tree.inode(key.objectid)?.is_some() {
        line.push_str(&escaped(&tree.any_path(key.objectid)?));
    }
    line.push('\n');
    Ok(Some(line.into_bytes()))
}

fn changes(
    fs: &Fs,
    old: &SentTree,
    new: &SentTree,
    source: &dyn NodeSource,
    job: &Job,
    found: ChangeCallback<'_>,
) -> Result<()> {
    let moves = Moves::new(old, new);
    let mut counted = |change: InodeChange| {
        job.check()?;
        job.advance(1);
        found(change)
    };
    let mut diff = Diff::new(source, Some(old.root()), new.root());
    let mut kept: Option<CommonInode> = None;
    let mut seen = None;
    while let Some(change) = diff.next()? {
        let ino = change.key.objectid;
        if seen != Some(ino) {
            seen = Some(ino);
            if let Some(done) = kept.take() {
                finish(fs, &moves, (old, new), done, &mut counted)?;
            }
            let (before, after) = (old.inode(ino)?, new.inode(ino)?);
            kept = match (before, after) {
                (Some(before), Some(after)) if is_same(ino, &before, &after) => Some(CommonInode {
                    ino,
                    old: before,
                    new: after,
                    links_changed: false,
                    xattrs: Vec::new(),
                    old_extents: Vec::new(),
                    new_extents: Vec::new(),
                }),
                (before, after) => {
                    for (kind, tree, item) in [(ChangeKind::Removed, old, before), (ChangeKind::Added, new, after)] {
                        let Some(item) = item else { continue };
                        for link in tree.links(ino)? {
                            counted(named(kind, &item, tree.path_of(&link)?))?;
                        }
                    }
                    None
                }
            };
        }
        match &mut kept {
            Some(kept) => note(fs, (old, new), kept, &change)?,
            None => super::sender::skip_inode(&mut diff, ino)?,
        }
    }
    kept.map_or(Ok(()), |done| finish(fs, &moves, (old, new), done, &mut counted))
}

fn named(kind: ChangeKind, item: &InodeItem, path: Vec<u8>) -> InodeChange {
    let file_type = type_name(item);
    InodeChange { kind, file_type, path, from: None, ranges: Vec::new(), attributes: Vec::new() }
}

fn type_name(item: &InodeItem) -> &'static str {
    match FileType::from_mode(item.mode) {
        Some(FileType::Regular) => "file",
        Some(FileType::Directory) => "directory",
        Some(FileType::CharDevice | FileType::BlockDevice) => "device",
        Some(FileType::Fifo) => "fifo",
        Some(FileType::Socket) => "socket",
        Some(FileType::Symlink) => "symlink",
        Some(FileType::Xattr) | None => "unknown",
    }
}

fn note(fs: &Fs, (old, new): (&SentTree, &SentTree), kept: &mut CommonInode, change: &ItemChange) -> Result<()> {
    match change.key.item_type {
        KeyType::INODE_REF | KeyType::INODE_EXTREF => kept.links_changed = true,
        KeyType::XATTR_ITEM => {
            let entries = |tree: &SentTree, item: &Option<Item>| -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
                let Some(item) = item else { return Ok(BTreeMap::new()) };
                let entries = DirItem::decode_all(item).map_err(|cause| tree.corrupt(cause))?;
                Ok(entries.into_iter().map(|entry| (entry.name, entry.data)).collect())
            };
            let (before, after) = (entries(old, &change.old)?, entries(new, &change.new)?);
            let names = before.keys().chain(after.keys().filter(|name| !before.contains_key(*name)));
            let differs = names.filter(|name| before.get(*name) != after.get(*name));
            kept.xattrs.extend(differs.cloned());
        }
        KeyType::EXTENT_DATA if is_regular(&kept.new) => {
            let decode = |tree: &SentTree, item: &Option<Item>| -> Result<Option<ExtentAt>> {
                let item = item.as_ref();
                item.map(|item| decode_of(tree.id(), &change.key, item, fs.geometry.sectorsize)).transpose()
            };
            kept.old_extents.extend(decode(old, &change.old)?);
            kept.new_extents.extend(decode(new, &change.new)?);
        }
        _ => {}
    }
    Ok(())
}

/// Passes on the changes of an inode that both snapshots have.
fn finish(
    fs: &Fs,
    moves: &Moves<'_>,
    (old, new): (&SentTree, &SentTree),
    kept: CommonInode,
    found: &mut impl FnMut(InodeChange) -> Result<()>,
) -> Result<()> {
    let CommonInode { ino, old: before, new: after, links_changed, xattrs, old_extents, new_extents } = kept;
    if links_changed && ino != Ino::ROOT_DIR.0 {
        let (goes, _, comes) = moves.compare(ino)?;
        let (mut goes, mut comes) = (goes.into_iter(), comes.into_iter());
        loop {
            let path = |tree: &SentTree, link: &InodeLink| tree.path_of(link);
            match (goes.next(), comes.next()) {
                (Some(from), Some(to)) => {
                    let renamed = named(ChangeKind::Renamed, &after, path(new, &to)?);
                    found(InodeChange { from: Some(path(old, &from)?), ..renamed })?;
                }
                (Some(from), None) => found(named(ChangeKind::Removed, &before, path(old, &from)?))?,
                (None, Some(to)) => found(named(ChangeKind::Added, &after, path(new, &to)?))?,
                (None, None) => break,
            }
        }
    }
    let mut attributes = Vec::new();
    let mut note = |name: &str, differs: bool| attributes.extend(differs.then(|| name.as_bytes().to_vec()));
    note("mode", before.mode != after.mode);
    note("owner", (before.uid, before.gid) != (after.uid, after.gid));
    note("size", is_regular(&after) && before.size != after.size);
    note("flags", before.flags != after.flags);
    attributes.extend(xattrs);
    // The value of `is_cut` does not matter: it concerns only ranges past the end of the file, and `changed_ranges`
    // ignores these ranges.
    let plan =
        MappingComparison { size: after.size, is_cut: false, sectorsize: fs.geometry.sectorsize, has_fallocate: false };
    let mut ranges = plan.changed_ranges(&old_extents, &new_extents);
    // The bytes past the old end of the file are new, even if both trees map them to the same extent.
    if is_regular(&after)
        && after.size > before.size
        && let Some(sector) = sector_of_end(before.size, plan.sectorsize)
        && extent_at(new, ino, before.size, plan.sectorsize)?.is_some_and(|item| item.is_data())
    {
        add_range(&mut ranges, before.size..sector.end.min(after.size));
    }
    if attributes.is_empty() && ranges.is_empty() {
        return Ok(());
    }
    let changed = named(ChangeKind::Changed, &after, new.any_path(ino)?);
    found(InodeChange { ranges, attributes, ..changed })
}

/// Adds a range to a list in ascending order, and joins ranges that overlap or touch.
fn add_range(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    ranges.push(range);
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let joined = next.start <= last.end;
        if joined {
            last.end = last.end.max(next.end);
        }
        joined
    });
}
