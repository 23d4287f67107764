//! Moving one chunk to other places on the devices, while other threads use it.
//!
//! The head of [`crate::extents::chunk_migration`] states the invariants of a migration.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;
use ubtrfs_volumes::{ChunkPlacement, MIGRATION_PIECE_BYTES};

use crate::engine::Engine;
use crate::job::Job;
use crate::nodes::threads::work_off;
use crate::race::race_point;

/// The result of [`Engine::migrate_chunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigratedChunk {
    /// Bytes of the chunk that were copied. A byte counts once, even if several copies of it were made.
    pub copied_bytes: u64,
    /// Whether the chunk changed. False if the chunk already has the requested place and profile.
    pub has_changed: bool,
}

impl Engine {
    /// Moves the chunk of the block group that starts at `start`. Returns when the move is durable. Units of `job`
    /// are bytes of one copy.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if the devices have no room; [`Error::Cancelled`]; [`Error::Refused`] if there is no such
    /// block group; [`Error::BlockGroupBusy`]; an error of a read, a write or a commit; [`Error::Corrupt`] if data
    /// contradicts its checksum. After an error, the block group stays where it was.
    pub fn migrate_chunk(&self, start: Logical, placement: &ChunkPlacement, job: &Job) -> Result<MigratedChunk> {
        self.abort_state.check_not_aborted()?;
        if self.space.is_on_seed(start) {
            // Its tree blocks carry the fsid of the seed, with which they may only lie on a seed device.
            return Err(Error::Refused {
                what: format!("block group {start} lies on a seed"),
                hint: "empty it instead: ubtrfs balance start",
            });
        }
        if self.pending_chunks.contains(start) {
            self.commit()?;
        }
        self.claims.begin_move(start)?;
        let moved = self.copy_and_record(start, placement, job);
        if moved.is_err() && self.claims.cancel_move(start) {
            self.volumes.cancel_migration(start);
            race_point();
            self.claims.end(start);
        }
        self.update_unallocated();
        moved
    }

    fn copy_and_record(&self, start: Logical, placement: &ChunkPlacement, job: &Job) -> Result<MigratedChunk> {
        let group = self.space.block_group_at(start).filter(|group| group.start == start);
        let chunk = self.volumes.chunk_at(start).filter(|(logical, _)| *logical == start);
        let (Some(group), Some((_, chunk))) = (group, chunk) else {
            return Err(Error::Refused {
                what: format!("there is no block group at {start}"),
                hint: "see: ubtrfs inspect dump-tree -t chunk",
            });
        };
        let drops_copies = {
            // Between the plan and the start of the migration, no other chunk may take the planned place.
            let _making = self.pending_chunks.lock_making();
            let target = self.volumes.plan_migration(start, placement).ok_or(Error::NoSpace)?;
            if target == *chunk {
                self.claims.end(start);
                return Ok(MigratedChunk { copied_bytes: 0, has_changed: false });
            }
            self.check_system_chunk_fits(start, &target)?;
            let drops_copies = target.stripes.len() < chunk.stripes.len();
            self.volumes.begin_migration(start, target)?;
            drops_copies
        };
        job.add_total(group.len_bytes);
        let copied_bytes = AtomicU64::new(0);
        let new_buf = || AlignedBuf::with_capacity(usize::try_from(MIGRATION_PIECE_BYTES).unwrap_or_default());
        work_off(pieces(start.0..start.advance(group.len_bytes).0), new_buf, |buf, piece| {
            job.check()?;
            self.abort_state.check_not_aborted()?;
            if drops_copies {
                // Repairing the first copy once is enough: during a migration, a failed write to any copy fails the
                // migration.
                self.repair_first_copy(&joined(self.space.taken_ranges(piece.clone())))?;
            }
            let taken = || joined(self.space.taken_ranges(piece.clone()));
            let offset = piece.start.saturating_sub(start.0);
            let mut check = self.begin_check(&piece)?;
            let copied = self.volumes.copy_piece(start, offset, buf, &taken, &mut |at, content| {
                check.look(at, content);
            })?;
            self.finish_check(check)?;
            copied_bytes.fetch_add(copied, Ordering::Relaxed);
            job.advance(len_of(&piece));
            Ok(())
        })?;
        let copied_bytes = copied_bytes.into_inner();
        self.claims.note_copied(start);
        while self.claims.is_copied(start) {
            self.commit()?;
            if let Some(error) = self.claims.failure_of(start) {
                return Err(error);
            }
        }
        Ok(MigratedChunk { copied_bytes, has_changed: true })
    }
}

/// Cuts a range into pieces.
fn pieces(range: Range<u64>) -> impl ExactSizeIterator<Item = Range<u64>> + Send {
    let nr = usize::try_from(len_of(&range).div_ceil(MIGRATION_PIECE_BYTES)).unwrap_or(usize::MAX);
    (0..nr).map(move |number| {
        let start = range.start.saturating_add((number as u64).saturating_mul(MIGRATION_PIECE_BYTES));
        start..start.saturating_add(MIGRATION_PIECE_BYTES).min(range.end)
    })
}

/// Joins ranges with small gaps between them: copying a gap costs less than another request.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start.saturating_sub(last.end) <= GAP_BYTES => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

fn len_of(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// Longest gap that is copied.
const GAP_BYTES: u64 = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_their_range_and_near_ranges_are_joined() {
        let piece = MIGRATION_PIECE_BYTES;
        assert_eq!(
            pieces(5..5 + 2 * piece + 1).collect::<Vec<_>>(),
            [5..5 + piece, 5 + piece..5 + 2 * piece, 5 + 2 * piece..6 + 2 * piece]
        );
        assert_eq!(
            joined(vec![0..1, 1 + GAP_BYTES..2 + GAP_BYTES, 1 << 30..2 << 30]),
            [0..2 + GAP_BYTES, 1 << 30..2 << 30]
        );
    }
}
