//! Trim: telling the devices which space is free.
//!
//! Invariants:
//! - I1. Free space of a block group is allocated while it is discarded, so no data is written to this space during the
//!   discard. The space is reserved before it is allocated, so that space promised to other reservations stays free.
//! - I2. Device space without chunks is discarded under the lock that is held while a chunk is placed, so no chunk is
//!   placed in this space during the discard.

use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;
use ubtrfs_space::{BlockGroup, Extent, SpaceKind};

use crate::engine::Engine;
use crate::job::Job;
use crate::race::race_point;

/// Maximum bytes of a piece. A piece is discarded in one request and cannot be allocated during that request.
const PIECE_BYTES: u64 = 64 << 20;
/// Bytes of a piece of device space without chunks, on devices of less than 64 TiB. No chunk is placed while a piece is
/// discarded.
const HOLE_PIECE_BYTES: u64 = 1 << 30;
/// The most pieces of such a space: a device may say that it is as large as can be.
const HOLE_PIECES_MAX: u64 = 64 << 10;
/// If a piece cannot be reserved, smaller pieces are tried, down to this number of bytes.
const PIECE_BYTES_MIN: u64 = 1 << 20;

impl Engine {
    /// Discards the space that commits freed since the last call and that is still free. Used if the filesystem was
    /// opened with `discard_later`.
    ///
    /// # Errors
    ///
    /// As for [`Engine::trim`]. After an error, the remaining ranges are dropped: no later call discards them.
    pub fn discard_freed(&self, job: &Job) -> Result<()> {
        for (start, end) in self.freed.take() {
            // A range can extend over several block groups.
            let mut at = start;
            while let Some(group) = self.space.block_group_from(Logical(at)).filter(|group| group.start.0 < end) {
                let group_end = group.start.advance(group.len_bytes).0;
                for free in self.free_ranges(&(at.max(group.start.0)..end.min(group_end))) {
                    self.trim_free(&group, free, job)?;
                }
                at = group_end;
            }
        }
        Ok(())
    }

    /// Discards free space on the devices: the free ranges of at least `min_bytes` in `range` (logical addresses), and
    /// all device space that belongs to no chunk. Commits first, so that space freed until now is included. Units of
    /// `job` are bytes of block groups. Returns the number of bytes discarded on the devices.
    ///
    /// # Errors
    ///
    /// `Unsupported` if no device supports discards; [`Io`](ubtrfs_error::Error::Io) if a device fails; `Cancelled`.
    pub fn trim(&self, range: &Range<u64>, min_bytes: u64, job: &Job) -> Result<u64> {
        self.check_writable()?;
        if !self.volumes.can_discard() {
            let what = "discarding free space of a device without discards".to_owned();
            return Err(Error::Unsupported { what, hint: "its free space need not be discarded" });
        }
        self.commit()?;
        let min_bytes = min_bytes.max(self.geometry.sectorsize.into());
        let groups = self.space.block_groups();
        groups.iter().for_each(|group| job.add_total(group.len_bytes));
        let mut trimmed = 0u64;
        for group in groups {
            let part = range.start.max(group.start.0)..range.end.min(group.start.advance(group.len_bytes).0);
            for free in self.free_ranges(&part) {
                if free.end.saturating_sub(free.start) >= min_bytes {
                    trimmed = trimmed.saturating_add(self.trim_free(&group, free, job)?);
                }
            }
            job.advance(group.len_bytes);
        }
        for (devid, hole) in self.volumes.unallocated_ranges() {
            let mut at = hole.start;
            let piece = hole.end.saturating_sub(at).div_ceil(HOLE_PIECES_MAX).next_multiple_of(HOLE_PIECE_BYTES);
            while at < hole.end {
                job.check()?;
                let end = hole.end.min(at.saturating_add(piece));
                // I2
                let _making = self.pending_chunks.lock_making();
                trimmed = trimmed.saturating_add(self.volumes.discard_unallocated(devid, at..end)?);
                at = end;
            }
        }
        Ok(trimmed)
    }

    /// The free ranges in a part of a block group.
    fn free_ranges(&self, part: &Range<u64>) -> Vec<Range<u64>> {
        if part.start >= part.end || self.space.is_read_only(Logical(part.start)) {
            return Vec::new();
        }
        let mut free = Vec::new();
        let mut at = part.start;
        for taken in self.space.taken_ranges(part.clone()) {
            free.push(at..taken.start);
            at = taken.end;
        }
        free.push(at..part.end);
        free.retain(|range| range.start < range.end);
        free
    }

    /// Discards the parts of a range that are still free.
    fn trim_free(&self, group: &BlockGroup, free: Range<u64>, job: &Job) -> Result<u64> {
        let kind = SpaceKind::of(group.flags);
        let mut most = PIECE_BYTES;
        let mut trimmed = 0u64;
        let mut at = free.start;
        while at < free.end {
            job.check()?;
            let end = free.end.min(at.saturating_add(most));
            let piece = Extent::new(Logical(at), end.saturating_sub(at));
            // I1
            let Ok(reservation) = self.space.reserve(kind, piece.len_bytes) else {
                if most <= PIECE_BYTES_MIN {
                    // The rest of the range is promised to other reservations.
                    break;
                }
                most /= 2;
                continue;
            };
            at = end;
            race_point();
            let is_free = self.space.allocate_exact(piece);
            drop(reservation);
            race_point();
            if !is_free {
                // Another thread has allocated a part of the piece.
                continue;
            }
            let discarded = self.volumes.discard(piece.bytenr, piece.len_bytes);
            self.space.release(piece);
            discarded?;
            let nr_copies = self.volumes.num_copies(piece.bytenr) as u64;
            trimmed = trimmed.saturating_add(piece.len_bytes.saturating_mul(nr_copies));
        }
        Ok(trimmed)
    }
}
