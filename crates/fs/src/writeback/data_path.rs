//! [`DataPath`]: the memory for dirty data, and the queue of inodes that have pending data (dirty or under writeback).
//! Decides how much data may be dirty before background threads write it, and before writers must wait.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::Logical;
use ubtrfs_transaction::EventCount;
use ubtrfs_transaction::lock_rank::{Rank, RankedRwLock};

use crate::inode::buf_pool::BufPool;
use crate::inode::file_data::{DataRun, FileData};
use crate::inode::state::Inode;
use crate::writeback::errors::WritebackErrors;
use crate::writeback::thread::WritebackThreads;

/// The writeback state of a filesystem ([`Fs`] holds it as `data`).
#[derive(Debug)]
pub(crate) struct DataPath {
    pub(crate) pool: Arc<BufPool>,
    /// Memory that dirty data may take.
    limit_bytes: u64,
    /// Memory of the data that batches are writing now.
    writing_bytes: AtomicU64,
    /// Batches that ended: their data is on disk and takes no memory, or is dirty again.
    pub(crate) ended_batches: EventCount,
    queue: Mutex<DirtyQueue>,
    /// The logical address where the last allocation for data ended, and where the next allocation begins if possible.
    pub(crate) hint: Mutex<Option<Logical>>,
    pub(crate) threads: WritebackThreads,
    pub(crate) errors: WritebackErrors,
    /// Locked for reading by batches that may write into existing extents of a file, and for writing while a snapshot
    /// is made.
    pub(crate) in_place: RankedRwLock<()>,
    /// A write that goes to the file's own extents reserves no space. It holds this lock for reading until its data is
    /// dirty. A snapshot, a clone, a block group that becomes read-only, and a move of shared blocks make these extents
    /// count as shared. Each of them holds the lock for writing: it first writes such data back, and keeps the lock
    /// until it is done.
    pub(crate) unreserved: RankedRwLock<()>,
}

/// Inodes with pending data, in the order in which they became dirty. The queue numbers of inodes whose data could not
/// be written have the bit [`FAILED`], so that these inodes come last; [`Fs::flush_some`](crate::Fs::flush_some) skips
/// them.
#[derive(Debug, Default)]
struct DirtyQueue {
    next: u64,
    inodes: BTreeMap<u64, Arc<Inode>>,
}

impl DataPath {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        Self {
            pool: BufPool::new(limit_bytes),
            limit_bytes,
            writing_bytes: AtomicU64::new(0),
            ended_batches: EventCount::default(),
            queue: Mutex::default(),
            hint: Mutex::default(),
            threads: WritebackThreads::default(),
            errors: WritebackErrors::default(),
            in_place: RankedRwLock::new(Rank::InPlace, (0, 0), ()),
            unreserved: RankedRwLock::new(Rank::Unreserved, (0, 0), ()),
        }
    }

    /// Adds an inode to the queue, because its data became dirty. `data` is the inode's data; the caller holds the
    /// inode's state lock.
    pub(crate) fn enqueue(&self, inode: &Arc<Inode>, data: &mut FileData) {
        if data.queued.is_none() {
            let mut queue = self.queue.lock();
            let at = queue.next;
            queue.next = queue.next.saturating_add(1);
            queue.inodes.insert(at, Arc::clone(inode));
            data.queued = Some(at);
        }
    }

    /// Whether any inode has pending data.
    pub(crate) fn has_dirty(&self) -> bool {
        !self.queue.lock().inodes.is_empty()
    }

    /// Removes an inode from the queue if none of its data is pending (I5 of [`crate::writeback::delalloc`]).
    pub(crate) fn dequeue(&self, data: &mut FileData) {
        if data.is_clean()
            && let Some(at) = data.queued.take()
        {
            let inode = self.queue.lock().inodes.remove(&at);
            assert!(inode.is_some(), "I1 of delalloc: the inode is not where it is queued");
            if let Some(inode) = &inode {
                self.errors.note_clean(inode.id);
            }
            // The caller also holds the inode, so dropping the queue's reference never frees the inode under the state
            // lock.
            drop(inode);
        }
    }

    /// All inodes with pending data. Inodes whose data could not be written come last.
    pub(crate) fn queued(&self) -> Vec<Arc<Inode>> {
        self.queue.lock().inodes.values().cloned().collect()
    }

    /// The first inodes in the queue, without inodes whose data could not be written.
    pub(crate) fn queued_healthy(&self, limit: usize) -> Vec<Arc<Inode>> {
        self.queue.lock().inodes.range(..FAILED).take(limit).map(|(_, inode)| Arc::clone(inode)).collect()
    }

    /// Moves an inode behind all inodes without the bit [`FAILED`], because its data could not be written. `data` is
    /// the inode's data; the caller holds the inode's state lock.
    pub(crate) fn enqueue_failed(&self, inode: &Arc<Inode>, data: &mut FileData) {
        assert!(!data.is_clean(), "I5 of delalloc: inode {:?} has no pending data", inode.id);
        let mut queue = self.queue.lock();
        let at = data.queued.unwrap_or(queue.next);
        if data.queued.is_none() {
            queue.next = queue.next.saturating_add(1);
        }
        queue.inodes.remove(&at);
        queue.inodes.insert(at | FAILED, Arc::clone(inode));
        data.queued = Some(at | FAILED);
    }

    /// Whether all dirty data belongs to files whose data could not be written, and no data is being written.
    pub(crate) fn has_only_failed_data(&self) -> bool {
        self.writing_bytes.load(Ordering::Relaxed) == 0 && self.queue.lock().inodes.range(..FAILED).next().is_none()
    }

    /// Memory of the data that no batch is writing yet.
    fn waiting_bytes(&self) -> u64 {
        self.pool.used_bytes().saturating_sub(self.writing_bytes.load(Ordering::Relaxed))
    }

    /// Whether so much data waits to be written that the writeback threads should start.
    pub(crate) fn should_write(&self) -> bool {
        self.waiting_bytes() > self.limit_bytes / 4
    }

    /// Whether so much data waits to be written that running writeback threads should continue.
    pub(crate) fn should_continue(&self) -> bool {
        self.waiting_bytes() > self.limit_bytes / 8
    }

    pub(crate) fn is_over_limit(&self) -> bool {
        self.pool.used_bytes() > self.limit_bytes
    }

    /// Counts the memory of the runs as being written until the token is dropped.
    pub(crate) fn start_writing<'r>(&self, runs: impl Iterator<Item = &'r DataRun>) -> BatchToken<'_> {
        let bytes = runs.map(DataRun::memory_bytes).sum();
        self.writing_bytes.fetch_add(bytes, Ordering::Relaxed);
        BatchToken { data: self, bytes }
    }
}

/// A token for a batch that is being written.
pub(crate) struct BatchToken<'d> {
    data: &'d DataPath,
    bytes: u64,
}

impl Drop for BatchToken<'_> {
    fn drop(&mut self) {
        self.data.writing_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.data.ended_batches.note();
    }
}

/// Bit in the queue numbers of inodes whose data could not be written.
const FAILED: u64 = 1 << 63;
