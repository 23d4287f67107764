//! An independent read-only checker of btrfs filesystems.
//!
//! The checker shares with the engine only the format and the devices. It chooses the superblock (`members`) and maps
//! logical addresses to the devices (`array`) by code of its own. So a bug in the engine cannot hide the damage that the
//! bug causes. In the stack of crates, the checker is above `device`, like `volumes`.
//!
//! The checker visits every tree once, in key order. Runs of leaves that were checked in one subvolume are usually not
//! read again in another subvolume (`segment`). `walk` reads blocks (`reader`) and records references; the modules
//! named after trees check items. A fact with two sides (a reference and its extent item, a directory entry and its
//! inode's name) is compared as a sum of hashes (`fingerprint`). If a sum is not zero, a second walk finds the facts
//! that disagree.
//!
//! Invariants:
//! - I1. Nothing is written, not even a repair.
//! - I2. Memory is bounded for any input: 32 bytes for each tree block, 16 bytes for each data extent, 16 bytes for
//!   each contiguous range with checksums or free space, 48 bytes for each logged file extent, about 100 bytes for each
//!   leaf that subvolumes may share, and a record for each chunk, block group and subvolume. Full quotas take about 20
//!   more bytes for each tree block and data extent. Time is also bounded: blocks that subvolumes share are read again
//!   only a limited number of times (`E-LIMIT`).
//! - I3. Arithmetic on values from disk uses checked, saturating or wrapping functions, never bare operators.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod array;
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
mod members;
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

pub use problem::{CheckLimits, Code, Place, Problem};
use ubtrfs_device::Device;
use ubtrfs_error::Result;

/// The options of a check.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether to read all data and compare every copy with its checksums.
    pub data_csums: bool,
    /// Limits on the number of reported problems.
    pub limits: CheckLimits,
}

/// Receives the progress of a check.
pub trait CheckProgress {
    /// Reports that a new part of the check begins. `total_bytes` is the number of bytes that the part will read, if
    /// known.
    fn stage(&self, name: &'static str, total_bytes: Option<u64>);
    /// Reports that `bytes` more bytes were read.
    fn advance(&self, bytes: u64);
}

/// Ignores progress.
impl CheckProgress for () {
    fn stage(&self, _: &'static str, _: Option<u64>) {}
    fn advance(&self, _: u64) {}
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of problems of each code, reported or not.
    pub counts: BTreeMap<Code, u64>,
    /// Whether all parts of the check ran. `false` if nothing of the chunk tree or of the root tree could be read.
    pub complete: bool,
    /// Numbers of trees, tree blocks, data extents and inodes.
    pub stats: CheckStats,
}

impl Report {
    /// Whether all parts of the check ran, and no problem has a code that begins with `E-`.
    pub fn is_clean(&self) -> bool {
        self.complete && !self.counts.keys().any(|code| code.is_error())
    }
}

/// Counts of the content of a filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckStats {
    /// Subvolumes and other trees.
    pub trees: u64,
    /// Tree blocks with an extent item.
    pub tree_blocks: u64,
    /// Data extents.
    pub data_extents: u64,
    /// Bytes that all extents use, according to the superblock.
    pub bytes_used: u64,
    /// Inodes; a shared inode counts in each subvolume.
    pub inodes: u64,
    /// Bytes of data whose copies were all compared with their checksums.
    pub data_bytes_verified: u64,
}

/// Checks the filesystem on these devices and calls `tell` with each problem as it is found.
///
/// # Errors
/// Fails if nothing could be checked: there is no superblock, features are unknown, a device is truncated, or the devices
/// belong to different filesystems. Missing devices are reported, and the rest is checked.
pub fn check(
    devices: Vec<Arc<dyn Device>>,
    options: Options,
    progress: &dyn CheckProgress,
    tell: &mut dyn FnMut(Problem),
) -> Result<Report> {
    checker::run(devices, options, progress, tell)
}
