//! The tree checker: is a tree block what the format says, before anything trusts it and before it is written?
//!
//! It sees one block alone; what spans blocks (references, space accounting) is for a filesystem check. Items of
//! unknown types pass: the feature bits of the superblock decide whether a filesystem may be used.
//!
//! Invariants:
//! - I1. No input panics, and none is read out of range.
//! - I2. No allocation on the path of a block that passes.
//! - I3. After `Ok`, every slot has a key above the one before, and in a leaf, data inside of the block; each known
//!   item has the size that its decoder reads.
//!
//! Source: the btrfs on-disk format page; the rules are those that Linux holds blocks to.

mod chunk;
mod dir;
mod extent;
mod file_extent;
mod free_space;
mod inode;
mod item;
mod misc;
mod node;
mod root;

use uuid::Uuid;

pub(crate) use chunk::{check_chunk, chunk_size};

use crate::csum::CsumType;
use crate::error::{Corrupt, FormatError};
use crate::ids::{Generation, Logical, RootId};
use crate::key::Key;
use crate::node::NodeView;
use crate::superblock::{Incompat, Superblock};

/// What a block is checked against.
#[derive(Clone, Copy, Debug)]
pub struct CheckContext {
    /// Bytes of a data block.
    pub sectorsize: u32,
    /// Bytes of a tree block.
    pub nodesize: u32,
    /// Checksum algorithm.
    pub csum_type: CsumType,
    /// The UUID that tree blocks carry.
    pub node_fsid: Uuid,
    /// Features of the filesystem.
    pub incompat: Incompat,
    /// The highest generation that anything in the block may carry: the superblock's, plus one for the transaction
    /// that runs. `None` does not limit.
    pub generation_limit: Option<Generation>,
    /// What the pointer to the block says.
    pub expected: Expected,
    /// Whether the checksum is verified, and that the block is marked as written: for what comes from a device.
    pub verify_csum: bool,
    /// Whether the filesystem is only read: unknown flags that allow reading pass.
    pub read_only: bool,
}

/// What is known of a block from where it is referred to; `None` is not compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected {
    /// Its address.
    pub bytenr: Option<Logical>,
    /// Its level.
    pub level: Option<u8>,
    /// The tree that it is reached through. Blocks of subvolumes may be owned by other subvolumes.
    pub tree: Option<RootId>,
    /// Its generation.
    pub generation: Option<Generation>,
    /// Its first key. Set, it also says that the block is not a root, so must not be empty.
    pub first_key: Option<Key>,
}

impl CheckContext {
    /// The context that a superblock gives; expects nothing in particular, verifies checksums.
    pub fn new(superblock: &Superblock) -> Self {
        Self {
            sectorsize: superblock.sectorsize,
            nodesize: superblock.nodesize,
            csum_type: superblock.csum_type().unwrap_or_default(),
            node_fsid: superblock.node_fsid(),
            incompat: superblock.incompat(),
            generation_limit: Some(Generation(superblock.generation.0.saturating_add(1))),
            expected: Expected::default(),
            verify_csum: true,
            read_only: false,
        }
    }

    /// The same with other expectations.
    #[must_use]
    pub fn expecting(mut self, expected: Expected) -> Self {
        self.expected = expected;
        self
    }

    /// The same with or without verifying the checksum.
    #[must_use]
    pub fn with_csum(mut self, verify: bool) -> Self {
        self.verify_csum = verify;
        self
    }

    /// The same for a filesystem that is only read.
    #[must_use]
    pub fn for_reading_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }
}

/// Checks a whole tree block: header, key order, layout, and every item.
pub fn check_node(raw: &[u8], ctx: &CheckContext) -> Result<(), Corrupt> {
    let place = |corrupt: Corrupt| {
        let view = NodeView::new(raw).ok();
        let tree = ctx.expected.tree.or(view.map(|view| view.owner()));
        let bytenr = ctx.expected.bytenr.or(view.map(|view| view.bytenr()));
        let corrupt = tree.into_iter().fold(corrupt, Corrupt::in_tree);
        bytenr.into_iter().fold(corrupt, Corrupt::at)
    };
    check_unplaced(raw, ctx).map_err(place)
}

fn check_unplaced(raw: &[u8], ctx: &CheckContext) -> Result<(), Corrupt> {
    let view = NodeView::new(raw)?;
    if ctx.verify_csum {
        crate::node::verify_csum(raw, ctx.csum_type)?;
    }
    node::check_header(&view, ctx)?;
    if view.is_leaf() { node::check_leaf(&view, ctx) } else { node::check_internal(&view, ctx) }
}

/// An error about one field.
#[cold]
fn bad(what: &'static str, field: &'static str, value: impl Into<u64>, expected: &'static str) -> FormatError {
    FormatError::Value { what, field, value: value.into(), expected }
}
