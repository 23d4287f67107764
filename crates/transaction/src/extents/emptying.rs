//! [`Relocations`]: the block groups that are being emptied.
//!
//! ```text
//!  begin --> Moving --- condemn --> Condemned -- a commit removes the group --> (gone)
//!              |                        |
//!              +------- end ------------+----> (an ordinary block group)
//! ```
//!
//! Owns the map, under a lock, and the lock under which groups are closed to allocations. Lock order: no other lock is
//! taken under the lock of the map.
//!
//! Invariants:
//! - I1. Soon after a group enters the map, the group is read-only: nothing is allocated in it. The group is removed
//!   only after it is condemned, because until then threads may read the old copies of data that has moved.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_format::Logical;

/// The stage of emptying a block group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emptying {
    /// Extents are being moved out of the block group.
    Moving,
    /// The block group is empty, and no thread reads from it: the next commit removes it.
    Condemned,
}

/// The block groups that are being emptied, by their start address.
#[derive(Debug, Default)]
pub(crate) struct Relocations {
    groups: Mutex<BTreeMap<Logical, Emptying>>,
    /// This lock is held while a relocation makes sure that writers find space in other groups, and forbids allocations
    /// in the group that it empties. Lock order: this lock -> all locks of commits and writeback.
    closing: Mutex<()>,
}

impl Relocations {
    /// Starts emptying a group. Returns false if the group is already being emptied.
    pub(crate) fn begin(&self, start: Logical) -> bool {
        let mut groups = self.groups.lock();
        let is_new = !groups.contains_key(&start);
        groups.entry(start).or_insert(Emptying::Moving);
        is_new
    }

    /// Takes the lock under which a relocation closes its group to allocations, or gives up after `patience`.
    pub(crate) fn try_lock_closing(&self, patience: Duration) -> Option<MutexGuard<'_, ()>> {
        self.closing.try_lock_for(patience)
    }

    pub(crate) fn condemn(&self, start: Logical) {
        let before = self.groups.lock().insert(start, Emptying::Condemned);
        assert!(before.is_some(), "I1: block group {start} is condemned, but nobody empties it");
    }

    pub(crate) fn end(&self, start: Logical) {
        self.groups.lock().remove(&start);
    }

    /// The state of a group, if it is being emptied.
    pub(crate) fn state_of(&self, start: Logical) -> Option<Emptying> {
        self.groups.lock().get(&start).copied()
    }

    /// Whether no group is being emptied.
    pub(crate) fn is_idle(&self) -> bool {
        self.groups.lock().is_empty()
    }

    /// Whether the next commit has a group to remove.
    pub(crate) fn have_condemned(&self) -> bool {
        self.groups.lock().values().any(|state| *state == Emptying::Condemned)
    }
}
