//! Replay of a tree log: changes that fsync made durable since the last commit become part of the subvolumes again.
//!
//! All changes are put as delayed items, in one operation. The next commit makes the changes durable and drops the log
//! in one step, so an interrupted replay starts over. On a read-only filesystem the changes stay in memory: a read-only
//! mount shows the fsynced state and writes nothing.
//!
//! Each subvolume's log is read in three passes, because names need inodes, and because old entries may have to be
//! removed before a reference can get its name or its index:
//!
//! | pass | items | what it does |
//! |---|---|---|
//! | inodes | `INODE_ITEM`, `DIR_LOG_INDEX` | takes over attributes; removes attributes, names and data that the log shows as gone |
//! | names | `DIR_INDEX` | adds entries whose inodes' references are not in the log |
//! | rest | `INODE_REF`, `INODE_EXTREF`, `XATTR_ITEM`, `EXTENT_DATA` | adds names, attributes and data |
//!
//! Finally, the links of all touched inodes are counted. An inode without links becomes an orphan; if it is a
//! directory, its entries are removed first.
//!
//! Invariants:
//! - I1. Directory sizes and `nbytes` are not taken from the log, but follow from the added and removed items.
//! - I2. A logged inode without links was an unlinked, open file: its items are skipped.
//! - I3. A log is untrusted, like everything on disk. A log that contradicts the subvolume is an error, and nothing is
//!   written.

use std::collections::{BTreeSet, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

use ubtrfs_format::item::{Compression, DirItem, FileExtentBody, FileType, InodeExtref, InodeItem, InodeRef};
use ubtrfs_format::{Ino, Key, KeyType, RootId, objectid};
use ubtrfs_space::RangeSet;
use ubtrfs_transaction::lock_rank::Alone;
use ubtrfs_transaction::{Engine, FilesystemGeometry, ItemRef, TransHandle, Tree};

use crate::error::{Error, Result};
use crate::items::dir_item::{self, PlannedChange, in_tree};
use crate::items::file_extent::{ExtentAt, ExtentPlan, decode, last_extent_before};
use crate::namei::create::orphan_key;
use crate::types::mode;

/// Replays the log of a filesystem that was just opened, if it has one.
pub(crate) fn replay(engine: &Arc<Engine>) -> Result<()> {
    let Some(log) = engine.take_log() else { return Ok(()) };
    replay_trees(engine, &log.trees).map_err(|error| {
        tracing::error!("the tree log cannot be replayed; `ro,rescue=nologreplay` shows the last commit: {error}");
        error
    })?;
    if engine.read_only().is_none() {
        engine.commit()?;
    }
    Ok(())
}

fn replay_trees(engine: &Engine, logs: &[(RootId, Arc<Tree>)]) -> Result<()> {
    // No other thread uses the filesystem yet, so the replay is one operation that reads and takes no locks of inodes.
    let _alone = Alone::new();
    let op = engine.begin_replay();
    let mut csums = RangeSet::default();
    for (root, log) in logs {
        if !root.is_subvolume() {
            return Err(corrupt(log, "subvolume", root.0, "expected a subvolume's id"));
        }
        // Skip the log of a subvolume that was deleted after its log was begun.
        if engine.root_item(*root)?.is_none_or(|item| item.refs == 0) {
            continue;
        }
        let Some(tree) = engine.tree(*root)? else { continue };
        let geometry = engine.geometry();
        let mut replay = Replay {
            engine,
            op: &op,
            tree: &tree,
            log,
            geometry,
            csums: &mut csums,
            touched: BTreeSet::new(),
            passed_over: HashSet::new(),
        };
        replay.run()?;
        tracing::info!("subvolume {root}: the tree log was replayed");
    }
    Ok(())
}

struct Replay<'a> {
    engine: &'a Engine,
    op: &'a TransHandle<'a>,
    tree: &'a Tree,
    log: &'a Tree,
    geometry: FilesystemGeometry,
    /// Ranges of data whose checksums were added. These checksums are not added again if another file refers to a part
    /// of the same extent.
    csums: &'a mut RangeSet,
    /// Inodes whose links will be counted.
    touched: BTreeSet<Ino>,
    /// Inodes that are skipped (I2).
    passed_over: HashSet<Ino>,
}

