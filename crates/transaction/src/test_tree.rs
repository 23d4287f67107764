//! A tree in memory for tests: items in a map, built into nodes on demand.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::node::{LeafBuilder, NodeBuilder, NodeHeader};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, Logical, RootId};
use ubtrfs_tree::{Batch, Node, NodePtr, NodeSource, RootPtr};

/// The items of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TestTree {
    pub(crate) tree: RootId,
    pub(crate) nodesize: usize,
    pub(crate) items: BTreeMap<Key, Vec<u8>>,
}

/// The items of a tree, built into nodes.
pub(crate) struct TestNodes {
    nodes: HashMap<Logical, Arc<Node>>,
    nodesize: usize,
    pub(crate) root: RootPtr,
}

impl TestTree {
    pub(crate) fn new(tree: RootId, nodesize: usize) -> Self {
        Self { tree, nodesize, items: BTreeMap::new() }
    }

    /// Applies a batch as `ubtrfs_tree::apply` would. The batch must be sorted, and each of its changes must have an
    /// effect.
    pub(crate) fn apply(&mut self, batch: &Batch) {
        assert!(batch.windows(2).all(|pair| pair[0].0 < pair[1].0), "keys of a batch ascend");
        for (key, value) in batch {
            let before = match value {
                Some(value) => self.items.insert(*key, value.to_vec()),
                None => self.items.remove(key),
            };
            assert_ne!(before.as_deref(), value.as_deref(), "{key} changes nothing");
        }
    }

    pub(crate) fn build(&self) -> TestNodes {
        let mut nodes = TestNodes {
            nodes: HashMap::new(),
            nodesize: self.nodesize,
            root: RootPtr { tree: self.tree, bytenr: Logical(0), generation: Generation(1), level: 0 },
        };
        let mut children: Vec<(Key, Logical)> = Vec::new();
        let mut items = self.items.iter().peekable();
        loop {
            let mut leaf = LeafBuilder::new(self.nodesize);
            let first = items.peek().map_or(Key::MIN, |(key, _)| **key);
            while items.next_if(|(key, data)| leaf.push(key, data)).is_some() {}
            children.push((first, nodes.add(self.tree, 0, |header| leaf.finish(header))));
            if items.peek().is_none() {
                break;
            }
        }
        let mut level = 0;
        while children.len() > 1 {
            level += 1;
            let mut parents = Vec::new();
            let mut rest = children.iter().peekable();
            while let Some((first, _)) = rest.peek() {
                let mut node = NodeBuilder::new(self.nodesize);
                while rest.next_if(|(key, bytenr)| node.push(key, *bytenr, Generation(1))).is_some() {}
                parents.push((*first, nodes.add(self.tree, level, |header| node.finish(header))));
            }
            children = parents;
        }
        nodes.root.level = level;
        nodes.root.bytenr = children[0].1;
        nodes
    }
}

impl TestNodes {
    fn add(&mut self, tree: RootId, level: u8, finish: impl FnOnce(&NodeHeader) -> Vec<u8>) -> Logical {
        let bytenr = Logical((self.nodes.len() as u64 + 1) * self.nodesize as u64);
        let header = NodeHeader { bytenr, generation: Generation(1), owner: tree, level, ..NodeHeader::default() };
        let node = Node::new(finish(&header).into_boxed_slice()).expect("valid");
        self.nodes.insert(bytenr, Arc::new(node));
        bytenr
    }
}

impl NodeSource for TestNodes {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        let missing = || {
            let expected = "expected a node";
            Corrupt::new(FormatError::Value { what: "test", field: "bytenr", value: ptr.bytenr.0, expected })
        };
        let node = self.nodes.get(&ptr.bytenr).cloned().ok_or_else(missing)?;
        node.verify(ptr)?;
        Ok(node)
    }

    fn nodesize(&self) -> usize {
        self.nodesize
    }
}
