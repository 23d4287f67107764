//! [`LeafHints`]: the leaves that threads looked into last. The items of an inode are neighbours, and so are the entries of a
//! directory: who asked for one of them soon asks for another one.
//!
//! ```text
//! lane of a thread    entries by name | entries by index | other items      some leaves each
//! ```
//!
//! Invariants:
//! - I1. A hint is for one version of one tree: each [`Tree`](crate::delayed::tree_view::Tree) begins with a version of its own and
//!   gets another one whenever its nodes change, under its view lock held exclusively. Who holds that lock finds only leaves
//!   of the tree as it is.
//! - I2. Nobody waits for a hint: where another thread is at it, there is none.
//! - I3. As many leaves as there are places are kept in memory besides the cache, at most.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{LeafPlace, Node};

use crate::handle::lanes::Lanes;
use crate::nodes::leaf_ahead::Walk;

/// What a tree's nodes are known by until they change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeVersion(u64);

/// The hints of all trees of a filesystem.
#[derive(Debug, Default)]
pub(crate) struct LeafHints {
    lanes: Lanes<Lane>,
    next_version: AtomicU64,
}

/// The hints of a thread, or of several.
#[derive(Debug, Default)]
struct Lane {
    kinds: [Mutex<Recent>; NR_KINDS],
    walk: Mutex<Walk>,
}

/// The leaves of one kind of items that were looked into last.
#[derive(Debug, Default)]
struct Recent {
    hints: [Option<Hint>; NR_RECENT],
    /// The one that is replaced next.
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

    /// The leaf that the key belongs to, if it is one of those that were looked into last.
    pub(crate) fn find(&self, version: TreeVersion, key: &Key) -> Option<LeafPlace> {
        let recent = self.lanes.mine().kinds[kind_of(key)].try_lock()?;
        let is_wanted = |hint: &&Hint| hint.version == version && hint.place.covers(key);
        recent.hints.iter().flatten().find(is_wanted).map(|hint| hint.place.clone())
    }

    /// This leaf was found for the key.
    pub(crate) fn note(&self, version: TreeVersion, key: &Key, place: &LeafPlace) {
        if let Some(mut recent) = self.lanes.mine().kinds[kind_of(key)].try_lock() {
            let oldest = recent.oldest;
            recent.oldest = (oldest + 1) % NR_RECENT;
            let before = recent.hints[oldest].replace(Hint { version, place: place.clone() });
            // Freeing what may be the last handle of a leaf is not for others to wait for.
            drop(recent);
            drop(before);
        }
    }

    /// This thread goes to the leaf in this slot of `parent`. Answers which of the leaves beside it are worth reading.
    pub(crate) fn step(&self, parent: &Node, slot: usize) -> [Range<usize>; 2] {
        let walk = self.lanes.mine().walk.try_lock();
        walk.map_or([0..0, 0..0], |mut walk| walk.step(parent.bytenr(), slot, parent.nritems()))
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
/// A walk through directories comes back to those above.
const NR_RECENT: usize = 4;
