//! The tree log: its trees are whole, and lie where nothing else is.
//!
//! Blocks of the log are in no extent tree; a replay makes the log's data extents known. So only the trees' structure
//! and their place are compared.

use ubtrfs_format::item::RootItem;
use ubtrfs_format::{KeyType, RootId};

use crate::block_table::RECORDED;
use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::walk::{Event, Kind, TreeRoot};

impl<'a> Checker<'a> {
    /// Reads the log root tree and the log of each subvolume.
    pub(crate) fn log_trees(&mut self) {
        if self.sb.log_root.0 == 0 {
            return;
        }
        let root = self.super_root(RootId::TREE_LOG);
        let mut logs = Vec::new();
        self.walk_tree(root, &mut |checker, event| {
            let Event::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items().filter(|(_, key, _)| key.item_type == KeyType::ROOT_ITEM) {
                let Ok(item) = RootItem::decode_any(data) else { continue };
                if checker.roots.tree(RootId(key.offset)).is_none() {
                    let text = format!("a log of subvolume {}, which does not exist", key.offset);
                    checker.sink.report(Code::Log, leaf.place(slot), text);
                }
                logs.push(TreeRoot {
                    id: RootId::TREE_LOG,
                    kind: Kind::Log,
                    bytenr: item.bytenr.0,
                    level: item.level,
                    generation: Some(item.generation),
                    drop: None,
                });
            }
        });
        for log in logs {
            self.walk_tree(log, &mut |_, _| {});
        }
        let mut blocks: Vec<u64> = self.log_blocks.iter().copied().collect();
        blocks.sort_unstable();
        for bytenr in blocks {
            let is_tree_block = self.blocks.get(bytenr).is_some_and(|block| block.flags & RECORDED != 0);
            if is_tree_block || self.data.overlaps(bytenr, self.nodesize as u64, self.sectorsize) {
                let place = Place::block(RootId::TREE_LOG, bytenr);
                self.sink.report(Code::Log, place, "a log block lies on an allocated extent");
            }
        }
    }
}
