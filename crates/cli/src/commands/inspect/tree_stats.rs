//! Walks the trees of a filesystem, and measures how full their leaves are.

use std::path::Path;

use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, NodeView};
use ubtrfs_format::{KeyType, RootId};

use super::blocks::{Blocks, Order};
use super::dump_tree;
use crate::commands::committed::Committed;
use crate::commands::offline::with_members;

/// Statistics of one tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct TreeStats {
    pub(crate) id: RootId,
    pub(crate) title: &'static str,
    pub(crate) levels: u64,
    pub(crate) nodes: u64,
    pub(crate) leaves: u64,
    pub(crate) items: u64,
    /// Bytes that items and their headers use in all leaves.
    pub(crate) used_bytes: u64,
    /// The number of bytes in all leaves that items and their headers could use: the size of the leaves without the
    /// block headers.
    pub(crate) leaf_bytes: u64,
    /// Leaves that are less than half full.
    pub(crate) sparse_leaves: u64,
    /// Leaves with directory index items.
    pub(crate) dir_index_leaves: u64,
    /// Directory index items in all leaves.
    pub(crate) dir_index_items: u64,
    /// Blocks that are unreadable or invalid. The other fields do not include unreadable or invalid blocks.
    pub(crate) damaged: u64,
}

impl TreeStats {
    /// How full the leaves are, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        if self.leaf_bytes == 0 { 0.0 } else { self.used_bytes as f64 / self.leaf_bytes as f64 }
    }

    fn add(&mut self, raw: &[u8]) {
        let Ok(view) = NodeView::new(raw) else { return };
        self.nodes += 1;
        self.levels = self.levels.max(u64::from(view.level()) + 1);
        if !view.is_leaf() {
            return;
        }
        let used: usize =
            (0..view.nritems()).map(|slot| ITEM_HEAD_SIZE + view.item_range(slot).map_or(0, |range| range.len())).sum();
        let room = raw.len() - HEADER_SIZE;
        let is_index = |slot: &usize| view.key(*slot).is_some_and(|key| key.item_type == KeyType::DIR_INDEX);
        let index_items = (0..view.nritems()).filter(is_index).count() as u64;
        self.leaves += 1;
        self.items += view.nritems() as u64;
        self.used_bytes += used as u64;
        self.leaf_bytes += room as u64;
        self.sparse_leaves += u64::from(used < room / 2);
        self.dir_index_leaves += u64::from(index_items > 0);
        self.dir_index_items += index_items;
    }
}

/// Walks all trees of an image or device.
pub(crate) fn tree_stats(device: &Path) -> anyhow::Result<Vec<TreeStats>> {
    Committed::open(&with_members(&[device.to_owned()])?)?.read_consistently(|devices| {
        let found = walk(&Blocks::open(devices)?);
        let is_damaged = found.iter().any(|tree| tree.damaged > 0);
        Ok((found, is_damaged))
    })
}

fn walk(blocks: &Blocks) -> Vec<TreeStats> {
    let mut found = Vec::new();
    for (id, title, root) in dump_tree::roots(blocks) {
        let mut stats = TreeStats { id, title, ..TreeStats::default() };
        let walked: Result<(), std::convert::Infallible> = blocks.walk(root, Order::BreadthFirst, &mut |_, block| {
            match &block.damage {
                Some(_) => stats.damaged += 1,
                None => stats.add(&block.raw),
            }
            Ok(())
        });
        let Ok(()) = walked;
        found.push(stats);
    }
    found
}
