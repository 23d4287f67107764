//! A store that keeps nodes in a map, and checks every rule of `NodeSink` during the calls.
//!
//! Rules: `leave` is called once per node, after its parent, with its original content, and never for a fresh node.
//! Content is emitted only to fresh addresses. The new root reaches no node for which `free_fresh` or `leave` was
//! called. When `apply` returns, the fresh addresses are exactly the addresses of the fresh nodes that the new root
//! reaches.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test file, and the example, uses a part")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::RwLock;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{HEADER_SIZE, LeafBuilder, NodeHeader};
use ubtrfs_format::{FormatError, Generation, Key, Logical, RootId};
use ubtrfs_tree::{
    ApplyStats, Batch, Cursor, Node, NodePtr, NodeSink, NodeSource, PartSink, RootPtr, apply, apply_in_parts,
};

pub const TREE: RootId = RootId(5);

#[derive(Debug, Default)]
struct Nodes {
    by_bytenr: HashMap<u64, Arc<Node>>,
    /// Addresses allocated in this transaction, whose content may still change.
    fresh: HashSet<u64>,
    left: HashSet<u64>,
    free: Vec<u64>,
    end: u64,
}

pub struct Store {
    nodesize: usize,
    nodes: RwLock<Nodes>,
    pub generation: u64,
    pub reads: std::sync::atomic::AtomicU64,
}

impl NodeSource for Store {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match self.nodes.read().by_bytenr.get(&ptr.bytenr.0) {
            Some(node) => Ok(Arc::clone(node)),
            None => Err(Error::from(FormatError::Short { what: "test store", need: self.nodesize, have: 0 })),
        }
    }

    fn nodesize(&self) -> usize {
        self.nodesize
    }
}

/// A changed item: key, old data, new data.
type Changed = (Key, Option<Vec<u8>>, Option<Vec<u8>>);

/// A callback for each node and its parent.
type Visit<'v> = &'v mut dyn FnMut(&Arc<Node>, Option<&Arc<Node>>);

pub struct Sink<'a> {
    store: &'a Store,
    /// Parent of each node before the batch.
    parents: HashMap<u64, u64>,
    /// Addresses that were freed.
    freed: HashSet<u64>,
    pub changes: Vec<Changed>,
    pub emitted: HashSet<u64>,
    pub nr_left_leaves: usize,
    pub record: bool,
}

impl NodeSink for Sink<'_> {
    fn is_fresh(&self, node: &Node) -> bool {
        let fresh = self.store.nodes.read().fresh.contains(&node.bytenr().0);
        assert!(!fresh || node.generation().0 == self.store.generation);
        fresh
    }

    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader {
        let generation = Generation(self.store.generation);
        NodeHeader { bytenr, level, generation, owner: TREE, ..NodeHeader::default() }
    }

    fn allocate(&mut self, _level: u8, near: Option<Logical>) -> Result<Logical> {
        assert!(near.is_some(), "a hint is always known");
        let mut nodes = self.store.nodes.write();
        let bytenr = nodes.free.pop().unwrap_or_else(|| {
            nodes.end += self.store.nodesize as u64;
            nodes.end
        });
        assert!(nodes.fresh.insert(bytenr), "{bytenr} was free");
        Ok(Logical(bytenr))
    }

    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()> {
        let mut nodes = self.store.nodes.write();
        let bytenr = node.bytenr().0;
        assert!(nodes.fresh.remove(&bytenr), "{bytenr} is freed and is not fresh");
        assert!(!self.emitted.contains(&bytenr), "{bytenr} is freed with new content");
        nodes.by_bytenr.remove(&bytenr);
        nodes.free.push(bytenr);
        self.freed.insert(bytenr);
        Ok(())
    }

    fn leave(&mut self, node: &Arc<Node>) -> Result<()> {
        let mut nodes = self.store.nodes.write();
        let bytenr = node.bytenr().0;
        assert!(!nodes.fresh.contains(&bytenr), "{bytenr} is fresh and is left");
        assert_eq!(nodes.by_bytenr[&bytenr].raw(), node.raw(), "original content");
        if let Some(parent) = self.parents.get(&bytenr) {
            let is_gone = nodes.left.contains(parent) || nodes.fresh.contains(parent) || self.freed.contains(parent);
            assert!(is_gone, "{bytenr} is left before its parent");
        }
        assert!(nodes.left.insert(bytenr), "{bytenr} is left twice");
        self.nr_left_leaves += usize::from(node.is_leaf());
        Ok(())
    }

    fn item_changed(&mut self, key: &Key, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<()> {
        if self.record {
            self.changes.push((*key, old.map(<[u8]>::to_vec), new.map(<[u8]>::to_vec)));
        }
        Ok(())
    }

    fn emit(&mut self, node: Arc<Node>) {
        let mut nodes = self.store.nodes.write();
        let bytenr = node.bytenr().0;
        assert!(nodes.fresh.contains(&bytenr), "{bytenr} is not fresh and gets content");
        assert!(self.emitted.insert(bytenr), "{bytenr} gets content twice in a batch");
        assert_eq!(node.raw().len(), self.store.nodesize);
        nodes.by_bytenr.insert(bytenr, node);
    }
}

