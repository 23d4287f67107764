//! [`BalanceState`]: whether a balance runs or waits to be resumed, and requests to stop it.
//!
//! ```text
//!            start                      pause, close
//!   none ------------> running(item) ----------------> paused(item)
//!    ^                    |    ^                          |  |
//!    +---- end, cancel ---+    +--------- resume ---------+  |
//!    +------------------------ cancel -----------------------+
//! ```
//!
//! The balance item is in the root tree while a balance runs or is paused.
//!
//! `BalanceState` keeps the state under a lock. Lock order: under this lock, only locks of [`ExclusiveOperations`] are
//! taken.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::item::BalanceItem;
use ubtrfs_transaction::Job;

use crate::devices::exclusive::{BalancePhase, ExclusiveOperations};
use crate::{Error, Result};

/// The balance of a filesystem.
#[derive(Debug)]
pub(crate) struct BalanceState {
    inner: Mutex<CurrentBalance>,
    changed: Condvar,
    /// Learns each change of the state, because a balance and a replacement exclude each other.
    exclusive: Arc<ExclusiveOperations>,
}

#[derive(Debug, Default)]
struct CurrentBalance {
    /// The balance item in the root tree.
    item: Option<BalanceItem>,
    running: Option<RunningBalance>,
    counts: BalanceCounts,
    /// Whether the filesystem is being closed, so that no balance can begin.
    is_closed: bool,
}

#[derive(Debug)]
struct RunningBalance {
    job: Arc<Job>,
    wish: Option<StopRequest>,
}

/// A request to a running balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopRequest {
    Pause,
    Cancel,
}

/// Numbers of block groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalanceCounts {
    /// Block groups that the filters select: those counted at the beginning, and those that a conversion added
    /// later.
    pub expected: u64,
    /// Block groups examined so far. Block groups that the filters leave out count as examined from the
    /// beginning.
    pub considered: u64,
    /// Block groups that were moved.
    pub completed: u64,
    /// Block groups among [`BalanceCounts::completed`] whose chunk was copied. A copy changes only the chunk and
    /// device trees.
    pub migrated: u64,
    /// Block groups that stayed, because an extent could not be moved or because there was no space.
    pub failed: u64,
    /// Block groups among [`BalanceCounts::failed`] for which there was no space.
    pub without_space: u64,
}

/// The result of [`Fs::balance_status`](crate::Fs::balance_status).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalanceStatus {
    /// The balance item: types of block groups, and their filters.
    pub item: BalanceItem,
    /// Whether the balance runs; otherwise it is paused.
    pub is_running: bool,
    /// Whether a pause was requested, but the balance has not stopped yet.
    pub is_pausing: bool,
    /// Whether cancelling was requested, but the balance has not stopped yet.
    pub is_cancelling: bool,
    /// The progress.
    pub counts: BalanceCounts,
}

impl BalanceState {
    pub(crate) fn new(exclusive: Arc<ExclusiveOperations>) -> Self {
        Self { inner: Mutex::default(), changed: Condvar::new(), exclusive }
    }

    /// Begins a run, with a new item or with the item of a paused balance. A new balance fails while a device is being
    /// replaced.
    pub(crate) fn begin(&self, new: Option<BalanceItem>) -> Result<(BalanceItem, Arc<Job>)> {
        let mut inner = self.inner.lock();
        if inner.is_closed {
            return Err(Error::Busy("the filesystem is being closed"));
        }
        if inner.running.is_some() {
            return Err(Error::InProgress("a balance is running; see: ubtrfs balance status"));
        }
        let item = match (new, inner.item.clone()) {
            (Some(_), Some(_)) => {
                return Err(Error::InProgress("a balance is paused; resume or cancel it first"));
            }
            (Some(item), None) => {
                self.exclusive.begin_balance()?;
                item
            }
            (None, Some(item)) => {
                self.exclusive.set_balance(Some(BalancePhase::Running));
                item
            }
            (None, None) => return Err(Error::NotRunning("there is no balance to resume")),
        };
        let job = Arc::new(Job::new());
        inner.item = Some(item.clone());
        inner.running = Some(RunningBalance { job: Arc::clone(&job), wish: None });
        inner.counts = BalanceCounts::default();
        Ok((item, job))
    }

    /// Ends the run. With `keep` the balance is paused; otherwise it is over.
    pub(crate) fn end(&self, keep: bool) {
        let mut inner = self.inner.lock();
        inner.running = None;
        if !keep {
            inner.item = None;
        }
        self.exclusive.set_balance(keep.then_some(BalancePhase::Paused));
        self.changed.notify_all();
    }

    /// Notes the item of a balance that an earlier mount left unfinished.
    pub(crate) fn found(&self, item: BalanceItem) {
        self.inner.lock().item = Some(item);
        self.exclusive.set_balance(Some(BalancePhase::Paused));
    }

    pub(crate) fn wish(&self) -> Option<StopRequest> {
        self.inner.lock().running.as_ref().and_then(|running| running.wish)
    }

    /// Stops a running balance, and waits until it has stopped. Returns false if no balance runs.
    pub(crate) fn stop(&self, wish: StopRequest) -> bool {
        let mut inner = self.inner.lock();
        let Some(running) = &mut inner.running else { return false };
        running.wish = Some(wish);
        running.job.cancel();
        while inner.running.is_some() {
            self.changed.wait(&mut inner);
        }
        true
    }

    /// Prevents further balances, and pauses a running one.
    pub(crate) fn close(&self) {
        self.inner.lock().is_closed = true;
        self.stop(StopRequest::Pause);
    }

    pub(crate) fn is_paused(&self) -> bool {
        let inner = self.inner.lock();
        inner.item.is_some() && inner.running.is_none()
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut BalanceCounts)) {
        change(&mut self.inner.lock().counts);
    }

    pub(crate) fn counts(&self) -> BalanceCounts {
        self.inner.lock().counts
    }

    pub(crate) fn status(&self) -> Option<BalanceStatus> {
        let inner = self.inner.lock();
        let wish = inner.running.as_ref().and_then(|running| running.wish);
        Some(BalanceStatus {
            item: inner.item.clone()?,
            is_running: inner.running.is_some(),
            is_pausing: wish == Some(StopRequest::Pause),
            is_cancelling: wish == Some(StopRequest::Cancel),
            counts: inner.counts,
        })
    }
}
