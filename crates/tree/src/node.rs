//! Immutable tree blocks, and the pointers to them.
//!
//! Invariants:
//! - I1. [`Node::new`] checks the geometry: item heads lie inside the block, item data lies between the heads and the
//!   end of the block, and the level is at most 7. So accessors never fail for a slot below `nritems`.
//! - I2. A node never changes.

#![allow(clippy::arithmetic_side_effects, reason = "I1: slots, offsets and lengths were checked against the block")]

use std::fmt;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, LEVEL_MAX, NodeView};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, Logical, RootId};

/// A block of a tree.
#[derive(Clone)]
pub struct Node {
    raw: Box<[u8]>,
    bytenr: Logical,
    generation: Generation,
    owner: RootId,
    nritems: u32,
    level: u8,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("bytenr", &self.bytenr)
            .field("generation", &self.generation)
            .field("owner", &self.owner)
            .field("level", &self.level)
            .field("nritems", &self.nritems)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Makes a node of a whole block. Checks the geometry (I1), but neither the checksum nor the items.
    pub fn new(raw: Box<[u8]>) -> Result<Self, FormatError> {
        let view = NodeView::new(&raw)?;
        let (level, nritems) = (view.level(), view.nritems());
        if level > LEVEL_MAX {
            let expected = "expected at most 7";
            return Err(FormatError::Value { what: "tree block", field: "level", value: level.into(), expected });
        }
        let size = if level == 0 { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
        let heads_end = nritems.checked_mul(size).and_then(|len| len.checked_add(HEADER_SIZE));
        if heads_end.is_none_or(|end| end > raw.len()) || (level > 0 && nritems == 0) {
            let (value, expected) = (nritems as u64, "expected at most what fits, and at least 1 in an internal node");
            return Err(FormatError::Value { what: "tree block", field: "nritems", value, expected });
        }
        let heads_end = heads_end.unwrap_or_default();
        for slot in 0..if level == 0 { nritems } else { 0 } {
            if view.item_range(slot).is_none_or(|range| range.start < heads_end) {
                let expected = "expected data between the item heads and the end of the block";
                return Err(FormatError::Value { what: "leaf", field: "item offset", value: slot as u64, expected });
            }
        }
        let (bytenr, generation, owner) = (view.bytenr(), view.generation(), view.owner());
        // A block has at most 64 KiB, and so fewer than 2^16 items.
        let nritems = nritems as u32;
        Ok(Self { raw, bytenr, generation, owner, nritems, level })
    }

    /// A [`NodeView`] of the block.
    pub fn view(&self) -> NodeView<'_> {
        NodeView::new(&self.raw).expect("I1: the block holds a header")
    }

    /// The block's bytes.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// Returns the block's bytes without a copy.
    pub fn into_raw(self) -> Box<[u8]> {
        self.raw
    }

    /// The block's address.
    pub fn bytenr(&self) -> Logical {
        self.bytenr
    }

    /// The transaction that made the block.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The tree that allocated the block.
    pub fn owner(&self) -> RootId {
        self.owner
    }

    /// The level of the block in its tree: 0 for a leaf.
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Number of items of a leaf, or of children of an internal node.
    pub fn nritems(&self) -> usize {
        self.nritems as usize
    }

    /// Whether this is a leaf.
    pub fn is_leaf(&self) -> bool {
        self.level == 0
    }

