//! All block groups and what is free in them.
#![allow(clippy::todo, unused_variables)]

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Generation, Logical, Result};

use crate::{Extent, Reservation, Shortage, SpaceKind};

/// Fixed properties of the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceConfig {
    /// Bytes of a sector.
    pub sectorsize: u32,
    /// Bytes of a tree block.
    pub nodesize: u32,
    /// Data and metadata share block groups.
    pub mixed: bool,
}

/// A block group, as its item says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGroup {
    /// Where it starts.
    pub start: Logical,
    /// Its length.
    pub len_bytes: u64,
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Bytes of all extents that the extent tree knows in it.
    pub used: u64,
}

/// The space of one kind. `total = used + reserved + pinned + readonly + free`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceInfo {
    /// Length of all block groups.
    pub total: u64,
    /// Bytes of the extents that the extent tree knows.
    pub used: u64,
    /// Bytes freed in a transaction that is not committed yet.
    pub pinned: u64,
    /// Bytes allocated that the extent tree does not know yet.
    pub reserved: u64,
    /// Free bytes that cannot be allocated: read-only block groups and superblock mirrors.
    pub readonly: u64,
    /// Bytes promised to reservations, not allocated yet.
    pub may_use: u64,
}

/// All block groups and what is free in them.
#[derive(Debug)]
pub struct Space {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {}

impl Space {
    /// No block groups yet.
    pub fn new(config: SpaceConfig) -> Self {
        todo!()
    }

    /// Adds a block group. `free` is what the free space tree (or the absence of extents) says and may include
    /// `reserved`, the bytes of superblock mirrors, which are never allocated.
    pub fn insert_block_group(
        &self,
        group: BlockGroup,
        free: Vec<Range<u64>>,
        reserved: Vec<Range<u64>>,
    ) -> Result<()> {
        todo!()
    }

    /// Forgets a block group.
    pub fn remove_block_group(&self, start: Logical) -> Option<BlockGroup> {
        todo!()
    }

    /// Makes a block group take no more allocations, or lifts that.
    pub fn set_read_only(&self, start: Logical, read_only: bool) {
        todo!()
    }

    /// All block groups, sorted.
    pub fn block_groups(&self) -> Vec<BlockGroup> {
        todo!()
    }

    /// The block group that holds this address.
    pub fn block_group_at(&self, bytenr: Logical) -> Option<BlockGroup> {
        todo!()
    }

    /// Block groups in which nothing is used, allocated or pinned.
    pub fn empty_groups(&self) -> Vec<BlockGroup> {
        todo!()
    }

    /// Takes free space: `want` bytes in one piece if there is such a piece, else the largest piece of at least `min`.
    /// `None`: make a chunk and try again. Metadata and system: multiples of the node size, aligned to it.
    pub fn allocate(&self, kind: SpaceKind, want: u64, min: u64, hint: Option<Logical>) -> Option<Extent> {
        todo!()
    }

    /// Gives back an allocated extent (or a part of it) that no committed or pending extent item knows.
    pub fn release(&self, extent: Extent) {
        todo!()
    }

    /// The extent's item was inserted: it leaves the on-disk free space and counts as used.
    pub fn extent_added(&self, extent: Extent) -> Result<()> {
        todo!()
    }

    /// The extent's item was deleted: it joins the on-disk free space and stays pinned until [`Space::unpin`].
    pub fn extent_removed(&self, extent: Extent, generation: Generation) -> Result<()> {
        todo!()
    }

    /// What was removed in transactions up to `upto` may be allocated again. Returns it, coalesced.
    pub fn unpin(&self, upto: Generation) -> Vec<Extent> {
        todo!()
    }

    /// Like [`Space::unpin`], but the space stays unallocatable until [`Space::finish_unpin`]: for discarding it first.
    pub fn start_unpin(&self, upto: Generation) -> Vec<Extent> {
        todo!()
    }

    /// Second half of [`Space::start_unpin`].
    pub fn finish_unpin(&self, extents: &[Extent]) {
        todo!()
    }

    /// Starts of the block groups whose items on disk are not up to date; they count as clean from now on.
    pub fn take_dirty_groups(&self) -> Vec<Logical> {
        todo!()
    }

    /// What the free space tree must say about a block group.
    pub fn disk_free(&self, start: Logical) -> Vec<Range<u64>> {
        todo!()
    }

    /// Promises space, or says what is missing. Never blocks.
    pub fn reserve(&self, kind: SpaceKind, bytes: u64) -> Result<Reservation, Shortage> {
        todo!()
    }

    /// Like [`Space::reserve`] for metadata, and when that fails out of the global reserve: for what frees space.
    pub fn reserve_from_global(&self, bytes: u64) -> Result<Reservation, Shortage> {
        todo!()
    }

    /// Sets the size of the global reserve of metadata.
    pub fn set_global_reserve(&self, bytes: u64) {
        todo!()
    }

    /// Logical bytes that new chunks could still add.
    pub fn set_unallocated(&self, data_bytes: u64, metadata_bytes: u64) {
        todo!()
    }

    /// The space of one kind.
    pub fn info(&self, kind: SpaceKind) -> SpaceInfo {
        todo!()
    }

    /// Reservations alive: (tokens, bytes). Both are zero when nothing runs.
    pub fn live_reservations(&self) -> (u64, u64) {
        todo!()
    }
}
