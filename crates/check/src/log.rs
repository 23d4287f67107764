//! Checks the tree log: its trees are complete, its blocks and data overlap nothing else, and its data has checksums.
//!
//! Blocks of the log are not in the extent tree, and a replay adds the log's data extents to the extent tree. So logged
//! data is either an extent of the extent tree, or lies in free space of a data block group. The checksums of logged
//! data are in the log or, for extents of the extent tree, in the csum tree.
//!
//! Invariants:
//! - I1. A logged file extent takes at most 80 bytes: 48 in the list of extents, and 16 in each of two lists of ranges.
//!   A contiguous run of checksums takes 16 bytes.

use ubtrfs_format::item::{BlockGroupFlags, InodeFlags, InodeItem, RootItem};
use ubtrfs_format::{Key, KeyType, RootId};

use crate::block_table::RECORDED;
use crate::checker::Checker;
use crate::csum::{CsumRanges, csum_items};
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::walk::{Leaf, TreeKind, TreeRoot, WalkEvent};

/// The content of the log.
#[derive(Debug, Default)]
pub(crate) struct Logged {
    /// The logs of the subvolumes.
    pub(crate) roots: Vec<TreeRoot>,
    /// Ranges of logged data that must have checksums after a replay.
    pub(crate) written: CsumRanges,
    /// Whether the whole log could be read.
    pub(crate) complete: bool,
    /// All logged extents in order, including those that the extent tree has already.
    extents: Vec<LoggedExtent>,
    all: CsumRanges,
    csums: CsumRanges,
}

/// The data extent that a logged file extent refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LoggedExtent {
    start: u64,
    end: u64,
    leaf: u64,
    slot: u32,
    /// The range that needs checksums, or (0, 0) if the extent needs none.
    needs: (u64, u64),
}

impl LoggedExtent {
    fn place(&self) -> Place {
        Place::item(RootId::TREE_LOG, self.leaf, self.slot as usize)
    }
}

impl Logged {
    /// Whether logged data extents cover all of this range.
    pub(crate) fn is_data(&self, from: u64, to: u64) -> bool {
        self.all.covered(from, to) == to.saturating_sub(from)
    }
}

