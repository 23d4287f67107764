//! Delayed items: every item change of a tree goes first into an ordered map in memory; the map is later applied to
//! the tree as one sorted batch.
//!
//! Invariants:
//! - I1. All items of one objectid are in one shard, so that a range inside one objectid needs one lock.
//! - I2. An item moves only from active to frozen to the tree. A reader that looks in that order misses nothing.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{Batch, Value};

/// What is to become of a key: a new value, or absence.
pub(crate) type Change = Option<Value>;

type Shard = BTreeMap<Key, Change>;

/// Changes of some objectids, and what is watched among them.
#[derive(Debug, Default)]
struct ActiveShard {
    changes: Shard,
    watched: HashSet<u64>,
    /// Keys of watched objectids that changed since they were last asked for.
    touched: BTreeSet<Key>,
}

/// The active changes of one tree.
#[derive(Debug)]
pub(crate) struct DelayedItems {
    shards: Box<[RwLock<ActiveShard>]>,
    nr_touched: AtomicUsize,
}

/// The changes of one tree that a running apply is merging into it.
#[derive(Debug, Default)]
pub(crate) struct FrozenItems {
    shards: Vec<Shard>,
}

impl DelayedItems {
    pub(crate) fn new() -> Self {
        let shards = (0..NR_SHARDS).map(|_| RwLock::default()).collect();
        Self { shards, nr_touched: AtomicUsize::new(0) }
    }

    /// Records a change; returns the bytes by which the map grew (0 where a change replaced another).
    pub(crate) fn set(&self, key: Key, change: Change) -> u64 {
        let bytes = ENTRY_BYTES + change.as_ref().map_or(0, |value| value.len() as u64);
        let mut shard = self.shards[shard_of(key.objectid)].write();
        if !shard.watched.is_empty() && shard.watched.contains(&key.objectid) && shard.touched.insert(key) {
            self.nr_touched.fetch_add(1, Ordering::Relaxed);
        }
        let replaced = shard.changes.insert(key, change);
        drop(shard);
        match replaced {
            Some(old) => bytes.saturating_sub(ENTRY_BYTES + old.map_or(0, |value| value.len() as u64)),
            None => bytes,
        }
    }

    /// The change of this key, if there is one.
    pub(crate) fn get(&self, key: &Key) -> Option<Change> {
        self.shards[shard_of(key.objectid)].read().changes.get(key).cloned()
    }

    /// Appends up to `limit` changes of `start..=end` in ascending order.
    pub(crate) fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, Change)> {
        if start.objectid == end.objectid {
            let shard = self.shards[shard_of(start.objectid)].read();
            return range_of(&shard.changes, start, end, limit);
        }
        let shards = self.shards.iter().map(|shard| shard.read());
        merge_ranges(shards.map(|shard| range_of(&shard.changes, start, end, limit)), limit)
    }

    /// The largest changed key in `start..=end`.
    pub(crate) fn last_le(&self, end: &Key, start: &Key) -> Option<(Key, Change)> {
        let last = |shard: &RwLock<ActiveShard>| {
            shard.read().changes.range(*start..=*end).next_back().map(|(key, change)| (*key, change.clone()))
        };
        if start.objectid == end.objectid {
            return last(&self.shards[shard_of(start.objectid)]);
        }
        self.shards.iter().filter_map(last).max_by_key(|(key, _)| *key)
    }

    /// Takes all changes, leaving none, and watches nothing any more. The caller holds the gate and the tree's view
    /// exclusively (I2).
    pub(crate) fn freeze(&self) -> FrozenItems {
        let frozen = self.shards.iter().map(|shard| std::mem::take(&mut *shard.write()).changes).collect();
        self.nr_touched.store(0, Ordering::Relaxed);
        FrozenItems { shards: frozen }
    }

    /// The changed keys of an objectid, in order.
    pub(crate) fn keys_of(&self, objectid: u64) -> Vec<Key> {
        let shard = self.shards[shard_of(objectid)].read();
        let range = Key::new(objectid, KeyType(0), 0)..=Key::new(objectid, KeyType(u8::MAX), u64::MAX);
        shard.changes.range(range).map(|(key, _)| *key).collect()
    }

    /// From now on notes which keys of an objectid change, until the next freeze.
    pub(crate) fn watch(&self, objectid: u64) {
        self.shards[shard_of(objectid)].write().watched.insert(objectid);
    }

    /// The keys of watched objectids that changed since this was last asked. No operation runs meanwhile.
    pub(crate) fn take_touched(&self) -> Vec<Key> {
        if self.nr_touched.swap(0, Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        self.shards.iter().flat_map(|shard| std::mem::take(&mut shard.write().touched)).collect()
    }
}

impl FrozenItems {
    pub(crate) fn get(&self, key: &Key) -> Option<&Change> {
        self.shards.get(shard_of(key.objectid))?.get(key)
    }

    pub(crate) fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, Change)> {
        if start.objectid == end.objectid {
            return self
                .shards
                .get(shard_of(start.objectid))
                .map_or_else(Vec::new, |shard| range_of(shard, start, end, limit));
        }
        merge_ranges(self.shards.iter().map(|shard| range_of(shard, start, end, limit)), limit)
    }

    pub(crate) fn last_le(&self, end: &Key, start: &Key) -> Option<(Key, Change)> {
        let last = |shard: &Shard| shard.range(*start..=*end).next_back().map(|(key, change)| (*key, change.clone()));
        if start.objectid == end.objectid {
            return last(self.shards.get(shard_of(start.objectid))?);
        }
        self.shards.iter().filter_map(last).max_by_key(|(key, _)| *key)
    }

    /// All changes as one sorted batch. The shards are sorted runs, which the stable sort merges.
    pub(crate) fn to_batch(&self) -> Batch {
        let mut batch = Batch::with_capacity(self.shards.iter().map(BTreeMap::len).sum());
        for shard in &self.shards {
            batch.extend(shard.iter().map(|(key, change)| (*key, change.clone())));
        }
        batch.sort_by_key(|(key, _)| *key);
        batch
    }
}

fn range_of(shard: &Shard, start: &Key, end: &Key, limit: usize) -> Vec<(Key, Change)> {
    shard.range(*start..=*end).take(limit).map(|(key, change)| (*key, change.clone())).collect()
}

fn merge_ranges(ranges: impl Iterator<Item = Vec<(Key, Change)>>, limit: usize) -> Vec<(Key, Change)> {
    let mut merged: Vec<_> = ranges.flatten().collect();
    merged.sort_by_key(|(key, _)| *key);
    merged.truncate(limit);
    merged
}

fn shard_of(objectid: u64) -> usize {
    // Neighbouring inodes go to different shards, so that threads in different files meet seldom.
    usize::try_from(objectid % NR_SHARDS).expect("a remainder of NR_SHARDS fits")
}

const NR_SHARDS: u64 = 64;
/// Key, map node and allocation overhead of an entry, estimated.
const ENTRY_BYTES: u64 = 64;
