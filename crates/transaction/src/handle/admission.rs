//! [`Admission`]: the load by which changes are admitted, and the progress of the flush by which writers are slowed.
//!
//! - I1. Each reservation ends once: when no change runs and no data is dirty, nothing is reserved.
//!
//! Owns the load of the running transaction, and the throttle. No other lock is taken under the lock of a thread's share
//! of the load.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::{BackgroundWork, Engine};
use crate::handle::flush_progress::{FlushProgress, Throttle};
use crate::handle::transaction_load::TransactionLoad;
use crate::health::metric::Metric;

/// The state of reservations.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    pub(crate) load: TransactionLoad,
    pub(crate) throttle: Throttle,
    /// Bytes of the extent tree at the last commit.
    pub(in crate::handle) extent_tree_bytes: AtomicU64,
}

impl Engine {
    /// Requests background work, unless it was requested already for the current active items.
    pub(crate) fn request(&self, work: BackgroundWork) {
        let asked = match work {
            BackgroundWork::Commit => &self.admission.load.asked_for_commit,
            BackgroundWork::FlushDelayedItems => &self.admission.load.asked_for_flush,
        };
        if !asked.load(Ordering::Relaxed)
            && !asked.swap(true, Ordering::Relaxed)
            && let Some(flusher) = self.flusher()
        {
            flusher.request_work(work);
        }
    }
}

impl Admission {
    /// Begins a flush of delayed items, which ends when the returned value is dropped.
    pub(crate) fn begin_flush(&self) -> FlushProgress<'_> {
        self.throttle.begin()
    }

    /// Notes that `done` of `all` frozen items are applied to the trees.
    pub(crate) fn flush_applied(&self, done: usize, all: usize) {
        self.throttle.applied(done, all);
    }

    /// Notes that the frozen items have left memory.
    pub(crate) fn frozen_items_dropped(&self) {
        self.load.frozen_items_dropped();
        self.throttle.stages.note();
    }

    /// The metric of the memory of delayed items.
    pub(crate) fn metric(&self) -> Metric {
        let help = "Memory of delayed items in the running transaction";
        Metric::gauge("delayed_item_bytes", help, self.load.memory_bytes() as f64)
    }
}
