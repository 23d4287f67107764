//! Requests of the engine ([`Flusher`]): writing data back, and waiting for threads that use extents.

use std::time::{Duration, Instant};

use ubtrfs_transaction::{BackgroundWork, DirtyData, Flusher, Job, ReclaimReason};

use crate::inode::extent_users::wait_for_extent_users;
use crate::writeback::delalloc::IN_PLACE;
use crate::writeback::no_flush::NoFlush;
use crate::{Error, Fs};

impl Flusher for Fs {
    fn dirty_data(&self) -> DirtyData {
        DirtyData { nr_ranges: self.data.pool.nr_used(), max_inline_bytes: self.max_inline() as u64 }
    }

    /// Writes back data of inodes whose writeback locks are free.
    fn flush_delalloc(&self, target_bytes: Option<u64>) -> ubtrfs_error::Result<()> {
        if NoFlush::is_active() {
            return Ok(());
        }
        self.flush_some(target_bytes.unwrap_or(u64::MAX), ReclaimReason::Reservation).map(drop).map_err(for_engine)
    }

    fn may_wait(&self) -> bool {
        !NoFlush::is_active()
    }

    fn wait_for_writes_in_place(&self) {
        drop(self.data.in_place.write());
    }

    fn with_space_for_all_data(&self, close: &mut dyn FnMut() -> ubtrfs_error::Result<()>) -> ubtrfs_error::Result<()> {
        let _unreserved = self.data.unreserved.write();
        for inode in self.data.queued() {
            let needs_space = {
                let state = inode.state.read();
                // A batch may have taken data without a reservation, and may not have looked at its extents yet.
                state.data.unreserved_bytes() > 0 || (state.has_flags(IN_PLACE) && state.data.has_writeback())
            };
            if needs_space {
                self.flush_inode(&inode, 0..u64::MAX).map_err(for_engine)?;
            }
        }
        close()
    }

    fn wait_for_deletions(&self) {
        let started = Instant::now();
        while !NoFlush::is_active() && started.elapsed() < DELETIONS_WAIT && self.inodes.awaits_deletions() {
            // Polls: whether the kernel still refers to a file is known under the locks of all shards only.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_for_readers(&self) {
        wait_for_extent_users(&self.inodes);
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
        self.context.commits.request_work(work)
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
