//! Lookups: an item by its key, and the leaf that a key belongs to.

use std::ops::Deref;
use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::Key;

use crate::node::{Node, RootPtr};
use crate::storage::{NodeSource, read};

/// An item of a leaf. Keeps the leaf in memory.
#[derive(Clone, Debug)]
pub struct Item {
    leaf: Arc<Node>,
    slot: usize,
}

impl Item {
    /// The item in this slot of a leaf. Panics if the slot does not exist.
    pub fn new(leaf: Arc<Node>, slot: usize) -> Self {
        assert!(leaf.is_leaf() && slot < leaf.nritems(), "slot {slot} of {leaf:?}");
        Self { leaf, slot }
    }

    /// The item's key.
    pub fn key(&self) -> Key {
        self.leaf.key(self.slot)
    }

    /// The leaf that holds the item.
    pub fn leaf(&self) -> &Arc<Node> {
        &self.leaf
    }

    /// The item's slot in the leaf.
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

/// A leaf and the range of keys that belong to it.
#[derive(Clone, Debug)]
pub struct LeafPlace {
    /// The leaf.
    pub leaf: Arc<Node>,
    /// The lowest key that belongs to the leaf.
    pub low: Key,
    /// The lowest key that belongs to the next leaf; `None` for the last leaf.
    pub high: Option<Key>,
}

impl LeafPlace {
    /// Whether the key belongs to this leaf.
    pub fn covers(&self, key: &Key) -> bool {
        self.low <= *key && self.high.is_none_or(|high| *key < high)
    }
}

/// Finds the leaf that a key belongs to. Before reading the leaf, calls `found` with the leaf's parent and slot.
pub fn find_leaf(
    source: &dyn NodeSource,
    root: &RootPtr,
    key: &Key,
    found: &mut dyn FnMut(&Node, usize),
) -> Result<LeafPlace> {
    let (mut low, mut high) = (Key::MIN, None);
    let mut node = read(source, &root.node_ptr())?;
    while !node.is_leaf() {
        let slot = node.child_slot(key);
        if slot > 0 {
            low = node.key(slot);
        }
        let next_slot = slot.saturating_add(1);
        if next_slot < node.nritems() {
            let next = node.key(next_slot);
            high = Some(high.map_or(next, |high: Key| high.min(next)));
        }
        if node.level() == 1 {
            found(&node, slot);
        }
        node = read(source, &node.child_ptr(slot, root.tree))?;
    }
    Ok(LeafPlace { leaf: node, low, high })
}

/// Finds the item with exactly this key.
pub fn get(source: &dyn NodeSource, root: &RootPtr, key: &Key) -> Result<Option<Item>> {
    let mut node = read(source, &root.node_ptr())?;
    while !node.is_leaf() {
        let slot = match node.search(key) {
            Ok(slot) => slot,
            Err(slot) => match slot.checked_sub(1) {
                Some(slot) => slot,
                None => return Ok(None),
            },
        };
        node = read(source, &node.child_ptr(slot, root.tree))?;
    }
    Ok(node.search(key).ok().map(|slot| Item::new(node, slot)))
}
