//! [`NameMap`]: an ordered map of changes of `DIR_ITEM`s. The keys of `DIR_ITEM`s are hashes, which are spread evenly.
//! So the first bits of a hash lead to a name's page without a search, as in an extendible hash table. The pages are in
//! key order. The items lie apart from the pages, in the order in which they were added:
//!
//! ```text
//! table   000  001  010  011  100 ..     by the first bits of a hash
//!            \ /     |    |
//! pages      p0      p1   p2             each has the hashes of one prefix, ascending, and where their items are
//! log     item, item, item, ..
//! ```
//!
//! A full page is split by the next bit of its prefix; if the prefix already has as many bits as the table's place
//! numbers, the table is doubled first. So recording a change reads one page of four cache lines, and appends to the
//! end of the log.
//!
//! Invariants:
//! - I1. A page with a prefix of `depth` bits is in all places of the table whose numbers begin with this prefix, and
//!   has the hashes that begin with this prefix.
//! - I2. The table has at most [`SPARSE`] places for each page. If names were chosen so that many hashes have equal
//!   first bits, a page can have more names than fit into it; the heads of such a page are in `more`.
//! - I3. The item of a head lies within the log; `garbage` counts the bytes of the log that no head points to.

use std::collections::BTreeMap;

use ubtrfs_format::{Key, KeyType};

use crate::delayed::item_log::ItemLog;
use crate::delayed::item_map::{DelayedChange, Growth};

/// Changes of names by directory and hash.
#[derive(Debug, Default)]
pub(crate) struct NameMap {
    dirs: BTreeMap<u64, DirChanges>,
}

/// Changes of one directory's names.
#[derive(Debug)]
pub(crate) struct DirChanges {
    /// Page numbers, by the first `bits` bits of a hash.
    table: Vec<u32>,
    bits: u32,
    /// Pages in the order of their numbers. Each group except the last has [`GROUP_PAGES`] pages.
    groups: Vec<Vec<NamePage>>,
    /// The heads of pages that have more heads than fit into them (I2).
    more: BTreeMap<u32, Vec<NameHead>>,
    log: ItemLog,
    garbage: usize,
    /// Bytes of memory that the whole directory takes.
    bytes: usize,
}

/// A name's hash and the position of its item.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameHead {
    hash: u32,
    /// Position in the log, or [`DELETED`].
    at: u32,
}

/// A page of four cache lines.
#[derive(Debug)]
#[repr(align(64))]
struct NamePage {
    /// Unused heads have the largest hash, so that a search need not know the number of used heads.
    heads: [NameHead; PAGE_NAMES],
    /// Number of heads, or [`MORE`].
    len: u8,
    /// Number of bits in the prefix of the page.
    depth: u8,
}

/// Some names of a directory in order, with their items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrderedNames<'n> {
    pub(crate) dir: u64,
    heads: &'n [NameHead],
    log: &'n ItemLog,
}

impl NameMap {
    /// Whether items with this key are names: directory entries whose offset is a hash. The offset of a name is at most
    /// [`LAST_HASH`].
    pub(crate) fn takes(key: &Key) -> bool {
        key.item_type == KeyType::DIR_ITEM && key.offset <= LAST_HASH
    }

