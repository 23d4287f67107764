//! [`LeafHints`]: the leaves that each thread searched last. The items of an inode are neighbours, and so are the
//! entries of a directory, so the next lookup of a thread often ends in one of the remembered leaves.
//!
//! ```text
//! hints of a thread   entries by name | entries by index | other items      some leaves each
//! ```
//!
//! Invariants:
//! - I1. A hint belongs to one version of one tree. Each [`Tree`](crate::delayed::tree_view::Tree) begins with a new
//!   version, and gets a new version whenever its nodes change, while its view lock is held exclusively. A thread that
//!   holds the view lock finds only leaves of the current tree.
//! - I2. No thread waits for a hint: a hint that another thread is using counts as absent.
//! - I3. A hint keeps its leaf in memory even if the cache drops it. Each hint keeps at most one leaf.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{LeafPlace, Node};

use crate::nodes::leaf_ahead::LeafAheadWalk;
use crate::per_thread::PerThread;

/// Identifies the nodes of a tree until they change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeVersion(u64);

/// The hints of all trees of a filesystem.
#[derive(Debug, Default)]
pub(crate) struct LeafHints {
    threads: PerThread<ThreadHints>,
    next_version: AtomicU64,
}

/// The hints of one thread or of several.
#[derive(Debug, Default)]
struct ThreadHints {
    kinds: [Mutex<Recent>; NR_KINDS],
    walk: Mutex<LeafAheadWalk>,
}

/// The last searched leaves for one kind of item.
#[derive(Debug, Default)]
struct Recent {
    hints: [Option<Hint>; NR_RECENT],
    /// Index of the hint that is replaced next.
    oldest: usize,
}

#[derive(Debug)]
struct Hint {
    version: TreeVersion,
    place: LeafPlace,
}

impl LeafHints {
    /// A version that no tree had before.
    pub(crate) fn new_version(&self) -> TreeVersion {
        TreeVersion(self.next_version.fetch_add(1, Ordering::Relaxed))
    }

    /// The leaf that the key belongs to, if there is a hint for it.
    pub(crate) fn find(&self, version: TreeVersion, key: &Key) -> Option<LeafPlace> {
        let recent = self.threads.current().kinds[kind_of(key)].try_lock()?;
        let is_wanted = |hint: &&Hint| hint.version == version && hint.place.covers(key);
        recent.hints.iter().flatten().find(is_wanted).map(|hint| hint.place.clone())
    }

    /// Remembers that this leaf was found for the key.
    pub(crate) fn note(&self, version: TreeVersion, key: &Key, place: &LeafPlace) {
        if let Some(mut recent) = self.threads.current().kinds[kind_of(key)].try_lock() {
            let oldest = recent.oldest;
            recent.oldest = oldest.saturating_add(1) % NR_RECENT;
            let before = recent.hints[oldest].replace(Hint { version, place: place.clone() });
            // Drop the replaced hint after unlocking: the hint may be the last handle of its leaf, and freeing a leaf
            // takes time.
            drop(recent);
            drop(before);
        }
    }

    /// Notes a step of this thread to the leaf in this slot of `parent`. Returns the neighbouring slots whose leaves
    /// are worth reading ahead, in ranges of at most about `reach_max` slots.
    pub(crate) fn step(&self, parent: &Node, slot: usize, reach_max: usize) -> [Range<usize>; 2] {
        let walk = self.threads.current().walk.try_lock();
        walk.map_or([0..0, 0..0], |mut walk| walk.step(parent.bytenr(), slot, parent.nritems(), reach_max))
    }
}

fn kind_of(key: &Key) -> usize {
    match key.item_type {
        KeyType::DIR_ITEM => 0,
        KeyType::DIR_INDEX => 1,
        _ => 2,
    }
}

const NR_KINDS: usize = 3;
/// Number of leaves kept for each kind of item. Several leaves are kept, because a walk through directories returns to
/// the directories above.
const NR_RECENT: usize = 4;
