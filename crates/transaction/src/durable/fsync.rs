//! Fsync: the log is written, or a commit is made. Fsyncs that begin while a log is being written share the next log.
//!
//! ```text
//! fsync ---> joins the open batch ---> is there a leader? -- yes --> waits for its batch
//!                                            | no
//!                                            v
//!      leads: commit lock -> closes the batch -> collects -> log blocks -> flush -> superblock -> flush -> wakes all
//! ```
//!
//! I1. A batch is closed under the commit lock: all changes made before the batch's fsyncs began are in the log that is
//!     written for the batch, or were committed.
//! I2. If a leader fails or panics, its whole batch gets the error, and the next batch can begin.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Ino, RootId};

use crate::engine::Engine;
use crate::tree_log::write::LogOutcome;

/// Counts of the batches of fsyncs that share a log, by their results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Number of logs written.
    pub written: u64,
    /// Number of batches that had nothing to write.
    pub unchanged: u64,
    /// Number of batches for which no log could be written, so that a commit was made instead, or the fsyncs failed.
    pub commits: u64,
}

/// The fsyncs that are under way. Owns their queue, under a lock; no lock is taken under the lock of the queue.
#[derive(Debug, Default)]
pub(crate) struct Fsyncs {
    queue: Mutex<FsyncQueue>,
    finished: Condvar,
    written: AtomicU64,
    unchanged: AtomicU64,
    commits: AtomicU64,
}

/// The fsyncs that wait for the open batch, and results of closed batches.
#[derive(Debug, Default)]
struct FsyncQueue {
    /// Id of the open batch, which new fsyncs join.
    open: u64,
    requests: Vec<(RootId, Ino)>,
    has_leader: bool,
    /// Results of closed batches, by the ids of the batches. A result stays until all fsyncs of its batch have read it.
    closed: BTreeMap<u64, ClosedBatch>,
}

#[derive(Debug)]
struct ClosedBatch {
    nr_waiting: usize,
    failure: Option<Error>,
}

impl Engine {
    /// Makes all earlier changes of this inode's items durable: by the tree log, or by a commit if the log cannot
    /// express the changes.
    ///
    /// The inode's data must already be written. The caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// The failure of the log or of the commit; all fsyncs that share a log get its failure. If a flush or the write of
    /// the log's superblock failed, the filesystem is read-only from then on.
    pub fn sync_inode(&self, root: RootId, ino: Ino) -> Result<()> {
        self.tree_log.note_used(self.generation());
        let mut queue = self.fsyncs.queue.lock();
        let batch = queue.open;
        queue.requests.push((root, ino));
        while queue.open == batch && queue.has_leader {
            self.fsyncs.finished.wait(&mut queue);
        }
        if queue.open == batch {
            queue.has_leader = true;
            drop(queue);
            return self.lead();
        }
        loop {
            // A closed batch enters the map when its leader ends, and leaves the map when all members have read the
            // result.
            if let Some(closed) = queue.closed.get_mut(&batch) {
                let failure = closed.failure.clone();
                closed.nr_waiting = closed.nr_waiting.saturating_sub(1);
                if closed.nr_waiting == 0 {
                    queue.closed.remove(&batch);
                }
                return failure.map_or(Ok(()), Err);
            }
            self.fsyncs.finished.wait(&mut queue);
        }
    }

    /// Counts of written logs, and of batches of fsyncs for which no log was written.
    pub fn log_stats(&self) -> LogStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Fsyncs { written, unchanged, commits, .. } = &self.fsyncs;
        LogStats { written: of(written), unchanged: of(unchanged), commits: of(commits) }
    }

    fn lead(&self) -> Result<()> {
        let panicked = Error::ReadOnly { reason: "writing the log panicked".to_owned() };
        let mut leader = BatchLeader { engine: self, batch: None, failure: Some(panicked) };
        let result = self.lead_batch(&mut leader);
        leader.failure = result.as_ref().err().cloned();
        drop(leader);
        result
    }

    #[allow(
        clippy::arithmetic_side_effects,
        reason = "the request of the leader is in its batch, and no computer writes 2^64 batches"
    )]
    fn lead_batch(&self, leader: &mut BatchLeader<'_>) -> Result<()> {
        let refused = self.abort_state.check_not_aborted();
        let commit_lock = self.commit_state.lock();
        let requests = {
            let mut queue = self.fsyncs.queue.lock();
            assert!(queue.has_leader && !queue.requests.is_empty(), "I1: a batch without its leader's request");
            let requests = std::mem::take(&mut queue.requests);
            leader.batch = Some((queue.open, requests.len() - 1));
            queue.open += 1;
            requests
        };
        let outcome =
            refused.and_then(|()| self.abort_state.check_not_failed()).and_then(|()| self.write_log(requests));
        drop(commit_lock);
        let counter = match &outcome {
            Ok(LogOutcome::Written) => &self.fsyncs.written,
            Ok(LogOutcome::Unchanged) => &self.fsyncs.unchanged,
            Ok(LogOutcome::NeedsCommit(_)) | Err(_) => &self.fsyncs.commits,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        match outcome? {
            LogOutcome::Written | LogOutcome::Unchanged => Ok(()),
            LogOutcome::NeedsCommit(why) => {
                tracing::debug!("fsync commits: {why}");
                self.commit()
            }
        }
    }
}

/// Gives the result to the batch and lets the next leader begin when dropped, also after a panic (I2).
struct BatchLeader<'e> {
    engine: &'e Engine,
    /// The closed batch, and the number of fsyncs that wait for it.
    batch: Option<(u64, usize)>,
    failure: Option<Error>,
}

impl Drop for BatchLeader<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.abort("writing the log panicked".to_owned());
        }
        let mut queue = self.engine.fsyncs.queue.lock();
        debug_assert!(queue.has_leader || std::thread::panicking(), "I2: a batch has two leaders");
        queue.has_leader = false;
        if let Some((batch, nr_waiting)) = self.batch
            && nr_waiting > 0
        {
            let before = queue.closed.insert(batch, ClosedBatch { nr_waiting, failure: self.failure.take() });
            debug_assert!(before.is_none(), "I2: batch {batch} has two results");
        }
        self.engine.fsyncs.finished.notify_all();
    }
}
