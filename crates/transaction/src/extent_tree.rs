//! The extent tree: extent items, their references, and the delayed refs that change them.
#![allow(clippy::todo, dead_code, unused_variables)]

use ubtrfs_format::item::ExtentFlags;
use ubtrfs_format::{Generation, Logical, Result};
use ubtrfs_space::{DelayedRefHead, Extent};
use ubtrfs_tree::{Batch, NodeSource, RootPtr};

/// What the trees' keepers need to know of the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LedgerConfig {
    /// Bytes of a tree block.
    pub(crate) nodesize: u32,
    /// Bytes of a sector.
    pub(crate) sectorsize: u32,
    /// Tree blocks get `METADATA_ITEM`s.
    pub(crate) skinny: bool,
}

/// What a run of delayed refs does.
#[derive(Debug, Default)]
pub(crate) struct ExtentChanges {
    /// For the extent tree.
    pub(crate) batch: Batch,
    /// Extents whose items come into being.
    pub(crate) added: Vec<Extent>,
    /// Extents whose items go away, and whether they hold data.
    pub(crate) removed: Vec<(Extent, bool)>,
}

/// An extent item without its references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentInfo {
    /// All references.
    pub(crate) refs: u64,
    /// Flags.
    pub(crate) flags: ExtentFlags,
    /// Transaction that allocated the extent.
    pub(crate) generation: Generation,
}

/// Turns delayed refs (sorted by bytenr) into changes of the extent tree.
pub(crate) fn run_delayed_refs(
    source: &dyn NodeSource,
    root: &RootPtr,
    heads: Vec<DelayedRefHead>,
    config: &LedgerConfig,
) -> Result<ExtentChanges> {
    todo!()
}

/// The item of the extent at `bytenr`, skinny or not.
pub(crate) fn lookup_extent(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    len_bytes: u64,
    is_tree: bool,
) -> Result<Option<ExtentInfo>> {
    todo!()
}
