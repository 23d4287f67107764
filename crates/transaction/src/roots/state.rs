//! [`Roots`]: the trees in memory, and the state of subvolumes as a whole.
//!
//! Owns the map of trees, the queue of deleted subvolumes, the failures to drop them, and the highest id. Lock order:
//! no lock is taken under any lock of [`Roots`]. No guard of a lock of [`Roots`] leaves this module.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::{RootId, objectid};

use crate::delayed::tree_view::Tree;

/// Trees by id, and the deletion of subvolumes.
#[derive(Debug)]
pub(crate) struct Roots {
    trees: RwLock<HashMap<RootId, Arc<Tree>>>,
    /// Trees whose root item the running commit has to write.
    changed: Mutex<BTreeSet<RootId>>,
    /// Trees visited by walks of all trees in memory.
    walked: AtomicU64,
    /// Deleted subvolumes that nothing uses any more, in the order in which they are dropped.
    dead: Mutex<VecDeque<RootId>>,
    /// Errors that prevented dropping deleted subvolumes and that were not taken yet.
    drop_failures: Mutex<Vec<Error>>,
    /// Whether a subvolume may share blocks with another one. The flag is never cleared.
    shares_blocks: AtomicBool,
    /// The highest subvolume id so far, or the error that prevented reading it. `None` on a read-only filesystem.
    last_id: Mutex<Option<Result<u64>>>,
}

impl Roots {
    /// The state with the trees that were loaded at open.
    pub(crate) fn new(trees: HashMap<RootId, Arc<Tree>>) -> Self {
        Self {
            trees: RwLock::new(trees),
            changed: Mutex::default(),
            walked: AtomicU64::new(0),
            dead: Mutex::default(),
            drop_failures: Mutex::default(),
            shares_blocks: AtomicBool::new(false),
            last_id: Mutex::default(),
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
        self.changed.lock().insert(id);
    }

    /// Takes the trees in memory whose root items have to be written, by id.
    pub(crate) fn take_changed(&self) -> Vec<Arc<Tree>> {
        let changed = std::mem::take(&mut *self.changed.lock());
        changed.into_iter().filter_map(|id| self.get(id)).collect()
    }

    /// Adds a loaded tree. If two threads load the tree at the same time, both get the copy of the first thread.
    pub(crate) fn keep(&self, tree: Arc<Tree>) -> Arc<Tree> {
        Arc::clone(self.trees.write().entry(tree.id()).or_insert(tree))
    }

    /// Removes a tree that was dropped.
    pub(crate) fn forget(&self, id: RootId) {
        self.trees.write().remove(&id);
    }

    /// Whether subvolumes may share blocks.
    pub(crate) fn shares_blocks(&self) -> bool {
        self.shares_blocks.load(Ordering::Relaxed)
    }

    /// Notes that subvolumes may share blocks.
    pub(crate) fn note_shared_blocks(&self) {
        self.shares_blocks.store(true, Ordering::Relaxed);
    }

    /// Queues a subvolume for the next commits to drop.
    pub(crate) fn push_dead(&self, id: RootId) {
        self.dead.lock().push_back(id);
    }

    /// Deleted subvolumes that are not dropped yet.
    pub(crate) fn dead(&self) -> Vec<RootId> {
        self.dead.lock().iter().copied().collect()
    }

    /// Number of deleted subvolumes that are not dropped yet.
    pub(crate) fn nr_dead(&self) -> usize {
        self.dead.lock().len()
    }

    /// Removes a subvolume whose drop succeeded or failed.
    pub(crate) fn remove_dead(&self, id: RootId) {
        let mut dead = self.dead.lock();
        // Most often it is the first.
        if let Some(at) = dead.iter().position(|other| *other == id) {
            dead.remove(at);
        }
    }

    /// Notes that a subvolume could not be dropped.
    pub(crate) fn note_drop_failure(&self, error: Error) {
        self.drop_failures.lock().push(error);
    }

    /// Takes the latest failure that was not taken yet.
    pub(crate) fn take_drop_failure(&self) -> Option<Error> {
        self.drop_failures.lock().pop()
    }

    /// Notes the highest subvolume id on disk, or the error that prevented reading it.
    pub(crate) fn note_highest_id(&self, highest: Result<u64>) {
        *self.last_id.lock() = Some(highest);
    }

    /// An id that no subvolume has had since the filesystem was opened.
    pub(crate) fn new_id(&self) -> Result<RootId> {
        let mut last = self.last_id.lock();
        let highest = match &*last {
            Some(highest) => highest.clone()?,
            None => {
                return Err(Error::Bug {
                    what: "a subvolume id was requested before the highest id was read".to_owned(),
                });
            }
        };
        if highest >= objectid::LAST_FREE {
            return Err(Error::NoSpace);
        }
        let id = highest.saturating_add(1);
        *last = Some(Ok(id));
        Ok(RootId(id))
    }
}
