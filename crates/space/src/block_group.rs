//! A block group: its item, and two views of its free space.
//!
//! ```text
//!            allocate            extent_added
//!   free ───────────────▶ allocated ─────────▶ used
//!     ▲ ▲      release       │                  │
//!     │ └────────────────────┘                  │ extent_removed
//!     └──────────────── pinned ◀────────────────┘
//!         finish_unpin
//! ```
//!
//! Invariants:
//! - I1. `disk_free` is the content of the free space tree: the space that no extent uses, including the superblock
//!   mirrors.
//! - I2. Free, allocated and pinned space and the mirrors are disjoint parts of `disk_free`.
//! - I3. Outside of `changed`, the free space tree on disk agrees with `disk_free`.

use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Corrupt, FormatError, Logical, RootId};

use crate::Extent;
use crate::range_set::{FreeSpace, RangeSet, len_of};

/// The fields of a block group item, and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGroup {
    /// Start address.
    pub start: Logical,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Bytes of the block group's extents in the extent tree.
    pub used: u64,
}

#[derive(Debug)]
pub(crate) struct BlockGroupState {
    pub(crate) item: BlockGroup,
    pub(crate) read_only: bool,
    /// Whether the group is read-only for ever, because it lies on a seed device.
    pub(crate) is_on_seed: bool,
    /// Allocated bytes without an extent item yet.
    pub(crate) allocated: u64,
    /// Bytes of extents whose items are deleted, but to which the trees of the last commit may still refer.
    pub(crate) pinned: u64,
    free: FreeSpace,
    disk_free: RangeSet,
    /// Ranges that `disk_free` gained or lost since [`Self::take_changed`], in the order of the changes.
    changed: Vec<Range<u64>>,
    mirrors: RangeSet,
}

impl BlockGroupState {
    /// Makes a block group. `free` may include the mirrors.
    pub(crate) fn new(item: BlockGroup, free: Vec<Range<u64>>, mirrors: Vec<Range<u64>>, sector: u64) -> Result<Self> {
        let bounds = item.start.0..item.start.0.checked_add(item.len_bytes).ok_or_else(|| {
            corrupt("block group", "length", item.len_bytes, "expected to end inside the address space", item.start)
        })?;
        if item.used > item.len_bytes {
            return Err(corrupt("block group", "used", item.used, "expected at most its length", item.start));
        }
        let mut group = Self {
            item,
            read_only: false,
            is_on_seed: false,
            allocated: 0,
            pinned: 0,
            free: FreeSpace::default(),
            disk_free: RangeSet::default(),
            changed: vec![bounds.clone()],
            mirrors: RangeSet::default(),
        };
        for mirror in mirrors {
            // Cut the mirror's range at the bounds of the group, and insert only the parts that are not in `mirrors`
            // yet: mirror ranges may extend past the group's end, and two of them may overlap.
            let mirror = mirror.start.max(bounds.start)..mirror.end.min(bounds.end);
            for part in group.mirrors.gaps(mirror) {
                group.mirrors.insert(part);
            }
        }
        for range in free {
            let inside = bounds.start <= range.start && range.end <= bounds.end;
            let aligned = range.start.is_multiple_of(sector) && range.end.is_multiple_of(sector);
            if !inside || !aligned || group.disk_free.insert(range.clone()).is_none() {
                let expected = "expected disjoint ranges of sectors inside the block group";
                return Err(corrupt("free space", "start", range.start, expected, item.start));
            }
            group.free_parts(range);
        }
        Ok(group)
    }

    pub(crate) fn end(&self) -> u64 {
        self.item.start.advance(self.item.len_bytes).0
    }

    pub(crate) fn free(&self) -> &FreeSpace {
        &self.free
    }

    pub(crate) fn disk_free(&self) -> &RangeSet {
        &self.disk_free
    }

    pub(crate) fn nr_disk_free(&self) -> u64 {
        self.disk_free.nr_ranges()
    }

    /// Returns where `disk_free` changed since the last call, sorted and coalesced. In a new group, all space changed.
    pub(crate) fn take_changed(&mut self) -> Vec<Range<u64>> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable_by_key(|range| range.start);
        changed.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        changed
    }

    pub(crate) fn mirror_bytes(&self) -> u64 {
        self.mirrors.bytes()
    }

    /// Whether the block group has no used, allocated or pinned bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.item.used == 0 && self.allocated == 0 && self.pinned == 0
    }

    pub(crate) fn allocate(&mut self, range: Range<u64>) {
        let allocated = self.allocated.checked_add(len_of(&range));
        assert!(self.free.remove(range), "I2: allocations come from free space");
        self.allocated = allocated.expect("I2: allocated space is a part of the group");
    }

    pub(crate) fn release(&mut self, range: Range<u64>) {
        let allocated = self.allocated.checked_sub(len_of(&range));
        let is_unused = self.disk_free.gaps(range.clone()).is_empty();
        self.allocated = allocated.filter(|_| is_unused).expect("I2: only allocated space is released");
        self.free_parts(range);
    }

    pub(crate) fn extent_added(&mut self, extent: Extent) -> Result<()> {
        let Some(used) = self.item.used.checked_add(extent.len_bytes) else {
            return Err(corrupt("block group", "used", self.item.used, "expected at most its length", self.item.start));
        };
        let allocated = self.allocated.checked_sub(extent.len_bytes);
        let range = extent.bytenr.0..extent.end();
        let Some(allocated) = allocated.filter(|_| self.disk_free.remove(range.clone()).is_some()) else {
            let expected = "expected an extent in allocated space";
            return Err(corrupt("extent", "length", extent.len_bytes, expected, extent.bytenr));
        };
        self.note_changed(range);
        self.allocated = allocated;
        self.item.used = used;
        Ok(())
    }

    pub(crate) fn extent_removed(&mut self, extent: Extent) -> Result<()> {
        let Some(used) = self.item.used.checked_sub(extent.len_bytes) else {
            let expected = "expected at least the length of a removed extent";
            return Err(corrupt("block group", "used", self.item.used, expected, self.item.start));
        };
        let range = extent.bytenr.0..extent.end();
        if self.disk_free.insert(range.clone()).is_none() {
            let expected = "expected an extent that is not in the free space tree";
            return Err(corrupt("extent", "length", extent.len_bytes, expected, extent.bytenr));
        }
        self.note_changed(range);
        self.item.used = used;
        // The sum does not overflow, because pinned space is a part of the group (I2).
        self.pinned = self.pinned.saturating_add(extent.len_bytes);
        Ok(())
    }

    pub(crate) fn unpin(&mut self, range: Range<u64>) {
        self.pinned = self.pinned.checked_sub(len_of(&range)).expect("I2: only pinned space is unpinned");
        self.free_parts(range);
    }

    fn note_changed(&mut self, range: Range<u64>) {
        match self.changed.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.changed.push(range),
        }
    }

    fn free_parts(&mut self, range: Range<u64>) {
        for part in self.mirrors.gaps(range) {
            assert!(self.free.insert(part), "I2: space becomes free once");
        }
    }
}

pub(crate) fn corrupt(
    what: &'static str,
    field: &'static str,
    value: u64,
    expected: &'static str,
    bytenr: Logical,
) -> Error {
    let cause = FormatError::Value { what, field, value, expected };
    Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(bytenr).into()
}
