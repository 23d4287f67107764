//! [`LoadedTrees`]: the trees in memory.
//!
//! Owns the map of trees and the set of trees whose root item changed, each under a lock. Lock order: no lock is taken
//! under any of these locks, except without waiting. No guard of these locks leaves this module.
//!
//! Invariants:
//! - I1. A subvolume's tree leaves memory only if nothing but the map holds it, it is settled ([`Tree::is_settled`]) and
//!   its root item need not be written, and only under the commit lock. So a tree that is not in memory is as the root
//!   tree says.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::RootItem;
use ubtrfs_format::{FormatError, Generation, Key, KeyType, RootId};
use ubtrfs_tree::RootPtr;

use crate::delayed::tree_view::{RootState, Tree};
use crate::engine::{Engine, MemoryPart};
use crate::lock_rank::{self, Rank};
use crate::race::race_point;

/// The trees in memory by id, and whether subvolumes may share blocks.
#[derive(Debug)]
pub(crate) struct LoadedTrees {
    trees: RwLock<HashMap<RootId, Arc<Tree>>>,
    /// Trees whose root item the running commit has to write.
    changed: Mutex<BTreeSet<RootId>>,
    /// Trees visited by walks of all trees in memory.
    walked: AtomicU64,
    /// The next unloading waits until there are at least this many trees.
    unload_at: AtomicUsize,
    /// Number of unloadings so far.
    nr_unloadings: AtomicU64,
    /// Whether a subvolume may share blocks with another subvolume. The flag is never cleared.
    shares_blocks: AtomicBool,
}

impl LoadedTrees {
    /// The trees that were loaded at open.
    pub(crate) fn new(trees: HashMap<RootId, Arc<Tree>>) -> Self {
        Self {
            trees: RwLock::new(trees),
            changed: Mutex::default(),
            walked: AtomicU64::new(0),
            unload_at: AtomicUsize::new(0),
            nr_unloadings: AtomicU64::new(0),
            shares_blocks: AtomicBool::new(false),
        }
    }

    /// A tree that is in memory.
    pub(crate) fn get(&self, id: RootId) -> Option<Arc<Tree>> {
        self.trees.read().get(&id).cloned()
    }

    /// All trees in memory, by id.
    pub(crate) fn all(&self) -> Vec<Arc<Tree>> {
        let mut trees: Vec<_> = self.trees.read().values().cloned().collect();
        self.walked.fetch_add(trees.len() as u64, Ordering::Relaxed);
        trees.sort_by_key(|tree| tree.id());
        trees
    }

    /// Number of trees that walks of all trees in memory have visited. A commit must not need such a walk.
    pub(crate) fn nr_walked(&self) -> u64 {
        self.walked.load(Ordering::Relaxed)
    }

    /// Notes that the root item of a tree in memory has to be written. The caller holds the commit lock.
    pub(crate) fn note_changed(&self, id: RootId) {
        debug_assert!(self.get(id).is_some(), "I1: the root item of tree {id} changes, but the tree is not in memory");
        self.changed.lock().insert(id);
    }

    /// Takes the trees in memory whose root items have to be written, by id.
    pub(crate) fn take_changed(&self) -> Vec<Arc<Tree>> {
        let changed = std::mem::take(&mut *self.changed.lock());
        changed.into_iter().filter_map(|id| self.get(id)).collect()
    }

    /// Adds a new tree.
    pub(crate) fn keep(&self, tree: Arc<Tree>) -> Arc<Tree> {
        Arc::clone(self.trees.write().entry(tree.id()).or_insert(tree))
    }

    /// Number of unloadings so far, for [`Self::keep_loaded`].
    pub(crate) fn nr_unloadings(&self) -> u64 {
        self.nr_unloadings.load(Ordering::Acquire)
    }

    /// Adds a loaded tree. If two threads load the tree at the same time, both get the copy of the first thread.
    /// Returns `None` if trees were unloaded since `nr_unloadings` was read, before the load began: another thread may
    /// have loaded the tree, changed it and unloaded it, so that this copy is old.
    pub(crate) fn keep_loaded(&self, tree: Arc<Tree>, nr_unloadings: u64) -> Option<Arc<Tree>> {
        let mut trees = self.trees.write();
        (self.nr_unloadings() == nr_unloadings).then(|| Arc::clone(trees.entry(tree.id()).or_insert(tree)))
    }

    /// Removes a tree that was dropped.
    pub(crate) fn forget(&self, id: RootId) {
        self.trees.write().remove(&id);
    }

    /// Whether there are so many trees in memory that unused ones should leave. `limit` is the number of trees that fit
    /// into memory.
    pub(crate) fn are_too_many(&self, limit: usize) -> bool {
        self.trees.read().len() > limit.max(self.unload_at.load(Ordering::Relaxed))
    }

    /// Removes trees of subvolumes that no thread uses (I1). `limit` is the number of trees that fit into memory. The
    /// caller holds the commit lock.
    pub(crate) fn unload_unused(&self, limit: usize) {
        lock_rank::check_held(Rank::Commit, "I1: trees leave memory under the commit lock");
        let mut unused = Vec::new();
        let changed = self.changed.lock().clone();
        let mut trees = self.trees.write();
        self.nr_unloadings.fetch_add(1, Ordering::Release);
        trees.retain(|id, tree| {
            let stays = !id.is_subvolume()
                || changed.contains(id)
                || Arc::strong_count(tree) > 1
                || !tree.is_settled()
                || !tree.end_readahead();
            if !stays {
                unused.push(Arc::clone(tree));
            }
            stays
        });
        let nr_left = trees.len();
        trees.shrink_to(nr_left.saturating_mul(2));
        self.unload_at.store(nr_left.saturating_add(limit / 4), Ordering::Relaxed);
        drop(trees);
        // Dropping thousands of trees takes time, so no lock is held.
        drop(unused);
    }

