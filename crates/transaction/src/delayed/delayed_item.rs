//! Delayed items: every item change of a tree first goes into an ordered map in memory. Later the map is applied to the
//! tree as one sorted batch.
//!
//! There are two kinds. *Rows* are items whose neighbours usually change with them: the items of an inode, and a
//! directory's entries by index. *Names* are `DIR_ITEM`s, whose keys are hashes ([`NameMap::takes`]). A few thousand
//! names change every leaf of a large directory, because their hashes are spread evenly. So leaves are written less
//! often if more names are applied in one batch. The two kinds are kept apart so that rows can be frozen alone.
//!
//! Invariants:
//! - I1. All entries of a directory are in one shard, and directories with neighbouring numbers use different shards.
//!   All other items of an objectid are in one shard, with the items of neighbouring inodes. So a range of keys inside
//!   one objectid lies in at most two shards.
//! - I2. An item moves only from active to frozen to the tree, so a reader that looks in this order misses nothing.
//! - I3. If a shard deletes names, its names are frozen with its rows: a tree never has the names of a directory
//!   without the directory's inode.
//! - I4. A shard takes memory only from its first change or watch until it is frozen as a whole, so a tree without
//!   changes takes little memory. Thousands of subvolumes may be in memory at the same time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{RwLock, RwLockWriteGuard};
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::Changes;

use crate::delayed::item_map::{ChangePage, DelayedChange, Growth, ItemMap, PAGE_ITEMS};
use crate::delayed::name_map::{NameMap, OrderedNames};
use crate::lock_rank::{Held, Rank};

/// Changes of some objectids, with rows and names in separate maps.
#[derive(Debug, Default)]
struct DelayedShard {
    rows: ItemMap,
    names: NameMap,
    /// The objectids of both maps.
    objectids: Objectids,
}

/// A set of objectids that can report false positives. Most lookups are for objectids without changes, and a single
/// clear bit proves that an objectid has no changes.
#[derive(Debug, Default)]
struct Objectids {
    bits: Option<Box<[u64; OBJECTID_WORDS]>>,
}

/// Active changes of some objectids, and the watched objectids.
#[derive(Debug, Default)]
struct ActiveShard {
    changes: DelayedShard,
    /// Whether `changes` deletes a name (I3).
    deletes_names: bool,
    watched: HashSet<u64>,
    /// Keys of watched objectids that changed since the last [`DelayedItems::take_touched`].
    touched: BTreeSet<Key>,
}

/// A shard, or nothing if the shard has no changes and no watches (I4).
type ShardSlot = RwLock<Option<Box<ActiveShard>>>;

/// The active changes of one tree.
#[derive(Debug, Default)]
pub(crate) struct DelayedItems {
    /// Made by the first change or watch (I4).
    shards: OnceLock<Box<[ShardSlot]>>,
    nr_touched: AtomicUsize,
}

/// The active changes of one shard, locked.
#[derive(Debug)]
pub(crate) struct LockedItems<'d> {
    number: usize,
    shard: RwLockWriteGuard<'d, Option<Box<ActiveShard>>>,
    nr_touched: &'d AtomicUsize,
    _held: Held,
}

/// The changes of one tree that a running apply is merging into it.
#[derive(Debug, Default)]
pub(crate) struct FrozenItems {
    /// Empty if the tree had no shards.
    shards: Vec<Option<Box<DelayedShard>>>,
}

/// Frozen changes in the order of their keys.
pub(crate) struct FrozenBatch<'f> {
    pages: Vec<FrozenPage<'f>>,
    /// Page and slot of each change; the slot is in the lowest bits.
    order: Vec<u32>,
}

