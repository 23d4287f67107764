//! Commits early when a burst of changes ends.
//!
//! Except on mounts of type `fuseblk`, sync(2) does not reach a FUSE server: the kernel sends dirty pages to the server
//! as writes, and sync(2) returns. So a mount that was busy and then falls quiet commits after [`QUIET`], not at the
//! next periodic commit.
//!
//! A1. A commit starts within `QUIET` plus one `TICK` of the last change, unless the filesystem is read-only. While
//!     changes continue, only the periodic commit commits them. If the commit after a burst fails, it is not repeated
//!     before the next change: otherwise a file that can never be written would cause a commit and a message every
//!     second.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_fs::Fs;

use crate::served_fs::ServedFs;

/// A commit starts when there was no change for this long.
const QUIET: Duration = Duration::from_secs(1);
/// The interval at which the flags are checked.
const TICK: Duration = Duration::from_millis(500);

/// Notes changes of the filesystem, and commits soon after they stop.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    /// Whether something changed since the last tick. A change writes the flag only if it is not set yet. So during a
    /// burst, the threads that make changes only read the flag, and do not contend for its cache line.
    is_busy: AtomicBool,
    /// Whether a tick has found a change since the last commit that this struct started.
    has_changes: AtomicBool,
    stopped: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Activity {
    /// Notes that a request is about to change something.
    pub(crate) fn note_change(&self) {
        if !self.is_busy.load(Ordering::Relaxed) {
            self.is_busy.store(true, Ordering::Relaxed);
        }
    }

    /// Commits on request, so that [`run`](Self::run) need not commit the same changes again.
    pub(crate) fn sync(&self, fs: &Fs) -> ubtrfs_fs::Result<()> {
        // Clear the flags before the commit starts, because the commit does not include changes made after its start.
        self.is_busy.store(false, Ordering::Relaxed);
        self.has_changes.store(false, Ordering::Relaxed);
        fs.sync().inspect_err(|_| self.note_change())
    }

    /// Ends [`run`](Self::run).
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _guard = self.lock.lock();
        self.wake.notify_all();
    }

    /// Waits for changes and commits them (A1), until [`stop`](Self::stop).
    pub(crate) fn run(&self, served: &ServedFs) {
        let mut quiet = Duration::ZERO;
        loop {
            {
                let mut guard = self.lock.lock();
                // `stop` notifies under the lock, so no notification is missed between the test of `stopped` and the
                // wait.
                if !self.stopped.load(Ordering::Relaxed) {
                    self.wake.wait_for(&mut guard, TICK);
                }
            }
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            if self.is_busy.swap(false, Ordering::Relaxed) {
                self.has_changes.store(true, Ordering::Relaxed);
                quiet = Duration::ZERO;
                continue;
            }
            quiet += TICK;
            if quiet < QUIET || !self.has_changes.load(Ordering::Relaxed) {
                continue;
            }
            let Some(fs) = served.get().filter(|fs| fs.read_only().is_none()) else { continue };
            // Clear the flag before the commit: a change during the commit sets `is_busy`, and then the next tick sets
            // `has_changes` again.
            self.has_changes.store(false, Ordering::Relaxed);
            match fs.sync() {
                // Closing commits everything itself.
                Ok(()) | Err(ubtrfs_fs::Error::Closed) => {}
                Err(error) => tracing::error!("commit failed: {error}"),
            }
        }
    }
}
