//! [`ItemMap`]: an ordered map of item changes that takes little more memory than the items do. Millions of them wait
//! for a commit, most of them small.
//!
//! Changes lie in pages, each with sorted heads and the data that they point to, and pages in groups:
//!
//! ```text
//! groups    [MIN.. ]  [k5.. ]                      by the lowest key that belongs to a group
//! group     [MIN.. ]  [k1.. ]  [k2.. ]             by the lowest key that belongs to a page; at most GROUP_PAGES
//! page      heads  key, start, len | key, start, len | ...    at most PAGE_ITEMS, ascending
//!           data   bytes of items, in the order in which they came
//! ```
//!
//! A full page is split in half, but in a row of ascending keys where the row goes on: a key behind all others of its page
//! begins a new one. So rows fill their pages. Groups are split alike.
//!
//! Most changes follow on one before: new inodes come last, new names of a directory behind its others, and the directory's
//! own item changes with each. So the last page is looked at before any search, and then the page where a change of these
//! objectids and types went last.
//!
//! Invariants:
//! - I1. The keys of a page are not below its lowest key, and below that of the next page; so are those of a group. The
//!   first page and the first group begin at [`Key::MIN`]. A group has a page at least.
//! - I2. A head's data lies within its page; `garbage` counts the bytes of data that no head points to.
//! - I3. `recent` is a hint: it may name any page, or none.

use std::sync::Arc;

use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::Value;

use crate::delayed_item::INODES_A_ROW;

/// What is to become of a key: a new value, or absence.
pub(crate) type Change = Option<Value>;

/// Item changes by key.
#[derive(Debug, Default)]
pub(crate) struct ItemMap {
    /// The groups' lowest keys.
    lowest: Vec<Key>,
    groups: Vec<Group>,
    recent: [PageAt; NR_RECENT],
}

/// Neighbouring pages.
#[derive(Debug, Default)]
struct Group {
    /// The pages' lowest keys.
    lowest: Vec<Key>,
    pages: Vec<Page>,
}

/// Where a page is: its group, and its place there.
#[derive(Clone, Copy, Debug, Default)]
struct PageAt {
    group: u32,
    page: u32,
}

/// Neighbouring changes.
#[derive(Debug, Default)]
pub(crate) struct Page {
    heads: Vec<Head>,
    data: Vec<u8>,
    garbage: usize,
    /// The slot that was added last.
    last_added: u8,
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

/// What changes did to the map's memory.
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
        if self.groups.is_empty() {
            self.lowest.push(Key::MIN);
            self.groups.push(Group { lowest: vec![Key::MIN], pages: vec![Page::default()] });
            growth.memory_bytes += PAGE_OVERHEAD;
        }
        let at = self.page_to_change(key);
        let page = &mut self.groups[at.group()].pages[at.page()];
        let memory_before = page.memory_bytes();
        let begun = match page.search(key) {
            Ok(slot) => {
                let old_len = page.heads[slot].data_len();
                growth.data_bytes = value.map_or(0, <[u8]>::len).saturating_sub(old_len);
                page.replace(slot, value);
                None
            }
            Err(slot) => {
                growth.is_new = true;
                growth.data_bytes = value.map_or(0, <[u8]>::len);
                page.add(slot, key, value)
            }
        };
        growth.memory_bytes += page.memory_bytes() - memory_before;
        if let Some((first, page)) = begun {
            growth.memory_bytes += page.memory_bytes() + PAGE_OVERHEAD;
            self.insert_page(at, first, page);
        }
        growth
    }

    /// The change of this key: a value, or absence; or `None`.
    pub(crate) fn get(&self, key: &Key) -> Option<Change> {
        let page = self.page(self.search(key)?);
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
        let at = self.search(end)?;
        let of_group = &self.groups[at.group()].pages[..=at.page()];
        let before = self.groups[..at.group()].iter().rev().flat_map(|group| group.pages.iter().rev());
        // A page has none that are low enough where all of its own are above `end`.
        of_group
            .iter()
            .rev()
            .chain(before)
            .find_map(|page| {
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
        self.pages().map(|page| page.memory_bytes() + PAGE_OVERHEAD).sum()
    }

    /// The pages in order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &Page> {
        self.groups.iter().flat_map(|group| &group.pages)
    }

    /// Pages and slots of the keys of `start..=end`, in order.
    fn places(&self, start: &Key, end: &Key) -> impl Iterator<Item = (&Page, usize)> {
        let (start, end) = (*start, *end);
        let first = self.search(&start).filter(|_| start <= end);
        let groups = first.map_or(&[][..], |first| &self.groups[first.group()..]);
        let skipped = first.map_or(0, PageAt::page);
        let pages = groups.iter().flat_map(|group| group.lowest.iter().zip(&group.pages)).skip(skipped);
        pages.take_while(move |(lowest, _)| **lowest <= end).flat_map(move |(_, page)| {
            let from = page.search(&start).unwrap_or_else(|slot| slot);
            (from..page.len()).map(move |slot| (page, slot)).take_while(move |(page, slot)| page.key(*slot) <= end)
        })
    }

    fn page(&self, at: PageAt) -> &Page {
        &self.groups[at.group()].pages[at.page()]
    }

    /// The page that the key belongs to; `None` where there are no pages.
    fn search(&self, key: &Key) -> Option<PageAt> {
        let up_to_key = |lowest: &[Key]| nr_before(lowest, key, |lowest| *lowest, |lowest| !is_below(key, lowest));
        let group = up_to_key(&self.lowest).checked_sub(1)?;
        let page = up_to_key(&self.groups[group].lowest);
        Some(PageAt::new(group, page.checked_sub(1).expect("I1: a group's first page begins where the group does")))
    }

    /// The same by way of the hints. There are pages.
    fn page_to_change(&mut self, key: &Key) -> PageAt {
        let last_group = self.groups.len() - 1;
        let last = self.groups[last_group].pages.len() - 1;
        if !is_below(key, &self.groups[last_group].lowest[last]) {
            return PageAt::new(last_group, last);
        }
        let slot = recent_slot(key);
        if !self.covers(self.recent[slot], key) {
            self.recent[slot] = self.search(key).expect("I1: the first page begins at the lowest key");
        }
        self.recent[slot]
    }

    /// Whether there is such a page and the key belongs to it.
    fn covers(&self, at: PageAt, key: &Key) -> bool {
        let Some(group) = self.groups.get(at.group()) else { return false };
        let Some(lowest) = group.lowest.get(at.page()) else { return false };
        let next = group.lowest.get(at.page() + 1).or_else(|| self.lowest.get(at.group() + 1));
        !is_below(key, lowest) && next.is_none_or(|next| is_below(key, next))
    }

    /// Adds a page behind another one.
    fn insert_page(&mut self, behind: PageAt, first: Key, page: Page) {
        let group = &mut self.groups[behind.group()];
        let place = behind.page() + 1;
        if group.pages.len() < GROUP_PAGES {
            group.insert(place, first, page);
            return;
        }
        let middle = if place == group.pages.len() { place } else { group.pages.len() / 2 };
        let mut upper = group.split_off(middle);
        match place < middle {
            true => group.insert(place, first, page),
            false => upper.insert(place - middle, first, page),
        }
        self.lowest.insert(behind.group() + 1, upper.lowest[0]);
        self.groups.insert(behind.group() + 1, upper);
    }
}

