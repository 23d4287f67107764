//! Moves a chunk to other places on the devices, or to another number of copies, while the chunk is read and written.
//!
//! The chunk's logical addresses stay, so no tree that refers to them changes. The new chunk item is the chunk's
//! *target*. Stripes of the target that are not stripes of the chunk are *fresh*.
//!
//! ```text
//! begin_migration -> copy_piece for all pieces -> (a commit records the new chunk item) -> finish_migration
//!        |                                                                                      |
//!        +---------------- writes go to the chunk's stripes and to the fresh ones ---------------+
//! ```
//!
//! Invariants:
//! - G1. Between the copy of a piece and the end of the migration, the piece's fresh stripes have the content of the
//!   chunk's copies. To ensure this, a write holds the locks of its pieces shared while it writes the chunk's copies
//!   and the fresh stripes, and the copy of a piece holds the piece's lock exclusively. Locks are taken in ascending
//!   order.
//! - G2. No write to a chunk misses the chunk's target: a migration begins and ends under the exclusive layout lock,
//!   which every write holds shared.
//! - G3. The device space of stripes from which a migration moved a chunk is free only when no reader uses these
//!   stripes any more.
//! - G4. If a write to any copy of the chunk, old or fresh, failed during a migration, the migration cannot be
//!   recorded: the copies that stay may be stale.
//! - G5. After the running commit has recorded the new chunk item, a write to the chunk fails if a fresh stripe
//!   cannot be written.
//! - G6. If the profile needs several devices, the copies of a chunk lie on different devices.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{DevId, Logical, Physical, Profile};

use crate::allocation;
use crate::chunk_map::Chunk;
use crate::device_space::DeviceSpace;
use crate::profile::{STRIPE_LEN, Segment};
use crate::set::{PlaceableDevice, Volumes, unmapped};

/// The requested layout of a chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPlacement {
    /// The new profile, in which each stripe has all bytes: empty for single, DUP, RAID1, RAID1C3 or RAID1C4. `None`
    /// keeps the profile that the chunk has when the migration is planned.
    pub profile: Option<BlockGroupFlags>,
    /// Whether stripes that end below the limits of their devices ([`Volumes::limit_device`]) stay where they are.
    /// If not set, all stripes move.
    pub keeps_stripes: bool,
}

/// The new layout of a chunk that is being migrated.
#[derive(Debug)]
pub(crate) struct MigrationTarget {
    pub(crate) item: Arc<ChunkItem>,
    /// Indexes of the fresh stripes in `item`.
    fresh: Vec<usize>,
    /// Locks of pieces (G1). The number of a piece modulo the number of locks selects the lock of the piece.
    pieces: Vec<RwLock<()>>,
    /// Whether a write to any copy failed (G4).
    has_failed: AtomicBool,
    /// Whether the running commit has recorded the new item (G5).
    is_recorded: AtomicBool,
}

impl MigrationTarget {
    pub(crate) fn new(chunk: &ChunkItem, item: ChunkItem) -> Self {
        let is_fresh = |stripe: &Stripe| !chunk.stripes.iter().any(|old| is_same_place(old, stripe));
        let fresh = item.stripes.iter().enumerate().filter(|(_, stripe)| is_fresh(stripe)).map(|(n, _)| n).collect();
        Self {
            item: Arc::new(item),
            fresh,
            pieces: (0..NR_PIECE_LOCKS).map(|_| RwLock::new(())).collect(),
            has_failed: AtomicBool::new(false),
            is_recorded: AtomicBool::new(false),
        }
    }

    pub(crate) fn fresh_stripes(&self) -> impl Iterator<Item = &Stripe> {
        self.fresh.iter().filter_map(|&index| self.item.stripes.get(index))
    }

    /// Notes that a write to a copy failed (G4).
    pub(crate) fn has_stripe_on(&self, devid: DevId) -> bool {
        self.item.stripes.iter().any(|stripe| stripe.devid == devid)
    }

    pub(crate) fn has_fresh_stripe_on(&self, devid: DevId) -> bool {
        self.fresh_stripes().any(|stripe| stripe.devid == devid)
    }

