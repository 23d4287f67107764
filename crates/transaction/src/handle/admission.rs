//! [`Admission`]: decides whether a change may begin, and makes it wait if necessary.
//!
//! - I1. Each reservation ends once: when no change runs and no data is dirty, nothing is reserved.
//!
//! Owns the load of the running transaction, and the throttle. No other lock is taken under the lock of a thread's share
//! of the load.

use std::sync::atomic::AtomicU64;

use ubtrfs_space::SpaceKind;

use crate::engine::Engine;
use crate::handle::throttle::{FlushProgress, Throttle};
use crate::handle::transaction_load::TransactionLoad;
use crate::health::metric::Metric;

/// The state of reservations.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    pub(crate) load: TransactionLoad,
    pub(in crate::handle) throttle: Throttle,
    /// Bytes of the extent tree at the last commit.
    pub(in crate::handle) extent_tree_bytes: AtomicU64,
}

impl Engine {
    /// Checks I1 in debug builds. Called when the filesystem was closed without a failure: no change runs, and all data is
    /// written.
    pub fn check_nothing_reserved(&self) {
        if cfg!(debug_assertions) {
            let nr_changes = self.admission.load.nr_reserved();
            assert_eq!(nr_changes, 0, "I1: reservations of changes were not given back");
            let may_use = [SpaceKind::Data, SpaceKind::Metadata].map(|kind| self.space.info(kind).may_use);
            assert_eq!(may_use, [0; 2], "I1: bytes of reservations were not given back");
            assert!(!self.quotas.reserved.is_held(), "I1: quota was not given back");
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
    }

    /// The metric of the memory of delayed items.
    pub(crate) fn metric(&self) -> Metric {
        let help = "Memory of delayed items in the running transaction";
        Metric::gauge("delayed_item_bytes", help, self.load.memory_bytes() as f64)
    }
}
