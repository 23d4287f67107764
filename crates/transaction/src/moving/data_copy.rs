//! Copies data extents outside of any commit: reads them with verification, and writes them to allocated space.
//!
//! Invariants:
//! - I1. The data does not change during the copy: its block group is read-only, and writes in place have ended.
//! - I2. If no step makes trees refer to a copy, the space of the copy is released ([`DataCopies`]).

use std::collections::BTreeMap;
use std::ops::Range;

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;
use ubtrfs_space::Extent;

use crate::delayed::sector_csums::SectorCsums;
use crate::engine::Engine;
use crate::extents::data_io::DataExtent;
use crate::nodes::threads::work_off;
use crate::relocation::step::CopiedData;

/// Copies of data extents, with their allocated space. On drop, the space of copies to which no tree refers is
/// released.
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
    /// Copies extents with several threads, so that reading, checking and writing overlap.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], or an error of a write. Extents that cannot be read are listed in `failures`.
    pub(crate) fn make(engine: &'e Engine, extents: &[Extent]) -> Result<Self> {
        let mut made = Self { engine, copies: Vec::new(), failures: Vec::new() };
        let mut rest = extents;
        while let Some((run, behind)) = next_run(rest) {
            made.place_run(run)?;
            rest = behind;
        }
        let stretches = stretches(&made.copies);
        let read: Mutex<Vec<Copied>> = Mutex::default();
        let new_buf = || AlignedBuf::with_capacity(usize::try_from(PIECE_BYTES).unwrap_or_default());
        work_off(stretches.into_iter(), new_buf, |buf, stretch| {
            let copied = engine.copy_stretch(&stretch, buf)?;
            read.lock().extend(copied);
            Ok(())
        })?;
        made.note(read.into_inner());
        Ok(made)
    }

    /// Removes the copies that a step put to use from the list, because trees refer to them now. So the drop of this
    /// value does not release their space.
    pub(crate) fn keep_used(&mut self, used: &[Logical]) {
        self.copies.retain(|copy| !used.contains(&copy.to.bytenr));
    }

    /// Allocates consecutive addresses for a run of extents. If free space is too fragmented, allocates each extent
    /// separately.
    fn place_run(&mut self, run: &[Extent]) -> Result<()> {
        let bytes = run.iter().map(|extent| extent.len_bytes).sum();
        match self.allocate(bytes) {
            Ok(place) => {
                let mut at = place.bytenr;
                for &from in run {
                    self.place(from, Extent::new(at, from.len_bytes));
                    at = at.advance(from.len_bytes);
                }
                Ok(())
            }
            Err(Error::NoSpace) if run.len() > 1 => {
                for &from in run {
                    let to = self.allocate(from.len_bytes)?;
                    self.place(from, to);
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn place(&mut self, from: Extent, to: Extent) {
        self.copies.push(CopiedData { from, to, csums: Vec::new() });
    }

    fn allocate(&self, bytes: u64) -> Result<Extent> {
        let mut reservation = self.engine.reserve_data(bytes)?;
        let place = self.engine.allocate_data(&mut reservation, bytes, bytes, None)?;
        Ok(Extent::new(place.bytenr, place.len_bytes))
    }

    /// Stores the checksums of the copied data. Extents that could not be read completely are removed from `copies` and
    /// added to `failures`.
    fn note(&mut self, mut read: Vec<Copied>) {
        let sectorsize = u64::from(self.engine.geometry.sectorsize);
        let csum_size = self.engine.geometry.csum_type.size();
        read.sort_by_key(|copied| (copied.part.copy, copied.part.offset));
        let mut unreadable: BTreeMap<usize, Error> = BTreeMap::new();
        for Copied { part, csums } in read {
            match csums {
                Ok(runs) => join_runs(&mut self.copies[part.copy].csums, runs, sectorsize, csum_size),
                Err(error) => drop(unreadable.entry(part.copy).or_insert(error)),
            }
        }
        // Remove the last copy first, so that smaller indexes stay valid.
        for (index, error) in unreadable.into_iter().rev() {
            let copy = self.copies.remove(index);
            self.engine.release_data(as_data(copy.to));
            self.failures.push((copy.from.bytenr, error));
        }
        self.failures.reverse();
    }
}

/// Consecutive bytes of one or several extents, whose copies are consecutive too.
struct Stretch {
    from: u64,
    to: u64,
    len_bytes: u64,
    parts: Vec<ExtentPart>,
}

/// A part of an extent.
#[derive(Clone, Copy)]
struct ExtentPart {
    /// The index of the extent's copy in [`DataCopies::copies`].
    copy: usize,
    /// The offset of the part in the extent.
    offset: u64,
    len_bytes: u64,
}

/// The checksums of a part, or the reason why it cannot be read.
struct Copied {
    part: ExtentPart,
    csums: Result<Vec<(u64, Vec<u8>)>>,
}

/// Cuts and joins extents into stretches of at most [`PIECE_BYTES`].
#[allow(
    clippy::arithmetic_side_effects,
    reason = "the ends of the extents were checked when they were read, and the copies are allocated"
)]
fn stretches(copies: &[CopiedData]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (copy, CopiedData { from, to, .. }) in copies.iter().enumerate() {
        let mut offset = 0;
        while offset < from.len_bytes {
            let (from_at, to_at) = (from.bytenr.0 + offset, to.bytenr.0 + offset);
            let follows = |last: &&mut Stretch| {
                (last.from + last.len_bytes, last.to + last.len_bytes) == (from_at, to_at)
                    && last.len_bytes < PIECE_BYTES
            };
            let last = match stretches.last_mut().filter(follows) {
                Some(last) => last,
                None => {
                    stretches.push(Stretch { from: from_at, to: to_at, len_bytes: 0, parts: Vec::new() });
                    let Some(last) = stretches.last_mut() else { break };
                    last
                }
            };
            let len_bytes = (from.len_bytes - offset).min(PIECE_BYTES - last.len_bytes);
            last.parts.push(ExtentPart { copy, offset, len_bytes });
            last.len_bytes += len_bytes;
            offset += len_bytes;
        }
    }
    stretches
}

impl Engine {
    /// Copies a stretch, or its parts one by one if not all of it can be read.
    #[allow(clippy::arithmetic_side_effects, reason = "places in a stretch; the sector size is at least 4096")]
    fn copy_stretch(&self, stretch: &Stretch, buf: &mut AlignedBuf) -> Result<Vec<Copied>> {
        match self.copy_range(stretch.from, stretch.to, stretch.len_bytes, buf) {
            Ok(csums) => {
                let sectorsize = u64::from(self.geometry.sectorsize);
                let mut first = 0;
                let of_part = |part: &ExtentPart| {
                    let sectors = first..first + usize::try_from(part.len_bytes / sectorsize).unwrap_or_default();
                    first = sectors.end;
                    Copied { part: *part, csums: Ok(runs_of(&csums, sectors, part.offset, sectorsize)) }
                };
                return Ok(stretch.parts.iter().map(of_part).collect());
            }
            Err(CopyError::Failed(error)) => return Err(error),
            Err(CopyError::Unreadable(error)) if stretch.parts.len() == 1 => {
                return Ok(vec![Copied { part: stretch.parts[0], csums: Err(error) }]);
            }
            Err(CopyError::Unreadable(_)) => {}
        }
        let mut all = Vec::new();
        let mut at = 0;
        for &part in &stretch.parts {
            let (from, to) = (stretch.from + at, stretch.to + at);
            at += part.len_bytes;
            all.extend(self.copy_stretch(&Stretch { from, to, len_bytes: part.len_bytes, parts: vec![part] }, buf)?);
        }
        Ok(all)
    }

    /// Copies data, and returns the checksums of the data.
    fn copy_range(&self, from: u64, to: u64, len_bytes: u64, buf: &mut AlignedBuf) -> Result<SectorCsums, CopyError> {
        let csums = self.csums_of(Logical(from), len_bytes).map_err(CopyError::Unreadable)?;
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        buf.clear();
        buf.extend_with(len, |content| self.read_sectors(Logical(from), content, &csums, false))
            .map_err(CopyError::Unreadable)?;
        self.write_data(Logical(to), buf).map_err(CopyError::Failed)?;
        Ok(csums)
    }
}

enum CopyError {
    Unreadable(Error),
    Failed(Error),
}

fn as_data(extent: Extent) -> DataExtent {
    DataExtent { bytenr: extent.bytenr, len_bytes: extent.len_bytes }
}

/// Takes the first extents, of at most [`RUN_BYTES`] in total, or a single extent that is larger.
fn next_run(extents: &[Extent]) -> Option<(&[Extent], &[Extent])> {
    let mut bytes = 0u64;
    let fits = |extent: &&Extent| {
        bytes = bytes.saturating_add(extent.len_bytes);
        bytes <= RUN_BYTES
    };
    let nr = extents.iter().take_while(fits).count().max(1);
    (!extents.is_empty()).then(|| extents.split_at(nr))
}

/// Returns the checksums of some sectors of an extent, as runs of consecutive sectors by their offset in the extent.
/// `offset` is the offset of the first of `sectors`.
#[allow(clippy::arithmetic_side_effects, reason = "offsets in an extent")]
fn runs_of(csums: &SectorCsums, sectors: Range<usize>, offset: u64, sectorsize: u64) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut is_joined = false;
    for (number, index) in sectors.enumerate() {
        let Some(csum) = csums.get(index) else {
            is_joined = false;
            continue;
        };
        match runs.last_mut().filter(|_| is_joined) {
            Some((_, run)) => run.extend_from_slice(csum),
            None => runs.push((offset + number as u64 * sectorsize, csum.to_vec())),
        }
        is_joined = true;
    }
    runs
}