    /// Records a change of a name.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "sizes of memory: a `Vec` never takes more than `isize::MAX` bytes"
    )]
    pub(crate) fn set(&mut self, key: &Key, value: Option<&[u8]>) -> Growth {
        debug_assert!(Self::takes(key), "{key:?} is not the key of a name");
        let mut is_new = false;
        let dir = self.dirs.entry(key.objectid).or_insert_with(|| {
            is_new = true;
            DirChanges::new()
        });
        let bytes_before = if is_new { 0 } else { dir.bytes };
        let mut growth = dir.set(hash_of(key.offset), value);
        // A `Vec` never takes more than `isize::MAX` bytes.
        growth.memory_bytes = dir.bytes as isize - bytes_before as isize;
        growth
    }

    /// The change of this key, if there is one: a value, or `None` for a deletion.
    pub(crate) fn get(&self, key: &Key) -> Option<DelayedChange> {
        debug_assert!(Self::takes(key), "{key:?} is not the key of a name");
        let dir = self.dirs.get(&key.objectid)?;
        let hash = hash_of(key.offset);
        let number = dir.page_of(hash);
        let slot = dir.search(number, hash).ok()?;
        Some(dir.value(dir.heads(number)[slot]).map(Into::into))
    }

    /// The keys of `start..=end` that changed, in order, and their changes.
    pub(crate) fn range(&self, start: &Key, end: &Key) -> impl Iterator<Item = (Key, DelayedChange)> {
        self.places(start, end).map(|(objectid, dir, head)| (key_of(objectid, head), dir.value(head).map(Into::into)))
    }

    /// The keys of `start..=end` that changed, in order.
    pub(crate) fn keys(&self, start: &Key, end: &Key) -> impl Iterator<Item = Key> {
        self.places(start, end).map(|(objectid, _, head)| key_of(objectid, head))
    }

    /// The last change of `start..=end`.
    pub(crate) fn last(&self, start: &Key, end: &Key) -> Option<(Key, DelayedChange)> {
        if start > end {
            return None;
        }
        let dirs = self.dirs.range(start.objectid..=end.objectid).rev();
        dirs.filter_map(|(&objectid, dir)| {
            let (first, last) = hashes_within(objectid, start, end)?;
            let head = dir.last(last).filter(|head| head.hash >= first)?;
            Some((key_of(objectid, head), dir.value(head).map(Into::into)))
        })
        .next()
    }

    /// The objectids of the directories, in ascending order.
    pub(crate) fn dirs(&self) -> impl Iterator<Item = u64> {
        self.dirs.keys().copied()
    }

    /// Bytes of memory that the map takes: the sum of [`Growth::memory_bytes`] of all changes.
    pub(crate) fn memory_bytes(&self) -> isize {
        self.dirs.values().map(|dir| dir.bytes as isize).sum()
    }

    /// All names in order, in pieces of at most `len`.
    pub(crate) fn pieces(&self, len: usize) -> impl Iterator<Item = OrderedNames<'_>> {
        self.dirs.iter().flat_map(move |(&objectid, dir)| {
            let pages = dir.pages_from(0).flat_map(move |number| dir.heads(number).chunks(len));
            pages.map(move |heads| OrderedNames { dir: objectid, heads, log: &dir.log })
        })
    }

    /// Whether all changes put items.
    pub(crate) fn delete_nothing(&self) -> bool {
        let mut pages = self.dirs.values().flat_map(|dir| dir.pages_from(0).map(|number| dir.heads(number)));
        pages.all(|heads| heads.iter().all(|head| head.at != DELETED))
    }

    fn places(&self, start: &Key, end: &Key) -> impl Iterator<Item = (u64, &DirChanges, NameHead)> {
        let (start, end) = (*start, *end);
        let objectids = start.objectid..=end.objectid.max(start.objectid);
        self.dirs
            .range(objectids)
            .filter_map(move |(&objectid, dir)| {
                let (first, last) = hashes_within(objectid, &start, &end).filter(|_| start <= end)?;
                Some(dir.places(first, last).map(move |head| (objectid, dir, head)))
            })
            .flatten()
    }
}

impl<'n> OrderedNames<'n> {
    /// Number of names.
    pub(crate) fn len(&self) -> usize {
        self.heads.len()
    }

    /// The key in this slot.
    pub(crate) fn key(&self, slot: usize) -> Key {
        key_of(self.dir, self.heads[slot])
    }

    /// The item in this slot; `None` for a deletion.
    pub(crate) fn value(&self, slot: usize) -> Option<&'n [u8]> {
        if slot == 0 {
            self.touch();
        }
        let NameHead { at, .. } = self.heads[slot];
        (at != DELETED).then(|| self.log.get(at))
    }

    /// Loads all items of the piece into the processor's cache. A caller that reads one item of the piece reads the
    /// other items next. The items lie apart, so loading all items together overlaps the cache misses.
    fn touch(&self) {
        let places = self.heads.iter().filter(|head| head.at != DELETED);
        std::hint::black_box(places.map(|head| self.log.touch(head.at)).fold(0, |all, byte| all ^ byte));
    }
}

