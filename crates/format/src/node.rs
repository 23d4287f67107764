//! The layout of tree blocks: a header, then either item heads growing up and item data growing down (leaf), or child
//! pointers (internal node).
//!
//! Header, 101 bytes:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 32 | csum of the bytes from 32 on |
//! | 32 | 16 | fsid (metadata uuid) |
//! | 48 | 8 | bytenr |
//! | 56 | 7 | flags: 1 written, 2 reloc |
//! | 63 | 1 | backref revision: 1 mixed |
//! | 64 | 16 | chunk tree uuid |
//! | 80 | 8 | generation |
//! | 88 | 8 | owner |
//! | 96 | 4 | nritems |
//! | 100 | 1 | level |
//!
//! Leaf item head, 25 bytes: key 17, data offset u32 (from the end of the header), data size u32.
//! Internal pointer, 33 bytes: key 17, blockptr u64, generation u64.
//!
//! Invariants:
//! - I1. Reading never panics: a slot or range outside of the block gives `None`.
//! - I2. [`LeafBuilder`] and [`NodeBuilder`] write blocks that pass [`crate::check`].

mod build;

pub use build::{LeafBuilder, NodeBuilder, NodeHeader, finish_block, write_header};
use uuid::Uuid;

use crate::csum::CsumType;
use crate::error::FormatError;
use crate::ids::{Generation, Logical, RootId};
use crate::key::Key;

/// Size of the header in bytes.
pub const HEADER_SIZE: usize = 101;
/// Size of an item head in a leaf, in bytes.
pub const ITEM_HEAD_SIZE: usize = 25;
/// Size of a child pointer in an internal node, in bytes.
pub const KEY_PTR_SIZE: usize = 33;
/// Highest level that a tree can have: levels are 0 (leaves) to 7.
pub const LEVEL_MAX: u8 = 7;
/// Header flag: the block was written.
pub const HEADER_FLAG_WRITTEN: u64 = 1;
/// Header flag: the block belongs to a relocation tree.
pub const HEADER_FLAG_RELOC: u64 = 2;
/// Backref revision: mixed backrefs, the only revision since 2009.
pub const BACKREF_REV_MIXED: u8 = 1;

/// Largest data of an item in a block of `nodesize` bytes: a leaf with only this item is full.
pub fn item_len_max(nodesize: usize) -> usize {
    nodesize.saturating_sub(HEADER_SIZE + ITEM_HEAD_SIZE)
}

/// A view of a block's header, leaf items and child pointers over its raw bytes.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    raw: &'a [u8],
}

