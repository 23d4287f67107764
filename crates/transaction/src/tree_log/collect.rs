//! Collects the log of an inode: the items that changed since the last commit, and the other items that a replay of
//! these changes needs.
//!
//! A replay adds names from `INODE_REF` items, and from `DIR_INDEX` items of directories that were fsynced. A replay
//! removes names that `DIR_LOG_INDEX` ranges cover and that no logged `DIR_INDEX` item has, and recounts links. So, for
//! each logged inode:
//!
//! - R1. A new directory that contains one of the inode's names is logged too, and so are the new directories above it.
//! - R2. A directory that lost a name of the inode is logged with the directory's entries, so that a replay removes the
//!   old name.
//! - R3. If the last commit gives one of the inode's names to another inode, that other inode must be dead; the replay
//!   takes the name from the dead inode. An inode that took a name from a dead inode and lost the name again must have
//!   lost it to another logged inode; otherwise a replay would bring the dead inode back. A directory index that a name
//!   had in the last commit must not belong to another name now: a directory that is loaded again reuses the indexes of
//!   entries that were removed from its end.
//! - R4. If a file with several links, or a file of the last commit, has a new name in a directory, the directory is
//!   logged with its entries, as in Linux: after a link or rename and an fsync of one file, a replay also finds the
//!   other files of the directory.
//!
//! For each directory that is logged with its entries:
//!
//! - R5. The inodes of new entries are logged (new directories with their entries), because a replay moves all names of
//!   an inode together.
//! - R6. If the inode of a removed entry still exists, the inode is logged too; without its other names in the log, a
//!   replay could remove its last name.
//!
//! An inode number identifies one inode: numbers in use by the last commit are not given to new inodes before the next
//! commit.
//!
//! Changes that the rules R1 to R6 do not cover force a commit: moved directories, removed directories of the last
//! commit, removed files of the last commit that were logged, names taken over from living inodes, names of subvolumes,
//! extended references, very many changes.

use std::collections::{BTreeMap, HashMap, VecDeque};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, InodeItem, InodeRef};
use ubtrfs_format::{Ino, Key, KeyType};
use ubtrfs_tree::{Batch, Item, Value};

use super::{LoggedInode, SubvolumeLog};
use crate::delayed::tree_view::{ItemRef, Tree};
use crate::engine::Engine;

/// The reason why no log is made.
#[derive(Debug)]
pub(crate) enum LogStop {
    /// A commit is needed instead of a log, for the given reason.
    Commit(&'static str),
    /// Reading failed.
    Error(Error),
}

impl From<Error> for LogStop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<ubtrfs_format::FormatError> for LogStop {
    fn from(error: ubtrfs_format::FormatError) -> Self {
        Self::Error(error.into())
    }
}

/// Collects the changes of one subvolume's log. The caller holds the commit lock and the gate exclusively.
pub(crate) struct Collector<'a> {
    pub(super) engine: &'a Engine,
    pub(super) tree: &'a Tree,
    pub(super) log: &'a mut SubvolumeLog,
    batch: BTreeMap<Key, Option<Value>>,
    /// Keys of logged inodes that changed since the log was last written.
    touched: HashMap<u64, Vec<Key>>,
    waiting: VecDeque<(u64, bool)>,
    /// Inodes that were handled, and whether their entries were logged too.
    done: HashMap<u64, bool>,
}

impl<'a> Collector<'a> {
    pub(crate) fn new(engine: &'a Engine, tree: &'a Tree, log: &'a mut SubvolumeLog) -> Result<Self, LogStop> {
        let committed = engine.committed_generation();
        if tree.is_sealed() {
            return Err(LogStop::Commit("the subvolume was deleted"));
        }
        if tree.root_ptr().generation > committed || tree.root.lock().last_snapshot > committed {
            return Err(LogStop::Commit("the subvolume, or a snapshot of it, was created since the last commit"));
        }
        let mut touched: HashMap<u64, Vec<Key>> = HashMap::new();
        for key in tree.active.take_touched() {
            touched.entry(key.objectid).or_default().push(key);
        }
        let (batch, waiting, done) = Default::default();
        Ok(Self { engine, tree, log, batch, touched, waiting, done })
    }

