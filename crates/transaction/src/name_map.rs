//! [`NameMap`]: an ordered map of changes of `DIR_ITEM`s. Their keys are hashes, which are spread evenly: a name's page is
//! found by the first bits of its hash, without a search, as in an extendible hash table whose pages stand in the order of
//! their keys:
//!
//! ```text
//! table   000  001  010  011  100 ..     by the first bits of a hash
//!            \ /     |    |
//! pages      p0      p1   p2             each has the names of one prefix, ascending
//! ```
//!
//! A full page is split by the next bit of its prefix; where that is as long as the table's, the table is doubled.
//!
//! Invariants:
//! - I1. A page with a prefix of `depth` bits stands in all places of the table that begin with it.
//! - I2. The table is at most [`SPARSE`] times as long as there are pages. Where names were chosen so that many hashes
//!   begin alike, a page has more names than it should instead.

use std::collections::BTreeMap;

use ubtrfs_format::{Key, KeyType};

use crate::item_map::{Change, Growth};
use crate::item_page::{Head, ItemPage, PageKey, nr_before};

/// Changes of names by directory and hash.
#[derive(Debug, Default)]
pub(crate) struct NameMap {
    dirs: BTreeMap<u64, Dir>,
}

/// Changes of one directory's names.
#[derive(Debug)]
struct Dir {
    /// 2 to the power of `bits` numbers of pages.
    table: Vec<u32>,
    bits: u32,
    pages: Vec<NamePage>,
}

#[derive(Debug, Default)]
struct NamePage {
    items: ItemPage<u64>,
    /// Bits of its prefix.
    depth: u32,
}

impl PageKey for u64 {
    const HEADS_STEP: usize = 8;
    const DATA_STEP: usize = 256;
}

impl NameMap {
    /// Records a change.
    pub(crate) fn set(&mut self, key: &Key, value: Option<&[u8]>) -> Growth {
        let mut growth = Growth::default();
        let dir = self.dirs.entry(key.objectid).or_insert_with(|| {
            growth.memory_bytes += DIR_OVERHEAD + PAGE_OVERHEAD;
            Dir { table: vec![0], bits: 0, pages: vec![NamePage::default()] }
        });
        dir.set(key.offset, value, &mut growth);
        growth
    }

    /// The change of this key: a value, or absence; or `None`.
    pub(crate) fn get(&self, key: &Key) -> Option<Change> {
        let dir = self.dirs.get(&key.objectid)?;
        let page = &dir.pages[dir.page_of(key.offset)];
        Some(change(&page.items, page.search(key.offset).ok()?))
    }

    /// The keys of `start..=end` that changed, in order, and their changes.
    pub(crate) fn range(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, Change)> {
        self.places(start, end).map(|(key, items, slot)| (key, change(items, slot)))
    }

    /// The keys of `start..=end` that changed, in order.
    pub(crate) fn keys(&self, start: &Key, end: &Key) -> impl Iterator<Item = Key> {
        self.places(start, end).map(|(key, ..)| key)
    }

    /// The last change of `start..=end`.
    pub(crate) fn last(&self, start: &Key, end: &Key) -> Option<(Key, Change)> {
        if start > end {
            return None;
        }
        let dirs = self.dirs.range(start.objectid..=end.objectid).rev();
        dirs.filter_map(|(&objectid, dir)| {
            let (first, last) = offsets_within(objectid, start, end)?;
            let (items, slot) = dir.last(last)?;
            let offset = items.heads()[slot].key;
            (offset >= first).then(|| (key_of(objectid, offset), change(items, slot)))
        })
        .next()
    }

    /// The directories, in order.
    pub(crate) fn dirs(&self) -> impl Iterator<Item = u64> {
        self.dirs.keys().copied()
    }

    /// Bytes that the map takes, as the growth of all changes adds up to.
    pub(crate) fn memory_bytes(&self) -> isize {
        self.dirs.values().map(Dir::memory_bytes).sum()
    }

