//! [`Receives`]: the subvolumes that are being received, so that a second receive under the same name does not treat
//! the first receive as interrupted.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_format::RootId;

use crate::Fs;

/// The running receives.
#[derive(Debug, Default)]
pub(crate) struct Receives {
    ids: Mutex<HashSet<RootId>>,
    /// Number of `ids`, which can be read without the lock.
    nr: AtomicUsize,
}

/// The locked set of running receives. While this guard lives, no other receive begins. This lock is taken before all
/// other locks.
#[derive(Debug)]
pub(crate) struct ReceivesGuard<'r> {
    receives: &'r Receives,
    ids: MutexGuard<'r, HashSet<RootId>>,
}

/// A guard of a receive, which ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Receiving<'r> {
    receives: &'r Receives,
    id: RootId,
}

impl Fs {
    /// Whether a stream is being received into the subvolume. If so, the subvolume changes without requests of its
    /// users.
    pub fn is_being_received(&self, id: RootId) -> bool {
        self.subvolumes.receives.has(id)
    }
}

impl Receives {
    /// Locks the set of running receives, so that no other receive begins.
    pub(crate) fn lock(&self) -> ReceivesGuard<'_> {
        ReceivesGuard { receives: self, ids: self.ids.lock() }
    }

    /// Whether the subvolume is being received.
    fn has(&self, id: RootId) -> bool {
        self.nr.load(Ordering::Acquire) > 0 && self.ids.lock().contains(&id)
    }
}

impl<'r> ReceivesGuard<'r> {
    /// Whether the subvolume is being received.
    pub(crate) fn has(&self, id: RootId) -> bool {
        self.ids.contains(&id)
    }

    /// Begins to receive a subvolume.
    pub(crate) fn begin(mut self, id: RootId) -> Receiving<'r> {
        self.ids.insert(id);
        self.receives.nr.store(self.ids.len(), Ordering::Release);
        Receiving { receives: self.receives, id }
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        let mut ids = self.receives.ids.lock();
        ids.remove(&self.id);
        self.receives.nr.store(ids.len(), Ordering::Release);
    }
}
