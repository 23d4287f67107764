//! [`Names`]: state of names that all directories share.
//!
//! `Names` owns the rename lock, the memory budget for known names of directories, and the unlinked inodes whose
//! deletion failed. Lock order: the rename lock comes after reservations and before the locks of inodes; no other lock
//! is taken under the lock of the unlinked inodes.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::inode::known_names::{KnownNames, NameBudget};
use crate::inode::state::Inode;

/// The rename lock, the memory budget for known names of directories, and the inodes whose deletion failed.
#[derive(Debug)]
pub(crate) struct Names {
    budget: Arc<NameBudget>,
    rename_lock: Mutex<()>,
    /// Unlinked, unused inodes that could not be deleted, mostly for lack of space.
    undeleted: Mutex<Vec<Arc<Inode>>>,
}

impl Names {
    /// Creates the state, with about `max_bytes` of memory for the known names of all directories.
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { budget: NameBudget::new(max_bytes), rename_lock: Mutex::default(), undeleted: Mutex::default() }
    }

    /// The known names of an empty directory.
    pub(crate) fn of_empty_dir(&self) -> KnownNames {
        KnownNames::of_empty(&self.budget)
    }

    /// Keeps an inode whose deletion failed, for another try.
    pub(crate) fn push_undeleted(&self, inode: Arc<Inode>) {
        self.undeleted.lock().push(inode);
    }

    /// Takes all inodes whose deletion failed.
    pub(crate) fn take_undeleted(&self) -> Vec<Arc<Inode>> {
        std::mem::take(&mut *self.undeleted.lock())
    }

    /// Whether the deletion of any inode failed and was not retried yet.
    pub(crate) fn has_undeleted(&self) -> bool {
        !self.undeleted.lock().is_empty()
    }

    /// Blocks other renames while the guard lives, so that a rename can rule out loops of directories.
    pub(crate) fn lock_renames(&self) -> MutexGuard<'_, ()> {
        self.rename_lock.lock()
    }
}
