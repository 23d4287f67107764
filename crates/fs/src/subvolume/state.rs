//! [`Subvolumes`]: the subvolumes that were loaded into memory ("entered"), and those that are being deleted.
//!
//! `Subvolumes` owns the flag lock, the change lock, the map of entered subvolumes, and [`Deletions`]. Lock order: the
//! change lock comes before reservations and the locks of inodes; no other lock is taken under the lock of the map.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard, RwLock};
use ubtrfs_format::RootId;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::subvolume::Subvolume;
use crate::subvolume::delete::Deletions;
use crate::subvolume::receives::Receives;
use crate::subvolume::sends::Sends;

/// The subvolumes in memory.
#[derive(Debug, Default)]
pub(crate) struct Subvolumes {
    entered: RwLock<HashMap<RootId, Arc<Subvolume>>>,
    change_lock: Mutex<()>,
    /// Held while a subvolume becomes read-only or writable.
    flag_lock: Mutex<()>,
    pub(in crate::subvolume) deletions: Deletions,
    pub(crate) sends: Sends,
    pub(crate) receives: Receives,
}

impl Subvolumes {
    /// Blocks creation, change and deletion of subvolumes by other threads.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        self.change_lock.lock()
    }

    /// Blocks changes of read-only flags by other threads. This lock comes before all others except the lock of running
    /// receives, because its holder waits for running changes.
    pub(crate) fn lock_flags(&self) -> MutexGuard<'_, ()> {
        self.flag_lock.lock()
    }

    /// A subvolume, if it was entered.
    pub(crate) fn get(&self, id: RootId) -> Option<Arc<Subvolume>> {
        self.entered.read().get(&id).cloned()
    }

    /// All subvolumes that were entered.
    pub(crate) fn all(&self) -> Vec<Arc<Subvolume>> {
        self.entered.read().values().cloned().collect()
    }

    /// Whether the subvolume was deleted since the filesystem was opened.
    pub(crate) fn is_deleted(&self, id: RootId) -> bool {
        self.deletions.has(id)
    }

    /// Adds an entered subvolume to the map. If two threads enter a subvolume at once, both get the subvolume that the
    /// first thread made.
    fn keep(&self, subvolume: Arc<Subvolume>) -> Arc<Subvolume> {
        Arc::clone(self.entered.write().entry(subvolume.id).or_insert(subvolume))
    }

    /// Removes a deleted subvolume from memory.
    pub(in crate::subvolume) fn forget(&self, id: RootId) -> Option<Arc<Subvolume>> {
        self.entered.write().remove(&id)
    }
}

impl Fs {
    /// The subvolume. The first call enters the subvolume and deletes its unlinked inodes, so the caller must hold no
    /// inode lock.
    pub(crate) fn subvolume(&self, root: RootId) -> Result<Arc<Subvolume>> {
        if let Some(subvolume) = self.subvolumes.get(root) {
            return Ok(subvolume);
        }
        if !root.is_subvolume() || self.subvolumes.is_deleted(root) {
            return Err(Error::NotFound);
        }
        let item = self.engine.root_item(root)?.filter(|item| item.refs > 0).ok_or(Error::NotFound)?;
        let tree = self.engine.tree(root)?.ok_or(Error::NotFound)?;
        let takes_changes = self.read_only().is_none();
        let subvolume = self.subvolumes.keep(Arc::new(Subvolume::enter(root, tree, &item, takes_changes)));
        if takes_changes {
            // A failed deletion does not prevent use of the subvolume.
            if let Err(error) = self.delete_orphans(&subvolume) {
                tracing::warn!("subvolume {root}: deleting unlinked inodes failed: {error}");
            }
        }
        Ok(subvolume)
    }
}
