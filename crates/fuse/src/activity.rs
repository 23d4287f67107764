//! Commits early when a burst of changes ends.
//!
//! sync(2) does not reach a FUSE server: the kernel hands over dirty pages and returns. So a mount that was busy and
//! then falls quiet commits after [`QUIET`], not at the next periodic commit.
//!
//! A1. A commit starts within `QUIET` plus one `TICK` of the last change, unless the filesystem is read-only. While
//!     changes continue, only the periodic commit commits them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_fs::Fs;

/// A commit starts when there was no change for this long.
const QUIET: Duration = Duration::from_secs(1);
/// How often the number of changes is checked.
const TICK: Duration = Duration::from_millis(500);

/// Counts changes.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    changes: AtomicU64,
    synced: AtomicU64,
    stopped: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Activity {
    /// Counts a request that is about to change something.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that all changes so far are committed.
    pub(crate) fn note_sync(&self) {
        self.synced.store(self.changes.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Ends [`run`](Self::run).
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _guard = self.lock.lock();
        self.wake.notify_all();
    }

    /// Watches and commits (A1) until [`stop`](Self::stop).
    pub(crate) fn run(&self, fs: &Fs) {
        let (mut seen, mut quiet) = (0, Duration::ZERO);
        while !self.stopped.load(Ordering::Relaxed) {
            {
                let mut guard = self.lock.lock();
                self.wake.wait_for(&mut guard, TICK);
            }
            let changes = self.changes.load(Ordering::Relaxed);
            if changes != seen {
                (seen, quiet) = (changes, Duration::ZERO);
                continue;
            }
            quiet += TICK;
            if quiet < QUIET || self.synced.load(Ordering::Relaxed) == seen || fs.read_only().is_some() {
                continue;
            }
            self.synced.store(seen, Ordering::Relaxed);
            if let Err(error) = fs.sync() {
                tracing::error!("commit failed: {error}");
            }
        }
    }
}