impl Group {
    fn insert(&mut self, place: usize, first: Key, page: Page) {
        self.lowest.insert(place, first);
        self.pages.insert(place, page);
    }

    /// Leaves the first `at` pages here and answers the others, with room for more.
    fn split_off(&mut self, at: usize) -> Self {
        let mut upper = Self { lowest: Vec::with_capacity(GROUP_PAGES), pages: Vec::with_capacity(GROUP_PAGES) };
        upper.lowest.extend(self.lowest.drain(at..));
        upper.pages.extend(self.pages.drain(at..));
        upper
    }
}

impl PageAt {
    fn new(group: usize, page: usize) -> Self {
        let place = |number| u32::try_from(number).expect("so many changes would not fit into memory");
        Self { group: place(group), page: place(page) }
    }

    fn group(self) -> usize {
        self.group as usize
    }

    fn page(self) -> usize {
        self.page as usize
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

    /// The slot of the key, or else where it belongs.
    fn search(&self, key: &Key) -> Result<usize, usize> {
        match self.heads.last() {
            Some(last) if !is_below(&last.key(), key) => {
                let slot = nr_before(&self.heads, key, Head::key, |other| is_below(other, key));
                if self.heads[slot].key() == *key { Ok(slot) } else { Err(slot) }
            }
            _ => Err(self.heads.len()),
        }
    }

    /// Adds a change in this slot. Where the page is full, part of it or the new change becomes another page, with its
    /// lowest key.
    fn add(&mut self, slot: usize, key: &Key, value: Option<&[u8]>) -> Option<(Key, Self)> {
        if self.has_room(value.map_or(0, <[u8]>::len)) {
            self.insert(slot, key, value);
            return None;
        }
        if slot == self.heads.len() {
            self.close();
            let mut next = Self::with_room();
            next.insert(0, key, value);
            return Some((*key, next));
        }
        let middle = if self.is_row_before(slot) { slot } else { self.heads.len() / 2 };
        let mut upper = self.split_off(middle);
        let first = upper.heads[0].key();
        match slot <= middle {
            true => self.insert(slot, key, value),
            false => upper.insert(slot - middle, key, value),
        }
        Some((first, upper))
    }

    /// Whether the last change that was added is the one before this slot, as in a row of ascending keys.
    fn is_row_before(&self, slot: usize) -> bool {
        slot.checked_sub(1) == Some(self.last_added.into())
    }

    /// A page that is going to be filled.
    fn with_room() -> Self {
        let (heads, data) = (Vec::with_capacity(PAGE_ITEMS / 2), Vec::with_capacity(PAGE_DATA / 2));
        Self { heads, data, ..Self::default() }
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
        self.last_added = u8::try_from(slot).expect("a page has PAGE_ITEMS slots");
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
            ..Self::default()
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

/// Whether a key comes before another one; by arithmetic, because nobody foresees the branches of a search.
fn is_below(key: &Key, other: &Key) -> bool {
    let rest = |key: &Key| u128::from(key.item_type.0) << 64 | u128::from(key.offset);
    (key.objectid < other.objectid) | ((key.objectid == other.objectid) & (rest(key) < rest(other)))
}

/// How many of these ascending keys come before a place near `key`. Where they differ by their offsets alone, the search
/// begins at a guess and doubles its steps: the hashes of names are spread evenly, so most guesses miss by a few keys only,
/// and few lines of memory are touched.
fn nr_before<T>(slots: &[T], key: &Key, key_of: impl Fn(&T) -> Key, is_before: impl Fn(&Key) -> bool) -> usize {
    let is_before = |slot: &T| is_before(&key_of(slot));
    let (Some(first), Some(last)) = (slots.first().map(&key_of), slots.last().map(&key_of)) else { return 0 };
    let kind = |key: &Key| (key.objectid, key.item_type);
    if kind(&first) != kind(&last) || kind(key) != kind(&last) || last.offset == first.offset {
        return slots.partition_point(is_before);
    }
    let share = key.offset.saturating_sub(first.offset) as f64 / (last.offset - first.offset) as f64;
    let guess = ((share * slots.len() as f64) as usize).min(slots.len() - 1);
    // Slots below `low` are before the place, those from `high` on are not.
    let (mut low, mut high) = (0, slots.len());
    let mut step = FIRST_STEP;
    if is_before(&slots[guess]) {
        low = guess + 1;
        while low + step < high {
            if !is_before(&slots[low + step]) {
                high = low + step;
                break;
            }
            low += step + 1;
            step *= 2;
        }
    } else {
        high = guess;
        while step < high {
            if is_before(&slots[high - step]) {
                low = high - step + 1;
                break;
            }
            high -= step;
            step *= 2;
        }
    }
    low + slots[low..high].partition_point(is_before)
}

/// Which hint is for this key: an inode's own items lie together, its entries and its extents apart from them.
fn recent_slot(key: &Key) -> usize {
    let kind = u64::from(key.item_type.0 >> 5);
    let mixed = ((key.objectid / INODES_A_ROW) ^ (kind << 56)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize % NR_RECENT
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
/// Pages of a group.
const GROUP_PAGES: usize = 128;
const NR_RECENT: usize = 8;
/// About how far a guess at a key's slot in a page misses.
const FIRST_STEP: usize = 3;
/// A page's place in the map, with what its allocations cost.
const PAGE_OVERHEAD: isize = 160;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
    fn a_guess_never_leads_to_another_slot_than_a_search() {
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for round in 0..3000u64 {
            let spread = [3, 100, 1 << 31][round as usize % 3];
            let mut offsets: Vec<u64> = (0..random(80)).map(|_| random(spread)).collect();
            if round.is_multiple_of(7) {
                offsets.push(u64::MAX);
            }
            offsets.sort_unstable();
            offsets.dedup();
            let keys: Vec<Key> = offsets.iter().map(|&offset| Key::new(9, KeyType::DIR_ITEM, offset)).collect();
            for offset in [0, random(spread), random(spread), spread, u64::MAX] {
                for key in [9, 8, 10].map(|objectid| Key::new(objectid, KeyType::DIR_ITEM, offset)) {
                    let below = nr_before(&keys, &key, |key| *key, |other| is_below(other, &key));
                    let up_to = nr_before(&keys, &key, |key| *key, |other| !is_below(&key, other));
                    assert_eq!(below, keys.partition_point(|other| *other < key), "{keys:?} {key:?}");
                    assert_eq!(up_to, keys.partition_point(|other| *other <= key), "{keys:?} {key:?}");
                }
            }
        }
    }

    #[test]
    fn a_row_fills_its_pages_also_before_other_keys() {
        let mut map = ItemMap::default();
        for ino in 300..360 {
            map.set(&Key::new(ino, KeyType::INODE_ITEM, 0), Some(&[0; 160]));
        }
        let nr_names = 50 * PAGE_ITEMS;
        for index in 0..nr_names as u64 {
            map.set(&Key::new(256, KeyType::DIR_INDEX, index), Some(&[0; 40]));
            map.set(&Key::new(257, KeyType::DIR_INDEX, index), None);
        }
        assert!(map.pages().count() <= 2 * 50 + 6, "{} pages", map.pages().count());
        assert_eq!(map.pages().map(Page::len).sum::<usize>(), 2 * nr_names + 60);
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
