//! The tree checker: checks a tree block against the format, after it is read and before it is written.
//!
//! The checker sees a single block. A filesystem check covers rules that span blocks (references, space accounting).
//! Items of unknown types pass, because the superblock's feature bits decide whether a filesystem may be used.
//!
//! Invariants:
//! - I1. The checker never panics and never reads out of range, on any input.
//! - I2. Checking a correct block allocates no memory.
//! - I3. After `Ok`, keys ascend from slot to slot, a leaf's item data is inside the block, and each known item has the
//!   size that its decoder reads.
//! - I4. After `Ok`, these ranges end below 2^64: chunks, block groups, device extents, extents, file extents (in the
//!   file and on disk), checksum items and free space items.
//!
//! Source: the btrfs on-disk format page. Linux refuses blocks by most of these rules too.

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

/// Everything that a block is checked against.
#[derive(Clone, Copy, Debug)]
pub struct CheckContext {
    /// Size of a data block in bytes.
    pub sectorsize: u32,
    /// Size of a tree block in bytes.
    pub nodesize: u32,
    /// Checksum algorithm.
    pub csum_type: CsumType,
    /// The UUID that tree blocks carry.
    pub node_fsid: Uuid,
    /// The UUIDs of tree blocks on seed devices. Entries that are not used are nil.
    pub seed_fsids: [Uuid; SEEDS_MAX],
    /// Features of the filesystem.
    pub incompat: Incompat,
    /// The highest generation allowed in the block: the superblock's, plus one for the running transaction. `None` for
    /// no limit.
    pub generation_limit: Option<Generation>,
    /// Facts that the pointer to the block promises.
    pub expected: ExpectedBlock,
    /// Whether the checksum must match and the block be marked as written: true for blocks read from a device.
    pub verify_csum: bool,
    /// Whether unknown flags are accepted if they forbid only writing: true for a filesystem that is opened for reading
    /// only.
    pub read_only: bool,
}

/// The most seed filesystems below one another.
pub const SEEDS_MAX: usize = 8;

/// Facts about a block that the pointer to it promises; a fact that is `None` is not compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpectedBlock {
    /// The block's address.
    pub bytenr: Option<Logical>,
    /// The block's level.
    pub level: Option<u8>,
    /// The tree that leads to the block. A subvolume's block may be owned by another subvolume.
    pub tree: Option<RootId>,
    /// The block's generation.
    pub generation: Option<Generation>,
    /// The block's first key; `None` for a root node, or if the key is not known. A block whose first key is expected
    /// must not be empty.
    pub first_key: Option<Key>,
}

impl CheckContext {
    /// The context of a filesystem with this superblock: checksums are verified, and [`Self::expected`] is empty.
    pub fn new(superblock: &Superblock) -> Self {
        Self {
            sectorsize: superblock.sectorsize,
            nodesize: superblock.nodesize,
            csum_type: superblock.csum_type().unwrap_or_default(),
            node_fsid: superblock.node_fsid(),
            seed_fsids: [Uuid::nil(); SEEDS_MAX],
            incompat: superblock.incompat(),
            generation_limit: Some(Generation(superblock.generation.0.saturating_add(1))),
            expected: ExpectedBlock::default(),
            verify_csum: true,
            read_only: false,
        }
    }

    /// Also accepts tree blocks of seed filesystems with these UUIDs, the first [`SEEDS_MAX`] ones.
    #[must_use]
    pub fn with_seeds(mut self, fsids: &[Uuid]) -> Self {
        self.seed_fsids.iter_mut().zip(fsids).for_each(|(own, fsid)| *own = *fsid);
        self
    }

    /// Whether a tree block with this UUID belongs to the filesystem.
    pub(crate) fn has_fsid(&self, fsid: Uuid) -> bool {
        fsid == self.node_fsid || (!fsid.is_nil() && self.seed_fsids.contains(&fsid))
    }

    /// Replaces [`Self::expected`].
    #[must_use]
    pub fn expecting(mut self, expected: ExpectedBlock) -> Self {
        self.expected = expected;
        self
    }

    /// Sets whether checksums are verified.
    #[must_use]
    pub fn with_csum(mut self, verify: bool) -> Self {
        self.verify_csum = verify;
        self
    }

    /// Sets whether the filesystem is only read.
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

/// Makes an error about one field.
#[cold]
fn bad(what: &'static str, field: &'static str, value: impl Into<u64>, expected: &'static str) -> FormatError {
    FormatError::Value { what, field, value: value.into(), expected }
}
