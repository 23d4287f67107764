//! [`WritebackJob`]: the data of one inode that a batch of writeback writes, cut into units.
//!
//! - I1. Only a job that holds the writeback lock exclusively writes into existing extents (I2 of
//!   [`crate::inode::writeback_lock`]), and only into extents that no other file uses, now or in the last commit.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtentBody};
use ubtrfs_transaction::{DataReservation, FilesystemGeometry, QuotaReservation, TransHandle, race_point};

use crate::inode::file_data::DataRun;
use crate::inode::state::Inode;
use crate::inode::writeback_lock::BatchGuard;
use crate::items::file_extent::{ExtentAt, extents_in};
use crate::writeback::inline_data::InlineData;
use crate::writeback::ordered_data::{self, Policy, UnitTarget, WritebackUnit};
use crate::{Fs, Result};

/// Data of one inode under writeback.
pub(super) struct WritebackJob<'i> {
    pub(super) inode: &'i Arc<Inode>,
    pub(super) runs: Vec<DataRun>,
    pub(super) units: Vec<WritebackUnit>,
    /// Number of units whose items were put. These are the first units of the job.
    pub(super) nr_put: usize,
    pub(super) bytes: u64,
    pub(super) reservation: Option<DataReservation>,
    /// The job's share of the reserved quota, kept here while `reservation` is merged with the reservations of other
    /// jobs.
    pub(super) quota: QuotaReservation,
    /// Number of bytes that `reservation` had before it was merged with the reservations of other jobs.
    pub(super) promised: u64,
    /// Whether some dirty data of the inode, in the job or not, had no reservation.
    pub(super) has_unreserved: bool,
    pub(super) policy: Policy,
    /// The whole file as an inline extent; the job then has no units.
    pub(super) inline: Option<InlineData>,
    /// Whether some data may be written into existing extents of the file.
    pub(super) in_place: bool,
    /// Whether the file is without copy-on-write, so that data may overwrite existing data, not only preallocated
    /// extents.
    pub(super) overwrite: bool,
    /// Whether the file's `nbytes` is 0, so that it probably has no extent items.
    pub(super) may_be_new: bool,
    /// Whether compressing the file's start saved less than a sector.
    pub(super) start_failed: bool,
    /// The size on disk once the job's data is written (`FileData::reach_with`), given the data that was pending when
    /// the job was prepared.
    pub(super) reach: u64,
    pub(super) guard: BatchGuard<'i>,
}

impl WritebackJob<'_> {
    /// Cuts the runs into units.
    pub(super) fn cut(&mut self, fs: &Fs) -> Result<()> {
        let mut ranges = Vec::new();
        let mut in_place = Vec::new();
        for (index, run) in self.runs.iter().enumerate() {
            let range = run.offset..run.end();
            if self.in_place {
                self.split_in_place(fs, index, range, &mut ranges, &mut in_place)?;
            } else {
                ranges.push((index, range));
            }
        }
        let mut units = ordered_data::cut(&ranges, &self.policy);
        if !in_place.is_empty() {
            units.append(&mut in_place);
            units.sort_by_key(|unit| unit.range.start);
        }
        self.units = units;
        Ok(())
    }

    /// Puts the checksums of the next units up to `end`. Checksums of adjacent new extents are joined and put in one
    /// call.
    #[allow(clippy::arithmetic_side_effects, reason = "the extents were allocated, so their ends are addresses")]
    pub(super) fn put_csums(&mut self, op: &TransHandle<'_>, geometry: FilesystemGeometry, end: usize) {
        let csum_size = geometry.csum_type.size();
        let mut pending: Option<(Logical, Vec<u8>)> = None;
        for unit in &mut self.units[self.nr_put..end] {
            let csums = std::mem::take(&mut unit.csums);
            if csums.is_empty() {
                continue;
            }
            if !unit.is_new() {
                op.add_csums(unit.bytenr(), csums);
                continue;
            }
            let end =
                |at: Logical, csums: &[u8]| at.0 + (csums.len() / csum_size) as u64 * u64::from(geometry.sectorsize);
            match &mut pending {
                Some((at, joined)) if end(*at, joined) == unit.bytenr().0 => joined.extend_from_slice(&csums),
                pending => {
                    if let Some((at, joined)) = pending.replace((unit.bytenr(), csums)) {
                        op.add_csums(at, joined);
                    }
                }
            }
        }
        if let Some((at, joined)) = pending {
            op.add_csums(at, joined);
        }
    }

    /// Splits a range into parts that need new extents and parts that are written into existing extents of the file.
    /// These existing extents are neither compressed nor shared: they are preallocated or, in a file without
    /// copy-on-write and checksums, hold data.
    fn split_in_place(
        &self,
        fs: &Fs,
        run: usize,
        range: Range<u64>,
        new: &mut Vec<(usize, Range<u64>)>,
        in_place: &mut Vec<WritebackUnit>,
    ) -> Result<()> {
        assert!(self.guard.is_exclusive(), "I1: a batch that shares the writeback lock writes in place");
        let inode = self.inode;
        let mut from = range.start;
        while from < range.end {
            let extents = extents_in(&inode.home.tree, inode.id.ino, from..range.end, 256, fs.geometry.sectorsize)?;
            if extents.is_empty() {
                break;
            }
            race_point();
            for at in extents {
                let part = at.start.max(range.start)..at.end.min(range.end);
                if self.may_write_into(fs, &at)? {
                    push_range(new, run, from..part.start);
                    in_place.push(WritebackUnit {
                        run,
                        range: part.clone(),
                        target: UnitTarget::InPlace { at },
                        csums: Vec::new(),
                    });
                } else {
                    push_range(new, run, from..part.end);
                }
                from = part.end;
            }
        }
        push_range(new, run, from..range.end);
        Ok(())
    }

    fn may_write_into(&self, fs: &Fs, at: &ExtentAt) -> Result<bool> {
        if at.extent.compression != Compression::None {
            return Ok(false);
        }
        let extent = match &at.extent.body {
            FileExtentBody::Prealloc(extent) => extent,
            FileExtentBody::Regular(extent) if self.overwrite && !self.policy.csums => extent,
            _ => return Ok(false),
        };
        let id = self.inode.id;
        Ok(extent.disk_bytenr.0 != 0 && !fs.engine.extent_is_shared(id.root, id.ino, at.start, extent)?)
    }
}

fn push_range(ranges: &mut Vec<(usize, Range<u64>)>, run: usize, range: Range<u64>) {
    if range.is_empty() {
        return;
    }
    match ranges.last_mut() {
        Some((last_run, last)) if *last_run == run && last.end == range.start => last.end = range.end,
        _ => ranges.push((run, range)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_run_that_touch_are_one_range() {
        let mut ranges = Vec::new();
        for (run, range) in [(0, 0..4096), (0, 4096..4096), (0, 4096..8192), (0, 12288..16384), (1, 16384..20480)] {
            push_range(&mut ranges, run, range);
        }
        assert_eq!(ranges, [(0, 0..8192), (0, 12288..16384), (1, 16384..20480)]);
    }
}
