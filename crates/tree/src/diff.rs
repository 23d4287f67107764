//! [`Diff`]: the items that differ between two trees, in key order. Nodes that both trees share are skipped whole, so
//! the cost grows with the difference.
//!
//! Two nodes are the same if address and generation are equal: nodes never change, and an address is not used again
//! while a tree reaches it. Nodes that both trees share have equal first keys and equal levels, so comparing the two
//! positions whenever their keys are equal finds every shared node.
//!
//! Invariants:
//! - I1. A path leads from the root (first) to the position (last): an item of a leaf, or a child (not entered yet) of
//!   an internal node. An empty path is past the end. No path ends in an empty node.
//! - I2. Positions only move forward in key order, also in crafted trees: a key that is not above the previous key is
//!   an error.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Corrupt, FormatError, Key, Logical, RootId};

use crate::lookup::Item;
use crate::node::{Node, NodePtr, RootPtr};
use crate::storage::{NodeSource, read};

/// A key whose items differ. At least one of the two items exists.
#[derive(Clone, Debug)]
pub struct ItemChange {
    /// The key.
    pub key: Key,
    /// The item of the old tree.
    pub old: Option<Item>,
    /// The item of the new tree.
    pub new: Option<Item>,
}

/// Walks the difference of two trees. The trees must not change during the walk.
pub struct Diff<'s> {
    source: &'s dyn NodeSource,
    old: TreePosition,
    new: TreePosition,
    /// Items of this objectid are reported even if they are equal.
    whole: Option<u64>,
    begun: bool,
}

/// A position in one of the trees (I1).
struct TreePosition {
    root: Option<RootPtr>,
    tree: RootId,
    path: Vec<(Arc<Node>, usize)>,
    /// A slot of the current level-1 node. Each leaf before this slot was passed, was announced
    /// ([`NodeSource::will_read`]), or is also in the other tree.
    announced: usize,
    last: Option<Key>,
}

impl<'s> Diff<'s> {
    /// Makes a walk through the difference from `old` to `new`. Without `old`, the walk reports all items of `new`.
    pub fn new(source: &'s dyn NodeSource, old: Option<RootPtr>, new: RootPtr) -> Self {
        Self { source, old: TreePosition::new(old), new: TreePosition::new(Some(new)), whole: None, begun: false }
    }

    /// From the current position on, reports all items of this objectid, also equal ones.
    pub fn report_all_of(&mut self, objectid: u64) {
        self.whole = Some(objectid);
    }

    /// Returns the next difference, or `None` at the end of the trees.
    ///
    /// # Errors
    ///
    /// Fails if a node is corrupt or cannot be read. After an error, the walk cannot be continued.
    #[expect(clippy::should_implement_trait, reason = "a step can fail")]
    pub fn next(&mut self) -> Result<Option<ItemChange>> {
        if !self.begun {
            self.begun = true;
            if !self.has_equal_roots() {
                self.old.begin(self.source)?;
                self.new.begin(self.source)?;
            }
        }
        loop {
            let (old, new) = (self.old.key(), self.new.key());
            let order = match (old, new) {
                (None, None) => return Ok(None),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(old), Some(new)) => old.cmp(&new),
            };
            match order {
                Ordering::Less if self.old.is_at_item() => return self.old_item().map(Some),
                Ordering::Greater if self.new.is_at_item() => return self.new_item().map(Some),
                Ordering::Less => self.enter_old()?,
                Ordering::Greater => self.enter_new()?,
                Ordering::Equal if self.is_shared() => {
                    self.old.step()?;
                    self.new.step()?;
                }
                Ordering::Equal => match (self.old.level(), self.new.level()) {
                    (0, 0) => {
                        if let Some(change) = self.both_items()? {
                            return Ok(Some(change));
                        }
                    }
                    (old, new) if old > new => self.enter_old()?,
                    (old, new) if old < new => self.enter_new()?,
                    _ => {
                        self.enter_old()?;
                        self.enter_new()?;
                    }
                },
            }
        }
    }

    /// Moves forward to about this key, to avoid reading the nodes before the key. The walk then reports every
    /// difference at or after the key, and may still report items before the key, also equal ones. Does nothing if the
    /// walk is already past the key.
    ///
    /// # Errors
    ///
    /// As for [`Diff::next`].
    pub fn skip_to(&mut self, key: &Key) -> Result<()> {
        self.old.skip_to(key)?;
        self.new.skip_to(key)
    }

    fn has_equal_roots(&self) -> bool {
        let place = |side: &TreePosition| side.root.map(|root| (root.bytenr, root.generation));
        place(&self.old) == place(&self.new)
    }

    /// Whether both positions are at the same node, and no equal item of the node must be reported.
    fn is_shared(&self) -> bool {
        let (Some(old), Some(new)) = (self.old.child(), self.new.child()) else { return false };
        let is_same = (old.bytenr, old.generation, old.level) == (new.bytenr, new.generation, new.level);
        is_same && self.whole.is_none_or(|whole| new.first_key.is_some_and(|key| key.objectid > whole))
    }

    fn enter_old(&mut self) -> Result<()> {
        self.old.enter(self.source, &self.new)
    }

    fn enter_new(&mut self) -> Result<()> {
        self.new.enter(self.source, &self.old)
    }

    fn old_item(&mut self) -> Result<ItemChange> {
        let item = self.old.take_item()?;
        Ok(ItemChange { key: item.key(), old: Some(item), new: None })
    }

    fn new_item(&mut self) -> Result<ItemChange> {
        let item = self.new.take_item()?;
        Ok(ItemChange { key: item.key(), old: None, new: Some(item) })
    }

    /// Compares the current items of both trees, which have equal keys, and moves past both.
    fn both_items(&mut self) -> Result<Option<ItemChange>> {
        let key = self.new.key();
        let is_wanted = key.is_some_and(|key| self.whole == Some(key.objectid));
        if !is_wanted && self.old.item_bytes() == self.new.item_bytes() {
            self.old.step()?;
            self.new.step()?;
            return Ok(None);
        }
        let (old, new) = (self.old.take_item()?, self.new.take_item()?);
        Ok(Some(ItemChange { key: new.key(), old: Some(old), new: Some(new) }))
    }
}

