//! [`LeafQueue`]: leaves that a thread reads before others need them. [`crate::nodes::leaf_ahead`] uses it for walks, and
//! [`crate::nodes::leaf_reader`] for batches.
//!
//! ```text
//! announce --> queue -- next --> the reading thread --> arrived --> wait_for returns
//! ```
//!
//! Owns the queue and the set of expected leaves, under one lock. Lock order: a tree's view -> the lock of the queue ->
//! the store's shards and cache.
//!
//! Invariants:
//! - I1. A leaf is expected from its announcement until its request has ended. It is in at most one request.
//! - I2. After the end of the reading thread, even by a panic, no leaf is expected, so no thread waits.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ubtrfs_format::Logical;
use ubtrfs_tree::NodePtr;

/// A request to read leaves that are neighbours on the devices.
pub(crate) trait LeafRequest {
    /// The leaves.
    fn leaves(&self) -> &[NodePtr];
}

impl LeafRequest for Vec<NodePtr> {
    fn leaves(&self) -> &[NodePtr] {
        self
    }
}

/// Requests that wait for the reading thread, and the leaves that will arrive.
#[derive(Debug)]
pub(crate) struct LeafQueue<R> {
    /// Maximum number of expected leaves.
    expected_max: usize,
    state: Mutex<LeafQueueState<R>>,
    /// Signals that a leaf was announced or arrived, or that the reading ends.
    changed: Condvar,
    /// Number of leaves in `LeafQueueState::expected`.
    nr_expected: AtomicUsize,
}

#[derive(Debug)]
struct LeafQueueState<R> {
    requests: VecDeque<R>,
    /// Leaves in `requests`, and leaves that are being read (I1).
    expected: HashSet<Logical>,
    accepts: bool,
    has_ended: bool,
}

/// The state of a leaf that a thread needs.
pub(crate) enum NeededLeaf<'q, R: LeafRequest> {
    /// Nobody reads the leaf.
    NotExpected,
    /// The leaf arrived, or could not be read.
    Arrived,
    /// The request with the leaf, which was waiting. The caller reads it.
    Waiting(TakenRequest<'q, R>),
}

impl<R: LeafRequest> LeafQueue<R> {
    /// Makes an empty queue. It accepts announcements at once, or after [`Self::accept`].
    pub(crate) fn new(expected_max: usize, accepts: bool) -> Self {
        let state = LeafQueueState { requests: VecDeque::new(), expected: HashSet::new(), accepts, has_ended: false };
        Self { expected_max, state: Mutex::new(state), changed: Condvar::new(), nr_expected: AtomicUsize::new(0) }
    }

    /// Accepts announcements from now on.
    pub(crate) fn accept(&self) {
        self.state.lock().accepts = true;
    }

    /// Announces the leaves that are `wanted` and not expected yet. `requests_of` makes requests of them.
    pub(crate) fn announce(
        &self,
        leaves: &[NodePtr],
        wanted: impl Fn(&NodePtr) -> bool,
        requests_of: impl FnOnce(Vec<NodePtr>) -> Vec<R>,
    ) {
        let mut state = self.state.lock();
        if !state.accepts || state.has_ended {
            return;
        }
        let mut new = Vec::with_capacity(leaves.len());
        for leaf in leaves {
            if state.expected.len() >= self.expected_max {
                break;
            }
            if wanted(leaf) && state.expected.insert(leaf.bytenr) {
                new.push(*leaf);
            }
        }
        if !new.is_empty() {
            state.requests.extend(requests_of(new));
            self.changed(&state);
        }
    }

