//! [`LeafReader`]: reads ahead the leaves that a large batch will change or a walk will visit. A thread reads and
//! checks these leaves while the caller works on earlier leaves. Leaves that are neighbours on the devices are read in
//! one request.
//!
//! ```text
//! apply -- will_read --> queue -- thread --> devices, tree checker --> arrived -- read_node --> apply
//! ```
//!
//! Owns the leaves that arrived, under a lock under which no other one is taken. The queue has a lock of its own
//! ([`crate::nodes::leaf_queue`]).
//!
//! Invariants:
//! - I1. A leaf that could not be read ahead is read again when it is needed; the second read tries all copies and
//!   reports the error.
//! - I2. A leaf that was read ahead is taken once and kept nowhere else: an apply reads a node once, and soon replaces
//!   it ([`crate::nodes::store::ScanSource`]). So memory holds at most the leaves that were announced but not yet
//!   taken. A walk may pass announced leaves without taking them, so beyond a limit the oldest leaves are dropped.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Result, start_helper};
use ubtrfs_format::Logical;
use ubtrfs_tree::{Node, NodePtr, NodeSource};

use crate::nodes::leaf_queue::LeafQueue;
use crate::nodes::store::{NodeStore, ScanSource};

/// Source of the nodes for one apply or one walk.
pub(crate) struct LeafReader<'s> {
    store: &'s NodeStore,
    /// Maximum number of leaves that arrived but were not taken.
    arrived_max: usize,
    /// Runs of neighbouring leaves.
    queue: LeafQueue<Vec<NodePtr>>,
    arrived: Mutex<ArrivedLeaves>,
}

#[derive(Default)]
struct ArrivedLeaves {
    leaves: HashMap<Logical, Arc<Node>>,
    /// The leaves of `leaves` in the order of their arrival. Leaves that were taken may still be listed.
    order: VecDeque<Logical>,
}

impl<'s> LeafReader<'s> {
    /// Runs `work` with a source that reads ahead.
    pub(crate) fn with<T>(store: &'s NodeStore, work: impl FnOnce(&Self) -> T) -> T {
        Self::with_limit(store, usize::MAX, work)
    }

    /// Runs `work` with a source that reads ahead, and keeps at most `arrived_max` leaves that were not taken.
    pub(crate) fn with_limit<T>(store: &'s NodeStore, arrived_max: usize, work: impl FnOnce(&Self) -> T) -> T {
        let (queue, arrived) = (LeafQueue::new(usize::MAX, true), Mutex::default());
        let reader = Self { store, arrived_max, queue, arrived };
        std::thread::scope(|scope| {
            let _end = reader.queue.end_on_drop();
            if !start_helper(scope, || reader.read_runs()).is_thread() {
                // Nothing is read ahead (I1).
                drop(reader.queue.end_on_drop());
            }
            work(&reader)
        })
    }

    fn read_runs(&self) {
        let _end = self.queue.end_on_drop();
        let mut buf = AlignedBuf::with_capacity(0);
        while let Some(run) = self.queue.next() {
            // I1
            let nodes = self.store.read_run(&run.request, &mut buf).unwrap_or_default();
            let mut arrived = self.arrived.lock();
            for node in nodes {
                arrived.keep(node, self.arrived_max);
            }
        }
    }

    /// Takes a leaf that was read ahead. If the leaf is still being read, waits for it. Without the wait, the leaf
    /// would arrive after its only use, and nothing would remove it from memory (I2).
    fn take(&self, bytenr: Logical) -> Option<Arc<Node>> {
        self.queue.wait_for(bytenr);
        self.arrived.lock().leaves.remove(&bytenr)
    }
}

impl ArrivedLeaves {
    /// Keeps a leaf that arrived. Drops all leaves except the last `most` leaves that arrived (I2).
    fn keep(&mut self, node: Arc<Node>, most: usize) {
        if most < usize::MAX {
            self.order.push_back(node.bytenr());
            while self.order.len() > most {
                if let Some(oldest) = self.order.pop_front() {
                    self.leaves.remove(&oldest);
                }
            }
        }
        self.leaves.insert(node.bytenr(), node);
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
        let runs_of = |leaves| self.store.runs_of(leaves, usize::MAX);
        self.queue.announce(ptrs, |ptr| !self.store.is_in_memory(ptr), runs_of);
    }

    fn nodesize(&self) -> usize {
        self.store.nodesize()
    }
}
