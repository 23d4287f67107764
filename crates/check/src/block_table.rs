//! A table with a record of every tree block outside of the log, made from the block's extent item and from the walks
//! that reached the block.
//!
//! A record takes 32 bytes, so the table of a filesystem with a million nodes (16 GiB of metadata) takes 32 MB.
//!
//! Invariants:
//! - I1. Records are sorted by address after a call of [`BlockTable::load`]. Reached blocks without an extent item are
//!   kept separately, with one record for each block.

use std::collections::HashMap;

/// The extent item has the full backref flag.
pub(crate) const FULL: u8 = 1 << 0;
/// A walk reached the block.
pub(crate) const REACHED: u8 = 1 << 1;
/// A walk reached the block in the tree that the block's header names as its owner.
pub(crate) const BY_OWNER: u8 = 1 << 2;
/// No copy of the block is usable.
pub(crate) const LOST: u8 = 1 << 4;
/// The block belongs to a relocation tree, so its full backref flag is not checked.
pub(crate) const RELOC: u8 = 1 << 5;
/// The block has an extent item.
pub(crate) const RECORDED: u8 = 1 << 6;
/// The current round of walks (the first or the second) reached the block.
pub(crate) const REACHED_IN_ROUND: u8 = 1 << 7;

/// One tree block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TreeBlock {
    pub(crate) bytenr: u64,
    /// The generation in the extent item, or in the header if there is no extent item.
    pub(crate) generation: u64,
    /// The owner in the header.
    pub(crate) owner: u64,
    /// The number of the walk that reached the block last.
    pub(crate) last_walk: u32,
    pub(crate) level: u8,
    pub(crate) flags: u8,
}

/// All tree blocks.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    records: Vec<TreeBlock>,
    unrecorded: HashMap<u64, TreeBlock>,
}

impl BlockTable {
    /// Loads the tree blocks that the extent tree lists. For each listed block that a walk had already reached,
    /// returns the extent tree's record and the record from the walk.
    pub(crate) fn load(&mut self, mut records: Vec<TreeBlock>) -> Vec<(TreeBlock, TreeBlock)> {
        records.sort_by_key(|block| block.bytenr);
        records.dedup_by_key(|block| block.bytenr);
        let mut early = Vec::new();
        for record in &mut records {
            record.flags |= RECORDED;
            if let Some(seen) = self.unrecorded.remove(&record.bytenr) {
                record.flags |= seen.flags;
                record.owner = seen.owner;
                record.last_walk = seen.last_walk;
                early.push((*record, seen));
            }
        }
        self.records = records;
        early
    }

    pub(crate) fn get(&self, bytenr: u64) -> Option<&TreeBlock> {
        match self.records.binary_search_by_key(&bytenr, |block| block.bytenr) {
            Ok(at) => self.records.get(at),
            Err(_) => self.unrecorded.get(&bytenr),
        }
    }

    /// Returns the record of a block; makes the record if there is none.
    pub(crate) fn entry(&mut self, bytenr: u64) -> &mut TreeBlock {
        match self.records.binary_search_by_key(&bytenr, |block| block.bytenr) {
            Ok(at) => &mut self.records[at],
            Err(_) => self.unrecorded.entry(bytenr).or_insert(TreeBlock { bytenr, ..TreeBlock::default() }),
        }
    }

    /// The blocks with an extent item, in order.
    pub(crate) fn recorded(&self) -> &[TreeBlock] {
        &self.records
    }

    /// Takes the records of blocks with an extent item out of the table. Lookups do not work until
    /// [`BlockTable::put_recorded`].
    pub(crate) fn take_recorded(&mut self) -> Vec<TreeBlock> {
        std::mem::take(&mut self.records)
    }

    /// Puts the records back into the table.
    pub(crate) fn put_recorded(&mut self, records: Vec<TreeBlock>) {
        self.records = records;
    }

    /// Whether a range overlaps a block with an extent item.
    pub(crate) fn overlaps(&self, bytenr: u64, len_bytes: u64, nodesize: u64) -> bool {
        let at = self.records.partition_point(|block| block.bytenr < bytenr.saturating_add(len_bytes));
        let before = at.checked_sub(1).and_then(|at| self.records.get(at));
        before.is_some_and(|block| block.bytenr.saturating_add(nodesize) > bytenr)
    }

    /// Whether a walk reached this block although the block has no extent item.
    pub(crate) fn is_unrecorded(&self, bytenr: u64) -> bool {
        self.unrecorded.contains_key(&bytenr)
    }

    /// The reached blocks without an extent item.
    pub(crate) fn unrecorded(&self) -> impl Iterator<Item = &TreeBlock> {
        self.unrecorded.values()
    }

    /// Forgets all visits, so that the next visit of each block counts as a first visit.
    pub(crate) fn forget_visits(&mut self) {
        for block in self.records.iter_mut().chain(self.unrecorded.values_mut()) {
            block.flags &= !REACHED_IN_ROUND;
            block.last_walk = 0;
        }
    }
}