    /// Waits for the next request. Returns `None` at the end.
    pub(crate) fn next(&self) -> Option<TakenRequest<'_, R>> {
        let mut state = self.state.lock();
        loop {
            if state.has_ended {
                return None;
            }
            if let Some(request) = state.requests.pop_front() {
                return Some(TakenRequest { queue: self, request });
            }
            self.changed.wait(&mut state);
        }
    }

    /// Waits until a leaf is not expected any more.
    pub(crate) fn wait_for(&self, bytenr: Logical) {
        self.wait_locked(&mut self.state.lock(), bytenr);
    }

    fn wait_locked(&self, state: &mut MutexGuard<'_, LeafQueueState<R>>, bytenr: Logical) {
        self.changed.wait_while(state, |state| state.expected.contains(&bytenr));
    }

    /// Takes the request with this leaf if it waits in the queue. If the leaf is being read, waits for it.
    pub(crate) fn need(&self, bytenr: Logical) -> NeededLeaf<'_, R> {
        if self.nr_expected.load(Ordering::Acquire) == 0 {
            return NeededLeaf::NotExpected;
        }
        let mut state = self.state.lock();
        if !state.expected.contains(&bytenr) {
            return NeededLeaf::NotExpected;
        }
        let has_leaf = |request: &R| request.leaves().iter().any(|leaf| leaf.bytenr == bytenr);
        let at = state.requests.iter().position(has_leaf);
        if let Some(request) = at.and_then(|at| state.requests.remove(at)) {
            return NeededLeaf::Waiting(TakenRequest { queue: self, request });
        }
        self.wait_locked(&mut state, bytenr);
        NeededLeaf::Arrived
    }

    /// Ends the reading: nothing is announced any more, and no thread waits (I2).
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.has_ended = true;
        state.expected.clear();
        let dropped = std::mem::take(&mut state.requests);
        self.changed(&state);
        drop(state);
        drop(dropped);
    }

    /// A guard of the reading thread, and of the work that uses its leaves (I2).
    pub(crate) fn end_on_drop(&self) -> EndLeafQueue<'_, R> {
        EndLeafQueue(self)
    }

    fn changed(&self, state: &LeafQueueState<R>) {
        self.nr_expected.store(state.expected.len(), Ordering::Release);
        self.changed.notify_all();
    }
}

/// A request that a thread reads. When dropped, also after a panic, its leaves are no longer expected (I1).
pub(crate) struct TakenRequest<'q, R: LeafRequest> {
    queue: &'q LeafQueue<R>,
    pub(crate) request: R,
}

impl<R: LeafRequest> Drop for TakenRequest<'_, R> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        for leaf in self.request.leaves() {
            let was_expected = state.expected.remove(&leaf.bytenr);
            debug_assert!(was_expected || state.has_ended, "I1: leaf {} is in two requests", leaf.bytenr);
        }
        self.queue.changed(&state);
    }
}

/// Ends the reading when dropped, also after a panic.
pub(crate) struct EndLeafQueue<'q, R: LeafRequest>(&'q LeafQueue<R>);

impl<R: LeafRequest> Drop for EndLeafQueue<'_, R> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_format::{Generation, RootId};

    use super::*;

    fn leaf(bytenr: u64) -> NodePtr {
        let first_key = None;
        NodePtr { tree: RootId::FS_TREE, bytenr: Logical(bytenr), generation: Generation(7), level: 0, first_key }
    }

    fn announce(queue: &LeafQueue<Vec<NodePtr>>, leaves: &[u64]) {
        let leaves: Vec<NodePtr> = leaves.iter().map(|&bytenr| leaf(bytenr)).collect();
        queue.announce(&leaves, |_| true, |new| new.chunks(2).map(<[NodePtr]>::to_vec).collect());
    }

    #[test]
    fn a_leaf_is_in_one_request_and_expected_until_that_has_ended() {
        let queue = LeafQueue::new(4, true);
        announce(&queue, &[1, 2]);
        announce(&queue, &[2, 3, 4, 5]);
        let first = queue.next().unwrap();
        assert_eq!(first.request.len(), 2);
        let NeededLeaf::Waiting(second) = queue.need(Logical(4)) else { panic!("nobody has taken it") };
        assert_eq!(
            second.request.iter().map(|leaf| leaf.bytenr.0).collect::<Vec<_>>(),
            [3, 4],
            "5 is beyond the limit"
        );
        assert!(matches!(queue.need(Logical(5)), NeededLeaf::NotExpected));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| matches!(queue.need(Logical(1)), NeededLeaf::Arrived));
            drop((first, second));
            // It has arrived by then, or was not expected any more.
            let _ = waits.join().unwrap();
        });
        assert!(matches!(queue.need(Logical(2)), NeededLeaf::NotExpected));
        announce(&queue, &[1]);
        assert!(queue.next().is_some());
    }

    #[test]
    fn nobody_waits_after_the_end() {
        let queue = LeafQueue::new(usize::MAX, false);
        announce(&queue, &[1]);
        assert!(matches!(queue.need(Logical(1)), NeededLeaf::NotExpected), "nothing is accepted yet");
        queue.accept();
        announce(&queue, &[1, 2]);
        let taken = queue.next().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| queue.wait_for(Logical(2)));
            drop(queue.end_on_drop());
        });
        drop(taken);
        assert!(queue.next().is_none());
        announce(&queue, &[3]);
        assert!(matches!(queue.need(Logical(3)), NeededLeaf::NotExpected));
    }
}
