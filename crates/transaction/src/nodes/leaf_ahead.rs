//! [`LeafAhead`]: the queue of a thread that reads and checks the next leaves of a tree walk. Leaves that are
//! neighbours on the devices are read in one request.
//!
//! ```text
//!   walk -- announce --> queue -- thread --> devices, tree checker --> node cache -- read_node --> walk
//! ```
//!
//! A walk that needs a leaf that is still in the queue reads that request itself, so both threads read and check.
//!
//! The queue and its lock are those of [`crate::nodes::leaf_queue`].
//!
//! Invariants:
//! - I1. A pointer is followed only if its tree has not changed since the pointer was found: the thread holds the
//!   tree's view lock shared, as every reader does, and drops jobs that were queued for another version of the tree.
//!   Blocks that a tree no longer uses may be overwritten. If only one copy of such a block is overwritten, a reader
//!   with a stale pointer would take the other copy for the valid one.
//! - I2. The readahead thread never waits for a view lock, because the holder of a view lock may be waiting for a leaf.
//!   The readahead thread takes a view lock even if writers wait for that lock; if a writer holds the lock, the thread
//!   drops the job.
//! - I3. A leaf that could not be read ahead is read again by the thread that needs it, which reports the error.
//!   Before [`LeafReadAhead::accept`] and after the end of the readahead thread, nothing is announced, and no thread
//!   waits. Between `accept` and the start of the thread, walks read the queued requests themselves.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;
use ubtrfs_format::Logical;
use ubtrfs_tree::NodePtr;

use crate::health::unwind::EngineId;
use crate::lock_rank::RankedRwLock;
use crate::nodes::leaf_hint::TreeVersion;
use crate::nodes::leaf_queue::{LeafQueue, LeafRequest, NeededLeaf};
use crate::nodes::store::NodeStore;

/// Leaves that are being read ahead, of all trees of a filesystem.
#[derive(Debug)]
pub(crate) struct LeafAhead {
    /// Maximum number of expected leaves.
    expected_max: usize,
    queue: LeafQueue<LeafJob>,
    /// Memory for the requests of threads that need a leaf.
    spare: Mutex<AlignedBuf>,
}

/// A request to read neighbouring leaves, valid for one version of their tree.
#[derive(Debug)]
struct LeafJob {
    view: SharedView,
    version: TreeVersion,
    run: Vec<NodePtr>,
}

/// Runs the readahead thread; see [`Engine::leaf_read_ahead`](crate::Engine::leaf_read_ahead).
#[derive(Clone, Debug)]
pub struct LeafReadAhead {
    store: Arc<NodeStore>,
    engine: EngineId,
}

/// A view of a tree with a version. While the lock of a view ([`SharedView`]) is held, the tree's nodes do not change.
pub(crate) trait AtVersion: std::fmt::Debug + Send + Sync {
    /// The version of the tree, which is new after each change of the tree's nodes.
    fn version(&self) -> TreeVersion;
}

/// A view of a tree, and its lock.
pub(crate) type SharedView = Arc<RankedRwLock<dyn AtVersion>>;

/// The position of a thread among the leaves below one parent, and how regular its steps are.
#[derive(Debug, Default)]
pub(crate) struct LeafAheadWalk {
    parent: Logical,
    slot: usize,
    /// Number of steps to nearby leaves minus number of other steps. A single other step does not end a walk, because a
    /// walk also reads other leaves now and then.
    steadiness: u32,
    /// Slots of leaves that were announced.
    announced: Range<usize>,
    /// Number of leaves that should be in memory or in the queue before and after the walk's position. Grows while the
    /// walk continues in the same direction.
    reach: [usize; 2],
}

impl LeafReadAhead {
    pub(crate) fn new(store: Arc<NodeStore>, engine: EngineId) -> Self {
        Self { store, engine }
    }

    /// Accepts announcements of leaves from now on. The caller must then start a thread that calls
    /// [`LeafReadAhead::run`]. Leaves that are announced before that thread runs stay in the queue.
    pub fn accept(&self) {
        self.store.ahead.queue.accept();
    }

