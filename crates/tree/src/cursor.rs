//! A position in a tree, with steps in key order.
//!
//! Invariants:
//! - I1. `path` is empty (no position), or leads from the root (first) to a leaf (last), each node with the chosen
//!   slot. Levels descend by one, because each node was verified against the pointer in its parent.
//! - I2. The chosen slot of the leaf has an item.
//! - I3. A step within a leaf only changes the slot. A step to another leaf keeps the common part of the path.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::Key;

use crate::lookup::Item;
use crate::node::{Node, RootPtr};
use crate::storage::{NodeSource, read};

/// Walks the tree below a root. Later changes make a new root and do not affect this walk.
pub struct Cursor<'s> {
    source: &'s dyn NodeSource,
    root: RootPtr,
    path: Vec<(Arc<Node>, usize)>,
}

impl<'s> Cursor<'s> {
    /// Makes a cursor without a position.
    pub fn new(source: &'s dyn NodeSource, root: RootPtr) -> Self {
        Self { source, root, path: Vec::new() }
    }

    /// The root of the walked tree.
    pub fn root(&self) -> RootPtr {
        self.root
    }

    /// Goes to the first item with a key >= `key`. If there is no such item, returns `None` and loses the position.
    pub fn seek_ge(&mut self, key: &Key) -> Result<Option<Key>> {
        let slot = self.descend(key)?;
        match slot {
            Ok(_) => Ok(self.key()),
            Err(slot) => {
                let Some((leaf, at)) = self.path.last_mut() else { return Ok(None) };
                if slot < leaf.nritems() {
                    *at = slot;
                    return Ok(Some(leaf.key(slot)));
                }
                self.next_leaf()
            }
        }
    }

    /// Goes to the last item with a key <= `key`. If there is no such item, returns `None` and loses the position.
    pub fn seek_le(&mut self, key: &Key) -> Result<Option<Key>> {
        let slot = self.descend(key)?;
        match slot {
            Ok(_) => Ok(self.key()),
            Err(slot) => {
                let Some((leaf, at)) = self.path.last_mut() else { return Ok(None) };
                if let Some(before) = slot.checked_sub(1) {
                    *at = before;
                    return Ok(Some(leaf.key(before)));
                }
                self.prev_leaf()
            }
        }
    }

    /// The key of the current item.
    pub fn key(&self) -> Option<Key> {
        self.path.last().map(|(leaf, slot)| leaf.key(*slot))
    }

    /// The data of the current item.
    pub fn data(&self) -> Option<&[u8]> {
        self.path.last().map(|(leaf, slot)| leaf.item(*slot))
    }

    /// The current item.
    pub fn item(&self) -> Option<Item> {
        self.path.last().map(|(leaf, slot)| Item::new(Arc::clone(leaf), *slot))
    }

    /// The leaf and slot of the current item.
    pub fn place(&self) -> Option<(&Arc<Node>, usize)> {
        self.path.last().map(|(leaf, slot)| (leaf, *slot))
    }

    /// The parent of the current leaf, and the leaf's slot in it. `None` without a position, or if the leaf is the root.
    pub fn parent(&self) -> Option<(&Arc<Node>, usize)> {
        let (_, above) = self.path.split_last()?;
        above.last().map(|(node, slot)| (node, *slot))
    }

    /// Goes to the next item. After the last item, returns `None` and loses the position.
    #[expect(clippy::should_implement_trait, reason = "a step can fail")]
    pub fn next(&mut self) -> Result<Option<Key>> {
        let Some((leaf, slot)) = self.path.last_mut() else { return Ok(None) };
        if let Some(next) = following(leaf, *slot) {
            *slot = next;
            return Ok(Some(leaf.key(next)));
        }
        self.next_leaf()
    }

    /// Goes to the previous item. Before the first item, returns `None` and loses the position.
    pub fn prev(&mut self) -> Result<Option<Key>> {
        let Some((leaf, slot)) = self.path.last_mut() else { return Ok(None) };
        if let Some(before) = slot.checked_sub(1) {
            *slot = before;
            return Ok(Some(leaf.key(before)));
        }
        self.prev_leaf()
    }

    /// Goes to the first item of the next leaf. After the last leaf, returns `None` and loses the position.
    pub fn next_leaf(&mut self) -> Result<Option<Key>> {
        self.step_leaf(following, |_| 0)
    }

    /// Goes to the last item of the previous leaf. Before the first leaf, returns `None` and loses the position.
    pub fn prev_leaf(&mut self) -> Result<Option<Key>> {
        self.step_leaf(|_, slot| slot.checked_sub(1), |node| node.nritems().saturating_sub(1))
    }

    fn step_leaf(
        &mut self,
        step: impl Fn(&Node, usize) -> Option<usize>,
        enter: impl Fn(&Node) -> usize,
    ) -> Result<Option<Key>> {
        self.path.pop();
        while let Some((node, slot)) = self.path.last_mut() {
            if let Some(next) = step(node, *slot) {
                *slot = next;
                break;
            }
            self.path.pop();
        }
        while let Some((node, slot)) = self.path.last() {
            if node.is_leaf() {
                return Ok(self.key());
            }
            match read(self.source, &node.child_ptr(*slot, self.root.tree)) {
                Ok(child) => {
                    let slot = enter(&child);
                    self.path.push((child, slot));
                }
                Err(error) => {
                    self.path.clear();
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Goes to the leaf that a key belongs to, and searches the leaf. Stays in the current leaf if the key lies between
    /// two of its items. In an empty tree, returns `Err(0)` without a position.
    fn descend(&mut self, key: &Key) -> Result<Result<usize, usize>> {
        if let Some((leaf, slot)) = self.path.last_mut().filter(|(leaf, _)| spans(leaf, key)) {
            let found = leaf.search(key);
            *slot = found.unwrap_or(0);
            return Ok(found);
        }
        self.path.clear();
        let mut node = read(self.source, &self.root.node_ptr())?;
        while !node.is_leaf() {
            let slot = node.child_slot(key);
            let child = match read(self.source, &node.child_ptr(slot, self.root.tree)) {
                Ok(child) => child,
                Err(error) => {
                    self.path.clear();
                    return Err(error);
                }
            };
            self.path.push((node, slot));
            node = child;
        }
        if node.nritems() == 0 {
            // Only a root may be empty. The path must not end in a leaf without items (I2).
            self.path.clear();
            return Ok(Err(0));
        }
        let found = node.search(key);
        let slot = found.unwrap_or(0);
        self.path.push((node, slot));
        Ok(found)
    }
}

/// Whether a leaf has an item with a key <= `key`, and one with a key >= `key`.
fn spans(leaf: &Node, key: &Key) -> bool {
    leaf.nritems().checked_sub(1).is_some_and(|last| leaf.key(0) <= *key && *key <= leaf.key(last))
}

/// The slot after `slot`, if the node has that slot.
fn following(node: &Node, slot: usize) -> Option<usize> {
    slot.checked_add(1).filter(|&next| next < node.nritems())
}

impl std::fmt::Debug for Cursor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cursor").field("root", &self.root).field("key", &self.key()).finish_non_exhaustive()
    }
}
