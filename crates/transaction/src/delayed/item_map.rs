//! [`ItemMap`]: an ordered map of item changes that takes little more memory than the items. Millions of changes, most
//! of them small, wait for a commit.
//!
//! Changes lie in pages ([`crate::delayed::item_page`]), and pages in groups:
//!
//! ```text
//! groups    [MIN.. ]  [k5.. ]                      by the lowest key that belongs to a group
//! group     [MIN.. ]  [k1.. ]  [k2.. ]             by the lowest key that belongs to a page; at most GROUP_PAGES
//! page      changes, ascending, at most PAGE_ITEMS
//! ```
//!
//! A full page is split in half. The exception is a page to which ascending keys are being added: it is split where the
//! next key is inserted, or, if that key comes after all keys of the page, the key begins a new page. So ascending keys
//! fill their pages. A full group is split in half, or, if the new page comes last in the group, the new page begins a
//! new group.
//!
//! In key order, most changes follow shortly after an earlier change: new inodes come last, new entries of a directory
//! come after its other entries, and each new entry changes the directory's own item. So the search for a change's page
//! tries the last page first, then the page that a change with a similar key used last (`recent_slot`), and only then
//! searches by key.
//!
//! Invariants:
//! - I1. The keys of a page are at or above its lowest key, and below the lowest key of the next page; groups follow
//!   this rule too. The first page and the first group begin at [`Key::MIN`]. A group has at least one page.
//! - I2. `recent` holds hints. A hint may name a wrong page, even a page that does not exist, so it is checked before
//!   it is used.

use std::sync::Arc;

use ubtrfs_format::Key;
use ubtrfs_tree::Value;

use crate::delayed::delayed_item::INODES_PER_ROW;
use crate::delayed::item_page::ItemPage;

/// The new value of a key, or `None` if it is deleted.
pub(crate) type DelayedChange = Option<Value>;

/// Item changes by key.
#[derive(Debug, Default)]
pub(crate) struct ItemMap {
    /// The groups' lowest keys.
    lowest: Vec<Key>,
    groups: Vec<PageGroup>,
    recent: [PageAt; NR_RECENT],
}

/// Neighbouring pages.
#[derive(Debug, Default)]
struct PageGroup {
    /// The pages' lowest keys.
    lowest: Vec<Key>,
    pages: Vec<ChangePage>,
}

/// The place of a page: its group, and its index in the group.
#[derive(Clone, Copy, Debug, Default)]
struct PageAt {
    group: u32,
    page: u32,
}

/// Neighbouring changes.
#[derive(Debug, Default)]
pub(crate) struct ChangePage {
    items: ItemPage,
    /// The slot of the change that was added last.
    last_added: u8,
}

/// The effect of a change on the size of the map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Whether the key had no change before.
    pub(crate) is_new: bool,
    /// Bytes by which the data of all changes grew; 0 if it shrank.
    pub(crate) data_bytes: usize,
    /// Bytes by which the map's memory grew; negative if it shrank.
    pub(crate) memory_bytes: isize,
}

impl ItemMap {
    /// Records a change.
    #[allow(clippy::arithmetic_side_effects, reason = "sizes of memory: a page takes far less than `isize::MAX` bytes")]
    pub(crate) fn set(&mut self, key: &Key, value: Option<&[u8]>) -> Growth {
        let mut growth = Growth::default();
        if self.groups.is_empty() {
            self.lowest.push(Key::MIN);
            self.groups.push(PageGroup { lowest: vec![Key::MIN], pages: vec![ChangePage::default()] });
            growth.memory_bytes += PAGE_OVERHEAD;
        }
        let at = self.page_to_change(key);
        debug_assert!(self.covers(at, key), "I1: {key:?} does not belong to the page");
        let page = &mut self.groups[at.group()].pages[at.page()];
        let memory_before = page.items.memory_bytes();
        let begun = match page.search(key) {
            Ok(slot) => {
                let old_len = page.items.heads()[slot].data_len();
                growth.data_bytes = value.map_or(0, <[u8]>::len).saturating_sub(old_len);
                page.items.replace(slot, value);
                None
            }
            Err(slot) => {
                growth.is_new = true;
                growth.data_bytes = value.map_or(0, <[u8]>::len);
                page.add(slot, key, value)
            }
        };
        growth.memory_bytes += page.items.memory_bytes() - memory_before;
        if let Some((first, page)) = begun {
            growth.memory_bytes += page.items.memory_bytes() + PAGE_OVERHEAD;
            self.insert_page(at, first, page);
        }
        growth
    }