impl<'a> Checker<'a> {
    /// Reads the log root tree and the log of each subvolume.
    pub(crate) fn log_trees(&mut self) {
        self.log.complete = true;
        if self.sb.log_root.0 == 0 {
            return;
        }
        let root = self.super_root(RootId::TREE_LOG);
        let mut logs = Vec::new();
        self.log.complete = self.walk_tree(root, &mut |checker, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items().filter(|(_, key, _)| key.item_type == KeyType::ROOT_ITEM) {
                let Ok(item) = RootItem::decode_any(data) else { continue };
                if checker.roots.tree(RootId(key.offset)).is_none() {
                    let text = format!("log of subvolume {}, which does not exist", key.offset);
                    checker.sink.report(Code::Log, leaf.place(slot), text);
                }
                logs.push(TreeRoot {
                    id: RootId::TREE_LOG,
                    kind: TreeKind::Log,
                    bytenr: item.bytenr.0,
                    level: item.level,
                    generation: Some(item.generation),
                    drop: None,
                });
            }
        });
        let (mut extents, mut csums) = (Vec::new(), Vec::new());
        for log in &logs {
            let mut inode = None;
            let complete = self.walk_tree(*log, &mut |checker, event| match event {
                WalkEvent::Leaf(leaf) => {
                    checker.logged_items(leaf, &mut inode, &mut extents);
                    csums.extend(
                        csum_items(leaf)
                            .map(|(_, start, csums)| (start, start.saturating_add(checker.csummed_bytes(csums)))),
                    );
                }
                WalkEvent::Known(_) | WalkEvent::Gap => inode = None,
            });
            self.log.complete &= complete;
        }
        extents.sort_unstable();
        self.log.written = CsumRanges::of(extents.iter().map(|extent: &LoggedExtent| extent.needs).collect());
        self.log.all = CsumRanges::of(extents.iter().map(|extent| (extent.start, extent.end)).collect());
        self.log.csums = CsumRanges::of(csums);
        self.log.extents = extents;
        self.log.roots = logs;
        self.compare_log_blocks();
    }

    /// Checks that blocks of the log overlap no allocated extent, no logged data, and no other block of the log.
    fn compare_log_blocks(&mut self) {
        let mut blocks: Vec<u64> = self.log_blocks.iter().copied().collect();
        blocks.sort_unstable();
        let nodesize = self.nodesize as u64;
        for (at, &bytenr) in blocks.iter().enumerate() {
            let end = bytenr.saturating_add(nodesize);
            let is_tree_block = self.blocks.get(bytenr).is_some_and(|block| block.flags & RECORDED != 0);
            let place = Place::block(RootId::TREE_LOG, bytenr);
            if is_tree_block
                || self.blocks.overlaps(bytenr, nodesize, nodesize)
                || self.data.overlaps(bytenr, nodesize, self.sectorsize)
            {
                self.sink.report(Code::Log, place, "a log block overlaps an allocated extent");
            }
            if self.log.all.covered(bytenr, end) > 0 {
                self.sink.report(Code::Log, place, "a log block overlaps logged data");
            }
            if blocks.get(at.saturating_add(1)).is_some_and(|&next| next < end) {
                self.sink.report(Code::Log, place, "two log blocks overlap");
            }
        }
    }

    /// Collects the file extents in a leaf. `inode` holds the inode number of the last inode item, and whether that
    /// inode's data has checksums.
    fn logged_items(&mut self, leaf: &Leaf<'_>, inode: &mut Option<(u64, bool)>, extents: &mut Vec<LoggedExtent>) {
        for (slot, key, data) in leaf.items() {
            match key.item_type {
                KeyType::INODE_ITEM => {
                    let item = InodeItem::decode(data).ok();
                    *inode = item.map(|item| (key.objectid, !item.flags().contains(InodeFlags::NODATASUM)));
                }
                KeyType::EXTENT_DATA => {
                    let has_csums = inode.is_some_and(|(ino, has_csums)| ino == key.objectid && has_csums);
                    extents.extend(self.logged_extent(leaf, slot, key, data, has_csums));
                }
                _ => {}
            }
        }
    }

    fn logged_extent(
        &mut self,
        leaf: &Leaf<'_>,
        slot: usize,
        key: Key,
        data: &[u8],
        has_csums: bool,
    ) -> Option<LoggedExtent> {
        let (kind @ (1 | 2), compression) = (u8_at(data, 20)?, u8_at(data, 16)?) else { return None };
        let (start, disk_len) = (u64_at(data, 21)?, u64_at(data, 29)?);
        let (offset, len) = (u64_at(data, 37)?, u64_at(data, 45)?);
        if start == 0 {
            return None;
        }
        let end = start.saturating_add(disk_len);
        if !self.extents_have_gaps() && !self.data.contains(start, disk_len, self.sectorsize) {
            self.place_logged(leaf.place(slot), key.objectid, start, end);
        }
        let from = start.saturating_add(offset);
        let needs = match (kind == 1 && has_csums, compression) {
            (false, _) => (0, 0),
            (true, 0) => (from.min(end), from.saturating_add(len).min(end)),
            (true, _) => (start, end),
        };
        Some(LoggedExtent { start, end, leaf: leaf.bytenr, slot: u32::try_from(slot).unwrap_or(u32::MAX), needs })
    }

    /// Checks that a logged extent that is not in the extent tree lies in a data block group and overlaps no allocated
    /// extent.
    fn place_logged(&mut self, place: Place, ino: u64, start: u64, end: u64) {
        let len_bytes = end.saturating_sub(start);
        let what = format!("inode {ino}: logged data of {len_bytes} bytes at {start}");
        if self.data.overlaps(start, len_bytes, self.sectorsize)
            || self.blocks.overlaps(start, len_bytes, self.nodesize as u64)
        {
            return self.sink.report(Code::Log, place, format!("{what} overlaps another extent"));
        }
        let fits = self.groups.flags_of(start, end).is_some_and(|flags| flags.contains(BlockGroupFlags::DATA));
        if self.groups.complete && !fits {
            self.sink.report(Code::Log, place, format!("{what} is in no data block group"));
        }
    }

    /// Compares logged extents with each other, and with checksums.
    pub(crate) fn compare_log(&mut self) {
        let extents = std::mem::take(&mut self.log.extents);
        // The extent with the highest end so far. Extents are in order of their start.
        let mut last: Option<LoggedExtent> = None;
        for extent in &extents {
            let same = last.is_some_and(|last| (last.start, last.end) == (extent.start, extent.end));
            if last.is_some_and(|last| extent.start < last.end) && !same {
                let text = format!("logged data at {} overlaps another logged extent", extent.start);
                self.sink.report(Code::Log, extent.place(), text);
            }
            if last.is_none_or(|last| last.end <= extent.end) {
                last = Some(*extent);
            }
            if self.csums.complete && self.log.complete {
                self.compare_logged_csums(extent);
            }
        }
    }

    fn compare_logged_csums(&mut self, extent: &LoggedExtent) {
        let (from, to) = extent.needs;
        let mut at = from;
        while at < to {
            match self.log.csums.end_at(at).max(self.csums.end_at(at)) {
                Some(end) => at = end,
                None => {
                    let len_bytes = to.saturating_sub(from);
                    let text = format!("logged data of {len_bytes} bytes at {from}: no checksum of the sector at {at}");
                    return self.sink.report(Code::CsumMissing, extent.place(), text);
                }
            }
        }
    }
}