impl Replay<'_> {
    fn run(&mut self) -> Result<()> {
        self.each_item(|replay, key, item| match key.item_type {
            KeyType::INODE_ITEM => replay.inode(Ino(key.objectid), item),
            _ => Ok(()),
        })?;
        self.each_item(|replay, key, item| match key.item_type {
            KeyType::DIR_INDEX if !replay.passed_over.contains(&Ino(key.objectid)) => replay.dir_index(key, item),
            _ => Ok(()),
        })?;
        self.each_item(|replay, key, item| {
            let ino = Ino(key.objectid);
            if replay.passed_over.contains(&ino) || replay.inode_item(ino)?.is_none() {
                return Ok(());
            }
            match key.item_type {
                KeyType::INODE_REF => replay.inode_ref(key, item),
                KeyType::INODE_EXTREF => replay.inode_extref(key, item),
                KeyType::XATTR_ITEM => {
                    DirItem::decode_all(item).map_err(in_tree(replay.log))?;
                    replay.op.put(replay.tree, *key, item);
                    Ok(())
                }
                KeyType::EXTENT_DATA => replay.extent(key, item),
                _ => Ok(()),
            }
        })?;
        self.count_links()
    }

    /// Calls `visit` with each item of the log that belongs to any inode, in key order.
    fn each_item(&mut self, mut visit: impl FnMut(&mut Self, &Key, &[u8]) -> Result<()>) -> Result<()> {
        let mut start = Key::new(objectid::FIRST_FREE, KeyType(0), 0);
        let end = Key::new(objectid::LAST_FREE, KeyType(u8::MAX), u64::MAX);
        loop {
            let items = self.log.range(&start, &end, STEP)?;
            for (key, item) in &items {
                visit(self, key, item)?;
            }
            match items.last().and_then(|(key, _)| key.successor()) {
                Some(next) if items.len() == STEP => start = next,
                _ => return Ok(()),
            }
        }
    }

    fn inode_item(&self, ino: Ino) -> Result<Option<InodeItem>> {
        match self.tree.get(&inode_key(ino))? {
            Some(raw) => Ok(Some(InodeItem::decode(&raw).map_err(in_tree(self.tree))?)),
            None => Ok(None),
        }
    }

    fn put_inode(&self, ino: Ino, item: &InodeItem) {
        self.op.put(self.tree, inode_key(ino), item.encode());
    }

    fn apply(&self, changes: Vec<PlannedChange>) {
        dir_item::put_changes(self.op, self.tree, changes);
    }

    // The first pass.

    fn inode(&mut self, ino: Ino, raw: &[u8]) -> Result<()> {
        let logged = InodeItem::decode(raw).map_err(in_tree(self.log))?;
        if logged.nlink == 0 {
            self.passed_over.insert(ino);
            return Ok(());
        }
        self.remove_xattrs(ino)?;
        let is_dir = file_type(&logged) == mode::DIRECTORY;
        if is_dir {
            self.remove_entries(ino)?;
        }
        let mut item = logged.clone();
        match self.inode_item(ino)? {
            Some(before) if file_type(&before) != file_type(&logged) => {
                return Err(corrupt(
                    self.log,
                    "inode mode",
                    logged.mode.into(),
                    "expected the type that the inode has",
                ));
            }
            // Generation 0 means that the log has only the inode's existence, not its attributes. So the inode keeps
            // its attributes, except that it gets the logged size if there is one.
            Some(before) if logged.generation.0 == 0 => {
                let size =
                    if file_type(&logged) == mode::REGULAR && logged.size != 0 { logged.size } else { before.size };
                item = InodeItem { size, ..before };
            }
            Some(before) => {
                item.nbytes = before.nbytes;
                if is_dir {
                    item.size = before.size;
                }
            }
            None => {
                item.nbytes = 0;
                if is_dir {
                    item.size = 0;
                }
            }
        }
        self.put_inode(ino, &item);
        if file_type(&item) == mode::REGULAR {
            self.drop_past_end(ino, item)?;
        }
        self.touched.insert(ino);
        Ok(())
    }

    /// Removes the inode's attributes that are missing from the log. The log holds all attributes that a logged inode
    /// had, so a missing attribute was removed.
    fn remove_xattrs(&self, ino: Ino) -> Result<()> {
        let (start, end) = items_of(ino, KeyType::XATTR_ITEM);
        for (key, item) in self.tree.range(&start, &end, usize::MAX)? {
            let mut entries = DirItem::decode_all(&item).map_err(in_tree(self.tree))?;
            let logged = dir_item::read_entries(self.log, &key)?;
            let nr_before = entries.len();
            entries.retain(|entry| logged.iter().any(|kept| kept.name == entry.name));
            if entries.is_empty() {
                self.op.delete(self.tree, key);
            } else if entries.len() < nr_before {
                let mut value = Vec::new();
                entries.iter().for_each(|entry| entry.encode_into(&mut value));
                self.op.put(self.tree, key, value);
            }
        }
        Ok(())
    }

    /// Removes the entries of a directory that are missing from the log, in the index ranges that the log covers.
    fn remove_entries(&mut self, dir: Ino) -> Result<()> {
        let (start, end) = items_of(dir, KeyType::DIR_LOG_INDEX);
        let mut from = 0;
        for (key, item) in self.log.range(&start, &end, usize::MAX)? {
            let last: [u8; 8] = item
                .first_chunk()
                .copied()
                .ok_or_else(|| corrupt(self.log, "size of a directory range", item.len() as u64, "expected 8"))?;
            let last = u64::from_le_bytes(last);
            self.remove_entries_in(dir, key.offset.max(from)..=last, |log, key, entry| {
                let logged = dir_item::read_entries(log, key)?;
                Ok(logged.iter().any(|kept| kept.name == entry.name))
            })?;
            from = from.max(last.saturating_add(1));
        }
        Ok(())
    }

    /// Removes the entries with these indexes, except those for which `is_kept` returns true.
    fn remove_entries_in(
        &mut self,
        dir: Ino,
        indexes: RangeInclusive<u64>,
        is_kept: impl Fn(&Tree, &Key, &DirItem) -> Result<bool>,
    ) -> Result<()> {
        let (mut first, last) = indexes.into_inner();
        while first <= last {
            let (start, end) = (dir_item::dir_index_key(dir, first), dir_item::dir_index_key(dir, last));
            let items = self.tree.range(&start, &end, STEP)?;
            for (key, item) in &items {
                for entry in DirItem::decode_all(item).map_err(in_tree(self.tree))? {
                    if !is_kept(self.log, key, &entry)? {
                        self.unlink(dir, &entry, key.offset)?;
                    }
                }
            }
            match items.last().and_then(|(key, _)| key.offset.checked_add(1)) {
                Some(next) if items.len() == STEP => first = next,
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    /// Drops the file's extents past its end.
    fn drop_past_end(&self, ino: Ino, mut item: InodeItem) -> Result<()> {
        let sectorsize = self.geometry.sectorsize;
        let end = item.size.checked_next_multiple_of(sectorsize.into()).unwrap_or(u64::MAX);
        let last = last_extent_before(self.tree, ino, u64::MAX, sectorsize)?;
        if last.is_none_or(|last| last.end <= end) {
            return Ok(());
        }
        let mut plan = ExtentPlan::default();
        plan.drop_range(self.tree, ino, end..u64::MAX, sectorsize)?;
        item.nbytes = plan.nbytes(item.nbytes);
        plan.apply(self.op, self.tree, ino);
        self.put_inode(ino, &item);
        Ok(())
    }

    // Names.

    /// Removes a name. `count_links` later counts the links of the inode.
    fn unlink(&mut self, dir: Ino, entry: &DirItem, index: u64) -> Result<()> {
        let Some(child) = child_of(entry) else { return Ok(()) };
        let mut changes = Vec::new();
        dir_item::plan_remove_ref(&mut changes, self.tree, child, dir, &entry.name)?;
        dir_item::plan_remove(&mut changes, self.tree, dir, &entry.name, index)?;
        self.apply(changes);
        self.resize_dir(dir, entry.name.len(), false)?;
        self.touched.insert(child);
        Ok(())
    }

    fn add_link(&mut self, dir: Ino, name: &[u8], child: Ino, index: u64) -> Result<()> {
        dir_item::check_name(name)?;
        let Some(item) = self.inode_item(child)? else { return Ok(()) };
        let file_type = FileType::from_mode(item.mode).unwrap_or(FileType::Regular) as u8;
        let mut changes = Vec::new();
        let target = (dir_item::inode_location(child), file_type);
        dir_item::plan_add(&mut changes, self.tree, &self.geometry, dir, name, target, index)?;
        dir_item::plan_add_ref(&mut changes, self.tree, &self.geometry, child, dir, name, index)?;
        self.apply(changes);
        self.resize_dir(dir, name.len(), true)?;
        // Count the directory's links too: if the directory has none, the entries that the log added to it are removed
        // again.
        self.touched.extend([dir, child]);
        Ok(())
    }

    fn resize_dir(&self, dir: Ino, name_len: usize, grows: bool) -> Result<()> {
        if let Some(mut item) = self.inode_item(dir)? {
            let bytes = (name_len as u64).saturating_mul(2);
            item.size = if grows { item.size.saturating_add(bytes) } else { item.size.saturating_sub(bytes) };
            self.put_inode(dir, &item);
        }
        Ok(())
    }

    fn is_dir(&self, ino: Ino) -> Result<bool> {
        Ok(self.inode_item(ino)?.is_some_and(|item| file_type(&item) == mode::DIRECTORY))
    }

    /// The entry of a name in the subvolume, with its index.
    fn find(&self, dir: Ino, name: &[u8]) -> Result<Option<(DirItem, u64)>> {
        let Some(entry) = dir_item::find_entry(self.tree, dir, name)? else { return Ok(None) };
        let by_ref = match child_of(&entry) {
            Some(child) => self.index_in_refs(self.tree, child, dir, name)?,
            None => None,
        };
        let index = match by_ref {
            Some(index) => Some(index),
            None => dir_item::find_index(self.tree, dir, name)?,
        };
        Ok(index.map(|index| (entry, index)))
    }

    /// The index of a name, from the references of its inode.
    fn index_in_refs(&self, tree: &Tree, child: Ino, dir: Ino, name: &[u8]) -> Result<Option<u64>> {
        let refs = dir_item::read_refs(tree, &dir_item::ref_key(child, dir))?;
        if let Some(found) = refs.iter().find(|inode_ref| inode_ref.name == name) {
            return Ok(Some(found.index));
        }
        let extrefs = dir_item::read_extrefs(tree, &dir_item::extref_key(child, dir, name))?;
        Ok(extrefs.iter().find(|extref| extref.parent == dir.0 && extref.name == name).map(|extref| extref.index))
    }

    /// Removes entries that have this name or index, so that the logged entry can be put in their place. Returns true
    /// if the logged entry is there already.
    fn make_way(&mut self, dir: Ino, name: &[u8], child: Ino, index: u64) -> Result<bool> {
        if let Some((entry, at)) = self.find(dir, name)? {
            let has_ref = self.index_in_refs(self.tree, child, dir, name)?.is_some();
            if child_of(&entry) == Some(child) && at == index && has_ref {
                return Ok(true);
            }
            if child_of(&entry).is_none() {
                return Err(corrupt(self.log, "name of a subvolume", dir.0, "expected no logged name in its place"));
            }
            self.unlink(dir, &entry, at)?;
        }
        for entry in dir_item::read_entries(self.tree, &dir_item::dir_index_key(dir, index))? {
            self.unlink(dir, &entry, index)?;
        }
        Ok(false)
    }

    /// Second pass: replays an entry of a directory that was fsynced.
    fn dir_index(&mut self, key: &Key, item: &[u8]) -> Result<()> {
        let dir = Ino(key.objectid);
        if !self.is_dir(dir)? {
            return Ok(());
        }
        for entry in DirItem::decode_all(item).map_err(in_tree(self.log))? {
            let Some(child) = child_of(&entry) else { continue };
            if self.passed_over.contains(&child) || self.inode_item(child)?.is_none() {
                continue;
            }
            // The third pass adds a name whose reference is in the log.
            if self.index_in_refs(self.log, child, dir, &entry.name)?.is_some() {
                continue;
            }
            if !self.make_way(dir, &entry.name, child, key.offset)? {
                self.add_link(dir, &entry.name, child, key.offset)?;
            }
        }
        Ok(())
    }

    // The third pass.

    /// Replays all names of an inode in one directory.
    fn inode_ref(&mut self, key: &Key, item: &[u8]) -> Result<()> {
        let (ino, dir) = (Ino(key.objectid), Ino(key.offset));
        let logged = InodeRef::decode_all(item).map_err(in_tree(self.log))?;
        // Skip the reference of the root directory to itself.
        if ino == dir || !self.is_dir(dir)? {
            return Ok(());
        }
        for before in dir_item::read_refs(self.tree, key)? {
            if !logged.iter().any(|kept| kept.name == before.name) {
                self.unlink_ref(ino, dir, &before.name, before.index)?;
            }
        }
        for InodeRef { index, name } in logged {
            if !self.make_way(dir, &name, ino, index)? {
                self.add_link(dir, &name, ino, index)?;
            }
        }
        Ok(())
    }

    fn inode_extref(&mut self, key: &Key, item: &[u8]) -> Result<()> {
        let ino = Ino(key.objectid);
        let logged = InodeExtref::decode_all(item).map_err(in_tree(self.log))?;
        for before in dir_item::read_extrefs(self.tree, key)? {
            if !logged.iter().any(|kept| kept.parent == before.parent && kept.name == before.name) {
                self.unlink_ref(ino, Ino(before.parent), &before.name, before.index)?;
            }
        }
        for InodeExtref { parent, index, name } in logged {
            let dir = Ino(parent);
            if self.is_dir(dir)? && !self.make_way(dir, &name, ino, index)? {
                self.add_link(dir, &name, ino, index)?;
            }
        }
        Ok(())
    }

    /// Removes a name for which the subvolume has a reference and the log has no reference.
    fn unlink_ref(&mut self, ino: Ino, dir: Ino, name: &[u8], index: u64) -> Result<()> {
        match dir_item::find_entry(self.tree, dir, name)? {
            Some(entry) if child_of(&entry) == Some(ino) => self.unlink(dir, &entry, index),
            // The name is missing or leads to another inode, so remove only the reference.
            _ => {
                let mut changes = Vec::new();
                dir_item::plan_remove_ref(&mut changes, self.tree, ino, dir, name)?;
                self.apply(changes);
                self.touched.insert(ino);
                Ok(())
            }
        }
    }

    /// Replaces a range of a file by a logged extent.
    fn extent(&mut self, key: &Key, raw: &[u8]) -> Result<()> {
        let ino = Ino(key.objectid);
        let Some(mut item) = self.inode_item(ino)? else { return Ok(()) };
        let sectorsize = self.geometry.sectorsize;
        let at = decode(self.log, key, raw, sectorsize)?;
        let mut plan = ExtentPlan::default();
        plan.drop_range(self.tree, ino, at.start..at.end, sectorsize)?;
        if !at.is_hole() || !self.geometry.no_holes {
            plan.insert(at.start, at.extent.clone());
        }
        item.nbytes = plan.nbytes(item.nbytes);
        plan.apply(self.op, self.tree, ino);
        self.put_inode(ino, &item);
        self.add_csums(&at)
    }

    /// Adds the checksums of an extent to the csum tree, which may lack them.
    fn add_csums(&mut self, at: &ExtentAt) -> Result<()> {
        let FileExtentBody::Regular(extent) = &at.extent.body else { return Ok(()) };
        if extent.disk_bytenr.0 == 0 {
            return Ok(());
        }
        let (start, len_bytes) = match at.extent.compression {
            Compression::None => (extent.disk_bytenr.0.saturating_add(extent.offset), extent.num_bytes),
            _ => (extent.disk_bytenr.0, extent.disk_num_bytes),
        };
        for gap in self.csums.gaps(start..start.saturating_add(len_bytes)) {
            let at = ubtrfs_format::Logical(gap.start);
            for (at, csums) in self.engine.logged_csums(self.log, at, gap.end.saturating_sub(gap.start))? {
                self.op.add_csums(at, csums);
            }
            self.csums.insert(gap);
        }
        Ok(())
    }

    // Counting links, after all items are replayed.

    fn count_links(&mut self) -> Result<()> {
        while let Some(ino) = self.touched.pop_first() {
            let Some(mut item) = self.inode_item(ino)? else { continue };
            let nr_links = self.links(ino)?;
            if item.nlink != nr_links {
                item.nlink = nr_links;
                self.put_inode(ino, &item);
            }
            if nr_links == 0 {
                if file_type(&item) == mode::DIRECTORY {
                    // Remove all entries, even those that came from the log: the code that deletes an orphan expects
                    // the directory to be empty.
                    self.remove_entries_in(ino, 0..=u64::MAX, |_, _, _| Ok(false))?;
                }
                self.op.put(self.tree, orphan_key(ino), Vec::new());
            } else if self.tree.get(&orphan_key(ino))?.is_some() {
                self.op.delete(self.tree, orphan_key(ino));
            }
        }
        Ok(())
    }

    fn links(&self, ino: Ino) -> Result<u32> {
        let mut nr_links = 0usize;
        let (start, _) = items_of(ino, KeyType::INODE_REF);
        let (_, end) = items_of(ino, KeyType::INODE_EXTREF);
        let count = |key: &Key, item: &ItemRef| match key.item_type {
            KeyType::INODE_REF => InodeRef::decode_all(item).map(|refs| refs.len()),
            _ => InodeExtref::decode_all(item).map(|refs| refs.len()),
        };
        for (key, item) in self.tree.range(&start, &end, usize::MAX)? {
            nr_links = nr_links.saturating_add(count(&key, &item).map_err(in_tree(self.tree))?);
        }
        Ok(u32::try_from(nr_links).unwrap_or(u32::MAX))
    }
}

fn inode_key(ino: Ino) -> Key {
    Key::new(ino.0, KeyType::INODE_ITEM, 0)
}

fn items_of(ino: Ino, item_type: KeyType) -> (Key, Key) {
    (Key::new(ino.0, item_type, 0), Key::new(ino.0, item_type, u64::MAX))
}

fn file_type(item: &InodeItem) -> u32 {
    item.mode & mode::TYPE
}

/// The inode that an entry points to; `None` for a subvolume.
fn child_of(entry: &DirItem) -> Option<Ino> {
    (entry.location.item_type == KeyType::INODE_ITEM).then_some(Ino(entry.location.objectid))
}

fn corrupt(log: &Tree, field: &'static str, value: u64, expected: &'static str) -> Error {
    let cause = ubtrfs_format::FormatError::Value { what: "tree log", field, value, expected };
    Error::Engine(ubtrfs_error::Error::from(cause).in_tree(log.id()))
}

/// Number of items read at once.
const STEP: usize = 256;
