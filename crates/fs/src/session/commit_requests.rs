//! [`CommitRequests`]: what other threads tell the commit thread (`mount/commit_thread.rs`).
//!
//! - I1. A change is announced before it is made. The commit thread looks for changes after it noted that it is idle,
//!   so it misses no change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_transaction::BackgroundWork;

/// Announced changes, requested work, and the commit thread's sleep.
#[derive(Debug, Default)]
pub(crate) struct CommitRequests {
    /// Whether the commit thread serves the requests.
    is_served: AtomicBool,
    /// Whether changes were announced since the commit thread last looked.
    has_new_changes: AtomicBool,
    /// Whether the thread looks for changes only at its longer interval, because there is nothing to commit.
    idle: AtomicBool,
    stopped: AtomicBool,
    /// Whether a commit is requested.
    commit_requested: AtomicBool,
    /// Whether the engine requests a flush of its delayed items.
    flush_requested: AtomicBool,
    /// Set to true to wake the thread from its sleep.
    wake: Mutex<bool>,
    changed: Condvar,
}

impl CommitRequests {
    /// Announces a change that is about to be made (I1).
    pub(crate) fn note_change(&self) {
        // Load before storing: the flag is nearly always set, and a load leaves copies in other processors' caches
        // valid.
        if !self.has_new_changes.load(Ordering::Relaxed) {
            self.has_new_changes.store(true, Ordering::Release);
        }
        if self.idle.load(Ordering::Acquire) {
            self.wake();
        }
    }

    /// Requests background work, which never writes dirty file data. Returns false if no thread serves requests.
    pub(crate) fn request_work(&self, work: BackgroundWork) -> bool {
        let asked = match work {
            BackgroundWork::Commit => &self.commit_requested,
            BackgroundWork::FlushDelayedItems => &self.flush_requested,
        };
        asked.store(true, Ordering::Release);
        self.wake();
        self.is_served.load(Ordering::Acquire)
    }

    /// Notes whether a thread serves the requests.
    pub(crate) fn set_served(&self, is_served: bool) {
        self.is_served.store(is_served, Ordering::Release);
    }

    /// The requested work; a commit does the work of a flush too.
    pub(crate) fn take_work(&self) -> Option<BackgroundWork> {
        let flush = self.flush_requested.swap(false, Ordering::AcqRel);
        if self.commit_requested.swap(false, Ordering::AcqRel) {
            return Some(BackgroundWork::Commit);
        }
        flush.then_some(BackgroundWork::FlushDelayedItems)
    }

    /// Whether changes were announced since the last call of this function or of [`Self::forget_changes`].
    pub(crate) fn take_changes(&self) -> bool {
        self.has_new_changes.swap(false, Ordering::AcqRel)
    }

    /// Forgets announced changes, which the caller has committed.
    pub(crate) fn forget_changes(&self) {
        self.has_new_changes.store(false, Ordering::Release);
    }

    /// Notes whether a new change must wake the thread (I1).
    pub(crate) fn set_idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Release);
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the thread must end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn wake(&self) {
        *self.wake.lock() = true;
        self.changed.notify_all();
    }

    /// Sleeps until the thread is woken, at most for `limit`.
    pub(crate) fn sleep(&self, limit: Duration) {
        let mut wake = self.wake.lock();
        if !*wake {
            self.changed.wait_for(&mut wake, limit);
        }
        *wake = false;
    }
}