/// Appends runs of checksums. A run that begins where the last run ends is joined with it.
#[allow(clippy::arithmetic_side_effects, reason = "offsets in an extent")]
fn join_runs(all: &mut Vec<(u64, Vec<u8>)>, runs: Vec<(u64, Vec<u8>)>, sectorsize: u64, csum_size: usize) {
    for (offset, run) in runs {
        let end = |(start, last): &(u64, Vec<u8>)| start + (last.len() / csum_size.max(1)) as u64 * sectorsize;
        match all.last_mut().filter(|last| end(last) == offset) {
            Some((_, last)) => last.extend(run),
            None => all.push((offset, run)),
        }
    }
}

/// Maximum bytes of extents that are copied to consecutive addresses.
const RUN_BYTES: u64 = 16 << 20;
/// Maximum bytes of a stretch, which is read in one request and written in one request.
const PIECE_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_cover_every_byte_of_every_extent_once() {
        let piece = PIECE_BYTES;
        let extents =
            [(0, 0, 4096), (4096, 4096, 3 * piece), (4096 + 3 * piece, 1 << 40, 4096), (1 << 41, 1 << 42, piece)];
        let of = |(from, to, len)| CopiedData {
            from: Extent::new(Logical(from), len),
            to: Extent::new(Logical(to), len),
            csums: Vec::new(),
        };
        let copies: Vec<CopiedData> = extents.into_iter().map(of).collect();
        let mut done = [0; 4];
        for stretch in stretches(&copies) {
            let mut at = 0;
            for part in &stretch.parts {
                assert_eq!(
                    (part.offset, copies[part.copy].from.bytenr.0 + part.offset),
                    (done[part.copy], stretch.from + at)
                );
                assert_eq!(copies[part.copy].to.bytenr.0 + part.offset, stretch.to + at);
                done[part.copy] += part.len_bytes;
                at += part.len_bytes;
            }
            assert!(at == stretch.len_bytes && at <= piece && at > 0);
        }
        assert_eq!(done, [4096, 3 * piece, 4096, piece]);
    }
}