    /// Number of trees in memory.
    pub(crate) fn nr_trees(&self) -> usize {
        self.trees.read().len()
    }

    /// Whether subvolumes may share blocks.
    pub(crate) fn shares_blocks(&self) -> bool {
        self.shares_blocks.load(Ordering::Relaxed)
    }

    /// Notes that subvolumes may share blocks.
    pub(crate) fn note_shared_blocks(&self) {
        self.shares_blocks.store(true, Ordering::Relaxed);
    }
}

impl Engine {
    /// Returns a tree, or `None` if the filesystem does not have it.
    ///
    /// # Errors
    ///
    /// Fails if the root tree cannot be read or the root item is corrupt.
    pub fn tree(&self, id: RootId) -> Result<Option<Arc<Tree>>> {
        self.enter();
        let tree = loop {
            let nr_unloadings = self.trees.nr_unloadings();
            if let Some(tree) = self.trees.get(id) {
                return Ok(Some(tree));
            }
            race_point();
            let Some((key, item)) = self.find_root_item(id)? else { return Ok(None) };
            if id.is_subvolume() && item.last_snapshot > Generation(0) {
                self.trees.note_shared_blocks();
            }
            let tree = Arc::new(Tree::new(
                RootPtr { tree: id, bytenr: item.bytenr, generation: item.generation, level: item.level },
                Arc::clone(&self.store),
                RootState::new(key.offset, item),
            ));
            race_point();
            if let Some(tree) = self.trees.keep_loaded(tree, nr_unloadings) {
                break tree;
            }
        };
        self.unload_trees();
        Ok(Some(tree))
    }

    /// If too many trees are in memory, unloads trees that no thread uses. During a commit, the commit unloads them at
    /// its end.
    pub fn unload_trees(&self) {
        if self.trees.are_too_many(self.trees_max())
            && let Some(_work) = self.commit_state.try_lock()
        {
            self.trees.unload_unused(self.trees_max());
        }
    }

    /// Unloads trees as [`Self::unload_trees`] does, at the end of a commit, before which changed trees could not be
    /// unloaded. The caller holds the commit lock.
    pub(crate) fn unload_committed_trees(&self) {
        if self.trees.nr_trees() > self.trees_max() {
            self.trees.unload_unused(self.trees_max());
        }
    }

    /// Number of trees in memory from which on unused trees are unloaded.
    fn trees_max(&self) -> usize {
        let bytes = self.options.memory_part(TREES_PART);
        usize::try_from(bytes / TREE_BYTES).unwrap_or(usize::MAX).max(TREES_MIN)
    }

    /// Number of trees in memory.
    pub fn nr_loaded_trees(&self) -> usize {
        self.trees.nr_trees()
    }

    /// The root item of a tree that is in memory, which may be newer than the item in the root tree.
    pub fn loaded_root_item(&self, id: RootId) -> Option<RootItem> {
        self.trees.get(id)?.root.lock().item.clone()
    }

    /// Returns the current root item of a tree, or `None` if the tree does not exist.
    ///
    /// # Errors
    ///
    /// Fails if the root tree cannot be read or the root item is corrupt.
    pub fn root_item(&self, id: RootId) -> Result<Option<RootItem>> {
        if let Some(item) = self.loaded_root_item(id) {
            return Ok(Some(item));
        }
        Ok(self.find_root_item(id)?.map(|(_, item)| item))
    }

    fn find_root_item(&self, id: RootId) -> Result<Option<(Key, RootItem)>> {
        let Some(roots) = self.trees.get(RootId::ROOT_TREE) else { return Ok(None) };
        let start = Key::new(id.0, KeyType::ROOT_ITEM, 0);
        let end = Key::new(id.0, KeyType::ROOT_ITEM, u64::MAX);
        let Some((key, data)) = roots.last_le(&end, &start)? else { return Ok(None) };
        let item = RootItem::decode_any(&data).map_err(|cause| Error::from(cause).in_tree(RootId::ROOT_TREE))?;
        Ok(Some((key, item)))
    }

    /// Returns a tree that this filesystem must have, given its feature bits. A missing tree is corruption.
    pub(crate) fn own_tree(&self, id: RootId) -> Result<Arc<Tree>> {
        self.tree(id)?.ok_or_else(|| missing_tree(id))
    }
}

/// The error for a missing tree that must exist.
pub(crate) fn missing_tree(id: RootId) -> Error {
    let expected = "expected this tree to exist";
    let cause = FormatError::Value { what: "RootItem", field: "objectid", value: id.0, expected };
    Error::from(cause).in_tree(RootId::ROOT_TREE)
}

/// Memory of the trees of subvolumes.
const TREES_PART: MemoryPart = (1, 32);
/// Estimated memory of a tree without delayed items, in bytes: root item, view, locks.
const TREE_BYTES: u64 = 2048;
/// The share above is at least this number of trees.
const TREES_MIN: usize = 256;
