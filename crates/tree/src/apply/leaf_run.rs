//! The run of leaves: a stream of items in key order, packed into leaves.
//!
//! Leaves are packed full. One full leaf is held back, because the last two leaves of a run may share their items:
//! - If the run grew by consecutive inserts, or at its end, the last leaf stays short: it receives the next inserts,
//!   and the leaves before it stay full.
//! - Otherwise (scattered inserts), if the last leaf is less than half as full as the one before, the two share their
//!   items evenly, so the next insert does not split a leaf again.
//! - A last leaf that is less than a quarter full absorbs a neighbour that fits as a whole.
//!
//! Invariants:
//! - I1. `full` holds items only if `current` does.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{ITEM_HEAD_SIZE, LeafBuilder, NodeHeader, NodeView};
use ubtrfs_format::{FormatError, Key};

use super::Applier;
use crate::node::{Node, RootPtr};

#[derive(Debug, Default)]
pub(super) struct LeafRun {
    full: Option<UnfinishedLeaf>,
    current: Option<UnfinishedLeaf>,
}

impl LeafRun {
    /// Whether the run's last leaf is less than a quarter full, and will get no items from the full leaf before it.
    pub(super) fn is_underfull(&self, nodesize: usize) -> bool {
        self.current.as_ref().is_some_and(|page| page.items.used_bytes() < LeafBuilder::capacity(nodesize) / 4)
            && !self.shares()
    }

    /// Whether the last two leaves should share their items evenly.
    fn shares(&self) -> bool {
        let (Some(full), Some(current)) = (&self.full, &self.current) else { return false };
        let inserted = full.nr_inserted.saturating_add(current.nr_inserted);
        let rows = full.nr_rows.saturating_add(current.nr_rows);
        let ascending = current.last_inserted || inserted >= rows.max(1).saturating_mul(ROW_MIN);
        !ascending && current.items.used_bytes() < full.items.used_bytes() / 2
    }
}

/// A leaf under construction.
#[derive(Debug)]
struct UnfinishedLeaf {
    items: LeafBuilder,
    /// Number of inserted items.
    nr_inserted: u32,
    /// Number of sequences of consecutive inserted items.
    nr_rows: u32,
    /// Whether the last item of the page was inserted, not replaced or copied.
    last_inserted: bool,
}

impl UnfinishedLeaf {
    fn new(nodesize: usize) -> Self {
        Self { items: LeafBuilder::new(nodesize), nr_inserted: 0, nr_rows: 0, last_inserted: false }
    }
}