    /// The key in this slot. Panics past the last slot.
    pub fn key(&self, slot: usize) -> Key {
        assert!(slot < self.nritems(), "slot {slot} of {} in block {}", self.nritems, self.bytenr);
        let size = if self.level == 0 { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
        let at = HEADER_SIZE + slot * size;
        let raw = self.raw[at..at + Key::SIZE].first_chunk().expect("I1: the heads lie inside the block");
        Key::decode(raw)
    }

    /// The first key, or `None` for an empty leaf.
    pub fn first_key(&self) -> Option<Key> {
        (self.nritems > 0).then(|| self.key(0))
    }

    /// Data of this leaf item. Panics past the last slot and in an internal node.
    pub fn item(&self, slot: usize) -> &[u8] {
        assert!(slot < self.nritems() && self.level == 0, "slot {slot} of {} in {self:?}", self.nritems);
        let at = HEADER_SIZE + slot * ITEM_HEAD_SIZE + Key::SIZE;
        let start = HEADER_SIZE + self.u32_at(at) as usize;
        &self.raw[start..start + self.u32_at(at + 4) as usize]
    }

    /// Bytes of this leaf item's data. Panics past the last slot and in an internal node.
    pub fn item_len(&self, slot: usize) -> usize {
        assert!(slot < self.nritems() && self.level == 0, "slot {slot} of {} in {self:?}", self.nritems);
        self.u32_at(HEADER_SIZE + slot * ITEM_HEAD_SIZE + Key::SIZE + 4) as usize
    }

    /// Address and generation of this child. Panics past the last slot and in a leaf.
    pub fn child(&self, slot: usize) -> (Logical, Generation) {
        assert!(slot < self.nritems() && self.level > 0, "slot {slot} of {} in {self:?}", self.nritems);
        let at = HEADER_SIZE + slot * KEY_PTR_SIZE + Key::SIZE;
        (Logical(self.u64_at(at)), Generation(self.u64_at(at + 8)))
    }

    /// The pointer to this child, with everything that this internal node promises about it.
    pub fn child_ptr(&self, slot: usize, tree: RootId) -> NodePtr {
        let (bytenr, generation) = self.child(slot);
        // `child` has asserted that the level is above 0.
        NodePtr { tree, bytenr, generation, level: self.level - 1, first_key: Some(self.key(slot)) }
    }

    /// Searches the keys. Returns `Ok` with the slot of the equal key or, if there is none, `Err` with the slot of the
    /// first greater key.
    pub fn search(&self, key: &Key) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.nritems());
        while low < high {
            let mid = low.midpoint(high);
            match self.key(mid).cmp(key) {
                std::cmp::Ordering::Equal => return Ok(mid),
                std::cmp::Ordering::Less => low = mid + 1,
                std::cmp::Ordering::Greater => high = mid,
            }
        }
        Err(low)
    }

    /// The slot of the child that a key belongs to: the last child with a key <= `key`; if there is none, the first
    /// child.
    pub fn child_slot(&self, key: &Key) -> usize {
        match self.search(key) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        }
    }

    /// Bytes used by items or pointers in this block, including heads.
    pub fn used_bytes(&self) -> usize {
        match self.level {
            0 => (0..self.nritems()).map(|slot| ITEM_HEAD_SIZE + self.item_len(slot)).sum(),
            _ => self.nritems() * KEY_PTR_SIZE,
        }
    }

    /// Checks that this is the node that a pointer promises.
    pub fn verify(&self, ptr: &NodePtr) -> Result<()> {
        let wrong = |field, value, expected| {
            let cause = FormatError::Value { what: "tree block", field, value, expected };
            Err(Error::Corrupt(Corrupt::new(cause).in_tree(ptr.tree).at(ptr.bytenr)))
        };
        if self.bytenr != ptr.bytenr {
            return wrong("bytenr", self.bytenr.0, "expected the address of the block");
        }
        if self.generation != ptr.generation {
            return wrong("generation", self.generation.0, "expected the generation that the parent names");
        }
        if self.level != ptr.level {
            return wrong("level", self.level.into(), "expected one less than the parent's");
        }
        match (ptr.first_key, self.first_key()) {
            (Some(_), None) => wrong("nritems", 0, "expected at least 1 below an internal node"),
            (Some(want), Some(found)) if want != found => {
                wrong("first key's objectid", found.objectid, "expected the first key that the parent names")
            }
            _ => Ok(()),
        }
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(*self.raw[at..at + 4].first_chunk().expect("I1: the heads lie inside the block"))
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(*self.raw[at..at + 8].first_chunk().expect("I1: the heads lie inside the block"))
    }
}

/// A pointer to a node, with facts that the node must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePtr {
    /// The tree that contains the pointer. The block's owner may be another tree, because snapshots share blocks.
    pub tree: RootId,
    /// Address of the block.
    pub bytenr: Logical,
    /// The transaction that made the block.
    pub generation: Generation,
    /// Level of the block.
    pub level: u8,
    /// First key of the block; `None` for a root block, which may also be empty.
    pub first_key: Option<Key>,
}

/// The root of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootPtr {
    /// The tree.
    pub tree: RootId,
    /// Address of the root block.
    pub bytenr: Logical,
    /// The transaction that made the root block.
    pub generation: Generation,
    /// Level of the root block; 0 if the tree is a single leaf.
    pub level: u8,
}

impl RootPtr {
    /// The pointer to the root block.
    pub fn node_ptr(&self) -> NodePtr {
        NodePtr {
            tree: self.tree,
            bytenr: self.bytenr,
            generation: self.generation,
            level: self.level,
            first_key: None,
        }
    }
}
