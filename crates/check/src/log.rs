//! The tree log: its trees are whole, and lie where nothing else is.
//!
//! Blocks of the log are in no extent tree, and a replay makes the log's data extents known. So the trees' structure and
//! their place are compared, and that logged data is either an extent that is known, or lies on none.

use ubtrfs_format::item::RootItem;
use ubtrfs_format::{KeyType, RootId};

use crate::block_table::RECORDED;
use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::walk::{Event, Kind, Leaf, TreeRoot};

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
            self.walk_tree(log, &mut |checker, event| {
                if let Event::Leaf(leaf) = event {
                    checker.logged_extents(leaf);
                }
            });
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

    fn logged_extents(&mut self, leaf: &Leaf<'_>) {
        if self.extents_have_gaps() {
            return;
        }
        for (slot, key, data) in leaf.items().filter(|(_, key, _)| key.item_type == KeyType::EXTENT_DATA) {
            let (Some(1 | 2), Some(bytenr), Some(len_bytes)) = (u8_at(data, 20), u64_at(data, 21), u64_at(data, 29))
            else {
                continue;
            };
            let is_known = || self.data.contains(bytenr, len_bytes, self.sectorsize);
            let is_taken = self.data.overlaps(bytenr, len_bytes, self.sectorsize)
                || self.blocks.overlaps(bytenr, len_bytes, self.nodesize as u64);
            if bytenr != 0 && is_taken && !is_known() {
                let text = format!(
                    "inode {}: logged data of {len_bytes} bytes at {bytenr} lies on another extent",
                    key.objectid
                );
                self.sink.report(Code::Log, leaf.place(slot), text);
            }
        }
    }
}
