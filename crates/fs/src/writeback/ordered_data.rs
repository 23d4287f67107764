//! Ordered data: data that writeback writes to the devices before the file's items refer to it.
//!
//! ```text
//!   dirty runs --cut()--> units --compress, allocate, checksum, write--> written units --finish--> items
//! ```
//!
//! Invariants:
//! - I1: a unit's items are put only after all of its bytes were written.
//! - I2: a unit becomes one new extent or goes into an existing extent of the file. A unit holds at most [`MAX_EXTENT`]
//!   bytes of the file; a compressed one, at most 128 KiB.
//! - I3: allocated bytes that no unit uses are released.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "ranges of dirty data end at most at `MAX_SIZE`, rounded up; extents are allocated ones"
)]

use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;
use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody};
use ubtrfs_transaction::{DataExtent, DataReservation, Engine, FilesystemGeometry};

use crate::Result;
use crate::compression::{self, CompressionMethod, MAX_UNCOMPRESSED};
use crate::inode::file_data::DataRun;
use crate::items::file_extent::{ExtentAt, whole_extent};

/// The largest extent that writeback makes.
pub(crate) const MAX_EXTENT: u64 = 128 << 20;

/// The rules for writing a file's new data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// Compress with this method.
    pub compress: Option<CompressionMethod>,
    /// Compress even data that does not look compressible. Do not set `NOCOMPRESS` if compressing the file's start
    /// saves no space.
    pub force: bool,
    /// Whether the data gets checksums.
    pub csums: bool,
}

/// A part of a run. A unit becomes one new extent, or goes into one existing extent (I2).
#[derive(Debug)]
pub(crate) struct WritebackUnit {
    /// The index of the unit's run in [`FileUnits::runs`].
    pub run: usize,
    /// The unit's range in the file.
    pub range: Range<u64>,
    /// The place to which the unit's bytes are written.
    pub target: UnitTarget,
    /// Checksums of the bytes on disk; empty if the file has no checksums.
    pub csums: Vec<u8>,
}

/// The place to which a unit's bytes are written.
#[derive(Debug)]
pub(crate) enum UnitTarget {
    /// A new extent, not compressed.
    Plain { bytenr: Logical },
    /// A new extent of these compressed bytes, which fill whole sectors.
    Compressed { bytenr: Logical, kind: Compression, bytes: AlignedBuf },
    /// An existing extent of the file.
    InPlace { at: ExtentAt },
}

impl WritebackUnit {
    /// Bytes on disk.
    pub(crate) fn disk_len(&self) -> u64 {
        match &self.target {
            UnitTarget::Compressed { bytes, .. } => bytes.len() as u64,
            UnitTarget::Plain { .. } | UnitTarget::InPlace { .. } => self.range.end - self.range.start,
        }
    }

    /// Whether the unit becomes a new extent, which needs space.
    pub(crate) fn is_new(&self) -> bool {
        !matches!(self.target, UnitTarget::InPlace { .. })
    }

    /// The unit's address on disk.
    pub(crate) fn bytenr(&self) -> Logical {
        match &self.target {
            UnitTarget::Plain { bytenr } | UnitTarget::Compressed { bytenr, .. } => *bytenr,
            UnitTarget::InPlace { at } => match &at.extent.body {
                FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => {
                    Logical(regular.disk_bytenr.0 + regular.offset + (self.range.start - at.start))
                }
                FileExtentBody::Inline(_) => Logical(0),
            },
        }
    }

    fn set_bytenr(&mut self, to: Logical) {
        match &mut self.target {
            UnitTarget::Plain { bytenr } | UnitTarget::Compressed { bytenr, .. } => *bytenr = to,
            UnitTarget::InPlace { .. } => {}
        }
    }

    /// The file extent item, for a unit that becomes a new extent.
    pub(crate) fn file_extent(&self) -> FileExtent {
        let len = self.range.end - self.range.start;
        let mut extent = whole_extent(self.bytenr(), self.disk_len());
        if let UnitTarget::Compressed { kind, .. } = &self.target {
            extent.compression = *kind;
            extent.ram_bytes = len;
            if let FileExtentBody::Regular(regular) = &mut extent.body {
                regular.num_bytes = len;
            }
        }
        extent
    }

