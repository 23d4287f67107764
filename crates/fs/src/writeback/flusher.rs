//! Writeback on request of the engine, and a guard that keeps a thread's own reservations from starting writeback.

use std::cell::Cell;
use std::time::{Duration, Instant};

use ubtrfs_transaction::{BackgroundWork, DirtyData, Flusher, Job, Reclaim};

use crate::{Error, Fs};

thread_local! {
    /// Whether reservations of this thread must not start writeback ([`NoFlush`]), because the thread writes data back
    /// itself or holds inode locks.
    static FLUSHING: Cell<bool> = const { Cell::new(false) };
}

/// Prevents writeback by reservations of this thread: writeback could deadlock on inode locks that the thread holds.
#[derive(Debug)]
pub(crate) struct NoFlush {
    before: bool,
}

impl NoFlush {
    pub(crate) fn new() -> Self {
        Self { before: FLUSHING.replace(true) }
    }
}

impl Drop for NoFlush {
    fn drop(&mut self) {
        FLUSHING.set(self.before);
    }
}

impl Flusher for Fs {
    fn dirty_data(&self) -> DirtyData {
        DirtyData { nr_ranges: self.data.pool.nr_used(), max_inline_bytes: self.max_inline() as u64 }
    }

    /// Writes back data of inodes whose writeback locks are free.
    fn flush_delalloc(&self, target_bytes: Option<u64>) -> ubtrfs_error::Result<()> {
        if FLUSHING.get() {
            return Ok(());
        }
        self.flush_some(target_bytes.unwrap_or(u64::MAX), Reclaim::Reservation).map(drop).map_err(for_engine)
    }

    fn may_wait(&self) -> bool {
        !FLUSHING.get()
    }

    fn wait_for_writes_in_place(&self) {
        drop(self.data.in_place.write());
    }

    fn with_space_for_all_data(&self, close: &mut dyn FnMut() -> ubtrfs_error::Result<()>) -> ubtrfs_error::Result<()> {
        let _unreserved = self.data.unreserved.write();
        for inode in self.data.queued() {
            if inode.state.read().data.unreserved_bytes() > 0 {
                self.flush_inode(&inode, 0..u64::MAX).map_err(for_engine)?;
            }
        }
        close()
    }

    fn wait_for_deletions(&self) {
        let started = Instant::now();
        while !FLUSHING.get() && started.elapsed() < DELETIONS_WAIT && self.inodes.awaits_deletions() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_for_readers(&self) {
        self.wait_for_extent_users();
    }

    fn while_nothing_is_sent(
        &self,
        job: &Job,
        moves: &mut dyn FnMut() -> ubtrfs_error::Result<()>,
    ) -> ubtrfs_error::Result<()> {
        let _moving = self.subvolumes.sends.begin_move(job)?;
        moves()
    }

    fn request_work(&self, work: BackgroundWork) -> bool {
        self.commit_thread.request_work(work)
    }
}

fn for_engine(error: Error) -> ubtrfs_error::Error {
    match error {
        Error::Engine(error) => error,
        other => ubtrfs_error::Error::Callback { errno: other.errno(), message: format!("writing data back: {other}") },
    }
}

/// How long a refused reservation waits for deletions. The kernel forgets a removed file some microseconds after its
/// last name is removed, unless a program still refers to the file.
const DELETIONS_WAIT: Duration = Duration::from_millis(30);
