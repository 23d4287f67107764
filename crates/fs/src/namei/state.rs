//! [`NameiState`]: state of names that all directories share.
//!
//! `NameiState` owns the rename lock, the unlinked inodes whose deletion failed, and the deleted subvolumes in use.
//! Lock order: the rename lock comes after reservations and before the locks of inodes; no other lock is taken under
//! the lock of the unlinked inodes.

use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_transaction::lock_rank::{MutexGuard, Rank, RankedMutex};

use crate::inode::state::Inode;
use crate::namei::deleted_subvolume::Deletions;

/// The rename lock, the inodes whose deletion failed, and the deleted subvolumes in use.
#[derive(Debug)]
pub(crate) struct NameiState {
    rename_lock: RankedMutex<()>,
    /// Unlinked, unused inodes that could not be deleted, mostly for lack of space.
    undeleted: Mutex<Vec<Arc<Inode>>>,
    /// Deleted subvolumes that are in use.
    pub(crate) deletions: Deletions,
}

impl NameiState {
    /// Creates the state.
    pub(crate) fn new() -> Self {
        Self {
            rename_lock: RankedMutex::new(Rank::Rename, ()),
            undeleted: Mutex::default(),
            deletions: Deletions::default(),
        }
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