/// Neighbouring changes of a map, at most [`PAGE_ITEMS`].
#[derive(Clone, Copy)]
enum FrozenPage<'f> {
    Rows(&'f ChangePage),
    Names(OrderedNames<'f>),
}

impl DelayedItems {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn make_shards(&self) -> &[ShardSlot] {
        self.shards.get_or_init(|| (0..NR_SHARDS).map(|_| RwLock::default()).collect())
    }

    /// The shards that were made; none if nothing changed yet.
    fn made_shards(&self) -> &[ShardSlot] {
        self.shards.get().map_or(&[], |shards| shards)
    }

    /// Runs `read` on a shard that has changes or watches.
    fn with_shard<T>(&self, number: usize, read: impl FnOnce(&ActiveShard) -> T) -> Option<T> {
        let _held = Held::wait(Rank::Shard, (0, 0));
        self.made_shards().get(number)?.read().as_deref().map(read)
    }

    /// Whether there are no changes and no watches. Returns false if another thread uses a shard.
    pub(crate) fn is_unused(&self) -> bool {
        self.made_shards().iter().all(|shard| shard.try_read().is_some_and(|shard| shard.is_none()))
    }

    /// Locks the shard of a key, for several changes.
    pub(crate) fn lock(&self, key: &Key) -> LockedItems<'_> {
        let number = shard_of(key);
        let _held = Held::wait(Rank::Shard, (0, 0));
        LockedItems { number, shard: self.make_shards()[number].write(), nr_touched: &self.nr_touched, _held }
    }

    /// Records a change.
    #[cfg(test)]
    pub(crate) fn set(&self, key: Key, value: Option<&[u8]>) -> Growth {
        self.lock(&key).set(key, value)
    }

    /// The change of this key, if there is one.
    pub(crate) fn get(&self, key: &Key) -> Option<DelayedChange> {
        self.with_shard(shard_of(key), |shard| shard.changes.get(key)).flatten()
    }

    /// Returns up to `limit` changes of `start..=end` in ascending order.
    pub(crate) fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        let of_shard = |number| self.with_shard(number, |shard| shard.changes.range(start, end, limit));
        merge_ranges(shards_between(start, end).filter_map(of_shard), limit)
    }

    /// Returns the changes of `start..=end` in descending order of their keys. Stops after the first change that is not
    /// a deletion, or after `limit` changes.
    pub(crate) fn backwards(&self, end: &Key, start: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        let of_shard = |number| self.with_shard(number, |shard| shard.changes.backwards(start, end, limit));
        join_backwards(shards_between(start, end).filter_map(of_shard), limit)
    }

    /// Takes all changes and ends all watches. The caller holds the gate and the tree's view exclusively (I2).
    pub(crate) fn freeze(&self) -> FrozenItems {
        let freeze = |shard: &ShardSlot| Some(Box::new(shard.write().take()?.changes));
        let frozen = self.made_shards().iter().map(freeze).collect();
        self.nr_touched.store(0, Ordering::Relaxed);
        FrozenItems { shards: frozen }
    }

    /// Takes the rows, and the names that must be frozen with them (I3). Watches continue. Also returns the number of
    /// bytes of memory that the taken names occupy. The caller holds the gate and the tree's view exclusively (I2).
    pub(crate) fn freeze_rows(&self) -> (FrozenItems, isize) {
        let mut names_bytes = 0_isize;
        let freeze = |slot: &ShardSlot| {
            let mut slot = slot.write();
            let shard = slot.as_mut()?;
            let mut frozen = DelayedShard {
                rows: std::mem::take(&mut shard.changes.rows),
                names: NameMap::default(),
                objectids: std::mem::take(&mut shard.changes.objectids),
            };
            if std::mem::take(&mut shard.deletes_names) {
                std::mem::swap(&mut frozen.names, &mut shard.changes.names);
                names_bytes = names_bytes.saturating_add(frozen.names.memory_bytes());
            }
            let DelayedShard { names, objectids, .. } = &mut shard.changes;
            names.dirs().for_each(|dir| objectids.add(dir));
            debug_assert!(names.delete_nothing(), "I3: a name that is deleted stays while its rows are frozen");
            let is_unused = objectids.is_empty() && shard.watched.is_empty();
            if is_unused {
                *slot = None;
            }
            Some(Box::new(frozen))
        };
        let shards = self.made_shards().iter().map(freeze).collect();
        (FrozenItems { shards }, names_bytes)
    }

    /// The changed keys of an objectid, in order.
    pub(crate) fn keys_of(&self, objectid: u64) -> Vec<Key> {
        let (start, end) = (Key::new(objectid, KeyType(0), 0), Key::new(objectid, KeyType(u8::MAX), u64::MAX));
        let mut keys = Vec::new();
        for number in shards_between(&start, &end) {
            self.with_shard(number, |shard| {
                keys.extend(shard.changes.rows.keys(&start, &end));
                keys.extend(shard.changes.names.keys(&start, &end));
            });
        }
        keys.sort_unstable();
        keys
    }

    /// Records which keys of an objectid change, until the next [`Self::freeze`].
    pub(crate) fn watch(&self, objectid: u64) {
        for number in [row_shard(objectid), entry_shard(objectid)] {
            self.make_shards()[number].write().get_or_insert_default().watched.insert(objectid);
        }
    }

    /// Takes the keys of watched objectids that changed since the last call. No operation may run during the call.
    pub(crate) fn take_touched(&self) -> Vec<Key> {
        if self.nr_touched.swap(0, Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let take = |shard: &ShardSlot| shard.write().as_mut().map(|shard| std::mem::take(&mut shard.touched));
        self.made_shards().iter().filter_map(take).flatten().collect()
    }
}

