//! Space in memory: block groups, their free space, allocation, reservations, and the queue of delayed refs.
//!
//! Third floor: knows `format` only. It never reads a tree; `transaction` loads it from the trees and persists what
//! it says.

#![forbid(unsafe_code)]

mod block_group;
pub mod delayed_ref;
mod range_set;
mod ref_deltas;
mod reservation;
mod space;
mod space_info;

pub use block_group::BlockGroup;
pub use delayed_ref::{DelayedRefHead, DelayedRefs, ExtentKind, RefKey};
pub use range_set::{Joined, RangeSet};
pub use ref_deltas::RefDeltas;
pub use reservation::{Reservation, Shortage};
pub use space::{Space, SpaceConfig};
pub use space_info::SpaceInfo;

use ubtrfs_format::Logical;
use ubtrfs_format::item::BlockGroupFlags;

/// What a block group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpaceKind {
    /// File data. The same as metadata on a filesystem with mixed block groups.
    Data,
    /// Tree blocks of every tree but the chunk tree.
    Metadata,
    /// Tree blocks of the chunk tree.
    System,
}

impl SpaceKind {
    /// The type bit of its block groups.
    pub fn flags(self) -> BlockGroupFlags {
        match self {
            Self::Data => BlockGroupFlags::DATA,
            Self::Metadata => BlockGroupFlags::METADATA,
            Self::System => BlockGroupFlags::SYSTEM,
        }
    }
}

/// A range of logical addresses: a tree block or a data extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Where it starts.
    pub bytenr: Logical,
    /// Its length.
    pub len_bytes: u64,
}

impl Extent {
    /// The extent of these bytes.
    pub fn new(bytenr: Logical, len_bytes: u64) -> Self {
        Self { bytenr, len_bytes }
    }

    /// The first address after it.
    pub fn end(self) -> u64 {
        self.bytenr.0.saturating_add(self.len_bytes)
    }
}
