//! [`ItemPage`]: a page of an [`ItemMap`](crate::delayed::item_map::ItemMap), with some item changes and the data of
//! the items, in little more memory than the data needs.
//!
//! ```text
//! heads  key, start, len | key, start, len | ...    ascending
//! data   bytes of items, in the order in which they were added
//! ```
//!
//! Invariants:
//! - I1. The data of a head lies within its page; `garbage` counts the bytes of data that no head points to.

use std::ops::Range;

use ubtrfs_format::{Key, KeyType};

/// Neighbouring changes.
#[derive(Debug, Default)]
pub(crate) struct ItemPage {
    heads: Vec<ItemHead>,
    data: Vec<u8>,
    garbage: usize,
}

/// A key and the place of its data, packed into few bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemHead {
    objectid: u64,
    offset: u64,
    start: u32,
    /// Length of the data, or [`DELETED`] if the key is deleted.
    len: u16,
    item_type: KeyType,
}

impl ItemPage {
    /// An empty page with room for `nr_heads` heads and `data_len` bytes of data.
    pub(crate) fn with_room(nr_heads: usize, data_len: usize) -> Self {
        Self { heads: Vec::with_capacity(nr_heads), data: Vec::with_capacity(data_len), garbage: 0 }
    }

    /// The heads, in order.
    pub(crate) fn heads(&self) -> &[ItemHead] {
        &self.heads
    }

    /// Bytes of data, including garbage.
    pub(crate) fn data_len(&self) -> usize {
        self.data.len()
    }

    /// The data in this slot; `None` for a deletion.
    #[allow(clippy::arithmetic_side_effects, reason = "I1: the data of a head lies within the page")]
    pub(crate) fn value(&self, slot: usize) -> Option<&[u8]> {
        let head = &self.heads[slot];
        (head.len != DELETED).then(|| &self.data[head.start as usize..head.start as usize + usize::from(head.len)])
    }

    /// Adds a change in this slot.
    pub(crate) fn insert(&mut self, slot: usize, key: &Key, value: Option<&[u8]>) {
        if self.heads.len() == self.heads.capacity() {
            self.heads.reserve_exact(HEADS_STEP);
        }
        let (start, len) = self.add_data(value);
        self.heads.insert(
            slot,
            ItemHead { objectid: key.objectid, offset: key.offset, start, len, item_type: key.item_type },
        );
    }

    /// Replaces the change in this slot.
    #[allow(clippy::arithmetic_side_effects, reason = "I1: the data of a head lies within the page")]
    pub(crate) fn replace(&mut self, slot: usize, value: Option<&[u8]>) {
        let head = self.heads[slot];
        let start = head.start as usize;
        if let Some(value) = value
            && usize::from(head.len) == value.len()
        {
            self.data[start..start + value.len()].copy_from_slice(value);
            return;
        }
        self.garbage += head.data_len();
        debug_assert!(self.garbage <= self.data.len(), "I1: more garbage than data");
        let (start, len) = self.add_data(value);
        self.heads[slot] = ItemHead { start, len, ..head };
        if self.garbage > GARBAGE_MAX && self.garbage > self.data.len() / 2 {
            *self = self.copy_of(0..self.heads.len());
        }
    }

    fn add_data(&mut self, value: Option<&[u8]>) -> (u32, u16) {
        let Some(value) = value else { return (0, DELETED) };
        if self.data.capacity().saturating_sub(self.data.len()) < value.len() {
            self.data.reserve_exact(value.len().max(DATA_STEP));
        }
        let start = self.data.len();
        self.data.extend_from_slice(value);
        let expected = "an item is smaller than a tree block, and few pages' worth of them are in one page";
        (u32::try_from(start).expect(expected), u16::try_from(value.len()).expect(expected))
    }

    /// Frees unused room. Called when no further changes are expected soon.
    pub(crate) fn close(&mut self) {
        self.heads.shrink_to_fit();
        self.data.shrink_to_fit();
    }

    /// Keeps the first `at` changes and returns the others.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let upper = self.copy_of(at..self.heads.len());
        *self = self.copy_of(0..at);
        upper
    }

    /// A page with the changes in `slots` and no garbage.
    fn copy_of(&self, slots: Range<usize>) -> Self {
        let heads = &self.heads[slots.clone()];
        let mut copy = Self::with_room(heads.len(), heads.iter().map(ItemHead::data_len).sum());
        for (head, slot) in heads.iter().zip(slots) {
            let (start, len) = copy.add_data(self.value(slot));
            copy.heads.push(ItemHead { start, len, ..*head });
        }
        debug_assert_eq!(
            copy.data.len(),
            copy.heads.iter().map(ItemHead::data_len).sum::<usize>(),
            "I1: a copy has no garbage"
        );
        copy
    }

    /// Bytes of memory that the page takes.
    #[allow(clippy::arithmetic_side_effects, reason = "sizes of memory: a page takes far less than `isize::MAX` bytes")]
    pub(crate) fn memory_bytes(&self) -> isize {
        // A `Vec` never takes more than `isize::MAX` bytes.
        (self.heads.capacity() * size_of::<ItemHead>() + self.data.capacity()) as isize
    }
}

impl ItemHead {
    /// The key.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.objectid, self.item_type, self.offset)
    }

    /// Bytes of the head's data.
    pub(crate) fn data_len(&self) -> usize {
        if self.len == DELETED { 0 } else { self.len.into() }
    }
}

/// Value of `ItemHead::len` if the key is deleted. Every item is shorter, because a block has at most 64 KiB, including
/// its header and the item's head.
const DELETED: u16 = u16::MAX;
const GARBAGE_MAX: usize = 1024;
/// Heads and data grow in small steps, so that a page that stops growing has little unused room.
const HEADS_STEP: usize = 16;
/// Growth step of the data in bytes.
const DATA_STEP: usize = 512;