impl LockedItems<'_> {
    /// Whether the key belongs to the locked shard.
    pub(crate) fn has(&self, key: &Key) -> bool {
        shard_of(key) == self.number
    }

    /// Records a change in the locked shard.
    #[allow(clippy::arithmetic_side_effects, reason = "sizes of memory")]
    pub(crate) fn set(&mut self, key: Key, value: Option<&[u8]>) -> Growth {
        debug_assert!(self.has(&key), "I1: {key:?} is kept elsewhere");
        let is_unused = self.shard.is_none();
        let shard = &mut **self.shard.get_or_insert_default();
        if !shard.watched.is_empty() && shard.watched.contains(&key.objectid) && shard.touched.insert(key) {
            self.nr_touched.fetch_add(1, Ordering::Relaxed);
        }
        let is_name = NameMap::takes(&key);
        shard.deletes_names |= is_name && value.is_none();
        shard.changes.objectids.add(key.objectid);
        let mut growth = match is_name {
            true => shard.changes.names.set(&key, value),
            false => shard.changes.rows.set(&key, value),
        };
        if is_unused {
            growth.memory_bytes += SHARD_BYTES;
        }
        growth
    }
}

impl FrozenItems {
    pub(crate) fn get(&self, key: &Key) -> Option<DelayedChange> {
        self.shard(shard_of(key))?.get(key)
    }

    fn shard(&self, number: usize) -> Option<&DelayedShard> {
        self.shards.get(number)?.as_deref()
    }

    pub(crate) fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        let of_shard = |number: usize| Some(self.shard(number)?.range(start, end, limit));
        merge_ranges(shards_between(start, end).filter_map(of_shard), limit)
    }

    /// See [`DelayedItems::backwards`].
    pub(crate) fn backwards(&self, end: &Key, start: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        let of_shard = |number: usize| Some(self.shard(number)?.backwards(start, end, limit));
        join_backwards(shards_between(start, end).filter_map(of_shard), limit)
    }

    /// All changes as one batch.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "numbers of pages and slots in memory: a page has at most `PAGE_ITEMS` slots"
    )]
    pub(crate) fn batch(&self) -> FrozenBatch<'_> {
        let mut pages = Vec::new();
        let mut places = Vec::with_capacity(2 * self.shards.len());
        for shard in self.shards.iter().flatten() {
            let first = pages.len();
            pages.extend(shard.rows.pages().map(FrozenPage::Rows));
            let middle = pages.len();
            pages.extend(shard.names.pieces(PAGE_ITEMS).map(FrozenPage::Names));
            places.extend([(first, middle), (middle, pages.len())].map(|(page, end)| MergePlace {
                page,
                slot: 0,
                end,
            }));
        }
        let mut order = Vec::with_capacity(pages.iter().map(FrozenPage::len).sum());
        let next = |place: &MergePlace| (place.page < place.end).then(|| pages[place.page].key(place.slot));
        let mut heap: BinaryHeap<_> =
            (0..places.len()).filter_map(|map| next(&places[map]).map(|key| Reverse((key, map)))).collect();
        while let Some(Reverse((_, map))) = heap.pop() {
            let others = heap.peek().map(|Reverse((key, _))| *key);
            let place = &mut places[map];
            let upcoming = loop {
                let at = place.page * PAGE_ITEMS + place.slot;
                order.push(u32::try_from(at).expect("so many changes would not fit into memory"));
                place.slot += 1;
                if place.slot == pages[place.page].len() {
                    (place.page, place.slot) = (place.page + 1, 0);
                }
                let upcoming = next(place);
                if upcoming.is_none_or(|key| others.is_some_and(|other| other < key)) {
                    break upcoming;
                }
            };
            if let Some(key) = upcoming {
                heap.push(Reverse((key, map)));
            }
        }
        let batch = FrozenBatch { pages, order };
        debug_assert!(batch.is_ascending(), "I1: two shards have the same key");
        batch
    }
}

