//! Copies of data extents: read with verification, written to allocated space, outside of any commit.
//!
//! Invariants:
//! - I1. The data does not change during the copy: its block group is read-only, and writes in place have ended.
//! - I2. An allocation that no step has put to use is released ([`DataCopies`]).

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Corrupt, FormatError, Logical, node::hex};
use ubtrfs_space::Extent;

use crate::engine::Engine;
use crate::extents::csum_tree::SectorCsums;
use crate::extents::data_io::DataExtent;
use crate::relocation::step::CopiedData;

/// Copies of data extents whose addresses are allocated.
pub(crate) struct DataCopies<'e> {
    engine: &'e Engine,
    pub(crate) copies: Vec<CopiedData>,
    /// Extents that could not be read.
    pub(crate) failures: Vec<(Logical, Error)>,
}

impl Drop for DataCopies<'_> {
    fn drop(&mut self) {
        self.copies.iter().for_each(|copy| self.engine.release_data(as_data(copy.to)));
    }
}

impl<'e> DataCopies<'e> {
    /// Copies extents, in order.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], or an error of a write. Extents that cannot be read are listed in `failures`.
    pub(crate) fn make(engine: &'e Engine, extents: &[Extent]) -> Result<Self> {
        let mut made = Self { engine, copies: Vec::new(), failures: Vec::new() };
        let mut rest = extents;
        while let Some((run, behind)) = next_run(rest) {
            made.copy_run(run)?;
            rest = behind;
        }
        Ok(made)
    }

    /// Keeps the copies that a step put to use: they belong to the trees now.
    pub(crate) fn keep_used(&mut self, used: &[Logical]) {
        self.copies.retain(|copy| !used.contains(&copy.to.bytenr));
    }

    /// Copies some extents to consecutive addresses, or to separate ones if free space is fragmented.
    fn copy_run(&mut self, run: &[Extent]) -> Result<()> {
        let bytes = run.iter().map(|extent| extent.len_bytes).sum();
        match self.allocate(bytes) {
            Ok(place) => {
                let mut at = place.bytenr.0;
                for &from in run {
                    let to = Extent::new(Logical(at), from.len_bytes);
                    at += from.len_bytes;
                    self.copy(from, to)?;
                }
                Ok(())
            }
            Err(Error::NoSpace) if run.len() > 1 => {
                for &from in run {
                    let to = self.allocate(from.len_bytes)?;
                    self.copy(from, to)?;
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn allocate(&self, bytes: u64) -> Result<Extent> {
        let mut reservation = self.engine.reserve_data(bytes)?;
        let place = self.engine.allocate_data(&mut reservation, bytes, bytes, None)?;
        Ok(Extent::new(place.bytenr, place.len_bytes))
    }

    fn copy(&mut self, from: Extent, to: Extent) -> Result<()> {
        match self.copy_content(from, to) {
            Ok(csums) => self.copies.push(CopiedData { from, to, csums }),
            Err(Copying::Unreadable(error)) => {
                self.engine.release_data(as_data(to));
                self.failures.push((from.bytenr, error));
            }
            Err(Copying::Failed(error)) => {
                self.engine.release_data(as_data(to));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Copies the data, and returns its checksums.
    fn copy_content(&self, from: Extent, to: Extent) -> Result<Vec<(u64, Vec<u8>)>, Copying> {
        let engine = self.engine;
        let csums = engine.csums_of(from.bytenr, from.len_bytes).map_err(Copying::Unreadable)?;
        let sectorsize = u64::from(engine.geometry.sectorsize);
        let mut buf = Vec::new();
        let mut at = 0;
        while at < from.len_bytes {
            let len = (from.len_bytes - at).min(PIECE_BYTES);
            buf.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            let first = usize::try_from(at / sectorsize).unwrap_or(usize::MAX);
            self.read(Logical(from.bytenr.0 + at), &mut buf, &csums, first).map_err(Copying::Unreadable)?;
            engine.write_data(Logical(to.bytenr.0 + at), &buf).map_err(Copying::Failed)?;
            at += len;
        }
        Ok(runs_of(&csums, sectorsize))
    }

    /// Reads sectors; `first` is the index in `csums` of the first one. Data without checksums is not verified.
    fn read(&self, at: Logical, buf: &mut [u8], csums: &SectorCsums, first: usize) -> Result<()> {
        let csum_type = self.engine.geometry.csum_type;
        let sectorsize = usize::try_from(self.engine.geometry.sectorsize).unwrap_or(usize::MAX);
        let bad_sector = std::cell::Cell::new(0);
        let check = |index: usize, sector: &[u8]| {
            let Some(stored) = csums.get(first + index) else { return Ok(()) };
            let computed = csum_type.compute(sector);
            let computed = &computed[..csum_type.size()];
            if stored == computed {
                return Ok(());
            }
            bad_sector.set(index);
            Err(FormatError::Checksum { what: "data sector", found: hex(stored), computed: hex(computed) })
        };
        self.engine.volumes.read(at, buf, sectorsize, &check).map_err(|error| match error {
            Error::Corrupt(corrupt) => {
                let bytenr = Logical(at.0.saturating_add((bad_sector.get() * sectorsize) as u64));
                Corrupt { bytenr: Some(bytenr), tree: None, ..corrupt }.into()
            }
            other => other,
        })
    }
}

enum Copying {
    Unreadable(Error),
    Failed(Error),
}

fn as_data(extent: Extent) -> DataExtent {
    DataExtent { bytenr: extent.bytenr, len_bytes: extent.len_bytes }
}

/// Takes extents of at most [`RUN_BYTES`] together, or a single larger one.
fn next_run(extents: &[Extent]) -> Option<(&[Extent], &[Extent])> {
    let mut bytes = 0u64;
    let fits = |extent: &&Extent| {
        bytes = bytes.saturating_add(extent.len_bytes);
        bytes <= RUN_BYTES
    };
    let nr = extents.iter().take_while(fits).count().max(1);
    (!extents.is_empty()).then(|| extents.split_at(nr))
}

/// The checksums of consecutive sectors, by the offset of the first.
fn runs_of(csums: &SectorCsums, sectorsize: u64) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut is_joined = false;
    for index in 0..csums.len() {
        let Some(csum) = csums.get(index) else {
            is_joined = false;
            continue;
        };
        match runs.last_mut().filter(|_| is_joined) {
            Some((_, run)) => run.extend_from_slice(csum),
            None => runs.push((index as u64 * sectorsize, csum.to_vec())),
        }
        is_joined = true;
    }
    runs
}

/// Bytes of extents that are copied to consecutive addresses.
const RUN_BYTES: u64 = 16 << 20;
/// Bytes of one read and write.
const PIECE_BYTES: u64 = 4 << 20;