    /// Whether the running commit, or an earlier one, has recorded the new chunk item.
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded.load(Ordering::SeqCst)
    }

    pub(crate) fn note_failure(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// Prevents the pieces of a range of the chunk from being copied while the returned guards are held.
    pub(crate) fn begin_write(&self, offset: u64, len: usize) -> Vec<RwLockReadGuard<'_, ()>> {
        let last = offset.saturating_add((len as u64).saturating_sub(1)) / MIGRATION_PIECE_BYTES;
        let first = offset / MIGRATION_PIECE_BYTES;
        let is_among = |index: u64| index.wrapping_sub(first) % NR_PIECE_LOCKS <= last.saturating_sub(first);
        (0..).zip(&self.pieces).filter(|(index, _)| is_among(*index)).map(|(_, lock)| lock.read()).collect()
    }

    fn begin_copy(&self, offset: u64) -> RwLockWriteGuard<'_, ()> {
        let index = offset / MIGRATION_PIECE_BYTES % NR_PIECE_LOCKS;
        self.pieces[usize::try_from(index).unwrap_or_default()].write()
    }
}

/// Whether two stripes are the same device extent. The chunks of the two stripes must have equal lengths.
pub(crate) fn is_same_place(one: &Stripe, other: &Stripe) -> bool {
    (one.devid, one.offset) == (other.devid, other.offset)
}

impl Volumes {
    /// Plans another place or profile for the chunk that starts at `logical`. Returns `None` if there is no such chunk
    /// or no room, or if the chunk or the new profile is striped. The plan equals the chunk's item if the chunk need not
    /// change. Copies of a profile with several devices never share a device (G6).
    pub fn plan_migration(&self, logical: Logical, placement: &ChunkPlacement) -> Option<ChunkItem> {
        let chunk = self.chunks.get(logical).filter(|chunk| chunk.start() == logical)?;
        let own = chunk.item.flags & BlockGroupFlags::PROFILES;
        let flags = chunk.item.flags.difference(BlockGroupFlags::PROFILES) | placement.profile.unwrap_or(own);
        let profile = allocation::writable_profile(flags)?;
        if !chunk.geometry.is_mirrored() || profile.is_striped() {
            return None;
        }
        let present = self.present();
        let fits = |stripe: &Stripe| {
            let end = stripe.offset.checked_add(chunk.item.length).map(|end| end.0);
            let device = present.iter().find(|device| device.devid == stripe.devid);
            let limit = device.map(|device| self.with_space(device, DeviceSpace::end));
            end.zip(limit).is_some_and(|(end, limit)| end <= limit)
        };
        // A stripe that stays keeps its number, so that each fresh stripe is copied from the copy that it replaces.
        let mut stripes: Vec<Option<Stripe>> = Vec::new();
        for copy in 0..usize::from(profile.stripes_min()) {
            let stays = |stripe: &Stripe| {
                let mut kept = stripes.iter().flatten();
                let keeps_apart = match profile.fits_one_device() {
                    true => kept.all(|other| other.devid == stripe.devid),
                    false => kept.all(|other| other.devid != stripe.devid),
                };
                placement.keeps_stripes && keeps_apart && fits(stripe)
            };
            let kept = chunk.item.stripes.get(copy).copied().filter(stays);
            stripes.push(kept);
        }
        self.place_stripes(&present, chunk.item.length, profile, &mut stripes)?;
        let stripes: Vec<Stripe> = stripes.into_iter().flatten().collect();
        Some(ChunkItem { flags, stripes, sub_stripes: profile.sub_stripes, ..(*chunk.item).clone() })
    }

