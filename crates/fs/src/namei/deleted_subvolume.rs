//! Subvolumes without a name: their inodes stay usable until no inode of the subvolume is in use any more. Then the
//! inodes leave memory, and the engine drops the tree. (`subvolume/delete.rs` removes the name.)
//!
//! - I1. Before the engine drops a tree, all of its inodes are out of memory and dead. Earlier work, such as deleting
//!   the items of an unlinked inode, may still be running, but the engine discards changes that are put into the tree
//!   afterwards.
//! - I2. Lock order: `Deletions::used` -> shards of the inode cache.
//! - I3. A subvolume is deleted once, so its tree is dropped once.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::RootId;

use crate::Fs;
use crate::file::truncate::forget_dirty_past;
use crate::inode::cache::InodeCache;
use crate::types::InodeId;

/// Deleted subvolumes that may still be in use.
#[derive(Debug, Default)]
pub(crate) struct Deletions {
    /// Deleted subvolumes whose inodes may still be used, each with the inodes that the last search found in use. The
    /// next search waits until all of these inodes are unused.
    used: Mutex<HashMap<RootId, HashSet<InodeId>>>,
    nr_used: AtomicUsize,
}

impl Deletions {
    /// Notes that a subvolume was deleted.
    pub(crate) fn add(&self, id: RootId) {
        let other = self.used.lock().insert(id, HashSet::new());
        assert!(other.is_none(), "I3: subvolume {id} is deleted again");
        self.nr_used.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a use of an inode ended. Returns true if the inode's subvolume is deleted and none of its inodes is
    /// used; only one call for a subvolume returns true.
    fn was_last(&self, given_back: InodeId, inodes: &InodeCache) -> bool {
        let mut used = self.used.lock();
        let Some(known) = used.get_mut(&given_back.root) else { return false };
        if !inodes.is_used(given_back) {
            known.remove(&given_back);
        }
        if !known.is_empty() {
            return false;
        }
        *known = inodes.used_of(given_back.root);
        let is_last = known.is_empty();
        if is_last {
            used.remove(&given_back.root);
            self.nr_used.fetch_sub(1, Ordering::SeqCst);
        }
        is_last
    }
}

impl Fs {
    /// Ends the deletion of a subvolume if `given_back` was its last used inode.
    pub(crate) fn end_deletion(&self, given_back: InodeId) {
        if self.names.deletions.nr_used.load(Ordering::SeqCst) > 0
            && self.names.deletions.was_last(given_back, &self.inodes)
        {
            self.let_go(given_back.root);
        }
    }

    /// Ends the deletion of all deleted subvolumes, even with inodes in use: the filesystem is being closed.
    pub(crate) fn end_all_deletions(&self) {
        let used = std::mem::take(&mut *self.names.deletions.used.lock());
        self.names.deletions.nr_used.store(0, Ordering::SeqCst);
        if self.context.read_only().is_none() {
            used.into_keys().for_each(|id| self.let_go(id));
        }
    }

    /// Drops a deleted subvolume: first its inodes (I1), then its tree.
    fn let_go(&self, id: RootId) {
        if let Some(subvolume) = self.entered.forget(id) {
            subvolume.mark_gone();
        }
        // Inodes are made under the lock of a directory, so new inodes may appear until all directories are dead.
        loop {
            let inodes = self.inodes.all_of(id);
            if inodes.is_empty() {
                break;
            }
            for inode in inodes {
                let _writeback = inode.writeback.lock();
                let mut state = inode.state.write();
                state.dead = true;
                forget_dirty_past(self, &mut state, 0);
                drop(state);
                self.inodes.remove(inode.id);
            }
        }
        debug_assert!(self.inodes.all_of(id).iter().all(|inode| inode.state.read().dead), "I1: an inode lives on");
        self.engine.drop_subvolume(id);
        self.context.commits.note_change();
    }
}
