//! The free space tree: the free ranges of every block group, as extents or as bitmaps.
#![allow(clippy::todo, dead_code, unused_variables)]

use std::ops::Range;

use ubtrfs_format::{Logical, Result};
use ubtrfs_tree::{Batch, NodeSource, RootPtr};

/// The free ranges of a block group, sorted and coalesced.
pub(crate) fn load_free_space(
    source: &dyn NodeSource,
    root: &RootPtr,
    start: Logical,
    len_bytes: u64,
    sectorsize: u32,
) -> Result<Vec<Range<u64>>> {
    todo!()
}

/// The free ranges of a block group, from the extents in it.
pub(crate) fn free_space_from_extents(
    source: &dyn NodeSource,
    extent_root: &RootPtr,
    start: Logical,
    len_bytes: u64,
    nodesize: u32,
) -> Result<Vec<Range<u64>>> {
    todo!()
}

/// What makes a block group's items say `free` (sorted, coalesced).
pub(crate) fn free_space_changes(
    source: &dyn NodeSource,
    root: &RootPtr,
    start: Logical,
    len_bytes: u64,
    free: &[Range<u64>],
    sectorsize: u32,
) -> Result<Batch> {
    todo!()
}

/// What deletes a block group's items.
pub(crate) fn remove_free_space(
    source: &dyn NodeSource,
    root: &RootPtr,
    start: Logical,
    len_bytes: u64,
) -> Result<Batch> {
    todo!()
}
