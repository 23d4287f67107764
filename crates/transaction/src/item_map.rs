//! [`ItemMap`]: an ordered map of item changes that takes little more memory than the items do. Millions of them wait
//! for a commit, most of them small.
//!
//! Changes lie in pages, each with sorted heads and the data that they point to:
//!
//! ```text
//! pages     [MIN.. ]  [k1.. ]  [k2.. ]             by the lowest key that belongs to a page
//! page      heads  key, start, len | key, start, len | ...    at most PAGE_ITEMS, ascending
//!           data   bytes of items, in the order in which they came
//! ```
//!
//! A full page is split in half, but where a key comes behind all others of its page it begins a new one: rows of
//! ascending keys fill their pages.
//!
//! Invariants:
//! - I1. The keys of a page are not below its lowest key, and below that of the next page. The first page begins at
//!   [`Key::MIN`].
//! - I2. A head's data lies within its page; `garbage` counts the bytes of data that no head points to.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::Value;

/// What is to become of a key: a new value, or absence.
pub(crate) type Change = Option<Value>;

/// Item changes by key.
#[derive(Debug, Default)]
pub(crate) struct ItemMap {
    pages: BTreeMap<Key, Page>,
}

/// Neighbouring changes.
#[derive(Debug, Default)]
pub(crate) struct Page {
    heads: Vec<Head>,
    data: Vec<u8>,
    garbage: usize,
}

/// A key and where its data is.
#[derive(Clone, Copy, Debug)]
struct Head {
    objectid: u64,
    offset: u64,
    start: u32,
    /// [`DELETED`] where the key is to be absent.
    len: u16,
    item_type: KeyType,
}

/// What a change did to the map's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Whether the key had no change so far.
    pub(crate) is_new: bool,
    /// Bytes by which the data of all changes grew.
    pub(crate) data_bytes: usize,
    /// Bytes by which the map's memory grew, or shrank.
    pub(crate) memory_bytes: isize,
}

impl ItemMap {
    /// Records a change.
    pub(crate) fn set(&mut self, key: &Key, value: Option<&[u8]>) -> Growth {
        let mut growth = Growth::default();
        if self.pages.is_empty() {
            self.pages.insert(Key::MIN, Page::default());
            growth.memory_bytes += PAGE_OVERHEAD;
        }
        let page = self.pages.range_mut(..=*key).next_back().map(|(_, page)| page);
        let page = page.expect("I1: the first page begins at the lowest key");
        let memory_before = page.memory_bytes();
        let mut begun = None;
        match page.search(key) {
            Ok(slot) => {
                let old_len = page.heads[slot].data_len();
                growth.data_bytes = value.map_or(0, <[u8]>::len).saturating_sub(old_len);
                page.replace(slot, value);
            }
            Err(slot) => {
                growth.is_new = true;
                growth.data_bytes = value.map_or(0, <[u8]>::len);
                if page.has_room(growth.data_bytes) {
                    page.insert(slot, key, value);
                } else if slot == page.heads.len() {
                    page.close();
                    let mut next = Page::default();
                    next.insert(0, key, value);
                    begun = Some((*key, next));
                } else {
                    let mut upper = page.split_off(page.heads.len() / 2);
                    let middle = page.heads.len();
                    let first = upper.heads[0].key();
                    match slot <= middle {
                        true => page.insert(slot, key, value),
                        false => upper.insert(slot - middle, key, value),
                    }
                    begun = Some((first, upper));
                }
            }
        }
        growth.memory_bytes += page.memory_bytes() - memory_before;
        if let Some((first, page)) = begun {
            growth.memory_bytes += page.memory_bytes() + PAGE_OVERHEAD;
            self.pages.insert(first, page);
        }
        growth
    }

    /// The change of this key: a value, or absence; or `None`.
    pub(crate) fn get(&self, key: &Key) -> Option<Change> {
        let (_, page) = self.pages.range(..=*key).next_back()?;
        Some(page.change(page.search(key).ok()?))
    }

    /// The keys of `start..=end` that changed, in order, and their changes.
    pub(crate) fn range(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, Change)> {
        self.places(start, end).map(|(page, slot)| (page.key(slot), page.change(slot)))
    }

    /// The keys of `start..=end` that changed, in order.
    pub(crate) fn keys(&self, start: &Key, end: &Key) -> impl Iterator<Item = Key> {
        self.places(start, end).map(|(page, slot)| page.key(slot))
    }