    /// The pages in order, each with its directory.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &ItemPage<u64>)> {
        self.dirs.iter().flat_map(|(&objectid, dir)| dir.pages_from(0).map(move |page| (objectid, page)))
    }

    fn places(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, &ItemPage<u64>, usize)> {
        let (start, end) = (*start, *end);
        let objectids = start.objectid..=end.objectid.max(start.objectid);
        self.dirs
            .range(objectids)
            .filter_map(move |(&objectid, dir)| {
                let (first, last) = offsets_within(objectid, &start, &end).filter(|_| start <= end)?;
                Some(
                    dir.places(first, last)
                        .map(move |(items, slot)| (key_of(objectid, items.heads()[slot].key), items, slot)),
                )
            })
            .flatten()
    }
}

impl Dir {
    fn set(&mut self, offset: u64, value: Option<&[u8]>, growth: &mut Growth) {
        loop {
            let number = self.page_of(offset);
            let page = &mut self.pages[number];
            let found = page.search(offset);
            if found.is_err() && !page.has_room(value.map_or(0, <[u8]>::len)) && self.can_split(number) {
                self.split(offset, growth);
                continue;
            }
            let page = &mut self.pages[number];
            let memory_before = page.items.memory_bytes();
            growth.data_bytes = value.map_or(0, <[u8]>::len);
            match found {
                Ok(slot) => {
                    growth.data_bytes = growth.data_bytes.saturating_sub(page.items.heads()[slot].data_len());
                    page.items.replace(slot, value);
                }
                Err(slot) => {
                    growth.is_new = true;
                    page.items.insert(slot, (offset, 0), value);
                }
            }
            growth.memory_bytes += page.items.memory_bytes() - memory_before;
            return;
        }
    }

    /// Where in the table a hash's page is.
    fn table_slot(&self, offset: u64) -> usize {
        (place_of(offset) >> (PLACE_BITS - self.bits)) as usize
    }

    fn page_of(&self, offset: u64) -> usize {
        self.table[self.table_slot(offset)] as usize
    }

    fn can_split(&self, number: usize) -> bool {
        let depth = self.pages[number].depth;
        depth < self.bits || (self.bits < PLACE_BITS && 2 * self.table.len() <= SPARSE * self.pages.len())
    }

    /// Splits the page that a hash belongs to.
    fn split(&mut self, offset: u64, growth: &mut Growth) {
        let number = self.page_of(offset);
        if self.pages[number].depth == self.bits {
            growth.memory_bytes += (self.table.len() * size_of::<u32>()) as isize;
            self.table = self.table.iter().flat_map(|&page| [page, page]).collect();
            self.bits += 1;
        }
        let page = &mut self.pages[number];
        page.depth += 1;
        let half = 1 << (PLACE_BITS - page.depth);
        let middle = place_of(offset) & !(2 * half - 1) | half;
        let memory_before = page.items.memory_bytes();
        let nr_lower = page.items.heads().partition_point(|head| place_of(head.key) < middle);
        let upper = NamePage { items: page.items.split_off(nr_lower), depth: page.depth };
        growth.memory_bytes += page.items.memory_bytes() - memory_before;
        growth.memory_bytes += upper.items.memory_bytes() + PAGE_OVERHEAD;
        let from = (middle >> (PLACE_BITS - self.bits)) as usize;
        let count = 1 << (self.bits - upper.depth);
        let new = u32::try_from(self.pages.len()).expect("so many changes would not fit into memory");
        self.table[from..from + count].fill(new);
        self.pages.push(upper);
    }

    /// The pages in order, from the one with this hash on.
    fn pages_from(&self, offset: u64) -> impl Iterator<Item = &ItemPage<u64>> {
        let mut slot = self.table_slot(offset);
        std::iter::from_fn(move || {
            let page = &self.pages[*self.table.get(slot)? as usize];
            let stride = 1usize << (self.bits - page.depth);
            slot = (slot / stride + 1) * stride;
            Some(&page.items)
        })
    }