impl Applier<'_> {
    /// Adds an item of the batch to the run.
    pub(super) fn put_item(&mut self, key: &Key, data: &[u8], inserted: bool) -> Result<()> {
        loop {
            let page = self.current_page();
            if page.items.push(key, data) {
                if inserted {
                    page.nr_inserted = page.nr_inserted.saturating_add(1);
                    page.nr_rows = page.nr_rows.saturating_add(u32::from(!page.last_inserted));
                }
                page.last_inserted = inserted;
                return Ok(());
            }
            self.turn_page()?;
        }
    }

    /// Adds items of an old leaf to the run.
    pub(super) fn copy_items(&mut self, leaf: &Node, mut slots: Range<usize>) -> Result<()> {
        while !slots.is_empty() {
            let page = self.current_page();
            let count = page.items.extend(&leaf.view(), slots.clone());
            slots.start = slots.start.saturating_add(count);
            if count > 0 {
                page.last_inserted = false;
            }
            if !slots.is_empty() {
                self.turn_page()?;
            }
        }
        Ok(())
    }

    /// Adds a whole leaf to the run, if the run's last leaf is underfull and has room for it.
    pub(super) fn pull_leaf(&mut self, leaf: &Arc<Node>) -> Result<bool> {
        let need = leaf.used_bytes();
        if !self.leaves.is_underfull(self.nodesize)
            || self.leaves.current.as_ref().is_none_or(|page| page.items.free_bytes() < need)
        {
            return Ok(false);
        }
        self.dissolve(leaf)?;
        self.copy_items(leaf, 0..leaf.nritems())?;
        Ok(true)
    }

    /// Ends the run by writing its last leaves.
    pub(super) fn end_leaves(&mut self) -> Result<()> {
        if self.leaves.shares() {
            self.share_last_two();
        } else if self.leaves.full.is_none() {
            self.pull_left_leaves()?;
        }
        for page in [self.leaves.full.take(), self.leaves.current.take()].into_iter().flatten() {
            self.write_leaf(page)?;
        }
        self.free_reusable(0)
    }

    /// Makes the root leaf of a tree that has lost all items.
    pub(super) fn empty_root(&mut self, old: &RootPtr) -> Result<RootPtr> {
        self.hints[0].get_or_insert(old.bytenr);
        let page = UnfinishedLeaf::new(self.nodesize);
        let bytenr = self.new_address(0)?;
        let header = self.sink.header(bytenr, 0);
        let root = self.emit(page.items.finish(&header))?;
        self.stats.leaves_written = self.stats.leaves_written.saturating_add(1);
        Ok(RootPtr { tree: self.tree, bytenr: root.bytenr, generation: root.generation, level: 0 })
    }

    fn current_page(&mut self) -> &mut UnfinishedLeaf {
        let nodesize = self.nodesize;
        self.leaves.current.get_or_insert_with(|| UnfinishedLeaf::new(nodesize))
    }

    /// Writes the page that was held back, and then holds back the current page, which is full.
    fn turn_page(&mut self) -> Result<()> {
        let Some(page) = self.leaves.current.take() else { return Ok(()) };
        if page.items.nritems() == 0 {
            let expected = "expected an item that fits into a leaf";
            let cause = FormatError::Value { what: "leaf", field: "item size", value: self.nodesize as u64, expected };
            return Err(Error::from(cause).in_tree(self.tree));
        }
        match self.leaves.full.replace(page) {
            Some(before) => self.write_leaf(before),
            None => Ok(()),
        }
    }

    /// Merges left neighbours into a run that is a single underfull leaf, as long as a whole neighbour fits.
    fn pull_left_leaves(&mut self) -> Result<()> {
        while self.leaves.is_underfull(self.nodesize) {
            let Some(left) = self.left_neighbour(0)? else { return Ok(()) };
            let Some(page) = self.leaves.current.take_if(|page| page.items.free_bytes() >= left.used_bytes()) else {
                return Ok(());
            };
            self.run_above(0).pop();
            self.dissolve(&left)?;
            self.copy_items(&left, 0..left.nritems())?;
            let raw = page.items.finish(&NodeHeader::default());
            let count = NodeView::new(&raw)?.nritems();
            let added = self.current_page().items.extend(&NodeView::new(&raw)?, 0..count);
            assert_eq!(added, count, "the two leaves fit into one");
        }
        Ok(())
    }

    /// Moves items from the full page to the current one until both hold about equally many bytes.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "bytes and items of the two pages, which a builder bounds to a leaf each"
    )]
    fn share_last_two(&mut self) {
        let (Some(full), Some(current)) = (self.leaves.full.take(), self.leaves.current.take()) else { return };
        let total = full.items.used_bytes() + current.items.used_bytes();
        let pages = [full.items.finish(&NodeHeader::default()), current.items.finish(&NodeHeader::default())];
        let views = pages.each_ref().map(|raw| NodeView::new(raw).expect("a builder makes whole blocks"));
        // Keep as few items on the left page as make up at least half of all bytes.
        let mut keep = views[0].nritems();
        let mut left_bytes = total - current_bytes(&views[1]);
        while keep > 1 {
            let item_bytes = head_and_data(&views[0], keep - 1);
            if (left_bytes - item_bytes) * 2 < total {
                break;
            }
            left_bytes -= item_bytes;
            keep -= 1;
        }
        let mut left = UnfinishedLeaf::new(self.nodesize);
        let mut right = UnfinishedLeaf::new(self.nodesize);
        let moved = left.items.extend(&views[0], 0..keep)
            + right.items.extend(&views[0], keep..views[0].nritems())
            + right.items.extend(&views[1], 0..views[1].nritems());
        // Both pages fit: the left page only lost items, and the right page holds at most half of all bytes.
        assert_eq!(moved, views[0].nritems() + views[1].nritems(), "shared items fit into two leaves");
        self.leaves.full = Some(left);
        self.leaves.current = Some(right);
    }

    fn write_leaf(&mut self, page: UnfinishedLeaf) -> Result<()> {
        self.stats.leaves_written = self.stats.leaves_written.saturating_add(1);
        self.stats.leaf_bytes_used = self.stats.leaf_bytes_used.saturating_add(page.items.used_bytes() as u64);
        let bytenr = self.new_address(0)?;
        let header = self.sink.header(bytenr, 0);
        let child = self.emit(page.items.finish(&header))?;
        self.run_above(0).push(child);
        self.cut_children(1)
    }
}

fn head_and_data(view: &NodeView<'_>, slot: usize) -> usize {
    ITEM_HEAD_SIZE.saturating_add(view.item(slot).map_or(0, <[u8]>::len))
}

fn current_bytes(view: &NodeView<'_>) -> usize {
    (0..view.nritems()).map(|slot| head_and_data(view, slot)).sum()
}

/// Inserts count as ascending if sequences of consecutive inserts have at least this average length.
const ROW_MIN: u32 = 4;