#[allow(
    clippy::arithmetic_side_effects,
    reason = "I1, I2: depths and numbers of bits are at most `HASH_BITS`; the rest are slots, pages and sizes of memory"
)]
impl DirChanges {
    fn new() -> Self {
        let first = vec![NamePage::default()];
        let bytes = DIR_OVERHEAD + pages_bytes(&first);
        Self {
            table: vec![0],
            bits: 0,
            groups: vec![first],
            more: BTreeMap::new(),
            log: ItemLog::default(),
            garbage: 0,
            bytes,
        }
    }

    /// Records a change. In the result, [`Growth::memory_bytes`] is 0; the caller sets it.
    fn set(&mut self, hash: u32, value: Option<&[u8]>) -> Growth {
        let data_bytes = value.map_or(0, <[u8]>::len);
        loop {
            let number = self.page_of(hash);
            match self.search(number, hash) {
                Ok(slot) => {
                    let before = self.replace(number, slot, value);
                    return Growth { data_bytes: data_bytes.saturating_sub(before), ..Growth::default() };
                }
                Err(_) if self.page(number).is_full() && self.can_split(number) => self.split(number, hash),
                Err(slot) => {
                    let head = NameHead { hash, at: self.add_item(value) };
                    self.insert(number, slot, head);
                    return Growth { is_new: true, data_bytes, ..Growth::default() };
                }
            }
        }
    }

    fn add_item(&mut self, value: Option<&[u8]>) -> u32 {
        let Some(value) = value else { return DELETED };
        let bytes_before = self.log.memory_bytes();
        let at = self.log.add(value);
        self.bytes += self.log.memory_bytes() - bytes_before;
        at
    }

    fn insert(&mut self, number: u32, slot: usize, head: NameHead) {
        if let Some(heads) = self.more.get_mut(&number) {
            let bytes_before = heads_bytes(heads);
            heads.insert(slot, head);
            self.bytes += heads_bytes(heads) - bytes_before;
            return;
        }
        let page = self.page_mut(number);
        let len = usize::from(page.len);
        if len < PAGE_NAMES {
            page.heads.copy_within(slot..len, slot + 1);
            page.heads[slot] = head;
            page.len += 1;
            return;
        }
        let mut heads = page.heads.to_vec();
        heads.insert(slot, head);
        self.set_heads(number, heads);
    }

    /// Replaces the item in this slot. Returns the length of the previous item.
    fn replace(&mut self, number: u32, slot: usize, value: Option<&[u8]>) -> usize {
        let before = self.heads(number)[slot];
        let len_before = self.value(before).map_or(0, <[u8]>::len);
        if before.at != DELETED
            && let Some(value) = value
            && value.len() == len_before
        {
            self.log.replace(before.at, value);
            return len_before;
        }
        let at = self.add_item(value);
        self.heads_mut(number)[slot].at = at;
        self.garbage += len_before;
        debug_assert!(self.garbage <= self.log.len(), "I3: more garbage than the log is long");
        if self.garbage > GARBAGE_MAX && self.garbage > self.log.len() / 2 {
            self.compact();
        }
        len_before
    }

    /// Rewrites the log without garbage.
    fn compact(&mut self) {
        let old = std::mem::take(&mut self.log);
        self.garbage = 0;
        let short = self.groups.iter_mut().flatten().filter(|page| page.len != MORE);
        let short = short.map(|page| &mut page.heads[..page.len.into()]);
        for heads in short.chain(self.more.values_mut().map(Vec::as_mut_slice)) {
            for head in heads.iter_mut().filter(|head| head.at != DELETED) {
                head.at = self.log.add(old.get(head.at));
            }
        }
        debug_assert!(self.log.len() <= old.len(), "I3: the log without garbage is longer");
        self.bytes = self.bytes + self.log.memory_bytes() - old.memory_bytes();
    }

