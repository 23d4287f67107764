//! [`CommitState`]: the commit lock, and what is known of the last commit.
//!
//! Owns the commit lock, the last superblock and the list of retired blocks. Lock order: the commit lock comes before every
//! other lock of the engine; nothing is taken under the other two.
//!
//! Invariants:
//! - I1. Trees change under the commit lock only: whoever changes one holds [`CommitWork`].
//! - I2. The superblock here is the one that was written last, and only the holder of the commit lock replaces it.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use ubtrfs_format::Generation;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_space::{DelayedRefs, Extent};

/// The lock and the result of commits.
#[derive(Debug)]
pub(crate) struct CommitState {
    work: Mutex<CommitWork>,
    committed: AtomicU64,
    superblock: RwLock<Superblock>,
    /// Features that items put since the filesystem was opened need, for the superblock of each commit; bits are only set.
    noted_incompat: AtomicU64,
    /// Blocks that the running transaction wrote and left again: they are free when it is committed.
    retired: Mutex<Vec<Extent>>,
}

/// What only the holder of the commit lock touches (I1).
#[derive(Debug)]
pub(crate) struct CommitWork {
    pub(crate) refs: DelayedRefs,
    /// Data extents of the frozen transaction that no item refers to any more. The log that the last superblock leads to may
    /// refer to them: they are free once a superblock without it is durable.
    pub(crate) unreferenced: Vec<Extent>,
    pub(crate) quota_flagged: bool,
    pub(crate) uuid_tree_in_step: bool,
}

impl CommitState {
    /// After the commit of this superblock.
    pub(crate) fn new(superblock: Superblock) -> Self {
        let work = CommitWork {
            refs: DelayedRefs::new(),
            unreferenced: Vec::new(),
            quota_flagged: false,
            uuid_tree_in_step: superblock.uuid_tree_generation == superblock.generation.0,
        };
        Self {
            work: Mutex::new(work),
            committed: AtomicU64::new(superblock.generation.0),
            superblock: RwLock::new(superblock),
            noted_incompat: AtomicU64::new(0),
            retired: Mutex::default(),
        }
    }

    /// The commit lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, CommitWork> {
        self.work.lock()
    }

    /// The last transaction on disk.
    pub(crate) fn committed(&self) -> Generation {
        Generation(self.committed.load(Ordering::Acquire))
    }

    /// The superblock of the last commit. Short: no other lock may be taken while it is held.
    pub(crate) fn superblock(&self) -> RwLockReadGuard<'_, Superblock> {
        self.superblock.read()
    }

    /// A superblock is durable (I2). `_work` shows that the commit lock is held.
    pub(crate) fn set_committed(&self, superblock: Superblock, _work: &mut CommitWork) {
        let transid = superblock.generation.0;
        *self.superblock.write() = superblock;
        self.committed.store(transid, Ordering::Release);
    }

    /// Items that were put need these features.
    pub(crate) fn note_incompat(&self, bits: u64) {
        self.noted_incompat.fetch_or(bits, Ordering::AcqRel);
    }

    /// All features that were noted so.
    pub(crate) fn noted_incompat(&self) -> u64 {
        self.noted_incompat.load(Ordering::Acquire)
    }

    /// The running transaction left these blocks, which it had written.
    pub(crate) fn retire(&self, extents: impl IntoIterator<Item = Extent>) {
        self.retired.lock().extend(extents);
    }

    /// Its commit is over: they are free.
    pub(crate) fn take_retired(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.retired.lock())
    }
}