    /// The last change of `start..=end`.
    pub(crate) fn last(&self, start: &Key, end: &Key) -> Option<(Key, Change)> {
        if start > end {
            return None;
        }
        // A page has none that are low enough where all of its own are above `end`.
        self.pages
            .range(..=*end)
            .rev()
            .find_map(|(_, page)| {
                let slot = match page.search(end) {
                    Ok(slot) => slot,
                    Err(slot) => slot.checked_sub(1)?,
                };
                Some((page.key(slot), page, slot))
            })
            .filter(|(key, ..)| key >= start)
            .map(|(key, page, slot)| (key, page.change(slot)))
    }

    /// Bytes that the map takes, as the growth of all changes adds up to.
    pub(crate) fn memory_bytes(&self) -> isize {
        self.pages.values().map(|page| page.memory_bytes() + PAGE_OVERHEAD).sum()
    }

    /// The pages in order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &Page> {
        self.pages.values()
    }

    /// Pages and slots of the keys of `start..=end`, in order.
    fn places(&self, start: &Key, end: &Key) -> impl Iterator<Item = (&Page, usize)> {
        let (start, end) = (*start, *end);
        let first = self.pages.range(..=start).next_back().map_or(Key::MIN, |(lowest, _)| *lowest);
        let pages = (start <= end).then(|| self.pages.range(first..=end)).into_iter().flatten();
        pages.flat_map(move |(_, page)| {
            let from = page.search(&start).unwrap_or_else(|slot| slot);
            (from..page.len()).map(move |slot| (page, slot)).take_while(move |(page, slot)| page.key(*slot) <= end)
        })
    }
}

impl Page {
    /// How many changes it has.
    pub(crate) fn len(&self) -> usize {
        self.heads.len()
    }

    /// The key in this slot.
    pub(crate) fn key(&self, slot: usize) -> Key {
        self.heads[slot].key()
    }

    /// The data in this slot; `None` for a key that is to be absent.
    pub(crate) fn value(&self, slot: usize) -> Option<&[u8]> {
        let head = &self.heads[slot];
        (head.len != DELETED).then(|| &self.data[head.start as usize..head.start as usize + usize::from(head.len)])
    }

    fn change(&self, slot: usize) -> Change {
        self.value(slot).map(Arc::from)
    }

    fn search(&self, key: &Key) -> Result<usize, usize> {
        self.heads.binary_search_by(|head| head.key().cmp(key))
    }

    fn has_room(&self, data_len: usize) -> bool {
        self.heads.is_empty() || (self.heads.len() < PAGE_ITEMS && self.data.len() + data_len <= PAGE_DATA)
    }

    fn insert(&mut self, slot: usize, key: &Key, value: Option<&[u8]>) {
        if self.heads.len() == self.heads.capacity() {
            self.heads.reserve_exact(HEADS_STEP);
        }
        let (start, len) = self.add_data(value);
        let head = Head { objectid: key.objectid, offset: key.offset, start, len, item_type: key.item_type };
        self.heads.insert(slot, head);
    }

    fn replace(&mut self, slot: usize, value: Option<&[u8]>) {
        let head = self.heads[slot];
        let start = head.start as usize;
        if let Some(value) = value
            && usize::from(head.len) == value.len()
        {
            self.data[start..start + value.len()].copy_from_slice(value);
            return;
        }
        self.garbage += head.data_len();
        let (start, len) = self.add_data(value);
        self.heads[slot] = Head { start, len, ..head };
        if self.garbage > GARBAGE_MAX && self.garbage > self.data.len() / 2 {
            *self = self.copy_of(0..self.heads.len());
        }
    }

    fn add_data(&mut self, value: Option<&[u8]>) -> (u32, u16) {
        let Some(value) = value else { return (0, DELETED) };
        if self.data.capacity() - self.data.len() < value.len() {
            self.data.reserve_exact(value.len().max(DATA_STEP));
        }
        let start = self.data.len();
        self.data.extend_from_slice(value);
        let expected = "an item is smaller than a tree block, and few pages' worth of them are in one page";
        (u32::try_from(start).expect(expected), u16::try_from(value.len()).expect(expected))
    }

    /// No more changes are going to come soon.
    fn close(&mut self) {
        self.heads.shrink_to_fit();
        self.data.shrink_to_fit();
    }

    /// Leaves the first `at` changes here and answers the others.
    fn split_off(&mut self, at: usize) -> Self {
        let upper = self.copy_of(at..self.heads.len());
        *self = self.copy_of(0..at);
        upper
    }