impl Store {
    pub fn new(nodesize: usize) -> (Self, RootPtr) {
        let nodes = Nodes { end: 1 << 20, ..Nodes::default() };
        let reads = Default::default();
        let mut store = Self { nodesize, nodes: RwLock::new(nodes), generation: 1, reads };
        let mut sink = store.sink(None);
        let bytenr = sink.allocate(0, Some(Logical(0))).unwrap();
        let raw = LeafBuilder::new(nodesize).finish(&sink.header(bytenr, 0));
        sink.emit(Arc::new(Node::new(raw.into_boxed_slice()).unwrap()));
        let root = RootPtr { tree: TREE, bytenr, generation: Generation(1), level: 0 };
        store.commit();
        (store, root)
    }

    /// Ends the transaction: fresh nodes count as written, and the addresses of nodes for which `leave` was called
    /// become free.
    pub fn commit(&mut self) {
        self.generation += 1;
        let nodes = self.nodes.get_mut();
        nodes.fresh.clear();
        for bytenr in std::mem::take(&mut nodes.left) {
            nodes.by_bytenr.remove(&bytenr);
            nodes.free.push(bytenr);
        }
    }

    pub fn sink(&self, root: Option<&RootPtr>) -> Sink<'_> {
        let mut parents = HashMap::new();
        if let Some(root) = root {
            self.walk(root, &mut |node, parent| {
                if let Some(parent) = parent {
                    parents.insert(node.bytenr().0, parent.bytenr().0);
                }
            });
        }
        Sink {
            store: self,
            parents,
            freed: HashSet::new(),
            changes: Vec::new(),
            emitted: HashSet::new(),
            nr_left_leaves: 0,
            record: root.is_some(),
        }
    }

    pub fn walk(&self, root: &RootPtr, visit: Visit<'_>) {
        self.walk_below(&root.node_ptr(), None, visit);
    }

    fn walk_below(&self, ptr: &NodePtr, parent: Option<&Arc<Node>>, visit: Visit<'_>) {
        let node = self.read_node(ptr).unwrap();
        node.verify(ptr).unwrap();
        visit(&node, parent);
        if !node.is_leaf() {
            for slot in 0..node.nritems() {
                self.walk_below(&node.child_ptr(slot, TREE), Some(&node), visit);
            }
        }
    }

    /// Applies a batch, and checks each call to the sink, but neither the order of `leave` nor the resulting tree.
    pub fn apply_fast(&self, root: &RootPtr, batch: &Batch) -> (RootPtr, ApplyStats) {
        apply(self, &mut self.sink(None), root, batch).unwrap()
    }

    /// Applies a batch to the tree and the model, and compares them.
    pub fn apply_checked(
        &self,
        root: &RootPtr,
        model: &mut BTreeMap<Key, Vec<u8>>,
        batch: &Batch,
    ) -> (RootPtr, ApplyStats) {
        self.apply_checked_in_parts(root, model, batch, 0)
    }

    /// Applies a batch like [`Self::apply_checked`], with `nr_parts` further sinks.
    pub fn apply_checked_in_parts(
        &self,
        root: &RootPtr,
        model: &mut BTreeMap<Key, Vec<u8>>,
        batch: &Batch,
        nr_parts: usize,
    ) -> (RootPtr, ApplyStats) {
        let mut sink = self.sink(Some(root));
        let mut parts: Vec<Sink<'_>> = (0..nr_parts).map(|_| self.sink(Some(root))).collect();
        let mut before = HashSet::new();
        let mut touched = HashSet::new();
        self.walk(root, &mut |node, _| {
            before.insert(node.bytenr().0);
        });
        for (key, value) in batch {
            if value.is_some() || model.contains_key(key) {
                touched.insert(leaf_of(self, root, key));
            }
        }
        let mut expected = Vec::new();
        for (key, value) in batch {
            let old = match value {
                Some(value) => model.insert(*key, value.to_vec()),
                None => model.remove(key),
            };
            if value.is_some() || old.is_some() {
                expected.push((*key, old, value.as_ref().map(|value| value.to_vec())));
            }
        }
        let mut sinks: Vec<PartSink<'_>> = parts.iter_mut().map(|part| part as PartSink<'_>).collect();
        let (new_root, stats) = apply_in_parts(self, &mut sink, &mut sinks, root, batch).unwrap();
        for part in parts {
            sink.changes.extend(part.changes);
            sink.nr_left_leaves += part.nr_left_leaves;
            assert!(part.emitted.is_disjoint(&sink.emitted), "two parts emitted one address");
            sink.emitted.extend(part.emitted);
        }
        assert!(sink.changes == expected, "the sink gets each change once, in order");
        if expected.is_empty() {
            assert_eq!(new_root, *root);
            assert!(sink.emitted.is_empty() && sink.nr_left_leaves == 0, "a batch without effect touches no node");
        }
        let is_new = sink.emitted.contains(&new_root.bytenr.0);
        assert!(is_new || new_root == *root, "a block that may be shared became the root");
        // Each run of touched leaves absorbs few untouched leaves.
        let most = 5 * touched.len() + 4 * nr_parts;
        assert!(sink.nr_left_leaves <= most, "{} left of {} touched", sink.nr_left_leaves, touched.len());
        assert_eq!(stats.items_put as usize, batch.iter().filter(|(_, value)| value.is_some()).count());
        assert_eq!(stats.items_deleted as usize, expected.iter().filter(|(_, _, new)| new.is_none()).count());
        assert_eq!(stats.nodes_written as usize, sink.emitted.len());
        self.check(&new_root, model, &before, nr_parts > 1);
        (new_root, stats)
    }

    fn check(&self, root: &RootPtr, model: &BTreeMap<Key, Vec<u8>>, before: &HashSet<u64>, in_parts: bool) {
        let mut reached = HashSet::new();
        let mut items = model.iter();
        let nodes = self.nodes.read();
        self.walk(root, &mut |node, parent| {
            let bytenr = node.bytenr().0;
            assert!(reached.insert(bytenr), "{bytenr} is reached twice");
            assert!(!nodes.left.contains(&bytenr), "{bytenr} was left and is used");
            assert!(before.contains(&bytenr) || nodes.fresh.contains(&bytenr), "{bytenr} is neither old nor fresh");
            assert!(parent.is_none() || node.nritems() > 0, "{bytenr} is empty and not the root");
            let needs_two = parent.is_none() && !node.is_leaf() && !in_parts;
            assert!(!needs_two || node.nritems() > 1, "the root has a single child");
            check_geometry(node);
            if node.is_leaf() {
                for slot in 0..node.nritems() {
                    let (key, data) = items.next().expect("more items than the model has");
                    assert_eq!(node.key(slot), *key);
                    assert!(node.item(slot) == &data[..], "data of {key}");
                }
            }
        });
        assert!(items.next().is_none(), "fewer items than the model has");
        for bytenr in before.difference(&reached) {
            assert!(nodes.left.contains(bytenr) || !nodes.fresh.contains(bytenr), "fresh {bytenr} leaked");
            assert!(nodes.left.contains(bytenr) || !nodes.by_bytenr.contains_key(bytenr), "{bytenr} leaked");
        }
        for bytenr in &nodes.fresh {
            assert!(reached.contains(bytenr), "fresh {bytenr} leaked");
        }
    }

    /// Used bytes and capacity of all leaves.
    pub fn leaf_fill(&self, root: &RootPtr) -> (usize, usize) {
        let (mut used, mut capacity) = (0, 0);
        self.walk(root, &mut |node, _| {
            if node.is_leaf() {
                used += node.used_bytes();
                capacity += LeafBuilder::capacity(self.nodesize);
            }
        });
        (used, capacity)
    }

    /// Returns two numbers. The first counts the pairs of neighbouring leaves that could be merged: they have one
    /// parent, one of them is less than a quarter full, and the items of both fit into one leaf. The second number
    /// counts all leaves.
    pub fn nr_underfull(&self, root: &RootPtr) -> (usize, usize) {
        let (mut count, mut leaves) = (0, 0);
        let mut last: Option<(u64, usize)> = None;
        let capacity = LeafBuilder::capacity(self.nodesize);
        self.walk(root, &mut |node, parent| {
            if let (true, Some(parent)) = (node.is_leaf(), parent) {
                let (used, parent) = (node.used_bytes(), parent.bytenr().0);
                let small = |(_, other): (u64, usize)| used.min(other) < capacity / 4 && used + other <= capacity;
                count += usize::from(last.is_some_and(|last| last.0 == parent && small(last)));
                last = Some((parent, used));
                leaves += 1;
            }
        });
        (count, leaves)
    }

    pub fn cursor(&self, root: &RootPtr) -> Cursor<'_> {
        Cursor::new(self, *root)
    }
}

fn leaf_of(store: &Store, root: &RootPtr, key: &Key) -> u64 {
    let mut node = store.read_node(&root.node_ptr()).unwrap();
    while !node.is_leaf() {
        node = store.read_node(&node.child_ptr(node.child_slot(key), TREE)).unwrap();
    }
    node.bytenr().0
}

/// Checks item heads as the kernel's tree checker does: ascending keys, and contiguous data from the end of the block.
fn check_geometry(node: &Node) {
    let mut end = node.raw().len();
    for slot in 0..node.nritems() {
        assert!(slot == 0 || node.key(slot - 1) < node.key(slot), "keys ascend");
        if node.is_leaf() {
            let range = node.view().item_range(slot).unwrap();
            assert_eq!(range.end, end, "data is contiguous");
            end = range.start;
        }
    }
    assert!(end >= HEADER_SIZE);
}

/// A deterministic random generator (splitmix64): a seed replays a run.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
