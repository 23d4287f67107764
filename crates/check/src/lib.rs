//! An independent read-only checker of btrfs filesystems.
//!
//! Shares only the format, the devices and the chunk map with the engine: what it says about an image is a second opinion
//! on what the engine wrote. Stands beside `tree` and `transaction`, above `volumes`.
//!
//! One pass over every tree, in key order, each block once where trees share it: `walk` reads (`reader`) and books
//! references; the modules named after trees look at items. Two sides of one fact (a reference and its extent item, a
//! directory entry and its inode's name) are compared as sums of hashes (`fingerprint`); only where a sum does not come
//! out at zero a second walk looks for the culprits.
//!
//! Invariants:
//! - I1. Nothing is written, not even a repair.
//! - I2. Any input ends in bounded memory: 40 bytes a tree block, 16 bytes a data extent, 16 bytes for each contiguous
//!   range with checksums or free space, about 100 bytes a leaf that subvolumes may share, and what there is of chunks,
//!   block groups and subvolumes. Time is bounded too: blocks that subvolumes share are read again a limited number of
//!   times (`E-LIMIT`).

#![forbid(unsafe_code)]

mod block_group;
mod block_table;
mod checker;
mod chunk;
mod csum;
mod extent;
mod extent_detail;
mod fingerprint;
mod free_space;
mod inode;
mod inode_names;
mod log;
mod prealloc;
mod problem;
mod quota;
mod raw;
mod reader;
mod root;
mod segment;
mod small_trees;
mod superblock;
mod walk;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use problem::{Code, Limits, Place, Problem};
use ubtrfs_device::Device;
use ubtrfs_error::Result;

/// What to check.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Read all data and compare every copy with its checksums.
    pub data_csums: bool,
    /// How many problems are told.
    pub limits: Limits,
}

/// Told how far a check is.
pub trait Progress {
    /// A new part begins; `total_bytes` will be read, if that is known.
    fn stage(&self, name: &'static str, total_bytes: Option<u64>);
    /// Bytes were read.
    fn advance(&self, bytes: u64);
}

/// No progress.
impl Progress for () {
    fn stage(&self, _: &'static str, _: Option<u64>) {}
    fn advance(&self, _: u64) {}
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How many problems of each code there are, told or not.
    pub counts: BTreeMap<Code, u64>,
    /// Whether the check went through to its end.
    pub complete: bool,
    /// Trees, tree blocks, data extents, inodes.
    pub stats: Stats,
}

impl Report {
    /// Whether no damage was found.
    pub fn is_clean(&self) -> bool {
        self.complete && !self.counts.keys().any(|code| code.is_error())
    }
}

/// What there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Subvolumes and other trees.
    pub trees: u64,
    /// Tree blocks with an extent item.
    pub tree_blocks: u64,
    /// Data extents.
    pub data_extents: u64,
    /// Bytes that all extents use.
    pub bytes_used: u64,
    /// Inodes; shared ones count in each subvolume.
    pub inodes: u64,
    /// Bytes of data that were compared with their checksums, all copies.
    pub data_bytes_verified: u64,
}

/// Checks the filesystem on these devices; each problem is handed to `tell` as it is found. An error means that nothing
/// could be checked: no superblock, unknown features, a device that is cut off.
pub fn check(
    devices: Vec<Arc<dyn Device>>,
    options: Options,
    progress: &dyn Progress,
    tell: &mut dyn FnMut(Problem),
) -> Result<Report> {
    checker::run(devices, options, progress, tell)
}
