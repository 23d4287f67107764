//! The node cache: nodes by address, with a budget in bytes.
//!
//! The cache is sharded by address. Each shard is a CLOCK: a ring of slots with "used" marks, and a hand that clears
//! marks and evicts the first unmarked node. A hit only sets a mark, under the shard's lock.
//!
//! Invariants:
//! - I1. `by_bytenr` lists exactly the occupied slots of `ring`; `bytes` is the sum of the block sizes of the nodes in
//!   `ring`.
//! - I2. A lookup finds a node only if the node has the expected generation. A stale node is a miss.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::{Generation, Logical};

use crate::node::Node;

/// Nodes in memory, shared by all trees.
#[derive(Debug)]
pub struct NodeCache {
    shards: Box<[Mutex<CacheShard>]>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Counters and current size of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found their node.
    pub hits: u64,
    /// Lookups that did not find their node.
    pub misses: u64,
    /// Cached nodes.
    pub nodes: u64,
    /// Bytes of cached nodes.
    pub bytes: u64,
}

impl NodeCache {
    /// Makes a cache for about `budget_bytes` of nodes.
    pub fn new(budget_bytes: u64) -> Self {
        let shards = (0..NR_SHARDS).map(|_| Mutex::new(CacheShard::default())).collect();
        let cache = Self { shards, hits: AtomicU64::new(0), misses: AtomicU64::new(0) };
        cache.set_budget(budget_bytes);
        cache
    }

    /// Changes the budget. If the cache exceeds the new budget, later inserts evict nodes.
    pub fn set_budget(&self, budget_bytes: u64) {
        for shard in &self.shards {
            shard.lock().budget_bytes = budget_bytes / NR_SHARDS;
        }
    }

    /// The node at this address, if it has this generation.
    pub fn get(&self, bytenr: Logical, generation: Generation) -> Option<Arc<Node>> {
        let found = self.shard(bytenr).lock().get(bytenr, generation);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Whether the cache holds the node at this address with this generation. Sets no "used" mark.
    pub fn contains(&self, bytenr: Logical, generation: Generation) -> bool {
        let shard = self.shard(bytenr).lock();
        let node = shard.by_bytenr.get(&bytenr.0).and_then(|&index| shard.ring[index].node.as_ref());
        node.is_some_and(|node| node.generation() == generation)
    }

    /// Adds a node, replacing any other node at its address.
    pub fn insert(&self, node: Arc<Node>) {
        self.shard(node.bytenr()).lock().insert(node);
    }

    /// Adds a node if that evicts no other node. Callers use this function for nodes of a scan, which are read once.
    pub fn insert_if_room(&self, node: Arc<Node>) {
        let mut shard = self.shard(node.bytenr()).lock();
        if shard.has_room_for(&node) {
            shard.insert(node);
        }
    }

    /// Notes that the node at this address is being replaced. Removes the node if its shard has no room for the
    /// replacement in addition.
    pub fn retire(&self, bytenr: Logical) {
        let mut shard = self.shard(bytenr).lock();
        if let Some(node) = shard.by_bytenr.get(&bytenr.0).and_then(|&index| shard.ring[index].node.as_ref())
            && !shard.has_room_for(node)
        {
            shard.remove(bytenr);
        }
    }

    /// Removes the node at this address.
    pub fn remove(&self, bytenr: Logical) {
        self.shard(bytenr).lock().remove(bytenr);
    }

    /// Removes all nodes.
    pub fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            *shard = CacheShard { budget_bytes: shard.budget_bytes, ..CacheShard::default() };
        }
    }

    /// Counters and current size.
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.nodes = stats.nodes.saturating_add(shard.by_bytenr.len() as u64);
            stats.bytes = stats.bytes.saturating_add(shard.bytes);
        }
        stats
    }

    fn shard(&self, bytenr: Logical) -> &Mutex<CacheShard> {
        // Blocks have at least 4 KiB, so the low 12 bits of addresses carry no information. Multiplicative hashing
        // spreads adjacent blocks over shards.
        let hash = (bytenr.0 >> 12).wrapping_mul(HASH_FACTOR) >> 32;
        &self.shards[(hash % NR_SHARDS) as usize]
    }
}

#[derive(Debug, Default)]
struct CacheShard {
    by_bytenr: HashMap<u64, usize, BuildHasherDefault<BytenrHasher>>,
    ring: Vec<CacheSlot>,
    vacant: Vec<usize>,
    hand: usize,
    bytes: u64,
    budget_bytes: u64,
}

#[derive(Debug, Default)]
struct CacheSlot {
    node: Option<Arc<Node>>,
    used: bool,
}

