//! [`SubvolumeRoots`]: the state of subvolumes as a whole.
//!
//! Owns the queue of deleted subvolumes, the failures to drop them, and the highest id, each under a lock. No lock is
//! taken under these locks, and no guard of them leaves this module.

use std::collections::VecDeque;

use parking_lot::Mutex;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::{RootId, objectid};

/// The deletion of subvolumes, and the ids of new subvolumes.
#[derive(Debug, Default)]
pub(crate) struct SubvolumeRoots {
    /// Deleted subvolumes that nothing uses any more, in the order in which they are dropped.
    dead: Mutex<VecDeque<RootId>>,
    /// Errors that prevented dropping deleted subvolumes and that were not taken yet.
    drop_failures: Mutex<Vec<Error>>,
    /// The highest subvolume id so far, or the error that prevented reading it. `None` on a read-only filesystem.
    last_id: Mutex<Option<Result<u64>>>,
}

impl SubvolumeRoots {
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