    /// The bytes that are written to disk.
    fn slices<'a>(&'a self, run: &'a DataRun) -> Vec<&'a [u8]> {
        match &self.target {
            UnitTarget::Compressed { bytes, .. } => vec![bytes],
            UnitTarget::Plain { .. } | UnitTarget::InPlace { .. } => run.pieces(self.range.clone()),
        }
    }
}

/// Cuts ranges of runs into units, each small enough for one extent, or for one compressed extent.
pub(crate) fn cut(ranges: &[(usize, Range<u64>)], policy: &Policy) -> Vec<WritebackUnit> {
    let most = if policy.compress.is_some() { MAX_UNCOMPRESSED as u64 } else { MAX_EXTENT };
    let mut units = Vec::with_capacity(ranges.len());
    for (run, range) in ranges {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + most);
            let target = UnitTarget::Plain { bytenr: Logical(0) };
            units.push(WritebackUnit { run: *run, range: at..end, target, csums: Vec::new() });
            at = end;
        }
    }
    units
}

/// Compresses the new units of all files whose policy has a compression method. A unit stays uncompressed if it is too
/// small, if it does not look compressible, or if compression saves no sector. Adjacent units that stay uncompressed
/// are joined. Many units are compressed on several threads. Sets [`FileUnits::start_failed`].
pub(crate) fn compress(batches: &mut [FileUnits<'_>], sectorsize: u32) {
    let mut work: Vec<Mutex<CompressJob<'_, '_>>> = Vec::new();
    for batch in &mut *batches {
        let Some(method) = batch.policy.compress else { continue };
        let (runs, policy, start_failed) = (batch.runs, batch.policy, &batch.start_failed);
        for unit in batch.units.iter_mut().filter(|unit| unit.is_new()) {
            work.push(Mutex::new(CompressJob { runs, unit, method, force: policy.force, start_failed }));
        }
    }
    let next = AtomicUsize::new(0);
    let drain = || {
        while let Some(slot) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            slot.lock().run(sectorsize);
        }
    };
    if work.len() < PARALLEL_UNITS {
        drain();
    } else {
        let nr_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MAX_THREADS);
        std::thread::scope(|scope| {
            for _ in 1..nr_threads {
                scope.spawn(drain);
            }
            drain();
        });
    }
    drop(work);
    for batch in batches.iter_mut().filter(|batch| batch.policy.compress.is_some()) {
        batch.units = join_plain(std::mem::take(&mut batch.units));
    }
}

/// One unit to compress.
struct CompressJob<'b, 'r> {
    runs: &'r [DataRun],
    unit: &'b mut WritebackUnit,
    method: CompressionMethod,
    force: bool,
    start_failed: &'b AtomicBool,
}

