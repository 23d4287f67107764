//! Delayed items: every item change of a tree goes first into an ordered map in memory; the map is later applied to
//! the tree as one sorted batch.
//!
//! Invariants:
//! - I1. All items of one objectid are in one shard, so that a range inside one objectid needs one lock.
//! - I2. An item moves only from active to frozen to the tree. A reader that looks in that order misses nothing.

use std::collections::BTreeMap;

use parking_lot::RwLock;
use ubtrfs_format::Key;
use ubtrfs_tree::{Batch, Value};

/// What is to become of a key: a new value, or absence.
pub(crate) type Change = Option<Value>;

type Shard = BTreeMap<Key, Change>;

/// The active changes of one tree.
#[derive(Debug)]
pub(crate) struct DelayedItems {
    shards: Box<[RwLock<Shard>]>,
}

/// The changes of one tree that a running apply is merging into it.
#[derive(Debug, Default)]
pub(crate) struct FrozenItems {
    shards: Vec<Shard>,
}

impl DelayedItems {
    pub(crate) fn new() -> Self {
        let shards = (0..NR_SHARDS).map(|_| RwLock::new(Shard::new())).collect();
        Self { shards }
    }

    /// Records a change; returns the bytes by which the map grew (0 where a change replaced another).
    pub(crate) fn set(&self, key: Key, change: Change) -> u64 {
        let bytes = ENTRY_BYTES + change.as_ref().map_or(0, |value| value.len() as u64);
        let replaced = self.shards[shard_of(key.objectid)].write().insert(key, change);
        match replaced {
            Some(old) => bytes.saturating_sub(ENTRY_BYTES + old.map_or(0, |value| value.len() as u64)),
            None => bytes,
        }
    }

    /// The change of this key, if there is one.
    pub(crate) fn get(&self, key: &Key) -> Option<Change> {
        self.shards[shard_of(key.objectid)].read().get(key).cloned()
    }

    /// Appends up to `limit` changes of `start..=end` in ascending order.
    pub(crate) fn range(&self, start: &Key, end: &Key, limit: usize) -> Vec<(Key, Change)> {
        if start.objectid == end.objectid {
            let shard = self.shards[shard_of(start.objectid)].read();
            return shard.range(*start..=*end).take(limit).map(|(key, change)| (*key, change.clone())).collect();
        }
        let shards = self.shards.iter().map(|shard| shard.read());
        merge_ranges(shards.map(|shard| range_of(&shard, start, end, limit)), limit)
    }

    /// The largest changed key in `start..=end`.
    pub(crate) fn last_le(&self, end: &Key, start: &Key) -> Option<(Key, Change)> {
        let last = |shard: &RwLock<Shard>| {
            shard.read().range(*start..=*end).next_back().map(|(key, change)| (*key, change.clone()))
        };
        if start.objectid == end.objectid {
            return last(&self.shards[shard_of(start.objectid)]);
        }
        self.shards.iter().filter_map(last).max_by_key(|(key, _)| *key)
    }

    /// Takes all changes, leaving none. The caller holds the gate and the tree's view exclusively (I2).
    pub(crate) fn freeze(&self) -> FrozenItems {
        FrozenItems { shards: self.shards.iter().map(|shard| std::mem::take(&mut *shard.write())).collect() }
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
