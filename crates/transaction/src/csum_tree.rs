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

impl SectorCsums {
    /// `nr_sectors` sectors without checksums.
    pub(crate) fn absent(nr_sectors: usize, csum_size: usize) -> Self {
        Self { csum_size, bytes: vec![0; nr_sectors * csum_size], present: vec![false; nr_sectors] }
    }

    /// Whether no sector lacks its checksum.
    pub(crate) fn is_complete(&self) -> bool {
        self.present.iter().all(|present| *present)
    }

    /// Sets the checksum of a sector that has none yet.
    pub(crate) fn fill(&mut self, index: usize, csum: &[u8]) {
        if self.present.get(index) == Some(&false) {
            self.present[index] = true;
            self.bytes[index * self.csum_size..][..self.csum_size].copy_from_slice(csum);
        }
    }

    /// Takes over the checksums of the sectors that have none yet.
    pub(crate) fn fill_from(&mut self, other: &Self) {
        for index in 0..self.len() {
            if let Some(csum) = other.get(index) {
                self.fill(index, csum);
            }
        }
    }
}
