//! [`RunningTransaction`]: the gate that operations enter, and the work that they leave to the commit.
//!
//! Owns the gate, the list of trees with delayed items, and the list of changes to subvolumes. Lock order: the gate,
//! then one of the lists; no lock is taken under a list's lock.
//!
//! Invariants:
//! - I1. All work of an operation belongs to one transaction: operations hold the gate, and [`RunningTransaction::end`]
//!   needs the closed gate.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::{Generation, RootId};

use crate::delayed::tree_view::Tree;
use crate::handle::root_change::RootChange;
use crate::lock_rank::{Rank, RankedMutex};
use crate::per_thread::{ClosedGate, EnteredGate, Gate};

/// The transaction that operations join.
#[derive(Debug)]
pub(crate) struct RunningTransaction {
    gate: Gate,
    transid: AtomicU64,
    /// Trees with delayed items.
    listed: RankedMutex<Vec<RootId>>,
    root_changes: Mutex<Vec<RootChange>>,
}

/// A transaction that takes no more operations.
#[derive(Debug)]
pub(crate) struct EndedTransaction {
    pub(crate) transid: Generation,
    /// Trees with delayed items, each once.
    pub(crate) listed: Vec<RootId>,
    /// Changes of subvolumes, in the order of the requests.
    pub(crate) root_changes: Vec<RootChange>,
}

impl RunningTransaction {
    /// The state after the transaction `committed`, which is the last one on disk.
    pub(crate) fn after(committed: Generation) -> Self {
        Self {
            gate: Gate::default(),
            transid: AtomicU64::new(committed.0.saturating_add(1)),
            listed: RankedMutex::new(Rank::ChangedTrees, Vec::new()),
            root_changes: Mutex::default(),
        }
    }

    /// The generation of the transaction.
    pub(crate) fn transid(&self) -> Generation {
        Generation(self.transid.load(Ordering::Acquire))
    }

    /// Waits until the gate is open, and keeps the transaction running until the guard is dropped.
    pub(crate) fn enter(&self) -> EnteredGate<'_> {
        self.gate.enter()
    }

    /// Closes the gate: waits until all operations have left, and blocks new operations.
    pub(crate) fn close_gate(&self) -> ClosedGate<'_> {
        self.gate.close()
    }

    /// Adds a tree to the list of trees with delayed items, and returns whether it was not in the list. The caller has
    /// entered the gate.
    pub(crate) fn list(&self, tree: &Tree) -> bool {
        // Read first: the flag is nearly always set, and a read leaves the other processors' cached copies valid. The
        // entered gate keeps the flag set.
        let is_new = !tree.listed.load(Ordering::Acquire) && !tree.listed.swap(true, Ordering::AcqRel);
        if is_new {
            self.listed.lock().push(tree.id());
        }
        is_new
    }

    /// Number of trees with delayed items, or with items that were applied since the last commit.
    pub(crate) fn nr_listed(&self) -> usize {
        self.listed.lock().len()
    }

    /// The trees with delayed items.
    pub(crate) fn listed(&self, _gate: &ClosedGate<'_>) -> Vec<RootId> {
        self.listed.lock().clone()
    }

    /// Asks the commit to make, change or delete a subvolume. The caller has entered the gate.
    pub(crate) fn request(&self, change: RootChange) {
        self.root_changes.lock().push(change);
    }

    /// Whether operations left any work for the commit.
    pub(crate) fn has_changes(&self) -> bool {
        !self.listed.lock().is_empty() || !self.root_changes.lock().is_empty()
    }

    /// Ends the transaction (I1) and begins the next one.
    pub(crate) fn end(&self, _gate: &ClosedGate<'_>) -> EndedTransaction {
        let listed = std::mem::take(&mut *self.listed.lock());
        let root_changes = std::mem::take(&mut *self.root_changes.lock());
        let transid = Generation(self.transid.fetch_add(1, Ordering::AcqRel));
        EndedTransaction { transid, listed, root_changes }
    }
}
