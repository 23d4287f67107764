//! A place in a tree, and steps from there in key order.
//!
//! Invariants:
//! - I1. `path` is empty, or goes from the root (first) to a leaf (last), each with the slot taken; levels descend by
//!   one (the source verified each node against its parent's promise).
//! - I2. The slot in the leaf is an item's.
//! - I3. A step costs nothing but a slot while it stays in the leaf; the upper part of the path is kept.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::Key;

use crate::lookup::Item;
use crate::node::{Node, RootPtr};
use crate::storage::{NodeSource, read};

/// Walks one tree as it was when its root was taken.
pub struct Cursor<'s> {
    source: &'s dyn NodeSource,
    root: RootPtr,
    path: Vec<(Arc<Node>, usize)>,
}

impl<'s> Cursor<'s> {
    /// A cursor that stands nowhere yet.
    pub fn new(source: &'s dyn NodeSource, root: RootPtr) -> Self {
        Self { source, root, path: Vec::new() }
    }

    /// The tree that is walked.
    pub fn root(&self) -> RootPtr {
        self.root
    }

    /// Goes to the first item whose key is not below this one. At the end of the tree: `None`, and nowhere.
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

    /// Goes to the last item whose key is not above this one. Before the first item: `None`, and nowhere.
    pub fn seek_le(&mut self, key: &Key) -> Result<Option<Key>> {
        let slot = self.descend(key)?;
        match slot {
            Ok(_) => Ok(self.key()),
            Err(slot) => {
                let Some((leaf, at)) = self.path.last_mut() else { return Ok(None) };
                if slot > 0 {
                    *at = slot - 1;
                    return Ok(Some(leaf.key(slot - 1)));
                }
                self.prev_leaf()
            }
        }
    }

    /// The key where the cursor stands.
    pub fn key(&self) -> Option<Key> {
        self.path.last().map(|(leaf, slot)| leaf.key(*slot))
    }

    /// The data where the cursor stands.
    pub fn data(&self) -> Option<&[u8]> {
        self.path.last().map(|(leaf, slot)| leaf.item(*slot))
    }

    /// The item where the cursor stands.
    pub fn item(&self) -> Option<Item> {
        self.path.last().map(|(leaf, slot)| Item::new(Arc::clone(leaf), *slot))
    }

    /// The leaf and the slot where the cursor stands.
    pub fn place(&self) -> Option<(&Arc<Node>, usize)> {
        self.path.last().map(|(leaf, slot)| (leaf, *slot))
    }

    /// One item on. Past the last one: `None`, and nowhere.
    #[expect(clippy::should_implement_trait, reason = "a step can fail")]
    pub fn next(&mut self) -> Result<Option<Key>> {
        let Some((leaf, slot)) = self.path.last_mut() else { return Ok(None) };
        if *slot + 1 < leaf.nritems() {
            *slot += 1;
            return Ok(Some(leaf.key(*slot)));
        }
        self.next_leaf()
    }

    /// One item back. Before the first one: `None`, and nowhere.
    pub fn prev(&mut self) -> Result<Option<Key>> {
        let Some((leaf, slot)) = self.path.last_mut() else { return Ok(None) };
        if *slot > 0 {
            *slot -= 1;
            return Ok(Some(leaf.key(*slot)));
        }
        self.prev_leaf()
    }

    /// Goes to the first item of the next leaf. At the end of the tree: `None`, and nowhere.
    pub fn next_leaf(&mut self) -> Result<Option<Key>> {
        let up = |node: &Node, slot: usize| (slot + 1 < node.nritems()).then_some(slot + 1);
        self.step_leaf(up, |_| 0)
    }

    /// Goes to the last item of the leaf before. At the start of the tree: `None`, and nowhere.
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

    /// Goes down to the leaf under which a key lies and searches there. An empty tree: nowhere and `Err(0)`.
    fn descend(&mut self, key: &Key) -> Result<Result<usize, usize>> {
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
            // Only a root may be empty; the path must not end in a leaf without items (I2).
            self.path.clear();
            return Ok(Err(0));
        }
        let found = node.search(key);
        let slot = found.unwrap_or(0);
        self.path.push((node, slot));
        Ok(found)
    }
}

impl std::fmt::Debug for Cursor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cursor").field("root", &self.root).field("key", &self.key()).finish_non_exhaustive()
    }
}
