//! The run of child pointers of a level, and the internal nodes made from the run.
//!
//! Nodes are packed full, like leaves (see `leaf_run`). If the last node would be less than half full, the last two
//! nodes of a run share their pointers evenly, unless the run grew at its end or grew a lot.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::node::NodeBuilder;
use ubtrfs_format::{Generation, Key, Logical, RootId};

use super::Applier;
use crate::node::{Node, NodePtr};

/// A child pointer of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChildRef {
    pub(super) key: Key,
    pub(super) bytenr: Logical,
    pub(super) generation: Generation,
    /// Whether this walk made the child node.
    pub(super) built: bool,
}

impl ChildRef {
    pub(super) fn untouched(ptr: &NodePtr) -> Self {
        let key = ptr.first_key.unwrap_or(Key::MIN);
        Self { key, bytenr: ptr.bytenr, generation: ptr.generation, built: false }
    }

    pub(super) fn node_ptr(&self, tree: RootId, level: u8) -> NodePtr {
        NodePtr { tree, bytenr: self.bytenr, generation: self.generation, level, first_key: Some(self.key) }
    }
}

#[derive(Debug, Default)]
pub(super) struct ChildRun {
    children: Vec<ChildRef>,
    /// Number of pointers in the old nodes that were taken apart into this run.
    nr_old: usize,
    /// Number of pointers in new nodes that this run has written.
    nr_written: usize,
}

impl ChildRun {
    pub(super) fn is_empty(&self) -> bool {
        self.children.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.children.len()
    }

    pub(super) fn push(&mut self, child: ChildRef) {
        self.children.push(child);
    }

    /// Appends another run.
    pub(super) fn append(&mut self, other: Self) {
        self.children.extend(other.children);
        self.nr_old = self.nr_old.saturating_add(other.nr_old);
        self.nr_written = self.nr_written.saturating_add(other.nr_written);
    }

    pub(super) fn pop(&mut self) -> Option<ChildRef> {
        self.children.pop()
    }

    pub(super) fn last_untouched(&self) -> Option<ChildRef> {
        self.children.last().filter(|child| !child.built).copied()
    }

    pub(super) fn add_old_children(&mut self, count: usize) {
        self.nr_old = self.nr_old.saturating_add(count);
    }

    /// Takes the only child left at the end of the walk.
    pub(super) fn take_only(&mut self) -> Option<ChildRef> {
        let only = self.children.pop();
        *self = Self::default();
        only
    }

    pub(super) fn is_underfull(&self, nodesize: usize) -> bool {
        !self.is_empty() && self.nr_written == 0 && self.len() < NodeBuilder::capacity(nodesize) / 4
    }

    /// Whether all nodes but the last stay full, because the run grew at its end or grew a lot.
    fn grew_ascending(&self, capacity: usize) -> bool {
        let grown = self.nr_written.saturating_add(self.len()).saturating_sub(self.nr_old);
        (grown > 0 && self.children.last().is_some_and(|child| child.built)) || grown > capacity / 8
    }
}

impl Applier<'_> {
    /// Adds all pointers of a node to the run of its level, if the run is not empty and stays within a node's capacity.
    pub(super) fn pull_children(&mut self, node: &Arc<Node>) -> Result<bool> {
        let capacity = NodeBuilder::capacity(self.nodesize);
        let run = self.run_below(node.level());
        if run.is_empty() || run.len().saturating_add(node.nritems()) > capacity {
            return Ok(false);
        }
        run.add_old_children(node.nritems());
        self.dissolve(node)?;
        let tree = self.tree;
        let run = self.run_below(node.level());
        for slot in 0..node.nritems() {
            run.push(ChildRef::untouched(&node.child_ptr(slot, tree)));
        }
        Ok(true)
    }

    /// Writes full nodes of this level while the run has pointers for more than two nodes.
    pub(super) fn cut_children(&mut self, level: u8) -> Result<()> {
        let capacity = NodeBuilder::capacity(self.nodesize);
        while level < self.top && self.run_below(level).len() > capacity.saturating_mul(2) {
            self.write_children(level, capacity)?;
        }
        Ok(())
    }

    /// Ends the run of this level by writing its last nodes.
    pub(super) fn end_children(&mut self, level: u8) -> Result<()> {
        let capacity = NodeBuilder::capacity(self.nodesize);
        if self.is_underfull(level) {
            self.pull_left_children(level)?;
        }
        let run = self.run_below(level);
        let total = run.len();
        if total > capacity {
            let shares = !run.grew_ascending(capacity) && total.saturating_sub(capacity) < capacity / 2;
            self.write_children(level, if shares { total.div_ceil(2) } else { capacity })?;
        }
        let rest = self.run_below(level).len();
        if rest > 0 {
            self.write_children(level, rest)?;
        }
        *self.run_below(level) = ChildRun::default();
        self.free_reusable(level)
    }

    /// Merges left neighbours into a run that is a single underfull node, as long as a whole neighbour fits.
    fn pull_left_children(&mut self, level: u8) -> Result<()> {
        let (capacity, tree) = (NodeBuilder::capacity(self.nodesize), self.tree);
        while self.is_underfull(level) {
            let Some(left) = self.left_neighbour(level)? else { return Ok(()) };
            if self.run_below(level).len().saturating_add(left.nritems()) > capacity {
                return Ok(());
            }
            self.run_above(level).pop();
            self.dissolve(&left)?;
            let run = self.run_below(level);
            run.add_old_children(left.nritems());
            run.children.splice(0..0, (0..left.nritems()).map(|slot| ChildRef::untouched(&left.child_ptr(slot, tree))));
        }
        Ok(())
    }

    /// Writes the first `count` pointers of a run as a node.
    fn write_children(&mut self, level: u8, count: usize) -> Result<()> {
        let bytenr = self.new_address(level)?;
        let header = self.sink.header(bytenr, level);
        let mut builder = NodeBuilder::new(self.nodesize);
        let run = self.run_below(level);
        run.nr_written = run.nr_written.saturating_add(count);
        for child in run.children.drain(..count) {
            assert!(builder.push(&child.key, child.bytenr, child.generation), "{count} pointers fit into a node");
        }
        let child = self.emit(builder.finish(&header))?;
        self.run_above(level).push(child);
        self.cut_children(level.saturating_add(1))
    }
}
