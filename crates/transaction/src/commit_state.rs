//! [`CommitState`]: the commit lock, and the state of the last commit.
//!
//! Owns the commit lock, and three locks that come after it in the lock order: those of the last superblock, of the
//! next label and of the list of retired blocks. Lock order: the commit lock comes before every other lock of the
//! engine, except the lock for a whole change of a device ([`crate::extents::device_items`]) and the lock for closing a block group
//! ([`crate::extents::block_group_claims`]), which come before the commit lock. No lock is taken under the other locks.
//!
//! Invariants:
//! - I1. Trees change under the commit lock only: a function that changes a tree takes [`CommitWork`] or parts of it.
//! - I2. The superblock in [`CommitState`] is the superblock of the last commit, and only the holder of the commit lock
//!   replaces it. The superblock that an fsync writes for a log is not kept here.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Generation;
use ubtrfs_format::superblock::{LABEL_SIZE, Superblock};
use ubtrfs_space::{DelayedRefs, Extent};

use crate::lock_rank::{MutexGuard, Rank, RankedMutex};
use crate::qgroup::account::QuotaWork;

/// The commit lock, and the result of the last commit.
#[derive(Debug)]
pub(crate) struct CommitState {
    work: RankedMutex<CommitWork>,
    committed: AtomicU64,
    /// Whether commits are held back. Changes only under the commit lock (H1 of `commit::held`).
    pub(crate) is_held: AtomicBool,
    superblock: RwLock<Superblock>,
    /// Feature bits for the superblock of each commit, noted when items that need them are put. Bits are set and never
    /// cleared.
    noted_incompat: AtomicU64,
    /// The label for the superblock of the next commit.
    noted_label: Mutex<Option<[u8; LABEL_SIZE]>>,
    /// Blocks that one transaction both made and replaced. Their addresses stay taken until the commit of that
    /// transaction (I3 of `cow/sink.rs`).
    retired: Mutex<Vec<Extent>>,
}

/// State that only the holder of the commit lock touches (I1).
#[derive(Debug)]
pub(crate) struct CommitWork {
    pub(crate) refs: DelayedRefs,
    /// Data extents of the frozen transaction that no item refers to any more. The log that the last superblock refers
    /// to may use unreferenced extents, so they are freed only when a superblock without that log is durable.
    pub(crate) unreferenced: Vec<Extent>,
    /// Ranges of data extents whose extent items were removed, and whose checksums are to be removed next.
    pub(crate) freed_data: Vec<std::ops::Range<u64>>,
    pub(crate) quota: QuotaWork,
    pub(crate) uuid_tree_in_step: bool,
}

impl CommitState {
    /// Makes the state that follows the commit of `superblock`.
    pub(crate) fn new(superblock: Superblock) -> Self {
        let work = CommitWork {
            refs: DelayedRefs::new(),
            unreferenced: Vec::new(),
            freed_data: Vec::new(),
            quota: QuotaWork::default(),
            uuid_tree_in_step: superblock.uuid_tree_generation == superblock.generation.0,
        };
        Self {
            work: RankedMutex::new(Rank::Commit, work),
            committed: AtomicU64::new(superblock.generation.0),
            is_held: AtomicBool::new(false),
            superblock: RwLock::new(superblock),
            noted_incompat: AtomicU64::new(0),
            noted_label: Mutex::new(None),
            retired: Mutex::default(),
        }
    }

    /// The commit lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, CommitWork> {
        self.work.lock()
    }

    /// The commit lock, if it is free.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, CommitWork>> {
        self.work.try_lock()
    }

    /// Fails if commits are held back (H2 of `commit::held`).
    pub(crate) fn check_not_held(&self) -> Result<()> {
        match self.is_held.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::Refused {
                what: "this would write a part of a transaction to disk".to_owned(),
                hint: "do it before the transaction or after it",
            }),
        }
    }

    /// The generation of the last transaction on disk.
    pub(crate) fn committed(&self) -> Generation {
        Generation(self.committed.load(Ordering::Acquire))
    }

    /// The superblock of the last commit. Take no other lock while the returned guard exists.
    pub(crate) fn superblock(&self) -> RwLockReadGuard<'_, Superblock> {
        self.superblock.read()
    }

    /// Notes that a superblock is durable (I2). `_work` proves that the caller holds the commit lock.
    pub(crate) fn set_committed(&self, superblock: Superblock, _work: &mut CommitWork) {
        let transid = superblock.generation.0;
        *self.superblock.write() = superblock;
        self.committed.store(transid, Ordering::Release);
    }

    /// Notes features that new items need.
    pub(crate) fn note_incompat(&self, bits: u64) {
        self.noted_incompat.fetch_or(bits, Ordering::AcqRel);
    }

    /// All features noted so far.
    pub(crate) fn noted_incompat(&self) -> u64 {
        self.noted_incompat.load(Ordering::Acquire)
    }

    /// Notes a label for the next superblock.
    pub(crate) fn note_label(&self, label: [u8; LABEL_SIZE]) {
        *self.noted_label.lock() = Some(label);
    }

    /// Whether a noted label still waits for a superblock.
    pub(crate) fn has_noted_label(&self) -> bool {
        self.noted_label.lock().is_some()
    }

    /// Takes the noted label.
    pub(crate) fn take_noted_label(&self) -> Option<[u8; LABEL_SIZE]> {
        self.noted_label.lock().take()
    }

    /// Notes blocks that one transaction both made and replaced.
    pub(crate) fn retire(&self, extents: impl IntoIterator<Item = Extent>) {
        self.retired.lock().extend(extents);
    }

    /// Takes the retired blocks, to be freed after the commit.
    pub(crate) fn take_retired(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.retired.lock())
    }
}
