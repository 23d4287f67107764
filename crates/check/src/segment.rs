//! Remembers checked runs of leaves that subvolumes share, so that a snapshot costs time only for its unshared leaves.
//!
//! A leaf whose first key is an inode item begins a *segment*, which ends before the next such leaf. No inode lies in
//! two segments. The results of a segment (sum of names, number of inodes) are remembered. The remembered results are
//! used again if another subvolume has the same leaves in the same order.
//!
//! Invariants:
//! - I1. A segment is remembered only if it had no problems, and no items that are compared outside of the ledger
//!   (inodes without names, entries of subvolumes, orphan items).
//! - I2. A segment takes about 100 bytes and has at least one leaf. Segments are remembered only if there are several
//!   subvolumes and full quotas are off.

use std::collections::HashMap;

use ubtrfs_format::{Generation, Key, KeyType};

use crate::checker::Checker;
use crate::reader::BlockPtr;
use crate::walk::Leaf;

/// The remembered results of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    hash: u64,
    /// The sum of the names in the segment, which is added to the sum of a whole subvolume.
    pub(crate) names: u64,
    pub(crate) inodes: u64,
    pub(crate) last_key: Key,
}

/// All remembered segments, by the address of their first leaf.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    pub(crate) enabled: bool,
    known: HashMap<u64, Known>,
}

/// A segment that is being checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    start: u64,
    hash: u64,
    names_before: u64,
    inodes_before: u64,
    problems_before: u64,
    last_key: Key,
    /// Whether the segment must not be remembered (I1).
    pub(crate) special: bool,
}

/// Whether a leaf with this first key begins a segment.
pub(crate) fn is_cut(key: Option<Key>) -> bool {
    key.is_some_and(|key| key.item_type == KeyType::INODE_ITEM)
}

impl<'a> Checker<'a> {
    /// Begins a segment with this leaf, if segments are remembered.
    pub(crate) fn open_segment(&self, leaf: &Leaf<'_>) -> Option<Open> {
        let open = Open {
            start: leaf.bytenr,
            hash: 0,
            names_before: self.names.total(),
            inodes_before: self.stats.inodes,
            problems_before: self.sink.total(),
            last_key: Key::MIN,
            special: false,
        };
        self.segments.enabled.then(|| self.extend_segment(open, leaf))
    }

    /// Adds a leaf to the current segment.
    pub(crate) fn extend_segment(&self, open: Open, leaf: &Leaf<'_>) -> Open {
        let view = leaf.view;
        let hash = self.leaf_hash(open.hash, leaf.bytenr, view.generation(), view.key(0).unwrap_or_default());
        let last_key = view.key(view.nritems().saturating_sub(1)).unwrap_or_default();
        Open { hash, last_key, ..open }
    }

    fn leaf_hash(&self, before: u64, bytenr: u64, generation: Generation, key: Key) -> u64 {
        let Key { objectid, item_type, offset } = key;
        self.hash.numbers(&[before, bytenr, generation.0, objectid, item_type.0.into(), offset])
    }

    /// Ends the current segment, and remembers it if that is allowed (I1).
    pub(crate) fn close_segment(&mut self, open: Option<Open>) {
        let Some(open) = open.filter(|open| !open.special && self.sink.total() == open.problems_before) else { return };
        let known = Known {
            hash: open.hash,
            names: self.names.total().wrapping_sub(open.names_before),
            inodes: self.stats.inodes.saturating_sub(open.inodes_before),
            last_key: open.last_key,
        };
        self.segments.known.insert(open.start, known);
    }

    /// Finds the remembered segments among leaves in key order. Maps the index of a segment's first leaf to the index
    /// after its last leaf and the segment's results.
    pub(crate) fn known_segments(&self, edges: &[BlockPtr]) -> HashMap<usize, (usize, Known)> {
        let mut found = HashMap::new();
        if !self.segments.enabled || self.segments.known.is_empty() {
            return found;
        }
        let mut cuts = (0..edges.len()).filter(|&at| is_cut(edges[at].key)).peekable();
        while let (Some(from), Some(&to)) = (cuts.next(), cuts.peek()) {
            let Some(known) = self.segments.known.get(&edges[from].bytenr) else { continue };
            let hash = edges[from..to]
                .iter()
                .try_fold(0, |hash, edge| Some(self.leaf_hash(hash, edge.bytenr, edge.generation?, edge.key?)));
            if hash == Some(known.hash) {
                found.insert(from, (to, *known));
            }
        }
        found
    }
}