impl DelayedShard {
    fn get(&self, key: &Key) -> Option<DelayedChange> {
        if !self.objectids.may_have(key.objectid) {
            return None;
        }
        if NameMap::takes(key) { self.names.get(key) } else { self.rows.get(key) }
    }

    /// Whether no key in this range can have changed.
    fn lacks(&self, start: &Key, end: &Key) -> bool {
        start.objectid == end.objectid && !self.objectids.may_have(start.objectid)
    }

    fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        if self.lacks(start, end) {
            return Vec::new();
        }
        let rows = self.rows.range(start, end).take(limit);
        let names = self.names.range(start, end).take(limit);
        match start.objectid == end.objectid && start.item_type == end.item_type {
            true if NameMap::takes(start) && NameMap::takes(end) => names.collect(),
            true if !is_name(start.item_type) => rows.collect(),
            _ => merge_ranges([rows.collect(), names.collect::<Vec<_>>()].into_iter(), limit),
        }
    }

    fn backwards(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, DelayedChange)> {
        if self.lacks(start, end) {
            return Vec::new();
        }
        let mut rows = Vec::new();
        for (key, value) in self.rows.backwards(start, end).take(limit) {
            rows.push((key, value.map(Arc::from)));
            if value.is_some() {
                break;
            }
        }
        let has_names = start.item_type <= KeyType::DIR_ITEM && end.item_type >= KeyType::DIR_ITEM;
        if start.objectid == end.objectid && !has_names {
            return rows;
        }
        let mut names = Vec::new();
        let mut last = self.names.last(start, end);
        while let Some((key, change)) = last.take() {
            let is_enough = change.is_some() || names.len().saturating_add(1) == limit;
            names.push((key, change));
            if !is_enough {
                last = key.predecessor().and_then(|end| self.names.last(start, &end));
            }
        }
        join_backwards([rows, names].into_iter(), limit)
    }
}

impl Objectids {
    fn add(&mut self, objectid: u64) {
        let (word, bit) = Self::place(objectid);
        self.bits.get_or_insert_with(|| Box::new([0; OBJECTID_WORDS]))[word] |= bit;
    }

    fn may_have(&self, objectid: u64) -> bool {
        let (word, bit) = Self::place(objectid);
        self.bits.as_ref().is_some_and(|bits| bits[word] & bit != 0)
    }

    fn is_empty(&self) -> bool {
        self.bits.is_none()
    }

    fn place(objectid: u64) -> (usize, u64) {
        // A shard has every NR_SHARDS-th row of inodes ([`INODES_PER_ROW`]), so all objectids in a shard agree in some
        // bits. The multiplication mixes the bits, so that the objectids spread over the whole set.
        let mixed = objectid.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        (mixed as usize / 64 % OBJECTID_WORDS, 1 << (mixed % 64))
    }
}

/// Whether items of this type are names (`DIR_ITEM`s). The keys of names are hashes, so the names that change are
/// spread over all leaves of their directory.
pub(crate) fn is_name(item_type: KeyType) -> bool {
    item_type == KeyType::DIR_ITEM
}

/// The position of a merge in the pages of a map.
struct MergePlace {
    page: usize,
    slot: usize,
    end: usize,
}