    fn value(&self, head: NameHead) -> Option<&[u8]> {
        (head.at != DELETED).then(|| self.log.get(head.at))
    }

    /// The place of a hash in the table.
    fn table_slot(&self, hash: u32) -> usize {
        (u64::from(hash) >> (HASH_BITS - self.bits)) as usize
    }

    fn page_of(&self, hash: u32) -> u32 {
        self.table[self.table_slot(hash)]
    }

    fn page(&self, number: u32) -> &NamePage {
        &self.groups[number as usize / GROUP_PAGES][number as usize % GROUP_PAGES]
    }

    fn page_mut(&mut self, number: u32) -> &mut NamePage {
        &mut self.groups[number as usize / GROUP_PAGES][number as usize % GROUP_PAGES]
    }

    fn heads(&self, number: u32) -> &[NameHead] {
        let page = self.page(number);
        if page.len == MORE { &self.more[&number] } else { &page.heads[..page.len.into()] }
    }

    fn heads_mut(&mut self, number: u32) -> &mut [NameHead] {
        let len = self.page(number).len;
        if len == MORE {
            return self.more.get_mut(&number).expect("I2: a page that says so has its heads there");
        }
        &mut self.page_mut(number).heads[..len.into()]
    }

    /// Takes the heads out of a page. The caller then gives the page heads with [`Self::set_heads`].
    fn take_heads(&mut self, number: u32) -> Vec<NameHead> {
        match self.more.remove(&number) {
            Some(heads) => {
                self.bytes -= heads_bytes(&heads);
                heads
            }
            None => self.heads(number).to_vec(),
        }
    }

    fn set_heads(&mut self, number: u32, heads: Vec<NameHead>) {
        let page = self.page_mut(number);
        if heads.len() <= PAGE_NAMES {
            page.heads[..heads.len()].copy_from_slice(&heads);
            page.heads[heads.len()..].fill(NO_HEAD);
            page.len = heads.len() as u8;
            return;
        }
        page.len = MORE;
        self.bytes += heads_bytes(&heads);
        self.more.insert(number, heads);
    }

    /// The slot of the name, or the slot at which an absent name would be inserted.
    fn search(&self, number: u32, hash: u32) -> Result<usize, usize> {
        let page = self.page(number);
        // Reads all cache lines at the same time. A binary search would wait for one cache line after another.
        let within = page.heads.iter().map(|head| usize::from(head.hash < hash)).sum();
        let heads = self.heads(number);
        let slot = if page.len == MORE { heads.partition_point(|head| head.hash < hash) } else { within };
        if heads.get(slot).is_some_and(|head| head.hash == hash) { Ok(slot) } else { Err(slot) }
    }

    fn can_split(&self, number: u32) -> bool {
        let depth = u32::from(self.page(number).depth);
        depth < self.bits || (self.bits < HASH_BITS && 2 * self.table.len() <= SPARSE * self.nr_pages())
    }

    fn nr_pages(&self) -> usize {
        (self.groups.len() - 1) * GROUP_PAGES + self.groups.last().map_or(0, Vec::len)
    }

    /// Splits the page that a hash belongs to.
    fn split(&mut self, number: u32, hash: u32) {
        let depth = self.page(number).depth + 1;
        if u32::from(depth) > self.bits {
            self.bytes += self.table.len() * size_of::<u32>();
            self.table = self.table.iter().flat_map(|&page| [page, page]).collect();
            self.bits += 1;
        }
        let half = 1 << (HASH_BITS - u32::from(depth));
        let middle = u64::from(hash) & !(2 * half - 1) | half;
        let mut lower = self.take_heads(number);
        let upper = lower.split_off(lower.partition_point(|head| u64::from(head.hash) < middle));
        let new = self.add_page();
        for (number, heads) in [(number, lower), (new, upper)] {
            self.page_mut(number).depth = depth;
            self.set_heads(number, heads);
        }
        let from = (middle >> (HASH_BITS - self.bits)) as usize;
        let count = 1 << (self.bits - u32::from(depth));
        self.table[from..from + count].fill(new);
    }

