//! One item by its key.

use std::ops::Deref;
use std::sync::Arc;

use ubtrfs_format::{Key, Result};

use crate::node::{Node, RootPtr};
use crate::storage::{NodeSource, read};

/// An item of a leaf; keeps the leaf in memory.
#[derive(Clone, Debug)]
pub struct Item {
    leaf: Arc<Node>,
    slot: usize,
}

impl Item {
    /// The item in this slot of a leaf. Panics where there is none.
    pub fn new(leaf: Arc<Node>, slot: usize) -> Self {
        assert!(leaf.is_leaf() && slot < leaf.nritems(), "slot {slot} of {leaf:?}");
        Self { leaf, slot }
    }

    /// Its key.
    pub fn key(&self) -> Key {
        self.leaf.key(self.slot)
    }

    /// The leaf that holds it.
    pub fn leaf(&self) -> &Arc<Node> {
        &self.leaf
    }

    /// Its slot in the leaf.
    pub fn slot(&self) -> usize {
        self.slot
    }
}

impl Deref for Item {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.leaf.item(self.slot)
    }
}

impl AsRef<[u8]> for Item {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// The item with exactly this key.
pub fn get(source: &dyn NodeSource, root: &RootPtr, key: &Key) -> Result<Option<Item>> {
    let mut node = read(source, &root.node_ptr())?;
    while !node.is_leaf() {
        let slot = match node.search(key) {
            Ok(slot) => slot,
            Err(0) => return Ok(None),
            Err(slot) => slot - 1,
        };
        node = read(source, &node.child_ptr(slot, root.tree))?;
    }
    Ok(node.search(key).ok().map(|slot| Item::new(node, slot)))
}
