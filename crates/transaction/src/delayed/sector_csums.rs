//! [`SectorCsums`]: the checksums of consecutive sectors, from memory and from the csum tree.

#![allow(clippy::arithmetic_side_effects, reason = "numbers of sectors and bytes of checksums in memory")]

/// Checksums of consecutive sectors, some of which may be absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SectorCsums {
    csum_size: usize,
    bytes: Vec<u8>,
    present: Vec<bool>,
}

impl SectorCsums {
    /// The checksum of a sector, or `None` if it is absent.
    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        let present = *self.present.get(index)?;
        present.then(|| &self.bytes[index * self.csum_size..][..self.csum_size])
    }

    /// Number of sectors.
    pub(crate) fn len(&self) -> usize {
        self.present.len()
    }

    /// `nr_sectors` sectors without checksums.
    pub(crate) fn absent(nr_sectors: usize, csum_size: usize) -> Self {
        Self { csum_size, bytes: vec![0; nr_sectors * csum_size], present: vec![false; nr_sectors] }
    }

    /// Whether every sector has a checksum.
    pub(crate) fn is_complete(&self) -> bool {
        self.present.iter().all(|present| *present)
    }

    /// Sets the checksum of a sector if it has none yet.
    pub(crate) fn fill(&mut self, index: usize, csum: &[u8]) {
        if self.present.get(index) == Some(&false) {
            self.present[index] = true;
            self.bytes[index * self.csum_size..][..self.csum_size].copy_from_slice(csum);
        }
    }

    /// Sets the checksums of consecutive sectors from `first` on.
    pub(crate) fn set_run(&mut self, first: usize, csums: &[u8]) {
        self.bytes[first * self.csum_size..][..csums.len()].copy_from_slice(csums);
        self.present[first..first + csums.len() / self.csum_size].fill(true);
    }

    /// Copies checksums from `other` for the sectors that have no checksum here.
    pub(crate) fn fill_from(&mut self, other: &Self) {
        for index in 0..self.len() {
            if let Some(csum) = other.get(index) {
                self.fill(index, csum);
            }
        }
    }
}