    fn add_page(&mut self) -> u32 {
        let number = u32::try_from(self.nr_pages()).expect("so many changes would not fit into memory");
        if self.groups.last().is_none_or(|group| group.len() == GROUP_PAGES) {
            let group = Vec::with_capacity(GROUP_PAGES);
            self.bytes += pages_bytes(&group);
            self.groups.push(group);
        }
        let group = self.groups.last_mut().expect("there is one now");
        self.bytes -= pages_bytes(group);
        group.push(NamePage::default());
        self.bytes += pages_bytes(group);
        number
    }

    /// The numbers of the pages in key order, from the page of this hash on.
    fn pages_from(&self, hash: u32) -> impl Iterator<Item = u32> {
        let mut slot = self.table_slot(hash);
        std::iter::from_fn(move || {
            let number = *self.table.get(slot)?;
            let stride = self.stride(number);
            slot = (slot / stride + 1) * stride;
            Some(number)
        })
    }

    /// Number of places that a page takes in the table.
    fn stride(&self, number: u32) -> usize {
        1 << (self.bits - u32::from(self.page(number).depth))
    }

    fn places(&self, first: u32, last: u32) -> impl Iterator<Item = NameHead> {
        let nr_slots = self.table_slot(last) - self.table_slot(first) + 1;
        self.pages_from(first).take(nr_slots).flat_map(move |number| {
            let heads = self.heads(number);
            let from = heads.partition_point(|head| head.hash < first);
            let to = heads.partition_point(|head| head.hash <= last);
            heads[from..to.max(from)].iter().copied()
        })
    }

    /// The name with the highest hash that is not above `hash`.
    fn last(&self, hash: u32) -> Option<NameHead> {
        let mut slot = self.table_slot(hash);
        loop {
            let number = self.table[slot];
            let heads = self.heads(number);
            if let Some(found) = heads.partition_point(|head| head.hash <= hash).checked_sub(1) {
                return Some(heads[found]);
            }
            let stride = self.stride(number);
            slot = (slot / stride * stride).checked_sub(1)?;
        }
    }

    #[cfg(test)]
    fn counted_bytes(&self) -> usize {
        // `DIR_OVERHEAD` includes the first place of the table.
        let table = (self.table.len() - 1) * size_of::<u32>();
        let pages = self.groups.iter().map(pages_bytes).sum::<usize>();
        let more = self.more.values().map(heads_bytes).sum::<usize>();
        DIR_OVERHEAD + table + pages + more + self.log.memory_bytes()
    }
}

impl Default for NamePage {
    fn default() -> Self {
        Self { heads: [NO_HEAD; PAGE_NAMES], len: 0, depth: 0 }
    }
}

impl NamePage {
    /// Whether the page has no room for another head.
    fn is_full(&self) -> bool {
        usize::from(self.len) >= PAGE_NAMES
    }
}

/// The first and the last hash of a directory that lie in a range of keys.
fn hashes_within(objectid: u64, start: &Key, end: &Key) -> Option<(u32, u32)> {
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
    (from <= to.min(LAST_HASH)).then(|| (hash_of(from), hash_of(to)))
}

fn key_of(objectid: u64, head: NameHead) -> Key {
    Key::new(objectid, KeyType::DIR_ITEM, head.hash.into())
}

fn hash_of(offset: u64) -> u32 {
    offset.min(LAST_HASH) as u32
}

#[allow(clippy::arithmetic_side_effects, reason = "a `Vec` never takes more than `isize::MAX` bytes")]
fn pages_bytes(pages: &Vec<NamePage>) -> usize {
    pages.capacity() * size_of::<NamePage>()
}