    /// Reads leaves ahead until [`LeafReadAhead::stop`]. Only one thread may call `run`.
    pub fn run(&self) {
        self.engine.enter();
        let ahead = &self.store.ahead;
        let _end = ahead.queue.end_on_drop();
        let mut buf = AlignedBuf::with_capacity(0);
        while let Some(job) = ahead.queue.next() {
            job.request.read(&self.store, &mut buf);
        }
    }

    /// Makes [`LeafReadAhead::run`] return soon.
    pub fn stop(&self) {
        self.store.ahead.queue.end();
        *self.store.ahead.spare.lock() = AlignedBuf::default();
    }
}

impl LeafAhead {
    /// Makes an empty queue. The number of expected leaves is limited so that a cache of `cache_nodes` nodes keeps each
    /// leaf until it is needed.
    pub(crate) fn new(cache_nodes: u64) -> Self {
        let expected_max = usize::try_from(cache_nodes / CACHE_SHARE).unwrap_or(usize::MAX).min(EXPECTED_MAX);
        Self { expected_max, queue: LeafQueue::new(expected_max, false), spare: Mutex::default() }
    }

    /// Announces leaves that may be needed soon.
    pub(crate) fn announce(&self, store: &NodeStore, view: &SharedView, version: TreeVersion, ptrs: &[NodePtr]) {
        let jobs_of = |leaves| {
            let runs = store.runs_of(leaves, RUN_MAX).into_iter();
            runs.map(|run| LeafJob { view: Arc::clone(view), version, run }).collect()
        };
        self.queue.announce(ptrs, |ptr| !store.is_in_memory(ptr), jobs_of);
    }

    /// The largest useful reach of a walk: leaves beyond it would not be announced.
    pub(crate) fn reach_max(&self) -> usize {
        REACH_MAX.min(self.expected_max / 2)
    }

    /// Waits for a leaf if it is being read ahead. If its request is still in the queue, reads the request. Returns
    /// whether the leaf was being read ahead.
    pub(crate) fn wait_for(&self, store: &NodeStore, bytenr: Logical) -> bool {
        match self.queue.need(bytenr) {
            NeededLeaf::NotExpected => false,
            NeededLeaf::Arrived => true,
            NeededLeaf::Waiting(job) => {
                let mut buf = std::mem::take(&mut *self.spare.lock());
                job.request.read(store, &mut buf);
                *self.spare.lock() = buf;
                true
            }
        }
    }
}

impl LeafRequest for LeafJob {
    fn leaves(&self) -> &[NodePtr] {
        &self.run
    }
}

impl LeafJob {
    fn read(&self, store: &NodeStore, buf: &mut AlignedBuf) {
        // I1, I2
        if let Some(view) = self.view.try_read_recursive()
            && view.version() == self.version
            && let Ok(nodes) = store.read_run(&self.run, buf)
        {
            nodes.into_iter().for_each(|node| store.keep(node));
        }
    }
}

impl LeafAheadWalk {
    /// Notes a step to the leaf in this slot of a parent with `nr_slots` slots. Returns two ranges of slots to read
    /// ahead, one after this slot and one before it, each of at most about `reach_max` leaves.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "slots of a node, a reach of at most `reach_max`, and a steadiness between 0 and `STEADINESS_MAX`"
    )]
    pub(crate) fn step(
        &mut self,
        parent: Logical,
        slot: usize,
        nr_slots: usize,
        reach_max: usize,
    ) -> [Range<usize>; 2] {
        let is_near = self.parent == parent && self.slot.abs_diff(slot) <= NEAR;
        if !is_near && self.steadiness > 0 {
            self.steadiness -= 1;
            return [0..0, 0..0];
        }
        if is_near {
            self.steadiness = (self.steadiness + 1).min(STEADINESS_MAX);
        } else {
            (self.parent, self.announced) = (parent, slot..slot);
        }
        self.slot = slot;
        if self.steadiness < STEADY {
            return [0..0, 0..0];
        }
        if !(self.announced.start..=self.announced.end).contains(&slot) {
            self.announced = slot..slot;
        }
        let known = self.announced.clone();
        if known.is_empty() {
            self.reach = [REACH_MIN; 2];
        }
        let [back, forth] = &mut self.reach;
        if slot < known.start + *back {
            self.announced.start = known.start.saturating_sub(*back);
            if !known.is_empty() {
                *back = (*back * 2).min(reach_max.max(REACH_MIN));
            }
        }
        if slot + *forth > known.end {
            self.announced.end = (known.end + *forth).min(nr_slots);
            if !known.is_empty() {
                *forth = (*forth * 2).min(reach_max.max(REACH_MIN));
            }
        }
        [known.end..self.announced.end.max(known.end), self.announced.start..known.start]
    }
}