    /// Fills the gaps in `stripes` with places for stripes of `len` bytes: on the device of the others for profiles of
    /// one device, else each on a device of its own. Devices with the most free space come first.
    fn place_stripes(
        &self,
        present: &[PlaceableDevice],
        len: u64,
        profile: &Profile,
        stripes: &mut [Option<Stripe>],
    ) -> Option<()> {
        let mut devices: Vec<&PlaceableDevice> = present.iter().collect();
        devices.sort_by_key(|device| std::cmp::Reverse(self.with_space(device, DeviceSpace::unallocated_bytes)));
        let kept: Vec<DevId> = stripes.iter().flatten().map(|stripe| stripe.devid).collect();
        let nr_missing = stripes.iter().filter(|stripe| stripe.is_none()).count();
        let stripe = |device: &PlaceableDevice, start| Stripe {
            devid: device.devid,
            offset: Physical(start),
            dev_uuid: device.uuid,
        };
        let starts = |device: &PlaceableDevice, number| {
            self.with_space(device, |space| space.starts_without_mirrors(len, number))
        };
        let fresh: Vec<Stripe> = if profile.fits_one_device() {
            let allowed = devices.iter().filter(|device| kept.iter().all(|devid| *devid == device.devid));
            let mut found = allowed.map(|device| (device, starts(device, nr_missing)));
            let (device, starts) = found.find(|(_, starts)| starts.len() == nr_missing)?;
            starts.into_iter().map(|start| stripe(device, start)).collect()
        } else {
            let others = devices.iter().filter(|device| !kept.contains(&device.devid));
            let placed = others.filter_map(|device| Some(stripe(device, starts(device, 1).first().copied()?)));
            placed.take(nr_missing).collect()
        };
        if fresh.len() < nr_missing {
            return None;
        }
        for (gap, fresh) in stripes.iter_mut().filter(|stripe| stripe.is_none()).zip(fresh) {
            *gap = Some(fresh);
        }
        Some(())
    }

    /// The smallest size, at least `least`, to which a device can be shrunk by moving whole stripes: all stripes past
    /// the new end find holes below it, in the order in which a resize moves them. `None` if there is no such device.
    /// At smaller sizes, extents have to move into the free space of other chunks.
    pub fn min_device_len(&self, devid: DevId, least: u64) -> Option<u64> {
        let item = self.dev_item(devid)?;
        let device = PlaceableDevice { devid, uuid: item.uuid, total_bytes: item.total_bytes, is_missing: false };
        let space = self.with_space(&device, DeviceSpace::clone);
        let mut stripes: Vec<Range<u64>> = Vec::new();
        for (_, chunk) in self.chunks().into_iter().rev() {
            let own = chunk.stripes.iter().filter(|stripe| stripe.devid == devid);
            stripes
                .extend(own.map(|stripe| stripe.offset.0..stripe.offset.0.saturating_add(chunk.device_extent_len())));
        }
        let fits = |end: u64| {
            let mut cut = space.clone();
            cut.set_end(end);
            let mut past = stripes.iter().filter(|stripe| stripe.end > end);
            past.all(|stripe| take_hole(&mut cut, allocation::len_bytes(stripe)).is_some())
        };
        let (mut low, mut high) = (least.div_ceil(STRIPE_LEN), item.total_bytes.div_ceil(STRIPE_LEN));
        while low < high {
            let middle = low.midpoint(high);
            if fits(middle.saturating_mul(STRIPE_LEN)) {
                high = middle;
            } else {
                low = middle.saturating_add(1);
            }
        }
        Some(low.saturating_mul(STRIPE_LEN).min(item.total_bytes.max(least)))
    }

    /// Makes every write to the chunk at `logical` also go to the fresh stripes of `target`, a plan of
    /// [`Volumes::plan_migration`].
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if a stripe of the target ends past the device's limit. Fails if the chunk is already being
    /// migrated, if the target contradicts itself or the chunk, or if other stripes lie in the target's place.
    pub fn begin_migration(&self, logical: Logical, target: ChunkItem) -> Result<()> {
        self.check_writable()?;
        debug_assert!(
            Profile::of(target.flags).is_none_or(|profile| profile.devs_min <= 1) || are_apart(&target),
            "G6: copies of the chunk at {logical} on one device"
        );
        let _exclusive = self.layout_lock.write();
        self.chunks.begin_migration(logical, target, self.sectorsize())
    }

