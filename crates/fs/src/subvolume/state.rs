//! [`Subvolumes`]: locks for changes of subvolumes, and the sends and receives that run.
//!
//! Lock order: the flag lock, the change lock, then reservations and the locks of inodes.

use ubtrfs_transaction::lock_rank::{MutexGuard, Rank, RankedMutex};

use crate::subvolume::receives::Receives;
use crate::subvolume::sends::Sends;

/// State of all changes of subvolumes.
#[derive(Debug)]
pub(crate) struct Subvolumes {
    change_lock: RankedMutex<()>,
    /// Held while a subvolume becomes read-only or writable.
    flag_lock: RankedMutex<()>,
    pub(crate) sends: Sends,
    pub(crate) receives: Receives,
}

impl Default for Subvolumes {
    fn default() -> Self {
        Self {
            change_lock: RankedMutex::new(Rank::Subvolumes, ()),
            flag_lock: RankedMutex::new(Rank::SubvolumeFlags, ()),
            sends: Sends::default(),
            receives: Receives::default(),
        }
    }
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
}