impl<'f> FrozenPage<'f> {
    fn len(&self) -> usize {
        match self {
            Self::Rows(page) => page.len(),
            Self::Names(names) => names.len(),
        }
    }

    fn key(&self, slot: usize) -> Key {
        match self {
            Self::Rows(page) => page.key(slot),
            Self::Names(names) => names.key(slot),
        }
    }

    fn value(&self, slot: usize) -> Option<&'f [u8]> {
        match self {
            Self::Rows(page) => page.value(slot),
            Self::Names(names) => names.value(slot),
        }
    }
}

impl FrozenBatch<'_> {
    /// Whether each key is there once, in order.
    fn is_ascending(&self) -> bool {
        (1..self.len()).all(|index| self.key(index.saturating_sub(1)) < self.key(index))
    }

    fn place(&self, index: usize) -> (FrozenPage<'_>, usize) {
        let at = self.order[index] as usize;
        (self.pages[at / PAGE_ITEMS], at % PAGE_ITEMS)
    }
}

impl Changes for FrozenBatch<'_> {
    fn len(&self) -> usize {
        self.order.len()
    }

    fn key(&self, index: usize) -> Key {
        let (page, slot) = self.place(index);
        page.key(slot)
    }

    fn value(&self, index: usize) -> Option<&[u8]> {
        let (page, slot) = self.place(index);
        page.value(slot)
    }
}

fn merge_ranges(
    mut ranges: impl Iterator<Item = Vec<(Key, DelayedChange)>>,
    limit: usize,
) -> Vec<(Key, DelayedChange)> {
    // Usually there is only one range, or only one range with changes.
    let mut merged = ranges.next().unwrap_or_default();
    let nr_first = merged.len();
    ranges.for_each(|range| merged.extend(range));
    if merged.len() == nr_first {
        return merged;
    }
    // Rows and names alternate by inode, and often there are no names. The stable sort is fast because it exploits runs
    // that are already sorted.
    merged.sort_by_key(|(key, _)| *key);
    merged.truncate(limit);
    merged
}

/// Joins lists of changes in descending order of their keys. Each of `lists` ends with its first change that is not a
/// deletion, after `limit` changes, or at the start of the range.
#[allow(clippy::arithmetic_side_effects, reason = "a number of lists")]
fn join_backwards(lists: impl Iterator<Item = Vec<(Key, DelayedChange)>>, limit: usize) -> Vec<(Key, DelayedChange)> {
    let mut joined: Vec<(Key, DelayedChange)> = Vec::new();
    let mut nr_lists = 0;
    for list in lists.filter(|list| !list.is_empty()) {
        nr_lists += 1;
        joined.extend(list);
    }
    if nr_lists > 1 {
        joined.sort_unstable_by_key(|(key, _)| Reverse(*key));
        // A list may lack the changes after its own end. So the joined list ends at its first change that is not a
        // deletion, or after `limit` changes: up to there, no list lacks a change.
        let first_value = joined.iter().position(|(_, change)| change.is_some());
        joined.truncate(first_value.map_or(limit, |at| at.saturating_add(1).min(limit)));
    }
    joined
}

/// The shard of a key (I1).
fn shard_of(key: &Key) -> usize {
    if is_entry(key.item_type) { entry_shard(key.objectid) } else { row_shard(key.objectid) }
}

/// Puts neighbouring rows of inodes ([`INODES_PER_ROW`]) into different shards, so that threads in different
/// directories rarely use the same shard.
fn row_shard(objectid: u64) -> usize {
    usize::try_from(objectid / INODES_PER_ROW % NR_SHARDS).expect("a remainder of NR_SHARDS fits")
}

fn entry_shard(objectid: u64) -> usize {
    usize::try_from(objectid % NR_SHARDS).expect("a remainder of NR_SHARDS fits")
}

