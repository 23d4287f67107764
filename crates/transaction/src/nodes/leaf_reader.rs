//! [`LeafReader`]: reads ahead the leaves that a large batch will change or a walk will visit. A thread reads and
//! checks these leaves while the caller works on earlier leaves. Leaves that are neighbours on the devices are read in
//! one request.
//!
//! ```text
//! apply -- will_read --> queue -- thread --> devices, tree checker --> arrived -- read_node --> apply
//! ```
//!
//! Owns the queue and the leaves that arrived, under one lock. No other lock is taken under the lock of the queue.
//!
//! Invariants:
//! - I1. A leaf that could not be read ahead is read again when it is needed; the second read tries all copies and
//!   reports the error.
//! - I2. A leaf that was read ahead is taken once and kept nowhere else: an apply reads a node once, and soon replaces
//!   it ([`crate::nodes::store::ScanSource`]). So memory holds at most the leaves that were announced but not yet
//!   taken. A walk may pass announced leaves without taking them, so beyond a limit the oldest leaves are dropped.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::Result;
use ubtrfs_format::Logical;
use ubtrfs_tree::{Node, NodePtr, NodeSource};

use crate::nodes::store::{NodeStore, ScanSource};

/// Source of the nodes for one apply or one walk.
pub(crate) struct LeafReader<'s> {
    store: &'s NodeStore,
    /// Maximum number of leaves that arrived but were not taken.
    arrived_max: usize,
    state: Mutex<ReaderState>,
    /// Signals that a leaf was announced or arrived, or that the reader ends.
    changed: Condvar,
}

#[derive(Default)]
struct ReaderState {
    /// Runs of neighbouring leaves.
    queue: VecDeque<Vec<NodePtr>>,
    /// Leaves in the queue, and leaves of the run that is being read.
    expected: HashSet<Logical>,
    arrived: HashMap<Logical, Arc<Node>>,
    /// The leaves of `arrived` in the order of their arrival. Leaves that were taken may still be listed.
    order: VecDeque<Logical>,
    ended: bool,
}

/// Ends the readahead when dropped, also after a panic.
struct EndLeafReader<'r, 's>(&'r LeafReader<'s>);

impl<'s> LeafReader<'s> {
    /// Runs `work` with a source that reads ahead.
    pub(crate) fn with<T>(store: &'s NodeStore, work: impl FnOnce(&Self) -> T) -> T {
        Self::with_limit(store, usize::MAX, work)
    }

    /// Runs `work` with a source that reads ahead, and keeps at most `arrived_max` leaves that were not taken.
    pub(crate) fn with_limit<T>(store: &'s NodeStore, arrived_max: usize, work: impl FnOnce(&Self) -> T) -> T {
        let reader = Self { store, arrived_max, state: Mutex::default(), changed: Condvar::new() };
        std::thread::scope(|scope| {
            let _end = EndLeafReader(&reader);
            scope.spawn(|| reader.read_runs());
            work(&reader)
        })
    }

    fn read_runs(&self) {
        // When this thread ends, even by a panic, the readahead ends, so threads that wait for a leaf wake up.
        let _end = EndLeafReader(self);
        let mut buf = AlignedBuf::with_capacity(0);
        while let Some(run) = self.next_run() {
            let nodes = self.store.read_run(&run, &mut buf);
            let mut state = self.state.lock();
            for ptr in &run {
                state.expected.remove(&ptr.bytenr);
            }
            // I1
            for node in nodes.unwrap_or_default() {
                state.arrived(node, self.arrived_max);
            }
            self.changed.notify_all();
        }
    }

    fn next_run(&self) -> Option<Vec<NodePtr>> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            if let Some(run) = state.queue.pop_front() {
                return Some(run);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Takes a leaf that was read ahead. If the leaf is still being read, waits for it. Without the wait, the leaf
    /// would arrive after its only use, and nothing would remove it from memory (I2).
    fn take(&self, bytenr: Logical) -> Option<Arc<Node>> {
        let mut state = self.state.lock();
        while state.expected.contains(&bytenr) {
            self.changed.wait(&mut state);
        }
        state.arrived.remove(&bytenr)
    }
}

impl ReaderState {
    /// Keeps a leaf that arrived. Drops all leaves except the last `most` leaves that arrived (I2).
    fn arrived(&mut self, node: Arc<Node>, most: usize) {
        if most < usize::MAX {
            self.order.push_back(node.bytenr());
            while self.order.len() > most {
                if let Some(oldest) = self.order.pop_front() {
                    self.arrived.remove(&oldest);
                }
            }
        }
        self.arrived.insert(node.bytenr(), node);
    }
}

impl NodeSource for LeafReader<'_> {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        if ptr.level == 0
            && let Some(node) = self.take(ptr.bytenr)
        {
            return node.verify(ptr).map(|()| node);
        }
        ScanSource(self.store).read_node(ptr)
    }

    fn will_read(&self, ptrs: &[NodePtr]) {
        let not_here = ptrs.iter().filter(|ptr| !self.store.is_in_memory(ptr)).copied();
        let runs = self.store.runs_of(not_here, usize::MAX);
        let mut state = self.state.lock();
        if !runs.is_empty() && !state.ended {
            state.expected.extend(runs.iter().flatten().map(|ptr| ptr.bytenr));
            state.queue.extend(runs);
            self.changed.notify_all();
        }
    }

    fn nodesize(&self) -> usize {
        self.store.nodesize()
    }
}

impl Drop for EndLeafReader<'_, '_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = true;
        state.expected.clear();
        self.0.changed.notify_all();
    }
}