    /// Copies a piece of the chunk at `logical` to the fresh stripes. The piece begins `offset` bytes, a multiple of
    /// [`MIGRATION_PIECE_BYTES`], after the start of the chunk. `used` returns the ranges of the piece that hold
    /// content; it is called while no write to the piece runs. `inspect` gets the address and the content of each read;
    /// it must not wait, because writes to the piece wait for it. `buf` has room for a piece. Returns the number of bytes
    /// copied. A byte that is copied to several fresh stripes counts once. Several threads may copy pieces of a chunk.
    ///
    /// # Errors
    ///
    /// Fails if a range cannot be read from any copy, or cannot be written.
    pub fn copy_piece(
        &self,
        logical: Logical,
        offset: u64,
        buf: &mut AlignedBuf,
        used: &dyn Fn() -> Vec<Range<u64>>,
        inspect: &mut dyn FnMut(Logical, &[u8]),
    ) -> Result<u64> {
        let chunk = self.chunks.get(logical).ok_or_else(|| unmapped(logical))?;
        let Some(target) = chunk.target.as_deref() else { return Err(not_begun(logical)) };
        let piece = offset..offset.saturating_add(MIGRATION_PIECE_BYTES);
        debug_assert!(offset.is_multiple_of(MIGRATION_PIECE_BYTES), "G1: the lock of another piece is held");
        let _alone = target.begin_copy(offset);
        let mut copied = 0u64;
        for range in used() {
            let Some(len_bytes) = range.end.checked_sub(range.start) else { continue };
            let len = usize::try_from(len_bytes).map_err(|_| unmapped(Logical(range.start)))?;
            let offset = chunk.range.offset_of(Logical(range.start)).ok_or_else(|| unmapped(Logical(range.start)))?;
            let is_inside = piece.contains(&offset) && offset.saturating_add(len_bytes) <= piece.end;
            if !is_inside || len > buf.capacity() || chunk.range.bytes_from(Logical(range.start)) < len_bytes {
                return Err(unmapped(Logical(range.end)));
            }
            let mut last_read = None;
            for &index in &target.fresh {
                let copy = index.min(chunk.geometry.nr_copies().saturating_sub(1));
                if last_read != Some(copy) {
                    buf.clear();
                    buf.extend_with(len, |content| self.read_any_copy(Logical(range.start), content, copy))?;
                    inspect(Logical(range.start), buf);
                    last_read = Some(copy);
                }
                let segment = Segment { stripe: index, offset, len_bytes };
                self.write_stripe(&target.item.stripes[index], segment, &[IoSlice::new(buf)])?;
            }
            copied = copied.saturating_add(len_bytes);
        }
        Ok(copied)
    }

    /// Reads a copy, or another copy if that read fails. Each fresh stripe is filled from the copy with the stripe's
    /// number, or from the last copy if the chunk has fewer copies. So damage in one copy does not spread to all.
    fn read_any_copy(&self, at: Logical, buf: &mut [u8], copy: usize) -> Result<()> {
        let error = match self.read_trusted_copy(at, buf, copy) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let mut others = (0..self.num_copies(at)).filter(|&other| other != copy);
        if others.any(|other| self.read_trusted_copy(at, buf, other).is_ok()) { Ok(()) } else { Err(error) }
    }

