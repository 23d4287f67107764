//! The csum tree: one checksum for every sector of checksummed data.
#![allow(clippy::todo, dead_code, unused_variables)]

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_format::{Logical, Result};
use ubtrfs_tree::{Batch, NodeSource, RootPtr};

/// Checksums of consecutive sectors, of which some may be absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SectorCsums {
    csum_size: usize,
    bytes: Vec<u8>,
    present: Vec<bool>,
}

impl SectorCsums {
    /// The checksum of a sector, or `None` where the tree holds none.
    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        let present = *self.present.get(index)?;
        present.then(|| &self.bytes[index * self.csum_size..][..self.csum_size])
    }

    /// Number of sectors.
    pub(crate) fn len(&self) -> usize {
        self.present.len()
    }
}

/// What inserts checksums (`insert`: address of the first sector -> checksums of consecutive sectors; what is there
/// is replaced) and deletes those of the ranges `remove`. The removal comes first.
pub(crate) fn csum_changes(
    source: &dyn NodeSource,
    root: &RootPtr,
    insert: &BTreeMap<u64, Vec<u8>>,
    remove: &[Range<u64>],
    csum_size: usize,
    sectorsize: u32,
    nodesize: u32,
) -> Result<Batch> {
    todo!()
}

/// The checksums of a range of sectors.
pub(crate) fn lookup_csums(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    len_bytes: u64,
    csum_size: usize,
    sectorsize: u32,
) -> Result<SectorCsums> {
    todo!()
}