    /// Returns the changes that bring the log tree up to date and add these inodes to it.
    pub(crate) fn run<'i>(mut self, wanted: impl IntoIterator<Item = &'i Ino>) -> Result<Batch, LogStop> {
        self.waiting.extend(wanted.into_iter().map(|ino| (ino.0, true)));
        let mut logged_before: Vec<u64> = self.touched.keys().copied().collect();
        logged_before.sort_unstable();
        self.waiting.extend(logged_before.into_iter().map(|ino| (ino, false)));
        while let Some((ino, entries)) = self.waiting.pop_front() {
            self.inode(ino, entries)?;
            if self.done.len() > MAX_INODES || self.log.item_bytes > MAX_BYTES {
                return Err(LogStop::Commit("the log would be too large"));
            }
        }
        Ok(self.batch.into_iter().collect())
    }

    /// Returns the item as of the last commit.
    pub(super) fn committed(&self, key: &Key) -> Result<Option<Item>> {
        self.tree.with_root(|source, root| ubtrfs_tree::get(source, root, key))
    }

    /// Returns the current inode item; `None` if the inode is gone or has no links.
    fn living(&self, ino: u64) -> Result<Option<(InodeItem, ItemRef)>, LogStop> {
        let Some(raw) = self.tree.get(&Key::new(ino, KeyType::INODE_ITEM, 0))? else { return Ok(None) };
        let item = InodeItem::decode(&raw)?;
        Ok((item.nlink > 0).then_some((item, raw)))
    }

    fn was_dir(&self, ino: u64) -> Result<bool, LogStop> {
        let Some(raw) = self.committed(&Key::new(ino, KeyType::INODE_ITEM, 0))? else { return Ok(false) };
        Ok(is_dir(&InodeItem::decode(&raw)?))
    }

    fn was_there(&self, ino: u64) -> Result<bool, LogStop> {
        Ok(self.committed(&Key::new(ino, KeyType::INODE_ITEM, 0))?.is_some())
    }

    /// Puts an item into the log, or removes it from the log if `value` is `None`.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "the bytes of items in memory; every item that leaves was counted when it was put"
    )]
    pub(super) fn set(&mut self, key: Key, value: Option<Value>) {
        if self.log.items.get(&key) == value.as_ref() {
            return;
        }
        let bytes = |value: &Value| ITEM_BYTES + value.len() as u64;
        let before = match &value {
            Some(value) => {
                self.log.item_bytes += bytes(value);
                self.log.items.insert(key, value.clone())
            }
            None => self.log.items.remove(&key),
        };
        self.log.item_bytes -= before.as_ref().map_or(0, bytes);
        self.batch.insert(key, value);
    }

    /// Copies the subvolume's current item into the log.
    fn copy(&mut self, key: Key) -> Result<(), LogStop> {
        let value = self.tree.get(&key)?.map(value_of);
        self.set(key, value);
        Ok(())
    }

    fn inode(&mut self, ino: u64, with_entries: bool) -> Result<(), LogStop> {
        let Some((item, raw)) = self.living(ino)? else { return self.drop_inode(ino) };
        let before = self.log.inodes.get(&ino).copied();
        let entries = is_dir(&item) && (with_entries || before.is_some_and(|before| before.entries));
        if self.done.get(&ino).is_some_and(|&with| with || !entries) {
            return Ok(());
        }
        self.done.insert(ino, entries);
        let is_first = before.is_none_or(|before| entries && !before.entries);
        let mut changed = self.touched.remove(&ino).unwrap_or_default();
        if is_first {
            changed = self.tree.active.keys_of(ino);
            if changed.is_empty() {
                return Ok(());
            }
            self.tree.active.watch(ino);
        }
        if changed.is_empty() {
            return Ok(());
        }
        self.log.inodes.insert(ino, LoggedInode { entries, end: before.and_then(|before| before.end) });
        self.set(Key::new(ino, KeyType::INODE_ITEM, 0), Some(value_of(raw)));
        if before.is_none() {
            // A replay deletes the attributes that the log does not have.
            let mut start = Key::new(ino, KeyType::XATTR_ITEM, 0);
            let end = Key::new(ino, KeyType::XATTR_ITEM, u64::MAX);
            loop {
                let found = self.tree.range(&start, &end, XATTRS_AT_ONCE)?;
                let next = found.last().filter(|_| found.len() == XATTRS_AT_ONCE).and_then(|(key, _)| key.successor());
                for (key, value) in found {
                    self.set(key, Some(value_of(value)));
                }
                // An inode may have any number of attributes, so the log may become too large here.
                if self.log.item_bytes > MAX_BYTES {
                    return Err(LogStop::Commit("the log would be too large"));
                }
                let Some(next) = next else { break };
                start = next;
            }
        }
        let mut offsets = Vec::new();
        for key in changed {
            match key.item_type {
                KeyType::INODE_ITEM | KeyType::DIR_ITEM => {}
                KeyType::INODE_REF => self.names(key, &item)?,
                KeyType::XATTR_ITEM => self.copy(key)?,
                KeyType::DIR_INDEX if entries => self.entry(key)?,
                KeyType::DIR_INDEX => {}
                KeyType::EXTENT_DATA => offsets.push(key.offset),
                _ => return Err(LogStop::Commit("an item of a type that is never logged changed")),
            }
        }
        self.extents(ino, &item, offsets)
    }

    /// Removes a deleted inode from the log, so that a replay does not make the inode again. The last commit must not
    /// have the inode: without its log, a replay would leave it as it was before its fsync.
    fn drop_inode(&mut self, ino: u64) -> Result<(), LogStop> {
        let Some(logged) = self.log.inodes.remove(&ino) else { return Ok(()) };
        if logged.entries {
            return Err(LogStop::Commit("a directory that was logged is gone"));
        }
        if self.was_there(ino)? {
            return Err(LogStop::Commit("a file of the last commit was logged, and is gone"));
        }
        let (start, end) = (Key::new(ino, KeyType(0), 0), Key::new(ino, KeyType(u8::MAX), u64::MAX));
        let keys: Vec<Key> = self.log.items.range(start..=end).map(|(key, _)| *key).collect();
        for key in keys {
            self.check_given_up(&key, &[])?;
            self.set(key, None);
        }
        Ok(())
    }

    /// Logs the changed names of an inode in one directory.
    fn names(&mut self, key: Key, item: &InodeItem) -> Result<(), LogStop> {
        let before = self.committed(&key)?;
        let now = self.tree.get(&key)?;
        let is_same = before.as_deref() == now.as_deref();
        if is_dir(item) && !is_same && self.was_there(key.objectid)? {
            return Err(LogStop::Commit("a directory moved"));
        }
        let dir = key.offset;
        let Some(now) = now else {
            self.check_given_up(&key, &[])?;
            self.set(key, None);
            if before.is_some() {
                // R2
                if self.living(dir)?.is_none() {
                    return Err(LogStop::Commit("a file was moved out of a directory that was then removed"));
                }
                self.waiting.push_back((dir, true));
            }
            return Ok(());
        };
        let names = InodeRef::decode_all(&now)?;
        self.check_given_up(&key, &names)?;
        self.set(key, Some(value_of(now)));
        if !is_dir(item) && !is_same && (item.nlink > 1 || self.was_there(key.objectid)?) {
            // R4
            self.waiting.push_back((dir, true));
        }
        if !self.was_there(dir)? {
            // R1. The directory is new, so the last commit has no name in it.
            self.waiting.push_back((dir, false));
            return Ok(());
        }
        names.iter().try_for_each(|name| {
            self.check_index(dir, name, key.objectid)?;
            self.check_name(dir, &name.name, key.objectid)
        })
    }

    /// Checks R3: the last commit gives this index to the same name of the inode, or to no name.
    fn check_index(&self, dir: u64, name: &InodeRef, ino: u64) -> Result<(), LogStop> {
        let Some(raw) = self.committed(&Key::new(dir, KeyType::DIR_INDEX, name.index))? else { return Ok(()) };
        for entry in DirItem::decode_all(&raw)? {
            if entry.name != name.name || inode_of(&entry)? != ino {
                return Err(LogStop::Commit("a directory index was reused"));
            }
        }
        Ok(())
    }

    /// Checks R3 for the names that the log has under this key but that are not in `kept`.
    fn check_given_up(&self, key: &Key, kept: &[InodeRef]) -> Result<(), LogStop> {
        let Some(logged) = self.log.items.get(key).filter(|_| key.item_type == KeyType::INODE_REF) else {
            return Ok(());
        };
        for InodeRef { name, .. } in InodeRef::decode_all(logged)? {
            if kept.iter().any(|kept| kept.name == name) {
                continue;
            }
            let place = Key::new(key.offset, KeyType::DIR_ITEM, name_hash(&name));
            let Some(raw) = self.committed(&place)? else { continue };
            if named(&raw, &name)?.is_none_or(|other| other == key.objectid) {
                continue;
            }
            let heir = self.tree.get(&place)?.map_or(Ok(None), |raw| named(&raw, &name))?;
            if heir.is_none_or(|heir| !self.log.inodes.contains_key(&heir)) {
                return Err(LogStop::Commit("a name was taken over from another inode and then removed"));
            }
        }
        Ok(())
    }

    /// Checks R3: the last commit gives this name to the same inode, to a dead file, or to no inode.
    fn check_name(&self, dir: u64, name: &[u8], ino: u64) -> Result<(), LogStop> {
        let Some(raw) = self.committed(&Key::new(dir, KeyType::DIR_ITEM, name_hash(name)))? else { return Ok(()) };
        let Some(other) = named(&raw, name)?.filter(|other| *other != ino) else { return Ok(()) };
        if self.living(other)?.is_some() {
            return Err(LogStop::Commit("a name was taken over from an inode that still exists"));
        }
        if self.was_dir(other)? {
            return Err(LogStop::Commit("a name was taken over from a directory"));
        }
        Ok(())
    }

    /// Logs a changed entry of a directory that is logged with its entries.
    fn entry(&mut self, key: Key) -> Result<(), LogStop> {
        let before = match self.committed(&key)? {
            Some(raw) => DirItem::decode_all(&raw)?,
            None => Vec::new(),
        };
        let Some(raw) = self.tree.get(&key)? else {
            self.set(key, None);
            for entry in &before {
                // R6
                let child = inode_of(entry)?;
                if self.living(child)?.is_some() {
                    self.waiting.push_back((child, false));
                } else if self.was_dir(child)? {
                    return Err(LogStop::Commit("a directory is gone"));
                }
            }
            if !before.is_empty() {
                let range = Key::new(key.objectid, KeyType::DIR_LOG_INDEX, key.offset);
                self.set(range, Some(key.offset.to_le_bytes().as_slice().into()));
            }
            return Ok(());
        };
        let now = DirItem::decode_all(&raw)?;
        if !before.is_empty() {
            return Err(LogStop::Commit("a directory index was reused"));
        }
        self.set(key, Some(value_of(raw)));
        for entry in &now {
            // R5
            self.waiting.push_back((inode_of(entry)?, true));
        }
        Ok(())
    }
}

/// The inode that has this name in a directory item.
fn named(dir_item: &[u8], name: &[u8]) -> Result<Option<u64>, LogStop> {
    DirItem::decode_all(dir_item)?.iter().find(|entry| entry.name == name).map(inode_of).transpose()
}

/// The inode that an entry points to.
fn inode_of(entry: &DirItem) -> Result<u64, LogStop> {
    match entry.location.item_type {
        KeyType::INODE_ITEM => Ok(entry.location.objectid),
        _ => Err(LogStop::Commit("the name of a subvolume changed")),
    }
}

fn is_dir(item: &InodeItem) -> bool {
    item.mode & 0o170_000 == 0o040_000
}

pub(super) fn value_of(item: ItemRef) -> Value {
    match item {
        ItemRef::Delayed(value) => value,
        ItemRef::Node(item) => (*item).into(),
    }
}

/// Maximum number of inodes for one write of the log.
const MAX_INODES: usize = 2000;
/// Number of attributes that are read at once.
const XATTRS_AT_ONCE: usize = 64;
/// Maximum number of bytes in the log of a subvolume.
const MAX_BYTES: u64 = 16 << 20;
/// Bytes that are counted for each item in addition to its data.
const ITEM_BYTES: u64 = 64;