impl CompressJob<'_, '_> {
    fn run(&mut self, sectorsize: u32) {
        let unit = &mut *self.unit;
        match compress_unit(&self.runs[unit.run], &unit.range, self.method, self.force, sectorsize) {
            CompressResult::Packed(bytes) => {
                unit.target = UnitTarget::Compressed { bytenr: Logical(0), kind: self.method.kind, bytes };
            }
            CompressResult::NotTried => {}
            CompressResult::DoesNotPay => {
                if unit.range.start == 0 {
                    self.start_failed.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

/// The outcome of compressing a unit.
enum CompressResult {
    /// The compressed bytes, padded to whole sectors.
    Packed(AlignedBuf),
    /// Compression saves less than one sector.
    DoesNotPay,
    /// The unit is too small, or does not look compressible.
    NotTried,
}

fn compress_unit(
    run: &DataRun,
    range: &Range<u64>,
    method: CompressionMethod,
    force: bool,
    sectorsize: u32,
) -> CompressResult {
    let sectorsize = sectorsize as usize;
    let len = (range.end - range.start) as usize;
    if len <= sectorsize {
        return CompressResult::NotTried;
    }
    let pieces = run.pieces(range.clone());
    let joined;
    let input = match pieces.as_slice() {
        [piece] => *piece,
        pieces => {
            joined = pieces.concat();
            joined.as_slice()
        }
    };
    if !force && !compression::looks_compressible(input) {
        return CompressResult::NotTried;
    }
    let Some(compressed) = compression::compress(method, input, len - sectorsize, sectorsize) else {
        return CompressResult::DoesNotPay;
    };
    let padded_len = compressed.len().next_multiple_of(sectorsize);
    let mut packed = AlignedBuf::with_capacity(padded_len);
    packed.extend_from_slice(&compressed);
    packed.resize(padded_len);
    CompressResult::Packed(packed)
}

/// Joins adjacent units that are not compressed into larger extents.
fn join_plain(units: Vec<WritebackUnit>) -> Vec<WritebackUnit> {
    let mut joined: Vec<WritebackUnit> = Vec::with_capacity(units.len());
    for unit in units {
        if let Some(last) = joined.last_mut()
            && last.run == unit.run
            && last.range.end == unit.range.start
            && matches!((&last.target, &unit.target), (UnitTarget::Plain { .. }, UnitTarget::Plain { .. }))
            && unit.range.end - last.range.start <= MAX_EXTENT
        {
            last.range.end = unit.range.end;
        } else {
            joined.push(unit);
        }
    }
    joined
}

/// The units of one file, with the runs that they were cut from.
#[derive(Debug)]
pub(crate) struct FileUnits<'r> {
    /// The runs that units refer to by index.
    pub runs: &'r [DataRun],
    /// The units.
    pub units: Vec<WritebackUnit>,
    /// The rules for writing the units.
    pub policy: Policy,
    /// Set if compressing the start of the file saved less than a sector.
    pub start_failed: AtomicBool,
}

/// Allocates, checksums and writes all units of several files. Adjacent units share one allocation and one write.
/// `reservation` covers the units. Allocation begins at `hint`, which is moved to the end of the allocated space. After
/// an error, all space that this call allocated is released, and `reservation` covers the units again.
pub(crate) fn write_out(
    engine: &Engine,
    batches: &mut [FileUnits<'_>],
    reservation: &mut DataReservation,
    hint: &Mutex<Option<Logical>>,
) -> Result<()> {
    let mut extents = Vec::new();
    let behind = *hint.lock();
    let result = allocate(engine, batches, reservation, behind, &mut extents).and_then(|end| {
        *hint.lock() = end;
        write_units(engine, batches)
    });
    if result.is_err() {
        extents.into_iter().for_each(|extent| engine.release_data_promised(extent, reservation));
    }
    result
}

fn allocate(
    engine: &Engine,
    batches: &mut [FileUnits<'_>],
    reservation: &mut DataReservation,
    mut hint: Option<Logical>,
    extents: &mut Vec<DataExtent>,
) -> Result<Option<Logical>> {
    let sectorsize = u64::from(engine.geometry().sectorsize);
    let mut wanted: u64 =
        batches.iter().flat_map(|batch| &batch.units).filter(|unit| unit.is_new()).map(WritebackUnit::disk_len).sum();
    // The unused rest of the last allocation.
    let mut free: Range<u64> = 0..0;
    for batch in batches {
        let mut units = Vec::with_capacity(batch.units.len());
        let mut waiting: Vec<WritebackUnit> = std::mem::take(&mut batch.units);
        waiting.reverse();
        while let Some(mut unit) = waiting.pop() {
            if !unit.is_new() {
                units.push(unit);
                continue;
            }
            let len = unit.disk_len();
            let is_plain = matches!(unit.target, UnitTarget::Plain { .. });
            if free.is_empty() || (!is_plain && free.end - free.start < len) {
                release(engine, extents, &free, reservation);
                let min = if is_plain { sectorsize } else { len };
                let want = wanted.min(MAX_ALLOCATION).max(len);
                let extent = match engine.allocate_data(reservation, want, min, hint) {
                    // No free range is large enough for the compressed extent, which cannot be split. The reservation
                    // covers the uncompressed bytes, so the uncompressed bytes are written to smaller free ranges
                    // instead.
                    Err(ubtrfs_error::Error::NoSpace) if !is_plain => {
                        unit.target = UnitTarget::Plain { bytenr: Logical(0) };
                        wanted = wanted - len + unit.disk_len();
                        free = 0..0;
                        waiting.push(unit);
                        continue;
                    }
                    extent => extent?,
                };
                free = extent.bytenr.0..extent.bytenr.0 + extent.len_bytes;
                hint = Some(Logical(free.end));
                extents.push(extent);
            }
            let room = free.end - free.start;
            if room < len {
                // The allocated space ends inside the unit, most often because free space is fragmented. So cut the
                // unit in two.
                let middle = unit.range.start + room;
                waiting.push(WritebackUnit {
                    run: unit.run,
                    range: middle..unit.range.end,
                    target: UnitTarget::Plain { bytenr: Logical(0) },
                    csums: Vec::new(),
                });
                unit.range.end = middle;
            }
            let len = unit.disk_len();
            unit.set_bytenr(Logical(free.start));
            free.start += len;
            wanted -= len;
            units.push(unit);
        }
        batch.units = units;
    }
    release(engine, extents, &free, reservation);
    Ok(hint)
}

/// Releases the unused end of the last allocation (I3).
fn release(engine: &Engine, extents: &mut [DataExtent], free: &Range<u64>, reservation: &mut DataReservation) {
    if let Some(last) = extents.last_mut()
        && !free.is_empty()
    {
        let len_bytes = free.end - free.start;
        engine.release_data_promised(DataExtent { bytenr: Logical(free.start), len_bytes }, reservation);
        last.len_bytes -= len_bytes;
    }
}

/// Checksums all units and writes them, adjacent ones in one write.
fn write_units(engine: &Engine, batches: &mut [FileUnits<'_>]) -> Result<()> {
    let geometry = engine.geometry();
    for batch in &mut *batches {
        if !batch.policy.csums {
            continue;
        }
        for unit in &mut batch.units {
            let mut csums = Vec::new();
            for slice in unit.slices(&batch.runs[unit.run]) {
                geometry.csum_type.compute_sectors(slice, geometry.sectorsize as usize, &mut csums);
            }
            unit.csums = csums;
        }
    }
    let mut pending: Vec<IoSlice<'_>> = Vec::new();
    let mut range = 0..0;
    // One write may hold units of several files, so writes are verifiable only if all of these files have checksums.
    let verifiable = batches.iter().all(|batch| batch.policy.csums);
    for batch in &*batches {
        for unit in &batch.units {
            let at = unit.bytenr().0;
            if at != range.end {
                flush(engine, &mut pending, &range, verifiable)?;
                range = at..at;
            }
            pending.extend(unit.slices(&batch.runs[unit.run]).into_iter().map(IoSlice::new));
            range.end += unit.disk_len();
        }
    }
    flush(engine, &mut pending, &range, verifiable)
}

fn flush(engine: &Engine, pending: &mut Vec<IoSlice<'_>>, range: &Range<u64>, verifiable: bool) -> Result<()> {
    if !pending.is_empty() {
        engine.write_data_vectored(Logical(range.start), pending, verifiable)?;
        pending.clear();
    }
    Ok(())
}

/// Cuts a written unit into two consecutive extents. Returns false if that is impossible.
pub(crate) fn halve(units: &mut Vec<WritebackUnit>, index: usize, geometry: FilesystemGeometry) -> bool {
    let unit = &mut units[index];
    let (start, sectorsize) = (unit.range.start, u64::from(geometry.sectorsize));
    let nr_sectors = (unit.range.end - start) / sectorsize / 2;
    let UnitTarget::Plain { bytenr } = &unit.target else { return false };
    if nr_sectors == 0 {
        return false;
    }
    let len = nr_sectors * sectorsize;
    let csums = match unit.csums.is_empty() {
        true => Vec::new(),
        false => unit.csums.split_off(nr_sectors as usize * geometry.csum_type.size()),
    };
    let target = UnitTarget::Plain { bytenr: Logical(bytenr.0 + len) };
    let second = WritebackUnit { run: unit.run, range: start + len..unit.range.end, target, csums };
    unit.range.end = start + len;
    units.insert(index + 1, second);
    true
}

/// With at least this many units, compression uses several threads.
const PARALLEL_UNITS: usize = 4;
const MAX_THREADS: usize = 16;
/// The largest single allocation.
const MAX_ALLOCATION: u64 = 256 << 20;
