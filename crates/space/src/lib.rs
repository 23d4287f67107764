//! Space accounting in memory: block groups, free space, allocation, reservations, and the queue of delayed refs.
//!
//! This crate depends only on `format` and `error`, and never reads a tree. The crate `transaction` loads the
//! accounting from the trees, and writes the changes of the accounting back into the trees.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod block_group;
pub mod delayed_ref;
mod range_set;
mod ref_deltas;
mod reservation;
mod space;
mod space_info;

pub use block_group::BlockGroup;
pub use delayed_ref::{DelayedRefHead, DelayedRefs, ExtentKind, OwnerMark, RefKey};
pub use range_set::{JoinedRanges, RangeSet};
pub use ref_deltas::RefDeltas;
pub use reservation::{Reservation, Shortage};
pub use space::{DirtyGroup, OtherGroups, Space, SpaceConfig};
pub use space_info::SpaceInfo;

use ubtrfs_format::Logical;
use ubtrfs_format::item::BlockGroupFlags;

/// The kind of content of a block group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpaceKind {
    /// File data. With mixed block groups, data shares the space of metadata.
    Data,
    /// Tree blocks of all trees except the chunk tree.
    Metadata,
    /// Tree blocks of the chunk tree.
    System,
}

impl SpaceKind {
    /// The type bit of this kind's block groups.
    pub fn flags(self) -> BlockGroupFlags {
        match self {
            Self::Data => BlockGroupFlags::DATA,
            Self::Metadata => BlockGroupFlags::METADATA,
            Self::System => BlockGroupFlags::SYSTEM,
        }
    }

    /// The kind of a block group with these flags. Mixed block groups count as metadata.
    pub fn of(flags: BlockGroupFlags) -> Self {
        if flags.contains(BlockGroupFlags::SYSTEM) {
            Self::System
        } else if flags.contains(BlockGroupFlags::METADATA) {
            Self::Metadata
        } else {
            Self::Data
        }
    }
}

/// A range of logical addresses: a tree block or a data extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Start address.
    pub bytenr: Logical,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl Extent {
    /// Makes the extent of `len_bytes` at `bytenr`.
    pub fn new(bytenr: Logical, len_bytes: u64) -> Self {
        Self { bytenr, len_bytes }
    }

    /// The first address after the extent, at most `u64::MAX`, which no block group reaches.
    pub fn end(self) -> u64 {
        self.bytenr.0.saturating_add(self.len_bytes)
    }

    /// Joins this extent and the adjacent extent `next` into one extent.
    fn joined(self, next: Self) -> Self {
        Self { len_bytes: self.len_bytes.saturating_add(next.len_bytes), ..self }
    }
}
