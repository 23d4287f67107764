//! [`Names`]: state of names that all directories share.
//!
//! Owns the rename lock and the memory budget for known names of directories. Lock order: the rename lock comes after
//! reservations and before the locks of inodes.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::inode::known_names::{KnownNames, NameBudget};

/// The rename lock, and the memory budget for known names of directories.
#[derive(Debug)]
pub(crate) struct Names {
    budget: Arc<NameBudget>,
    rename_lock: Mutex<()>,
}

impl Names {
    /// Creates the state, with about `max_bytes` of memory for the known names of all directories.
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { budget: NameBudget::new(max_bytes), rename_lock: Mutex::default() }
    }

    /// The known names of an empty directory.
    pub(crate) fn of_empty_dir(&self) -> KnownNames {
        KnownNames::of_empty(&self.budget)
    }

    /// Prevents other renames from moving directories while the guard lives, so that a rename can rule out loops.
    pub(crate) fn lock_renames(&self) -> MutexGuard<'_, ()> {
        self.rename_lock.lock()
    }
}