/// Maximum number of leaves in a request.
const RUN_MAX: usize = 32;
/// The reach of a walk at its beginning.
const REACH_MIN: usize = 16;
/// The reach of a long walk. Many requests in the queue keep both threads busy.
pub(crate) const REACH_MAX: usize = 64;
/// The number of leaves being read ahead is at most the number of nodes in the cache divided by this constant.
const CACHE_SHARE: u64 = 8;
const EXPECTED_MAX: usize = 256;
/// Longest step of a walk, in slots: leaves of other directories may lie between the leaves of one directory's files.
const NEAR: usize = 16;
/// Minimum steadiness at which steps count as a walk.
const STEADY: u32 = 2;
const STEADINESS_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const PARENT: Logical = Logical(1 << 20);

    /// The slots that these steps announce.
    fn announced(slots: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut walk = LeafAheadWalk::default();
        let steps = slots.into_iter().flat_map(|slot| walk.step(PARENT, slot, 200, REACH_MAX)).flatten();
        steps.collect()
    }

    #[test]
    fn a_walk_announces_each_leaf_once_before_it_comes_there() {
        for slots in [(0..200).collect::<Vec<_>>(), (0..200).rev().collect()] {
            let mut walk = LeafAheadWalk::default();
            let mut known = HashSet::new();
            for (number, slot) in slots.into_iter().enumerate() {
                assert!(number < 4 || known.contains(&slot), "step {number} to {slot}");
                for ahead in walk.step(PARENT, slot, 200, REACH_MAX).into_iter().flatten() {
                    assert!(ahead < 200 && known.insert(ahead), "{ahead}");
                }
            }
            assert!(known.len() > 190);
        }
    }

    #[test]
    fn a_long_walk_reads_further_ahead_in_its_direction() {
        let mut walk = LeafAheadWalk::default();
        let mut last = [0..0, 0..0];
        for slot in 500..600 {
            for (known, new) in last.iter_mut().zip(walk.step(PARENT, slot, 1000, REACH_MAX)) {
                *known = if new.is_empty() { known.clone() } else { new };
            }
        }
        assert!(last[0].len() == REACH_MAX && last[0].end > 600 + REACH_MAX, "{last:?}");
        assert!(last[1].start >= 500 - 2 * REACH_MIN, "{last:?}");
    }

    #[test]
    fn looking_here_and_there_announces_nothing() {
        assert!(announced((0..1000).map(|number| number * 37 % 200)).is_empty());
        assert!(announced([5, 100, 6, 101, 7, 102]).is_empty());
    }

    #[test]
    fn a_walk_continues_after_a_detour() {
        let mut walk = LeafAheadWalk::default();
        let mut known = HashSet::new();
        for slot in 50..150 {
            known.extend(walk.step(PARENT, slot, 200, REACH_MAX).into_iter().flatten());
            assert!(slot < 54 || known.contains(&(slot + 1)), "{slot}");
            if slot % 3 == 0 {
                assert_eq!(walk.step(Logical(4096), 7, 200, REACH_MAX), [0..0, 0..0], "elsewhere");
            }
        }
    }
}
