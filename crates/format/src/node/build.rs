//! Builds tree blocks in memory: headers, leaves and internal nodes.
//!
//! Invariants:
//! - I1. Offsets are computed by this program or checked, so a wrong index is a bug of this program and panics.
//! - I2. Blocks are at most 64 KiB, so offsets fit in 32 bits.

#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "I1, I2"
)]

use uuid::Uuid;

use super::{BACKREF_REV_MIXED, HEADER_FLAG_WRITTEN, HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, NodeView};
use crate::csum::CsumType;
use crate::ids::{Generation, Logical, RootId};
use crate::key::Key;

/// The header fields of a block, except for checksum and item count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeHeader {
    /// Filesystem id that blocks carry.
    pub fsid: Uuid,
    /// Chunk tree UUID.
    pub chunk_tree_uuid: Uuid,
    /// The block's own address.
    pub bytenr: Logical,
    /// The running transaction.
    pub generation: Generation,
    /// The tree that allocates the block.
    pub owner: RootId,
    /// The level of the block in its tree: 0 for a leaf.
    pub level: u8,
    /// Header flags; [`finish_block`] adds [`HEADER_FLAG_WRITTEN`].
    pub flags: u64,
}

/// Writes the header fields of a block, except for the checksum.
pub fn write_header(raw: &mut [u8], header: &NodeHeader, nritems: usize) {
    let mut at = 32;
    let mut put = |bytes: &[u8]| {
        raw[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(header.fsid.as_bytes());
    put(&header.bytenr.0.to_le_bytes());
    let flags = header.flags | (u64::from(BACKREF_REV_MIXED) << 56);
    put(&flags.to_le_bytes());
    put(header.chunk_tree_uuid.as_bytes());
    put(&header.generation.0.to_le_bytes());
    put(&header.owner.0.to_le_bytes());
    put(&u32::try_from(nritems).unwrap_or(u32::MAX).to_le_bytes());
    put(&[header.level]);
}

/// Marks the block as written and stores its checksum: the last step before the block is written to the device.
pub fn finish_block(raw: &mut [u8], csum_type: CsumType) {
    raw[56] |= HEADER_FLAG_WRITTEN as u8;
    let csum = csum_type.compute(&raw[32..]);
    raw[..32].copy_from_slice(&csum);
}

/// Fills a leaf item by item, in key order.
#[derive(Debug)]
pub struct LeafBuilder {
    raw: Vec<u8>,
    nritems: usize,
    data_start: usize,
}

impl LeafBuilder {
    /// Bytes available to items (heads and data) in a leaf.
    pub fn capacity(nodesize: usize) -> usize {
        nodesize - HEADER_SIZE
    }

    /// An empty leaf of `nodesize` bytes.
    pub fn new(nodesize: usize) -> Self {
        Self { raw: vec![0; nodesize], nritems: 0, data_start: nodesize }
    }

    /// Bytes left for heads and data.
    pub fn free_bytes(&self) -> usize {
        self.data_start - (HEADER_SIZE + self.nritems * ITEM_HEAD_SIZE)
    }

    /// Number of items so far.
    pub fn nritems(&self) -> usize {
        self.nritems
    }

    /// Appends an item; returns `false`, without a change, if it does not fit. Keys must ascend.
    #[must_use]
    pub fn push(&mut self, key: &Key, data: &[u8]) -> bool {
        if data.len() + ITEM_HEAD_SIZE > self.free_bytes() {
            return false;
        }
        let start = self.data_start - data.len();
        self.raw[start..self.data_start].copy_from_slice(data);
        let at = HEADER_SIZE + self.nritems * ITEM_HEAD_SIZE;
        self.raw[at..at + 17].copy_from_slice(&key.encode());
        // I2: offsets and lengths fit in 32 bits.
        self.raw[at + 17..at + 21].copy_from_slice(&((start - HEADER_SIZE) as u32).to_le_bytes());
        self.raw[at + 21..at + 25].copy_from_slice(&(data.len() as u32).to_le_bytes());
        self.data_start = start;
        self.nritems += 1;
        true
    }

    /// Bytes used by heads and data so far.
    pub fn used_bytes(&self) -> usize {
        Self::capacity(self.raw.len()) - self.free_bytes()
    }

    /// Appends the items in these slots of `leaf`, until one does not fit. Returns the number of items appended.
    /// Contiguous data is copied at once; in a leaf that passed the checker, all data is contiguous.
    pub fn extend(&mut self, leaf: &NodeView<'_>, slots: std::ops::Range<usize>) -> usize {
        let mut at = slots.start;
        while at < slots.end {
            match self.extend_piece(leaf, at..slots.end) {
                0 => break,
                count => at += count,
            }
        }
        at - slots.start
    }

    /// Appends the items in these slots of `leaf`, until one does not fit or its data is not contiguous with the data
    /// of the item before. Returns the number of items appended.
    fn extend_piece(&mut self, leaf: &NodeView<'_>, slots: std::ops::Range<usize>) -> usize {
        let mut data: Option<std::ops::Range<usize>> = None;
        let (mut count, mut free_bytes) = (0, self.free_bytes());
        for slot in slots.clone() {
            let Some(range) = leaf.item_range(slot) else { break };
            let need = range.len() + ITEM_HEAD_SIZE;
            if need > free_bytes || data.as_ref().is_some_and(|data| data.start != range.end) {
                break;
            }
            free_bytes -= need;
            data = Some(range.start..data.map_or(range.end, |data| data.end));
            count += 1;
        }
        let Some(data) = data else { return 0 };
        let (Some(bytes), Some(from)) = (leaf.raw().get(data.clone()), leaf.slot_at(slots.start, ITEM_HEAD_SIZE))
        else {
            return 0;
        };
        let start = self.data_start - bytes.len();
        self.raw[start..self.data_start].copy_from_slice(bytes);
        let at = HEADER_SIZE + self.nritems * ITEM_HEAD_SIZE;
        let heads = &mut self.raw[at..at + count * ITEM_HEAD_SIZE];
        let Some(old_heads) = leaf.raw().get(from..from + heads.len()) else { return 0 };
        heads.copy_from_slice(old_heads);
        // All data offsets change by an equal distance.
        let moved = (start as u32).wrapping_sub(data.start as u32);
        for head in heads.chunks_exact_mut(ITEM_HEAD_SIZE) {
            let [.., o0, o1, o2, o3, _, _, _, _] = head else { break };
            let offset = u32::from_le_bytes([*o0, *o1, *o2, *o3]).wrapping_add(moved);
            [*o0, *o1, *o2, *o3] = offset.to_le_bytes();
        }
        self.data_start = start;
        self.nritems += count;
        count
    }

    /// The block, with its header but no checksum yet.
    pub fn finish(mut self, header: &NodeHeader) -> Vec<u8> {
        write_header(&mut self.raw, header, self.nritems);
        self.raw
    }
}

/// Fills an internal node pointer by pointer, in key order.
#[derive(Debug)]
pub struct NodeBuilder {
    raw: Vec<u8>,
    nritems: usize,
}

impl NodeBuilder {
    /// The number of pointers that fit in a node.
    pub fn capacity(nodesize: usize) -> usize {
        (nodesize - HEADER_SIZE) / KEY_PTR_SIZE
    }

    /// An empty node of `nodesize` bytes.
    pub fn new(nodesize: usize) -> Self {
        Self { raw: vec![0; nodesize], nritems: 0 }
    }

    /// Number of pointers so far.
    pub fn nritems(&self) -> usize {
        self.nritems
    }

    /// Appends a pointer; returns `false`, without a change, if the node is full. Keys must ascend.
    #[must_use]
    pub fn push(&mut self, key: &Key, bytenr: Logical, generation: Generation) -> bool {
        if self.nritems == Self::capacity(self.raw.len()) {
            return false;
        }
        let at = HEADER_SIZE + self.nritems * KEY_PTR_SIZE;
        self.raw[at..at + 17].copy_from_slice(&key.encode());
        self.raw[at + 17..at + 25].copy_from_slice(&bytenr.0.to_le_bytes());
        self.raw[at + 25..at + 33].copy_from_slice(&generation.0.to_le_bytes());
        self.nritems += 1;
        true
    }

    /// The block, with its header but no checksum yet.
    pub fn finish(mut self, header: &NodeHeader) -> Vec<u8> {
        write_header(&mut self.raw, header, self.nritems);
        self.raw
    }
}
