//! [`Receives`]: the subvolumes that are being received, so that a second receive under the same name does not treat
//! the first receive as interrupted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ubtrfs_format::RootId;

use crate::Fs;

/// The running receives.
#[derive(Debug, Default)]
pub(crate) struct Receives {
    ids: Mutex<HashMap<RootId, ReceiveStage>>,
    /// Number of `ids`, which can be read without the lock.
    nr: AtomicUsize,
    /// Wakes the threads that wait for the end of a receive.
    ended: Condvar,
}

/// Where a receive stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceiveStage {
    /// Commands may still come.
    Running,
    /// The receive has stopped, and deletes or keeps its subvolume now.
    Ending,
}

/// The locked set of running receives. While this guard lives, no other receive begins. This lock is taken before all
/// other locks.
#[derive(Debug)]
pub(crate) struct ReceivesGuard<'r> {
    receives: &'r Receives,
    ids: MutexGuard<'r, HashMap<RootId, ReceiveStage>>,
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
        self.nr.load(Ordering::Acquire) > 0 && self.ids.lock().contains_key(&id)
    }
}

impl<'r> ReceivesGuard<'r> {
    /// Whether the subvolume is being received.
    pub(crate) fn has(&self, id: RootId) -> bool {
        self.ids.contains_key(&id)
    }

    /// Waits until a receive that has stopped has deleted or kept its subvolume. Returns whether there was such a
    /// receive.
    pub(crate) fn wait_for_end(&mut self, id: RootId) -> bool {
        let is_ending = |ids: &HashMap<RootId, ReceiveStage>| ids.get(&id) == Some(&ReceiveStage::Ending);
        let waits = is_ending(&self.ids);
        while is_ending(&self.ids) {
            self.receives.ended.wait(&mut self.ids);
        }
        waits
    }

    /// Begins to receive a subvolume.
    pub(crate) fn begin(mut self, id: RootId) -> Receiving<'r> {
        self.ids.insert(id, ReceiveStage::Running);
        self.receives.nr.store(self.ids.len(), Ordering::Release);
        Receiving { receives: self.receives, id }
    }
}

impl Receiving<'_> {
    /// Notes that the receive has stopped, so that another receive of this name waits for the end.
    pub(crate) fn stop(&self) {
        self.receives.ids.lock().insert(self.id, ReceiveStage::Ending);
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        let mut ids = self.receives.ids.lock();
        ids.remove(&self.id);
        self.receives.nr.store(ids.len(), Ordering::Release);
        self.receives.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receive_that_has_stopped_is_waited_for_and_a_running_one_is_not() {
        let receives = Receives::default();
        let id = RootId(256);
        let receiving = receives.lock().begin(id);
        let mut locked = receives.lock();
        assert!(!locked.wait_for_end(id) && locked.has(id));
        drop(locked);
        receiving.stop();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut locked = receives.lock();
                locked.wait_for_end(id);
                assert!(!locked.has(id));
            });
            drop(receiving);
        });
        assert!(!receives.has(id));
    }
}
