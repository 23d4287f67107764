//! [`WritebackLock`]: controls which tasks may work on a file's extents at the same time.
//!
//! Several batches of one file's data may be in flight at once, so the devices do not idle while the next batch is
//! prepared. All code that changes extents, except batches of writeback, holds the lock exclusively.
//!
//! Invariants:
//! - I1: while a holder is exclusive, no other task has data of the file under writeback.
//! - I2: batches that share the lock have disjoint ranges of the file (I5 of [`crate::inode::file_data`]) and write
//!   into new extents only. Each batch holds [`WritebackLock::extents`] from planning its items until it has put them,
//!   so no other batch changes extents in between.

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_transaction::lock_rank::{LockOrder, Rank, RankedRwLock, ReadGuard, WriteGuard};
use ubtrfs_transaction::race_point;

/// The writeback lock of a file. This lock is taken before the inode's state lock.
#[derive(Debug)]
pub(crate) struct WritebackLock {
    batches: RankedRwLock<()>,
    extents: Mutex<()>,
}

/// A guard that gives the exclusive right to change the file's extents.
pub(crate) type ExclusiveGuard<'i> = WriteGuard<'i, ()>;

/// The lock of a batch whose data is being written.
pub(crate) enum BatchGuard<'i> {
    Shared { _guard: ReadGuard<'i, ()> },
    Exclusive { _guard: ExclusiveGuard<'i> },
}

/// How a batch takes the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The batch does not wait: if the lock is not free, the batch does not get it.
    Never,
    /// The batch waits for an exclusive holder, and shares the lock with other batches. But if the batch must be alone,
    /// it waits for all holders, and takes the lock exclusively.
    ForExclusive,
    /// The batch waits for all holders, and takes the lock exclusively.
    ForAll,
}

impl WritebackLock {
    /// The lock of a file; `key` orders the locks of several files.
    pub(crate) fn new(key: LockOrder) -> Self {
        Self { batches: RankedRwLock::new(Rank::Writeback, key, ()), extents: Mutex::default() }
    }

    /// Takes the lock exclusively: waits for all other holders.
    pub(crate) fn lock(&self) -> ExclusiveGuard<'_> {
        race_point();
        self.batches.write()
    }

    /// Takes the lock exclusively if nothing else holds it.
    pub(crate) fn try_lock(&self) -> Option<ExclusiveGuard<'_>> {
        self.batches.try_write()
    }

    /// Takes the lock for a batch; with `alone`, exclusively. Returns `None` only with [`Wait::Never`].
    pub(crate) fn lock_for_batch(&self, wait: Wait, alone: bool) -> Option<BatchGuard<'_>> {
        race_point();
        match (wait, alone) {
            (Wait::Never, false) => self.batches.try_read().map(|_guard| BatchGuard::Shared { _guard }),
            (Wait::Never, true) => self.try_lock().map(|_guard| BatchGuard::Exclusive { _guard }),
            (Wait::ForExclusive, false) => Some(BatchGuard::Shared { _guard: self.batches.read() }),
            (Wait::ForExclusive, true) | (Wait::ForAll, _) => Some(BatchGuard::Exclusive { _guard: self.lock() }),
        }
    }

    /// Takes the lock that a batch holds from planning its items until it has put them (I2).
    pub(crate) fn extents(&self) -> MutexGuard<'_, ()> {
        self.extents.lock()
    }
}

impl BatchGuard<'_> {
    /// Whether the batch holds the lock exclusively.
    pub(crate) fn is_exclusive(&self) -> bool {
        matches!(self, Self::Exclusive { .. })
    }
}