#[allow(clippy::arithmetic_side_effects, reason = "a `Vec` never takes more than `isize::MAX` bytes")]
fn heads_bytes(heads: &Vec<NameHead>) -> usize {
    heads.capacity() * size_of::<NameHead>()
}

const HASH_BITS: u32 = 32;
const LAST_HASH: u64 = u32::MAX as u64;
/// Number of heads in a page: these heads, `len` and `depth` together take four cache lines.
const PAGE_NAMES: usize = 31;
/// Value of `NamePage::len` if the heads are in `DirChanges::more`.
const MORE: u8 = u8::MAX;
const DELETED: u32 = u32::MAX;
const NO_HEAD: NameHead = NameHead { hash: u32::MAX, at: DELETED };
const GROUP_PAGES: usize = 64;
const SPARSE: usize = 16;
/// Bytes of garbage that a log of any length may have.
const GARBAGE_MAX: usize = 4096;
/// Estimated overhead of a directory in bytes: its entry in the map, and the overhead of its allocations.
const DIR_OVERHEAD: usize = 320;

#[cfg(test)]
mod tests {
    use super::*;

    type Model = BTreeMap<Key, Option<Vec<u8>>>;

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 32
    }

    fn compare(map: &NameMap, model: &Model, (low, high): (Key, Key)) {
        let plain = |(key, change): (Key, DelayedChange)| (key, change.map(|value| value.to_vec()));
        let in_range = || model.iter().filter(|(key, _)| (low..=high).contains(key));
        let expected: Vec<_> = in_range().map(|(key, value)| (*key, value.clone())).collect();
        assert!(map.range(&low, &high).map(plain).eq(expected.iter().cloned()), "{low:?} {high:?}");
        assert!(map.keys(&low, &high).eq(expected.iter().map(|(key, _)| *key)));
        assert_eq!(map.last(&low, &high).map(plain), expected.last().cloned());
        if NameMap::takes(&low) {
            assert_eq!(map.get(&low).map(|change| change.map(|value| value.to_vec())), model.get(&low).cloned());
        }
    }

    /// A random hash, which is the offset of a key. `kind` selects the distribution: evenly spread, with equal first
    /// bits, one of only 50 values, or near the upper end.
    fn offset_of(kind: u64, state: &mut u64) -> u64 {
        match kind {
            0 => random(state),
            1 => 0x1234_0000 | random(state) & 0xffff,
            2 => (random(state) % 50) << 26,
            _ => LAST_HASH - random(state) % 1000,
        }
    }

    #[test]
    fn a_name_map_is_ordered() {
        let (mut map, mut model) = (NameMap::default(), Model::new());
        let (mut memory, mut state) = (0, 3);
        for step in 0..60_000u64 {
            let dir = [256, 257, 302, 303, 1 << 40][random(&mut state) as usize % 5];
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
                    let dir = [255, 256, 257, 302, 303, u64::MAX][random(state) as usize % 6];
                    Key::new(dir, KeyType(item_type), offset_of(dir % 4, state))
                };
                let (low, high) = (any(&mut state), any(&mut state));
                compare(&map, &model, (low, high));
                compare(&map, &model, (Key { objectid: high.objectid, ..low }, high));
            }
        }
        compare(&map, &model, (Key::MIN, Key::MAX));
        assert_eq!(memory, map.memory_bytes());
        assert_eq!(memory, map.dirs.values().map(|dir| dir.counted_bytes() as isize).sum::<isize>());
        let in_order =
            map.pieces(20).flat_map(|names| (0..names.len()).map(move |slot| (names.key(slot), names.value(slot))));
        assert!(in_order.eq(model.iter().map(|(key, value)| (*key, value.as_deref()))));
    }

    #[test]
    fn a_name_map_takes_little_more_memory_than_its_items() {
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
        assert!(dir.table.len() <= SPARSE * dir.nr_pages(), "I2");
        assert!(map.memory_bytes() < 20_000 * 100);
        assert!(map.get(&Key::new(256, KeyType::DIR_ITEM, 0x1234_0000 | 777)).is_some());
    }
}
