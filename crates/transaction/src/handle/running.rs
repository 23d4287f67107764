//! [`RunningTransaction`]: the gate that operations enter, and what they leave for the commit besides their items.
//!
//! Owns the gate, the list of trees with delayed items, and the list of changes to subvolumes. Lock order: the gate, then
//! one of the lists; nothing is taken under a list's lock.
//!
//! Invariants:
//! - I1. What an operation leaves is in one transaction as a whole: operations hold the gate, and [`RunningTransaction::end`]
//!   asks for the closed gate.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLockReadGuard};
use ubtrfs_format::{Generation, RootId};

use crate::delayed::tree_view::Tree;
use crate::handle::lanes::{Closed, Gate};
use crate::roots::subvolume_roots::RootChange;

/// The transaction that operations join.
#[derive(Debug)]
pub(crate) struct RunningTransaction {
    gate: Gate,
    transid: AtomicU64,
    /// Trees with delayed items.
    listed: Mutex<Vec<RootId>>,
    root_changes: Mutex<Vec<RootChange>>,
}

/// A transaction that takes no more operations.
#[derive(Debug)]
pub(crate) struct EndedTransaction {
    pub(crate) transid: Generation,
    /// Trees with delayed items, each once.
    pub(crate) listed: Vec<RootId>,
    /// In the order in which they were asked for.
    pub(crate) root_changes: Vec<RootChange>,
}

impl RunningTransaction {
    /// The first transaction after the one on disk.
    pub(crate) fn after(committed: Generation) -> Self {
        Self {
            gate: Gate::default(),
            transid: AtomicU64::new(committed.0.saturating_add(1)),
            listed: Mutex::default(),
            root_changes: Mutex::default(),
        }
    }

    /// Its number.
    pub(crate) fn transid(&self) -> Generation {
        Generation(self.transid.load(Ordering::Acquire))
    }

    /// Waits until the gate is open, and keeps the transaction running until the guard is dropped.
    pub(crate) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.enter()
    }

    /// Waits until all operations have left, and lets none in.
    pub(crate) fn close_gate(&self) -> Closed<'_> {
        self.gate.close()
    }

    /// A tree gets delayed items. With the gate entered.
    pub(crate) fn list(&self, tree: &Tree) {
        // Read first: nearly always it is set, and then no other processor's copy goes stale. The gate keeps it so.
        if !tree.listed.load(Ordering::Acquire) && !tree.listed.swap(true, Ordering::AcqRel) {
            self.listed.lock().push(tree.id());
        }
    }

    /// The trees with delayed items.
    pub(crate) fn listed(&self, _gate: &Closed<'_>) -> Vec<RootId> {
        self.listed.lock().clone()
    }

    /// Has the commit make, change or delete a subvolume. With the gate entered.
    pub(crate) fn ask_for(&self, change: RootChange) {
        self.root_changes.lock().push(change);
    }

    /// Whether any operation left anything.
    pub(crate) fn has_changes(&self) -> bool {
        !self.listed.lock().is_empty() || !self.root_changes.lock().is_empty()
    }

    /// Ends it (I1); the next one begins.
    pub(crate) fn end(&self, _gate: &Closed<'_>) -> EndedTransaction {
        let listed = std::mem::take(&mut *self.listed.lock());
        let root_changes = std::mem::take(&mut *self.root_changes.lock());
        let transid = Generation(self.transid.fetch_add(1, Ordering::AcqRel));
        EndedTransaction { transid, listed, root_changes }
    }
}