impl CacheShard {
    fn get(&mut self, bytenr: Logical, generation: Generation) -> Option<Arc<Node>> {
        let slot = &mut self.ring[*self.by_bytenr.get(&bytenr.0)?];
        let node = slot.node.as_ref().filter(|node| node.generation() == generation)?;
        slot.used = true;
        Some(Arc::clone(node))
    }

    /// Whether a node fits into the budget without evicting another node.
    fn has_room_for(&self, node: &Node) -> bool {
        self.bytes.saturating_add(node.raw().len() as u64) <= self.budget_bytes
    }

    fn insert(&mut self, node: Arc<Node>) {
        self.remove(node.bytenr());
        let len = node.raw().len() as u64;
        while !self.has_room_for(&node) && !self.by_bytenr.is_empty() {
            self.evict_one();
        }
        if len > self.budget_bytes {
            return;
        }
        let bytenr = node.bytenr().0;
        let slot = CacheSlot { node: Some(node), used: false };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.ring[index] = slot;
                index
            }
            None => {
                let index = self.ring.len();
                self.ring.push(slot);
                index
            }
        };
        self.by_bytenr.insert(bytenr, index);
        self.bytes = self.bytes.saturating_add(len);
    }

    fn remove(&mut self, bytenr: Logical) {
        if let Some(index) = self.by_bytenr.remove(&bytenr.0) {
            self.vacate(index);
        }
    }

    fn vacate(&mut self, index: usize) {
        if let Some(node) = self.ring[index].node.take() {
            self.bytes = self.bytes.checked_sub(node.raw().len() as u64).expect("I1: `bytes` includes the node");
            self.vacant.push(index);
        }
    }

    /// Evicts the first node not used since the hand's last round. Ends within two rounds, because the first round
    /// clears all marks.
    fn evict_one(&mut self) {
        loop {
            let index = self.hand;
            self.hand = index.checked_add(1).filter(|&next| next < self.ring.len()).unwrap_or(0);
            let slot = &mut self.ring[index];
            let Some(node) = &slot.node else { continue };
            if std::mem::take(&mut slot.used) {
                continue;
            }
            let bytenr = node.bytenr().0;
            self.by_bytenr.remove(&bytenr);
            self.vacate(index);
            return;
        }
    }
}

/// Hashes an address with one multiplication. A keyed hash is not needed: the budget bounds a shard's map, and
/// addresses come from our allocator or from checked blocks.
#[derive(Debug, Default)]
struct BytenrHasher(u64);

impl Hasher for BytenrHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(HASH_FACTOR);
        self.0 = mixed ^ (mixed >> 32);
    }
}

const NR_SHARDS: u64 = 16;
const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use ubtrfs_format::node::{LeafBuilder, NodeHeader};

    use super::*;

    fn leaf(bytenr: u64, generation: u64) -> Arc<Node> {
        let header =
            NodeHeader { bytenr: Logical(bytenr), generation: Generation(generation), ..NodeHeader::default() };
        Arc::new(Node::new(LeafBuilder::new(4096).finish(&header).into_boxed_slice()).unwrap())
    }

    #[test]
    fn a_stale_generation_is_a_miss() {
        let cache = NodeCache::new(1 << 20);
        cache.insert(leaf(65536, 7));
        assert!(cache.get(Logical(65536), Generation(6)).is_none());
        assert!(cache.get(Logical(65536), Generation(7)).is_some());
        cache.insert(leaf(65536, 8));
        assert!(cache.get(Logical(65536), Generation(7)).is_none());
        cache.remove(Logical(65536));
        assert!(cache.get(Logical(65536), Generation(8)).is_none());
        assert_eq!(cache.stats(), CacheStats { hits: 1, misses: 3, nodes: 0, bytes: 0 });
    }

    #[test]
    fn the_budget_holds_and_used_nodes_stay() {
        let cache = NodeCache::new(4096 * 16 * 8);
        let kept = |index: u64| index.is_multiple_of(100);
        for index in 0..800 {
            cache.insert(leaf(index << 12, 1));
            for used in (0..=index).filter(|index| kept(*index)) {
                cache.get(Logical(used << 12), Generation(1));
            }
            assert!(cache.stats().bytes <= 4096 * 16 * 8);
        }
        for used in (0..800).filter(|index| kept(*index)) {
            assert!(cache.get(Logical(used << 12), Generation(1)).is_some(), "{used} was in constant use");
        }
        cache.clear();
        assert_eq!(cache.stats().nodes, 0);
    }

    #[test]
    fn a_cache_without_budget_holds_nothing() {
        let cache = NodeCache::new(0);
        cache.insert(leaf(4096, 1));
        assert_eq!(cache.stats().nodes, 0);
    }
}