    /// The change of this key, if there is one: a value, or `None` for a deletion.
    pub(crate) fn get(&self, key: &Key) -> Option<DelayedChange> {
        let page = self.page(self.search(key)?);
        Some(page.change(page.search(key).ok()?))
    }

    /// The keys of `start..=end` that changed, in order, and their changes.
    pub(crate) fn range(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, DelayedChange)> {
        self.places(start, end).map(|(page, slot)| (page.key(slot), page.change(slot)))
    }

    /// The keys of `start..=end` that changed, in order.
    pub(crate) fn keys(&self, start: &Key, end: &Key) -> impl Iterator<Item = Key> {
        self.places(start, end).map(|(page, slot)| page.key(slot))
    }

    /// The changes of `start..=end`, the last one first; `None` is a deletion.
    pub(crate) fn backwards(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, Option<&[u8]>)> {
        let (start, end) = (*start, *end);
        let last = self.search(&end).filter(|_| start <= end);
        let of_group = last.map_or(&[][..], |last| &self.groups[last.group()].pages[..=last.page()]);
        let before =
            self.groups[..last.map_or(0, PageAt::group)].iter().rev().flat_map(|group| group.pages.iter().rev());
        let changes = of_group.iter().rev().chain(before).flat_map(move |page| {
            // `behind` is 0 for a page whose keys are all above `end`.
            let behind = page.search(&end).map_or_else(|slot| slot, |slot| slot.saturating_add(1));
            (0..behind).rev().map(move |slot| (page.key(slot), page.value(slot)))
        });
        changes.take_while(move |(key, _)| *key >= start)
    }

    /// Bytes of memory that the map takes: the sum of [`Growth::memory_bytes`] of all changes.
    #[cfg(test)]
    fn memory_bytes(&self) -> isize {
        self.pages().map(|page| page.items.memory_bytes() + PAGE_OVERHEAD).sum()
    }

