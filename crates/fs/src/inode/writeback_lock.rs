//! [`WritebackLock`]: who may work on a file's extents at the same time.
//!
//! Several batches of one file's data may be on their way to the devices at once, so that these never wait for the next
//! batch to be prepared. Everybody else who changes extents works alone.
//!
//! Invariants:
//! - I1: who holds the lock exclusively sees no data of the file under writeback.
//! - I2: batches that share the lock have disjoint ranges of the file (I5 of [`crate::inode::file_data`]) and write into new
//!   extents only. Each plans and puts its items under [`WritebackLock::extents`], so no plan is put that another
//!   batch made wrong.

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The lock of one file. Taken before the inode's state lock.
#[derive(Debug, Default)]
pub(crate) struct WritebackLock {
    batches: RwLock<()>,
    extents: Mutex<()>,
}

/// The right to change the file's extents alone.
pub(crate) type ExclusiveGuard<'i> = RwLockWriteGuard<'i, ()>;

/// What a batch holds while its data is being written.
pub(crate) enum BatchGuard<'i> {
    Shared { _guard: RwLockReadGuard<'i, ()> },
    Exclusive { _guard: ExclusiveGuard<'i> },
}

/// How a batch gets at the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all where others keep it out.
    Never,
    /// For who works alone.
    ForExclusive,
    /// For all, to work alone.
    ForAll,
}

impl WritebackLock {
    /// Waits for all batches and for who works alone.
    pub(crate) fn lock(&self) -> ExclusiveGuard<'_> {
        self.batches.write()
    }

    /// The same without waiting.
    pub(crate) fn try_lock(&self) -> Option<ExclusiveGuard<'_>> {
        self.batches.try_write()
    }

    /// The lock for a batch; with `alone` not together with others.
    pub(crate) fn lock_for_batch(&self, wait: Wait, alone: bool) -> Option<BatchGuard<'_>> {
        match (wait, alone) {
            (Wait::Never, false) => self.batches.try_read().map(|_guard| BatchGuard::Shared { _guard }),
            (Wait::Never, true) => self.try_lock().map(|_guard| BatchGuard::Exclusive { _guard }),
            (Wait::ForExclusive, false) => Some(BatchGuard::Shared { _guard: self.batches.read() }),
            (Wait::ForExclusive, true) | (Wait::ForAll, _) => Some(BatchGuard::Exclusive { _guard: self.lock() }),
        }
    }

    /// For a batch that replaces extents of the file now (I2).
    pub(crate) fn extents(&self) -> MutexGuard<'_, ()> {
        self.extents.lock()
    }
}

impl BatchGuard<'_> {
    /// Whether no other batch of the file is on its way.
    pub(crate) fn is_exclusive(&self) -> bool {
        matches!(self, Self::Exclusive { .. })
    }
}