    fn places(&self, first: u64, last: u64) -> impl Iterator<Item = (&ItemPage<u64>, usize)> {
        let nr_slots = self.table_slot(last) - self.table_slot(first) + 1;
        self.pages_from(first).take(nr_slots).flat_map(move |items| {
            let heads = items.heads();
            let from = heads.partition_point(|head| head.key < first);
            let to = heads.partition_point(|head| head.key <= last);
            (from..to.max(from)).map(move |slot| (items, slot))
        })
    }

    /// The last name up to this hash.
    fn last(&self, offset: u64) -> Option<(&ItemPage<u64>, usize)> {
        let mut slot = self.table_slot(offset);
        loop {
            let page = &self.pages[self.table[slot] as usize];
            if let Some(found) = page.items.heads().partition_point(|head| head.key <= offset).checked_sub(1) {
                return Some((&page.items, found));
            }
            let stride = 1usize << (self.bits - page.depth);
            slot = (slot / stride * stride).checked_sub(1)?;
        }
    }

    fn memory_bytes(&self) -> isize {
        // The first place of the table is in the overhead.
        let table = (self.table.len() - 1) * size_of::<u32>();
        let pages: isize = self.pages.iter().map(|page| page.items.memory_bytes() + PAGE_OVERHEAD).sum();
        DIR_OVERHEAD + table as isize + pages
    }
}

impl NamePage {
    /// The slot of the name, or else where it belongs.
    fn search(&self, offset: u64) -> Result<usize, usize> {
        let heads = self.items.heads();
        let width_bits = PLACE_BITS - self.depth;
        let within = place_of(offset) & ((1 << width_bits) - 1);
        let guess = (within * heads.len() as u64) >> width_bits;
        let slot = nr_before(heads, guess as usize, |head: &Head<u64>| head.key < offset);
        if heads.get(slot).is_some_and(|head| head.key == offset) { Ok(slot) } else { Err(slot) }
    }

    fn has_room(&self, data_len: usize) -> bool {
        let nr_names = self.items.heads().len();
        nr_names == 0 || (nr_names < PAGE_NAMES && self.items.data_len() + data_len <= PAGE_DATA)
    }
}

/// The hashes of a directory that lie in a range of keys: from the first to the last.
fn offsets_within(objectid: u64, start: &Key, end: &Key) -> Option<(u64, u64)> {
    let first = if objectid > start.objectid { Key::new(objectid, KeyType(0), 0) } else { *start };
    let last = if objectid < end.objectid { Key::new(objectid, KeyType(u8::MAX), u64::MAX) } else { *end };
    let of_names = KeyType::DIR_ITEM.0;
    let from = match first.item_type.0.cmp(&of_names) {
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Equal => first.offset,
        std::cmp::Ordering::Greater => return None,
    };
    let to = match last.item_type.0.cmp(&of_names) {
        std::cmp::Ordering::Less => return None,
        std::cmp::Ordering::Equal => last.offset,
        std::cmp::Ordering::Greater => u64::MAX,
    };
    (from <= to).then_some((from, to))
}

fn key_of(objectid: u64, offset: u64) -> Key {
    Key::new(objectid, KeyType::DIR_ITEM, offset)
}

fn change(items: &ItemPage<u64>, slot: usize) -> Change {
    items.value(slot).map(Into::into)
}

/// A hash has 32 bits; a larger offset, which no name has, counts as the last of them.
fn place_of(offset: u64) -> u64 {
    offset.min(u32::MAX.into())
}