    /// A page with these changes and no garbage.
    fn copy_of(&self, slots: std::ops::Range<usize>) -> Self {
        let heads = &self.heads[slots.clone()];
        let mut copy = Self {
            heads: Vec::with_capacity(heads.len()),
            data: Vec::with_capacity(heads.iter().map(Head::data_len).sum()),
            garbage: 0,
        };
        for (head, slot) in heads.iter().zip(slots) {
            let (start, len) = copy.add_data(self.value(slot));
            copy.heads.push(Head { start, len, ..*head });
        }
        copy
    }

    fn memory_bytes(&self) -> isize {
        // A `Vec` never takes more than `isize::MAX` bytes.
        (self.heads.capacity() * size_of::<Head>() + self.data.capacity()) as isize
    }
}

impl Head {
    fn key(&self) -> Key {
        Key::new(self.objectid, self.item_type, self.offset)
    }

    fn data_len(&self) -> usize {
        if self.len == DELETED { 0 } else { self.len.into() }
    }
}

/// Longer than any item: blocks are at most 64 KiB, with their header and the item's head.
const DELETED: u16 = u16::MAX;
/// Changes of a page.
pub(crate) const PAGE_ITEMS: usize = 64;
/// Bytes of data of a page, where it has more than one change.
const PAGE_DATA: usize = 4096;
/// Data grows by steps, so that a page which stays as it is has little room that nobody uses.
const DATA_STEP: usize = 512;
const HEADS_STEP: usize = 16;
const GARBAGE_MAX: usize = 1024;
/// A page's place in the map, with what its allocations cost.
const PAGE_OVERHEAD: isize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> Key {
        Key::new(number / 100, KeyType(u8::try_from(number / 10 % 10).unwrap()), number % 10)
    }

    fn value_of(seed: u64) -> Option<Vec<u8>> {
        let len = usize::try_from(seed >> 8).unwrap() % if seed.is_multiple_of(97) { 9000 } else { 180 };
        (!seed.is_multiple_of(11)).then(|| vec![seed as u8; len])
    }

    #[test]
    fn it_is_an_ordered_map() {
        let (mut map, mut model) = (ItemMap::default(), BTreeMap::new());
        let mut memory = 0;
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        for step in 0..60_000u64 {
            // Ascending rows, and keys here and there.
            let number = if step % 3 == 0 { 5_000 + step / 3 } else { random() % 30_000 };
            let value = value_of(random());
            let growth = map.set(&key(number), value.as_deref());
            memory += growth.memory_bytes;
            let before: Option<Option<Vec<u8>>> = model.insert(key(number), value.clone());
            let len = |value: &Option<Vec<u8>>| value.as_ref().map_or(0, Vec::len);
            assert_eq!(growth.is_new, before.is_none());
            assert_eq!(growth.data_bytes, len(&value).saturating_sub(before.as_ref().map_or(0, len)));
            if step % 500 != 0 {
                continue;
            }
            let (low, high) = (key(random() % 30_000), key(random() % 30_000));
            let plain = |(key, change): (Key, Change)| (key, change.map(|value| value.to_vec()));
            let found: Vec<_> = map.range(&low, &high).map(plain).collect();
            let in_range = || model.iter().filter(|(key, _)| **key >= low && **key <= high);
            let expected: Vec<_> = in_range().map(|(key, value)| (*key, value.clone())).collect();
            assert_eq!(found, expected);
            assert!(map.keys(&low, &high).eq(in_range().map(|(key, _)| *key)));
            assert_eq!(map.last(&low, &high).map(plain), expected.last().cloned());
            assert_eq!(map.get(&low).map(|change| change.map(|value| value.to_vec())), model.get(&low).cloned());
        }
        assert_eq!(memory, map.memory_bytes());
    }

    #[test]
    fn it_takes_little_more_memory_than_its_items() {
        let mut map = ItemMap::default();
        let (mut memory, mut data) = (0, 0);
        // What files in one directory put.
        for ino in 1000..20_000u64 {
            let hash = u64::from((ino as u32).wrapping_mul(0x9e37_79b9));
            for (key, len) in [
                (Key::new(ino, KeyType::INODE_ITEM, 0), 160),
                (Key::new(ino, KeyType::INODE_REF, 256), 20),
                (Key::new(256, KeyType::DIR_ITEM, hash), 40),
                (Key::new(256, KeyType::DIR_INDEX, ino), 40),
            ] {
                memory += map.set(&key, Some(&vec![0; len])).memory_bytes;
                data += len + 25;
            }
        }
        let memory = usize::try_from(memory).unwrap();
        assert!(memory < data * 6 / 5, "{memory} bytes for {data} bytes of items with their heads");
    }
}
