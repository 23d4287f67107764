//! Compares block groups with chunks, and each group's used bytes with the extents in the group.

use ubtrfs_format::item::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_format::superblock::CompatRo;
use ubtrfs_format::{KeyType, RootId};

use crate::checker::Checker;
use crate::extent::ExtentSummary;
use crate::problem::{Code, Place};
use crate::walk::{Leaf, WalkEvent};

/// A block group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedGroup {
    pub(crate) start: u64,
    pub(crate) end: u64,
    used: u64,
    pub(crate) flags: u64,
    pub(crate) place: Place,
    /// Sum of the lengths of the extents found in the group.
    found: u64,
}

/// The block groups, in order of their addresses.
#[derive(Debug, Default)]
pub(crate) struct BlockGroups {
    pub(crate) list: Vec<CheckedGroup>,
    pub(crate) complete: bool,
}

impl BlockGroups {
    pub(crate) fn add(&mut self, leaf: &Leaf<'_>) {
        for (slot, key, data) in leaf.items().filter(|(_, key, _)| key.item_type == KeyType::BLOCK_GROUP_ITEM) {
            let (Ok(item), Some(end)) = (BlockGroupItem::decode(data), key.objectid.checked_add(key.offset)) else {
                continue;
            };
            let place = leaf.place(slot);
            let (start, used, flags) = (key.objectid, item.used, item.flags);
            self.list.push(CheckedGroup { start, end, used, flags, place, found: 0 });
        }
    }

    /// Returns the flags of the group that contains a range.
    pub(crate) fn flags_of(&self, start: u64, end: u64) -> Option<BlockGroupFlags> {
        let at = self.list.partition_point(|group| group.start <= start);
        let group = self.list.get(at.checked_sub(1)?).filter(|group| end <= group.end)?;
        Some(BlockGroupFlags::from_bits_retain(group.flags))
    }

    /// Returns the group that contains an address.
    fn at(&mut self, bytenr: u64) -> Option<&mut CheckedGroup> {
        let at = self.list.partition_point(|group| group.start <= bytenr);
        self.list.get_mut(at.checked_sub(1)?).filter(|group| bytenr < group.end)
    }
}

impl<'a> Checker<'a> {
    /// Reads the block group tree, on filesystems that have one.
    pub(crate) fn block_group_tree(&mut self) {
        if !self.has_ro(CompatRo::BLOCK_GROUP_TREE) {
            return;
        }
        let Some(root) = self.needed_root(RootId::BLOCK_GROUP_TREE) else {
            self.groups.complete = false;
            return;
        };
        self.groups.complete = self.walk_tree(root, &mut |checker, event| {
            if let WalkEvent::Leaf(leaf) = event {
                checker.groups.add(leaf);
            }
        });
    }

    /// Adds an extent's length to its block group. Checks that the extent lies in one group of the right kind (data,
    /// metadata or system), and that a tree block does not cross a boundary of 64 KiB.
    pub(crate) fn record_in_group(&mut self, extent: &ExtentSummary) {
        let end = extent.bytenr.saturating_add(extent.len_bytes);
        let what = if extent.is_data { "data extent" } else { "tree block" };
        let place = Place { bytenr: Some(extent.bytenr), ..Place::tree(RootId::EXTENT_TREE) };
        if !self.groups.complete {
            return;
        }
        let chunk_tree = extent.owner == Some(RootId::CHUNK_TREE.0);
        let Some(group) = self.groups.at(extent.bytenr) else {
            let text = format!("{what} of {} bytes is in no block group", extent.len_bytes);
            return self.sink.report(Code::ExtentGroup, place, text);
        };
        group.found = group.found.saturating_add(extent.len_bytes);
        let (group_end, flags) = (group.end, BlockGroupFlags::from_bits_retain(group.flags));
        if end > group_end {
            let text = format!("{what} of {} bytes ends behind its block group", extent.len_bytes);
            self.sink.report(Code::ExtentGroup, place, text);
        }
        let wanted = match extent.is_data {
            true => BlockGroupFlags::DATA,
            false if chunk_tree => BlockGroupFlags::SYSTEM,
            false => BlockGroupFlags::METADATA,
        };
        // A block of any tree may lie in a system group: mkfs.btrfs puts the first blocks of all trees into its
        // temporary system group.
        let fits = flags.intersects(wanted) || (!extent.is_data && flags.contains(BlockGroupFlags::SYSTEM));
        if !fits {
            self.sink.report(Code::ExtentGroup, place, format!("{what} is in a block group of another kind"));
        }
        let stripe_of = |at: u64| at >> 16;
        if !extent.is_data && stripe_of(extent.bytenr) != stripe_of(end.saturating_sub(1)) {
            self.sink.report(Code::ExtentGroup, place, "tree block crosses a boundary of 64 KiB");
        }
    }

    /// Compares block groups with chunks, the used bytes of each group with the extents in the group, and the
    /// superblock's used bytes with the sum over all groups.
    pub(crate) fn compare_groups(&mut self) {
        if !self.groups.complete {
            return;
        }
        self.for_each_extent(&mut |checker, extent| checker.record_in_group(extent));
        let groups = std::mem::take(&mut self.groups.list);
        for group in &groups {
            let len = group.end.saturating_sub(group.start);
            match self.array.chunk_at(ubtrfs_format::Logical(group.start)) {
                Some((start, chunk)) if start.0 == group.start && chunk.length == len => {
                    if chunk.flags.bits() != group.flags {
                        let (flags, chunk) = (group.flags, chunk.flags.bits());
                        let text = format!("block group {} has type {flags:#x}, its chunk {chunk:#x}", group.start);
                        self.sink.report(Code::BlockGroup, group.place, text);
                    }
                }
                _ => {
                    let text = format!("block group {} of {len} bytes has no chunk", group.start);
                    self.sink.report(Code::BlockGroup, group.place, text);
                }
            }
            if group.found != group.used && !self.extents_have_gaps() {
                let text = format!(
                    "block group {} has {} bytes used, its extents have {}",
                    group.start, group.used, group.found
                );
                self.sink.report(Code::BlockGroupUsed, group.place, text);
            }
        }
        for (start, _) in self.array.chunks() {
            if groups.binary_search_by_key(&start.0, |group| group.start).is_err() {
                let place = Place { bytenr: Some(start.0), ..Place::tree(RootId::CHUNK_TREE) };
                self.sink.report(Code::BlockGroup, place, format!("chunk {start} has no block group"));
            }
        }
        let used: u64 = groups.iter().fold(0, |sum, group| sum.saturating_add(group.used));
        if used != self.sb.bytes_used {
            let text = format!("the superblock has {} bytes used, the block groups {used}", self.sb.bytes_used);
            self.sink.report(Code::SuperUsed, Place::default(), text);
        }
        self.groups.list = groups;
    }
}