    /// The pages in order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &ChangePage> {
        self.groups.iter().flat_map(|group| &group.pages)
    }

    /// The pages and slots of the keys of `start..=end`, in order.
    fn places(&self, start: &Key, end: &Key) -> impl Iterator<Item = (&ChangePage, usize)> {
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

    fn page(&self, at: PageAt) -> &ChangePage {
        &self.groups[at.group()].pages[at.page()]
    }

    /// The page that the key belongs to; `None` if the map is empty.
    fn search(&self, key: &Key) -> Option<PageAt> {
        let group = self.lowest.partition_point(|lowest| !is_below(key, lowest)).checked_sub(1)?;
        let page = self.groups[group].lowest.partition_point(|lowest| !is_below(key, lowest));
        Some(PageAt::new(group, page.checked_sub(1).expect("I1: a group's first page begins where the group does")))
    }

    /// Finds the page that the key belongs to, with the help of the hints. The map must not be empty.
    #[allow(clippy::arithmetic_side_effects, reason = "the map is not empty, and no group is empty (I1)")]
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

    /// Whether this page exists and the key belongs to it.
    fn covers(&self, at: PageAt, key: &Key) -> bool {
        let Some(group) = self.groups.get(at.group()) else { return false };
        let Some(lowest) = group.lowest.get(at.page()) else { return false };
        let next =
            group.lowest.get(at.page().saturating_add(1)).or_else(|| self.lowest.get(at.group().saturating_add(1)));
        !is_below(key, lowest) && next.is_none_or(|next| is_below(key, next))
    }

    /// Adds a page after the page at `behind`.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "places of pages and groups in memory; `place` is at least `middle` in that arm"
    )]
    fn insert_page(&mut self, behind: PageAt, first: Key, page: ChangePage) {
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

impl PageGroup {
    fn insert(&mut self, place: usize, first: Key, page: ChangePage) {
        debug_assert!(
            self.lowest.get(place.wrapping_sub(1)).is_none_or(|lowest| *lowest < first)
                && self.lowest.get(place).is_none_or(|lowest| first < *lowest),
            "I1: a page that begins at {first:?} is not in order"
        );
        self.lowest.insert(place, first);
        self.pages.insert(place, page);
    }

    /// Keeps the first `at` pages and returns the others as a group with room for more pages.
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

impl ChangePage {
    /// Number of changes.
    pub(crate) fn len(&self) -> usize {
        self.items.heads().len()
    }

    /// The key in this slot.
    pub(crate) fn key(&self, slot: usize) -> Key {
        self.items.heads()[slot].key()
    }

    /// The data in this slot; `None` for a deletion.
    pub(crate) fn value(&self, slot: usize) -> Option<&[u8]> {
        self.items.value(slot)
    }

    fn change(&self, slot: usize) -> DelayedChange {
        self.value(slot).map(Arc::from)
    }

    /// The slot of the key, or the slot at which an absent key would be inserted.
    fn search(&self, key: &Key) -> Result<usize, usize> {
        let heads = self.items.heads();
        match heads.last() {
            Some(last) if !is_below(&last.key(), key) => {
                let slot = heads.partition_point(|head| is_below(&head.key(), key));
                if heads[slot].key() == *key { Ok(slot) } else { Err(slot) }
            }
            _ => Err(heads.len()),
        }
    }

    /// Adds a change in this slot. If the page is full, a part of it or the new change becomes another page, which is
    /// returned with its lowest key.
    #[allow(clippy::arithmetic_side_effects, reason = "`slot` is above `middle` in that arm")]
    fn add(&mut self, slot: usize, key: &Key, value: Option<&[u8]>) -> Option<(Key, Self)> {
        if self.has_room(value.map_or(0, <[u8]>::len)) {
            self.insert(slot, key, value);
            return None;
        }
        if slot == self.len() {
            self.items.close();
            let mut next = self.of_same_size();
            next.insert(0, key, value);
            return Some((*key, next));
        }
        let middle = if self.is_row_before(slot) { slot } else { self.len() / 2 };
        let mut upper = Self { items: self.items.split_off(middle), ..Self::default() };
        self.last_added = 0;
        let first = upper.key(0);
        match slot <= middle {
            true => self.insert(slot, key, value),
            false => upper.insert(slot - middle, key, value),
        }
        Some((first, upper))
    }

    /// An empty page with as much room as this full page takes: the next ascending keys usually have items of the same
    /// size.
    fn of_same_size(&self) -> Self {
        let (nr_items, data_len) = match self.len() {
            PAGE_ITEMS => (PAGE_ITEMS, self.items.data_len()),
            nr_items => (nr_items, PAGE_DATA),
        };
        let a_bit_more = |room: usize| room.saturating_add(room / 16);
        let items = ItemPage::with_room(a_bit_more(nr_items).min(PAGE_ITEMS), a_bit_more(data_len).min(PAGE_DATA));
        Self { items, ..Self::default() }
    }

    /// Whether the change before this slot was added last, as happens when keys are added in ascending order.
    fn is_row_before(&self, slot: usize) -> bool {
        slot.checked_sub(1) == Some(self.last_added.into())
    }

    fn has_room(&self, data_len: usize) -> bool {
        let nr_items = self.len();
        nr_items == 0 || (nr_items < PAGE_ITEMS && self.items.data_len().saturating_add(data_len) <= PAGE_DATA)
    }

    fn insert(&mut self, slot: usize, key: &Key, value: Option<&[u8]>) {
        self.items.insert(slot, key, value);
        self.last_added = u8::try_from(slot).expect("a page has PAGE_ITEMS slots");
    }
}

/// Whether a key comes before another one. Uses arithmetic instead of branches, because the processor cannot predict
/// the branches of a search.
fn is_below(key: &Key, other: &Key) -> bool {
    let rest = |key: &Key| u128::from(key.item_type.0) << 64 | u128::from(key.offset);
    (key.objectid < other.objectid) | ((key.objectid == other.objectid) & (rest(key) < rest(other)))
}

/// The index in `recent` of the hint for a key. The inode items, references and attributes of a row of inodes
/// ([`INODES_PER_ROW`]) share a hint. The entries of a directory share a hint, and the extents of a file share a hint.
fn recent_slot(key: &Key) -> usize {
    let kind = u64::from(key.item_type.0 >> 5);
    let row = if kind == 0 { key.objectid / INODES_PER_ROW } else { key.objectid };
    let mixed = (row ^ (kind << 56)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize % NR_RECENT
}

/// Maximum number of changes in a page.
pub(crate) const PAGE_ITEMS: usize = 64;
/// Maximum bytes of data in a page that has more than one change.
const PAGE_DATA: usize = 4096;
/// Maximum number of pages in a group.
const GROUP_PAGES: usize = 128;
const NR_RECENT: usize = 32;
/// Estimated overhead of a page in bytes: its entry in the map, and the overhead of its allocations.
const PAGE_OVERHEAD: isize = 160;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ubtrfs_format::KeyType;

    use super::*;

    fn key(number: u64) -> Key {
        Key::new(number / 100, KeyType(u8::try_from(number / 10 % 10).unwrap()), number % 10)
    }

    fn value_of(seed: u64) -> Option<Vec<u8>> {
        let len = usize::try_from(seed >> 8).unwrap() % if seed.is_multiple_of(97) { 9000 } else { 180 };
        (!seed.is_multiple_of(11)).then(|| vec![seed as u8; len])
    }

    #[test]
    fn an_item_map_is_ordered() {
        let (mut map, mut model) = (ItemMap::default(), BTreeMap::new());
        let mut memory = 0;
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        for step in 0..60_000u64 {
            // Use both ascending keys and scattered keys.
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
            let plain = |(key, change): (Key, DelayedChange)| (key, change.map(|value| value.to_vec()));
            let found: Vec<_> = map.range(&low, &high).map(plain).collect();
            let in_range = || model.iter().filter(|(key, _)| **key >= low && **key <= high);
            let expected: Vec<_> = in_range().map(|(key, value)| (*key, value.clone())).collect();
            assert_eq!(found, expected);
            assert!(map.keys(&low, &high).eq(in_range().map(|(key, _)| *key)));
            let backwards = map.backwards(&low, &high).map(|(key, value)| (key, value.map(<[u8]>::to_vec)));
            assert!(backwards.eq(expected.iter().rev().cloned()));
            assert_eq!(map.get(&low).map(|change| change.map(|value| value.to_vec())), model.get(&low).cloned());
        }
        assert_eq!(memory, map.memory_bytes());
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
        assert_eq!(map.pages().map(ChangePage::len).sum::<usize>(), 2 * nr_names + 60);
    }

    #[test]
    fn an_item_map_takes_little_more_memory_than_its_items() {
        let mut map = ItemMap::default();
        let (mut memory, mut data) = (0, 0);
        // Put the items of new files in one directory.
        for ino in 1000..20_000u64 {
            let hash = u64::from((ino as u32).wrapping_mul(0x9e37_79b9));
            for (key, len) in [
                (Key::new(ino, KeyType::INODE_ITEM, 0), 160),
                (Key::new(ino, KeyType::INODE_REF, 256), 20),
                (Key::new(256, KeyType::DIR_ITEM, hash), 40),
                (Key::new(256, KeyType::DIR_INDEX, ino), 40),
            ] {
                memory += map.set(&key, Some(&vec![0; len])).memory_bytes;
                data += len + ubtrfs_format::node::ITEM_HEAD_SIZE;
            }
        }
        let memory = usize::try_from(memory).unwrap();
        assert!(memory < data * 6 / 5, "{memory} bytes for {data} bytes of items with their heads");
    }
}