impl TreePosition {
    fn new(root: Option<RootPtr>) -> Self {
        let tree = root.map_or(RootId(0), |root| root.tree);
        Self { root, tree, path: Vec::new(), announced: 0, last: None }
    }

    fn begin(&mut self, source: &dyn NodeSource) -> Result<()> {
        let Some(root) = self.root else { return Ok(()) };
        let node = read(source, &root.node_ptr())?;
        if node.nritems() > 0 {
            self.push(node);
            self.note_key()?;
        }
        Ok(())
    }

    fn top(&self) -> Option<(&Arc<Node>, usize)> {
        self.path.last().map(|(node, slot)| (node, *slot))
    }

    fn key(&self) -> Option<Key> {
        self.top().map(|(node, slot)| node.key(slot))
    }

    fn level(&self) -> u8 {
        self.top().map_or(0, |(node, _)| node.level())
    }

    fn is_at_item(&self) -> bool {
        self.top().is_some_and(|(node, _)| node.is_leaf())
    }

    /// The child at the position; `None` if the position is an item or the end.
    fn child(&self) -> Option<NodePtr> {
        self.top().filter(|(node, _)| !node.is_leaf()).map(|(node, slot)| node.child_ptr(slot, self.tree))
    }

    fn item_bytes(&self) -> Option<&[u8]> {
        self.top().filter(|(node, _)| node.is_leaf()).map(|(node, slot)| node.item(slot))
    }

    /// Addresses of the leaves below the current level-1 node. Leaves that both trees have are not read, so the other
    /// tree's side does not announce these leaves.
    fn children(&self) -> HashSet<Logical> {
        let parent = self.path.iter().find(|(node, _)| node.level() == 1);
        parent.map_or_else(HashSet::new, |(node, _)| (0..node.nritems()).map(|slot| node.child(slot).0).collect())
    }

    fn push(&mut self, node: Arc<Node>) {
        if node.level() == 1 {
            self.announced = 0;
        }
        self.path.push((node, 0));
    }

    /// Announces the leaves that come next, except for leaves that the other tree has too.
    fn announce(&mut self, source: &dyn NodeSource, other: &Self) {
        let Some((parent, slot)) = self.top() else { return };
        if slot.saturating_add(AHEAD_LEAST) < self.announced || self.announced >= parent.nritems() {
            return;
        }
        let end = slot.saturating_add(AHEAD).min(parent.nritems());
        let shared = other.children();
        let ptrs = (self.announced.max(slot)..end).map(|slot| parent.child_ptr(slot, self.tree));
        source.will_read(&ptrs.filter(|ptr| !shared.contains(&ptr.bytenr)).collect::<Vec<_>>());
        self.announced = end;
    }

    /// Replaces the child at the position by the child's first item or child.
    fn enter(&mut self, source: &dyn NodeSource, other: &Self) -> Result<()> {
        let Some(ptr) = self.child() else { return Ok(()) };
        if ptr.level == 0 {
            self.announce(source, other);
        }
        // I1: `read` refuses empty nodes below an internal node.
        self.push(read(source, &ptr)?);
        Ok(())
    }

    fn take_item(&mut self) -> Result<Item> {
        let (leaf, slot) = self.top().expect("I1: the caller saw an item here");
        let item = Item::new(Arc::clone(leaf), slot);
        self.step()?;
        Ok(item)
    }

    /// Moves past the item or child at the position.
    fn step(&mut self) -> Result<()> {
        while let Some((node, slot)) = self.path.last_mut() {
            *slot = slot.saturating_add(1);
            if *slot < node.nritems() {
                return self.note_key();
            }
            self.path.pop();
        }
        Ok(())
    }

    /// Checks that the position moved forward (I2).
    fn note_key(&mut self) -> Result<()> {
        let Some(key) = self.key() else { return Ok(()) };
        if let Some(last) = self.last.filter(|last| *last >= key) {
            let expected = "expected keys that ascend through the tree";
            let cause = FormatError::Value { what: "tree block", field: "objectid", value: last.objectid, expected };
            let at = self.top().map_or(Logical(0), |(node, _)| node.bytenr());
            return Err(Error::Corrupt(Corrupt::new(cause).in_tree(self.tree).at(at)));
        }
        self.last = Some(key);
        Ok(())
    }

    fn skip_to(&mut self, key: &Key) -> Result<()> {
        for depth in 0..self.path.len() {
            let Some((node, slot)) = self.path.get_mut(depth) else { return Ok(()) };
            if node.is_leaf() {
                let at = node.search(key).unwrap_or_else(|at| at);
                if at > *slot {
                    *slot = at.saturating_sub(1);
                    return self.step();
                }
                return Ok(());
            }
            let at = node.child_slot(key);
            if at > *slot {
                *slot = at;
                self.path.truncate(depth.saturating_add(1));
                return self.note_key();
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Diff<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Diff").field("old", &self.old.key()).field("new", &self.new.key()).finish_non_exhaustive()
    }
}

/// Maximum number of leaves that are announced ahead of the position.
const AHEAD: usize = 64;
/// If at most this number of announced leaves lie ahead of the position, more leaves are announced.
const AHEAD_LEAST: usize = 32;