const PLACE_BITS: u32 = 32;
/// Names of a page, and bytes of data where it has more than one.
const PAGE_NAMES: usize = 32;
const PAGE_DATA: usize = 4096;
const SPARSE: usize = 16;
/// A page's place, with what its allocations cost.
const PAGE_OVERHEAD: isize = 112;
/// A directory's place, with what its allocations cost.
const DIR_OVERHEAD: isize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    type Model = BTreeMap<Key, Option<Vec<u8>>>;

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 32
    }

    fn compare(map: &NameMap, model: &Model, (low, high): (Key, Key)) {
        let plain = |(key, change): (Key, Change)| (key, change.map(|value| value.to_vec()));
        let in_range = || model.iter().filter(|(key, _)| (low..=high).contains(key));
        let expected: Vec<_> = in_range().map(|(key, value)| (*key, value.clone())).collect();
        assert!(map.range(&low, &high).map(plain).eq(expected.iter().cloned()), "{low:?} {high:?}");
        assert!(map.keys(&low, &high).eq(expected.iter().map(|(key, _)| *key)));
        assert_eq!(map.last(&low, &high).map(plain), expected.last().cloned());
        assert_eq!(map.get(&low).map(|change| change.map(|value| value.to_vec())), model.get(&low).cloned());
    }

    /// Hashes of some kind: even, beginning alike, few, too large.
    fn offset_of(kind: u64, state: &mut u64) -> u64 {
        match kind {
            0 => random(state),
            1 => 0x1234_0000 | random(state) & 0xffff,
            2 => (random(state) % 50) << 27,
            _ => u64::MAX - random(state) % 1000,
        }
    }

    #[test]
    fn it_is_an_ordered_map() {
        let (mut map, mut model) = (NameMap::default(), Model::new());
        let (mut memory, mut state) = (0, 3);
        for step in 0..60_000u64 {
            let dir = [256, 257, 300, 301, 1 << 40][random(&mut state) as usize % 5];
            let key = Key::new(dir, KeyType::DIR_ITEM, offset_of(dir % 4, &mut state));
            let len = random(&mut state) as usize % if step % 97 == 0 { 9000 } else { 90 };
            let value = (step % 11 != 0).then(|| vec![step as u8; len]);
            let growth = map.set(&key, value.as_deref());
            memory += growth.memory_bytes;
            let before = model.insert(key, value.clone());
            let len = |value: &Option<Vec<u8>>| value.as_ref().map_or(0, Vec::len);
            assert_eq!(growth.is_new, before.is_none());
            assert_eq!(growth.data_bytes, len(&value).saturating_sub(before.as_ref().map_or(0, len)));
            if step % 1000 == 0 {
                let any = |state: &mut u64| {
                    let item_type = [0, 84, 84, 84, 96][random(state) as usize % 5];
                    let dir = [255, 256, 257, 300, 301, u64::MAX][random(state) as usize % 6];
                    Key::new(dir, KeyType(item_type), offset_of(dir % 4, state))
                };
                let (low, high) = (any(&mut state), any(&mut state));
                compare(&map, &model, (low, high));
                compare(&map, &model, (Key { objectid: high.objectid, ..low }, high));
            }
        }
        compare(&map, &model, (Key::MIN, Key::MAX));
        assert_eq!(memory, map.memory_bytes());
        let in_order = map.pages().flat_map(|(dir, items)| items.heads().iter().map(move |head| key_of(dir, head.key)));
        assert!(in_order.eq(model.keys().copied()));
    }

    #[test]
    fn it_takes_little_more_memory_than_its_items() {
        let (mut map, mut memory, mut data, mut state) = (NameMap::default(), 0, 0, 5);
        for _ in 0..100_000 {
            let key = Key::new(256, KeyType::DIR_ITEM, random(&mut state));
            memory += map.set(&key, Some(&[0; 45])).memory_bytes;
            data += 45 + 25;
        }
        assert!(memory < data * 6 / 5, "{memory} bytes for {data} bytes of items with their heads");
    }

    #[test]
    fn hashes_that_begin_alike_do_not_blow_up_the_table() {
        let mut map = NameMap::default();
        for name in 0..20_000 {
            map.set(&Key::new(256, KeyType::DIR_ITEM, 0x1234_0000 | name), Some(&[0; 45]));
        }
        let dir = &map.dirs[&256];
        assert!(dir.table.len() <= SPARSE * dir.pages.len(), "I2");
        assert!(map.memory_bytes() < 20_000 * 100);
    }
}