/// The shards that may hold changes of `start..=end`.
fn shards_between(start: &Key, end: &Key) -> impl Iterator<Item = usize> + use<> {
    let objectid = start.objectid;
    let is_one = objectid == end.objectid;
    let has_entries = start.item_type <= KeyType::DIR_INDEX && end.item_type >= KeyType::DIR_ITEM;
    let has_others = start.item_type < KeyType::DIR_ITEM || end.item_type > KeyType::DIR_INDEX;
    let others = (is_one && has_others).then(|| row_shard(objectid));
    let entries = (is_one && has_entries).then(|| entry_shard(objectid)).filter(|shard| others != Some(*shard));
    let all = if is_one { 0..0 } else { 0..NR_SHARDS as usize };
    all.chain(others).chain(entries)
}

/// Whether items of this type are directory entries.
fn is_entry(item_type: KeyType) -> bool {
    (KeyType::DIR_ITEM..=KeyType::DIR_INDEX).contains(&item_type)
}

const NR_SHARDS: u64 = 64;
/// Estimated memory of a shard without its items, in bytes.
const SHARD_BYTES: isize = (size_of::<ActiveShard>() + OBJECTID_WORDS * size_of::<u64>()) as isize;
/// Number of words in a set of objectids: enough bits for a few thousand objectids.
const OBJECTID_WORDS: usize = 128;
/// Number of inodes in a row of inodes, which is the range of inode numbers from one multiple of this number to the
/// next. The delayed items of these inodes, except directory entries, share a lock and lie side by side. Threads use
/// different locks if each takes the numbers of its new inodes from rows of its own.
pub const INODES_PER_ROW: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shards_with_changes_take_memory() {
        let items = DelayedItems::new();
        let nr_shards =
            |items: &DelayedItems| items.made_shards().iter().filter(|shard| shard.read().is_some()).count();
        assert_eq!(items.get(&Key::new(256, KeyType::INODE_ITEM, 0)), None);
        assert!(items.made_shards().is_empty() && items.is_unused(), "I4: a tree that is only read has no shards");
        // A new file in a root directory.
        let keys = [(256, KeyType::DIR_ITEM), (256, KeyType::DIR_INDEX), (257, KeyType::INODE_ITEM)];
        let mut memory_bytes = 0;
        for (objectid, item_type) in keys {
            memory_bytes += items.set(Key::new(objectid, item_type, 7), Some(&[0; 160])).memory_bytes;
        }
        assert_eq!(nr_shards(&items), 2, "I4");
        assert!(memory_bytes >= 2 * SHARD_BYTES, "the throttle counts the shards: {memory_bytes}");
        assert!(!items.is_unused());
        let (frozen, _) = items.freeze_rows();
        assert_eq!(nr_shards(&items), 1, "the names stay");
        assert_eq!(frozen.batch().len(), 2);
        assert_eq!(items.freeze().batch().len(), 1);
        assert!(items.is_unused(), "I4");
        items.watch(256);
        assert!(!items.is_unused(), "a watch must not get lost");
    }

    #[test]
    fn changes_are_found_after_rows_were_frozen() {
        let items = DelayedItems::new();
        let key = |objectid, item_type| Key::new(objectid, item_type, 7);
        let (dirs, inodes) = (256..2000u64, 2000..9000u64);
        for objectid in dirs.clone().step_by(3) {
            items.set(key(objectid, KeyType::DIR_ITEM), Some(b"name"));
        }
        for objectid in inodes.clone().step_by(5) {
            items.set(key(objectid, KeyType::INODE_ITEM), None);
        }
        let (frozen, _) = items.freeze_rows();
        for objectid in dirs.chain(inodes) {
            let (name, row) = (key(objectid, KeyType::DIR_ITEM), key(objectid, KeyType::INODE_ITEM));
            let has_name = objectid < 2000 && (objectid - 256).is_multiple_of(3);
            let has_row = objectid >= 2000 && (objectid - 2000).is_multiple_of(5);
            assert_eq!(items.get(&name).is_some(), has_name, "{objectid}");
            assert_eq!(
                items.range(&key(objectid, KeyType(0)), &key(objectid, KeyType(255)), 9).len(),
                usize::from(has_name)
            );
            assert_eq!(frozen.get(&row).is_some(), has_row, "{objectid}");
            assert_eq!(
                !frozen.backwards(&key(objectid, KeyType(255)), &key(objectid, KeyType(0)), 9).is_empty(),
                has_row
            );
        }
    }

    #[test]
    fn a_directory_and_its_entries_are_one_range() {
        let items = DelayedItems::new();
        let first = |objectid| Key::new(objectid, KeyType(0), 0);
        let last = |objectid| Key::new(objectid, KeyType(u8::MAX), u64::MAX);
        for dir in 256..400 {
            items.watch(dir);
            let keys =
                [KeyType::INODE_ITEM, KeyType::INODE_REF, KeyType::DIR_ITEM, KeyType::DIR_INDEX, KeyType::EXTENT_DATA]
                    .map(|item_type| Key::new(dir, item_type, 3));
            for key in keys.iter().rev() {
                items.set(*key, Some(b"item"));
            }
            let found: Vec<Key> = items.range(&first(dir), &last(dir), 9).into_iter().map(|(key, _)| key).collect();
            assert_eq!(found, keys);
            assert_eq!(items.keys_of(dir), keys);
            assert_eq!(items.range(&first(dir), &last(dir), 2).len(), 2);
            assert_eq!(items.backwards(&last(dir), &first(dir), 1)[0].0, keys[4]);
            assert_eq!(items.backwards(&keys[3], &first(dir), 1)[0].0, keys[3]);
            assert_eq!(items.backwards(&Key::new(dir, KeyType::DIR_ITEM, 2), &first(dir), 1)[0].0, keys[1]);
            assert_eq!(items.range(&keys[2], &keys[3], 9).len(), 2);
            let mut touched = items.take_touched();
            touched.sort_unstable();
            assert_eq!(touched, keys);
        }
        let beside = |dir: u64| entry_shard(dir) != entry_shard(dir + 1);
        assert!((256..400).all(beside), "neighbours are filled by different threads");
        assert_eq!(items.freeze().range(&first(256), &last(400), usize::MAX).len(), 5 * 144);
    }

    #[test]
    fn entries_with_offsets_that_no_name_has_are_found_among_the_others() {
        let items = DelayedItems::new();
        let key = |offset| Key::new(256, KeyType::DIR_ITEM, offset);
        let offsets = [7, u64::from(u32::MAX), 1 << 32, u64::MAX];
        for offset in offsets {
            items.set(key(offset), (offset != 1 << 32).then_some(&b"entry"[..]));
        }
        let found = |start: u64, end: u64| -> Vec<u64> {
            items.range(&key(start), &key(end), 9).into_iter().map(|(key, _)| key.offset).collect()
        };
        assert_eq!(found(0, u64::MAX), offsets);
        assert_eq!(found(8, u32::MAX.into()), [u64::from(u32::MAX)]);
        assert_eq!(found(1 << 33, u64::MAX), [u64::MAX]);
        assert_eq!(items.get(&key(1 << 32)), Some(None));
        assert_eq!(items.backwards(&key(1 << 40), &key(0), 1)[0].0, key(1 << 32));
        assert_eq!(items.backwards(&key(9), &key(0), 1)[0].0, key(7));
        let frozen = items.freeze();
        let batch = frozen.batch();
        assert_eq!((0..batch.len()).map(|index| batch.key(index).offset).collect::<Vec<_>>(), offsets);
    }

    #[test]
    fn a_batch_has_all_changes_in_order() {
        let items = DelayedItems::new();
        let mut keys: Vec<Key> = (0..20_000u64)
            .map(|number| {
                let objectid = 256 + number * 7919 % 1500;
                Key::new(objectid, KeyType(u8::try_from(number % 5).unwrap()), number)
            })
            .collect();
        for key in &keys {
            items.set(*key, Some(&key.offset.to_le_bytes()));
        }
        keys.sort_unstable();
        let frozen = items.freeze();
        let batch = frozen.batch();
        let found: Vec<Key> = (0..batch.len()).map(|index| batch.key(index)).collect();
        assert_eq!(found, keys);
        assert!((0..batch.len()).all(|index| batch.value(index) == Some(&keys[index].offset.to_le_bytes()[..])));
        assert_eq!(items.freeze().batch().len(), 0);
    }
}