    /// Repeats a write to a chunk on the fresh stripes of the chunk's target. The caller has held the guards of
    /// [`MigrationTarget::begin_write`] since before it wrote to the chunk (G1).
    pub(crate) fn write_target(
        &self,
        target: &MigrationTarget,
        offset: u64,
        bufs: &[IoSlice<'_>],
        len: usize,
    ) -> Result<()> {
        for &index in &target.fresh {
            let segment = Segment { stripe: index, offset, len_bytes: len as u64 };
            let Err(error) = self.write_stripe(&target.item.stripes[index], segment, bufs) else { continue };
            tracing::warn!("writing to the new place of a chunk failed: {error}");
            target.note_failure();
            if target.is_recorded.load(Ordering::SeqCst) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The new chunk item of the chunk at `logical`, if it is being migrated.
    pub fn migration_target(&self, logical: Logical) -> Option<Arc<ChunkItem>> {
        let chunk = self.chunks.get(logical).filter(|chunk| chunk.start() == logical)?;
        chunk.target.as_ref().map(|target| Arc::clone(&target.item))
    }

    /// Returns the new chunk item for the running commit to record. After this call, failed writes to fresh stripes
    /// are errors (G5).
    ///
    /// # Errors
    ///
    /// Fails if a write to any copy failed (G4), or no migration has begun.
    pub fn record_migration(&self, logical: Logical) -> Result<Arc<ChunkItem>> {
        let _exclusive = self.layout_lock.write();
        let chunk = self.chunks.get(logical).filter(|chunk| chunk.start() == logical);
        let target = chunk.as_ref().and_then(|chunk| chunk.target.as_deref()).ok_or_else(|| not_begun(logical))?;
        if target.has_failed.load(Ordering::SeqCst) {
            return Err(Error::Refused {
                what: format!("a write to chunk {logical} failed while it was being moved, so it stays where it was"),
                hint: "see the error counters of the devices: ubtrfs stats",
            });
        }
        target.is_recorded.store(true, Ordering::SeqCst);
        Ok(Arc::clone(&target.item))
    }

    /// Ends a migration: the chunk becomes its target. Call this function when the new chunk item is durable.
    ///
    /// # Errors
    ///
    /// Fails if the target contradicts itself, which [`Volumes::begin_migration`] refuses.
    pub fn finish_migration(&self, logical: Logical) -> Result<()> {
        let _exclusive = self.layout_lock.write();
        debug_assert!(
            self.chunks.get(logical).is_none_or(|chunk| {
                chunk.target.as_ref().is_none_or(|target| target.is_recorded.load(Ordering::SeqCst))
            }),
            "G4: no commit has recorded the new place of the chunk at {logical}"
        );
        self.chunks.finish_migration(logical, self.sectorsize())
    }

    /// Cancels a migration: the chunk stays as it is.
    pub fn cancel_migration(&self, logical: Logical) {
        let _exclusive = self.layout_lock.write();
        self.chunks.cancel_migration(logical);
    }
}

impl Chunk {
    /// The fresh stripes of the chunk's migration target, if the chunk is being migrated.
    pub(crate) fn fresh_extents(&self) -> Vec<(DevId, Range<u64>)> {
        let len = self.geometry.stripe_len_bytes();
        let extent = |stripe: &Stripe| (stripe.devid, stripe.offset.0..stripe.offset.advance(len).0);
        self.target.iter().flat_map(|target| target.fresh_stripes().map(extent)).collect()
    }
}

/// Takes the first part of a hole of `len` bytes that contains no superblock mirror. Logical ranges over a mirror must
/// not be allocated, but a migrated chunk may already use any of its logical ranges.
fn take_hole(space: &mut DeviceSpace, len: u64) -> Option<u64> {
    let start = space.first_without_mirrors(len)?;
    space.insert(start..start.saturating_add(len)).then_some(start)
}

/// Whether all stripes of a chunk lie on different devices.
fn are_apart(chunk: &ChunkItem) -> bool {
    let devids: BTreeSet<u64> = chunk.stripes.iter().map(|stripe| stripe.devid.0).collect();
    devids.len() == chunk.stripes.len()
}

fn not_begun(logical: Logical) -> Error {
    Error::Bug { what: format!("chunk {logical} is not being migrated") }
}

/// Bytes of a chunk that are copied in one step. Writes to these bytes wait until the bytes are copied.
pub const MIGRATION_PIECE_BYTES: u64 = 4 << 20;
/// The number of locks, larger than the number of threads that copy at the same time.
const NR_PIECE_LOCKS: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_excludes_the_copy_of_exactly_its_pieces() {
        const PIECE: u64 = MIGRATION_PIECE_BYTES;
        let item = ChunkItem {
            length: 1 << 30,
            owner: 2,
            stripe_len: 1 << 16,
            flags: BlockGroupFlags::DATA,
            io_align: 1 << 16,
            io_width: 1 << 16,
            sector_size: 4096,
            sub_stripes: 1,
            stripes: Vec::new(),
        };
        let target = MigrationTarget::new(&item.clone(), item);
        for (offset, len) in
            [(0, 1), (PIECE - 1, 2), (15 * PIECE, 4096), (15 * PIECE + 1, PIECE), (3 * PIECE, 40 * PIECE)]
        {
            let writing = target.begin_write(offset, usize::try_from(len).unwrap());
            for number in 0..256 {
                let index = usize::try_from(number % NR_PIECE_LOCKS).unwrap();
                let overlaps = (0..16).any(|turn| {
                    let start = (number % 16 + 16 * turn) * PIECE;
                    start < offset + len && offset < start + PIECE
                });
                assert_eq!(target.pieces[index].try_write().is_none(), overlaps, "{number}: {offset} {len}");
            }
            drop(writing);
        }
    }
}