impl<'a> NodeView<'a> {
    /// A view over a whole block of `nodesize` bytes.
    pub fn new(raw: &'a [u8]) -> Result<Self, FormatError> {
        if raw.len() < HEADER_SIZE {
            return Err(FormatError::Short { what: "tree block", need: HEADER_SIZE, have: raw.len() });
        }
        Ok(Self { raw })
    }

    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let bytes = self.raw.get(at..at.checked_add(N)?)?;
        bytes.try_into().ok()
    }

    fn u64(&self, at: usize) -> u64 {
        self.array(at).map_or(0, u64::from_le_bytes)
    }

    fn u32(&self, at: usize) -> u32 {
        self.array(at).map_or(0, u32::from_le_bytes)
    }

    /// The whole block.
    pub fn raw(&self) -> &'a [u8] {
        self.raw
    }

    /// The stored checksum, 32 bytes.
    pub fn csum(&self) -> [u8; 32] {
        self.array(0).unwrap_or_default()
    }

    /// Filesystem id.
    pub fn fsid(&self) -> Uuid {
        Uuid::from_bytes(self.array(32).unwrap_or_default())
    }

    /// The block's own address.
    pub fn bytenr(&self) -> Logical {
        Logical(self.u64(48))
    }

    /// Header flags, without the backref revision.
    pub fn flags(&self) -> u64 {
        self.u64(56) & 0x00ff_ffff_ffff_ffff
    }

    /// Backref revision.
    pub fn backref_rev(&self) -> u8 {
        self.raw.get(63).copied().unwrap_or_default()
    }

    /// Chunk tree UUID.
    pub fn chunk_tree_uuid(&self) -> Uuid {
        Uuid::from_bytes(self.array(64).unwrap_or_default())
    }

    /// Transaction that wrote the block.
    pub fn generation(&self) -> Generation {
        Generation(self.u64(80))
    }

    /// The tree that allocated the block.
    pub fn owner(&self) -> RootId {
        RootId(self.u64(88))
    }

    /// Number of items or pointers.
    pub fn nritems(&self) -> usize {
        usize::try_from(self.u32(96)).unwrap_or(usize::MAX)
    }

    /// The level of the block in its tree: 0 for a leaf.
    pub fn level(&self) -> u8 {
        self.raw.get(100).copied().unwrap_or_default()
    }

    /// Whether this is a leaf.
    pub fn is_leaf(&self) -> bool {
        self.level() == 0
    }

    fn slot_at(&self, slot: usize, size: usize) -> Option<usize> {
        (slot < self.nritems()).then_some(())?;
        slot.checked_mul(size)?.checked_add(HEADER_SIZE)
    }

    /// The key in this slot, of a leaf or an internal node.
    pub fn key(&self, slot: usize) -> Option<Key> {
        let size = if self.is_leaf() { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
        Some(Key::decode(&self.array(self.slot_at(slot, size)?)?))
    }

    /// The byte range of this leaf item's data in the block.
    pub fn item_range(&self, slot: usize) -> Option<std::ops::Range<usize>> {
        let at = self.slot_at(slot, ITEM_HEAD_SIZE)?;
        let offset = usize::try_from(u32::from_le_bytes(self.array(at.checked_add(17)?)?)).ok()?;
        let len = usize::try_from(u32::from_le_bytes(self.array(at.checked_add(21)?)?)).ok()?;
        let start = offset.checked_add(HEADER_SIZE)?;
        let end = start.checked_add(len)?;
        (end <= self.raw.len()).then_some(start..end)
    }

    /// This leaf item's data.
    pub fn item(&self, slot: usize) -> Option<&'a [u8]> {
        self.raw.get(self.item_range(slot)?)
    }

    /// This internal node's child: its address and generation.
    pub fn child(&self, slot: usize) -> Option<(Logical, Generation)> {
        let at = self.slot_at(slot, KEY_PTR_SIZE)?;
        let bytenr = u64::from_le_bytes(self.array(at.checked_add(17)?)?);
        let generation = u64::from_le_bytes(self.array(at.checked_add(25)?)?);
        Some((Logical(bytenr), Generation(generation)))
    }

    /// Searches the keys: `Ok(slot)` of an equal key; without an equal key, `Err(slot)` of the first greater key.
    pub fn search(&self, key: &Key) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.nritems());
        while low < high {
            let mid = low.midpoint(high);
            let Some(found) = self.key(mid) else { return Err(low) };
            match found.cmp(key) {
                std::cmp::Ordering::Equal => return Ok(mid),
                std::cmp::Ordering::Less => low = mid.saturating_add(1),
                std::cmp::Ordering::Greater => high = mid,
            }
        }
        Err(low)
    }
}

/// Compares the stored checksum with the computed one.
pub fn verify_csum(raw: &[u8], csum_type: CsumType) -> Result<(), FormatError> {
    let size = csum_type.size();
    let (Some(found), Some(body)) = (raw.get(..size), raw.get(32..)) else {
        return Err(FormatError::Short { what: "tree block", need: HEADER_SIZE, have: raw.len() });
    };
    let computed = csum_type.compute(body);
    let computed = computed.get(..size).unwrap_or_default();
    if found == computed {
        return Ok(());
    }
    Err(FormatError::Checksum { what: "tree block", found: hex(found), computed: hex(computed) })
}

/// Checks that this is the valid block of an address and a generation.
pub fn verify_block(
    raw: &[u8],
    csum_type: CsumType,
    bytenr: Logical,
    generation: Generation,
) -> Result<(), FormatError> {
    verify_csum(raw, csum_type)?;
    let view = NodeView::new(raw)?;
    let wrong = |field, value, expected| Err(FormatError::Value { what: "tree block", field, value, expected });
    if view.bytenr() != bytenr {
        return wrong("bytenr", view.bytenr().0, "expected the address of the block");
    }
    match view.generation() == generation {
        true => Ok(()),
        false => wrong("generation", view.generation().0, "expected the generation of the block"),
    }
}

/// Lower-case hex of some bytes.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
