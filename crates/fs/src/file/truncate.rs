//! Changing a file's size, and dropping all its data.
//!
//! Invariants:
//! - I1: the state stays locked for writing from the first change to the last, so that no other thread sees or extends
//!   a partly truncated file.
//! - I2: extents are dropped step by step, the last ones first, and each step reduces the size on disk, so after a
//!   crash no data lies past the size on disk.
//! - I3: the last sector's bytes past the new size are zero on disk before the size on disk becomes the new size.
//! - I4: nothing changes before space for the change is reserved. A failed truncation leaves the file unchanged, or at
//!   a size between the old and the new one.
//! - I5: data extents past the end of a file, which a crash or Linux may leave on disk, are dropped before the file changes
//!   for the first time after it was loaded. Otherwise the file would show their content when it grows.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtentBody, InodeFlags, Timespec};
use ubtrfs_transaction::lock_rank::WriteGuard;
use ubtrfs_transaction::{DataExtent, DataReservation, QuotaReservation};

use crate::file::read::check_regular;
use crate::file::write::check_not_read_only;
use crate::inode::state::{Inode, InodeState};
use crate::inode::writeback_lock::ExclusiveGuard;
use crate::items::file_extent::{ExtentPlan, extents_in, last_extent_before, whole_extent};
use crate::session::context::MetadataPurpose;
use crate::types::MAX_SIZE;
use crate::writeback::no_flush::NoFlush;
use crate::{Error, Fs, Result};

impl Fs {
    /// Sets the size of a regular file. Takes its own reservations and locks, puts the inode item, and sets mtime and
    /// ctime if the size changes. Returns false if the file became longer.
    pub(crate) fn set_size(&self, inode: &Arc<Inode>, size: u64) -> Result<bool> {
        if size > MAX_SIZE {
            return Err(Error::FileTooBig);
        }
        self.drop_stale_tail(inode)?;
        let sectorsize = u64::from(self.geometry.sectorsize);
        let old_size = inode.read()?.item.size;
        let needs_sector = size != old_size && (!old_size.min(size).is_multiple_of(sectorsize) || size > old_size);
        let mut space = match needs_sector {
            true => Some(self.engine.reserve_data_for(inode.id.root, sectorsize)?),
            false => None,
        };
        let purpose =
            if size <= old_size { MetadataPurpose::Removal(STEP_MIN + 8) } else { MetadataPurpose::Change(16) };
        let reservation = self.context.reserve(purpose)?;
        let (_locks, mut state) = lock(inode)?;
        check_regular(&state)?;
        check_not_read_only(&state)?;
        // If the size stays the same, no times change, as on Linux. ftruncate and O_TRUNC change the times in any case;
        // the code for these calls sets the times itself.
        let time = (size != state.item.size).then(Timespec::now);
        // If the size stays the same, preallocated extents past the end of the file are dropped.
        if size < state.item.size || (size == state.item.size && state.has_flags(InodeFlags::PREALLOC)) {
            drop(reservation);
            return shrink(self, inode, &mut state, (size, time), space).map(|()| true);
        }
        let mut plan = ExtentPlan::default();
        let is_longer = size > state.item.size;
        if is_longer {
            let state = &mut *state;
            // Also within one sector, old bytes past the old end become visible.
            self.prepare_end(inode, state, size.next_multiple_of(sectorsize), &mut space)?;
            self.plan_size(inode, state, size, &mut plan)?;
        }
        set_times(&mut state, time);
        let op = self.engine.begin(reservation);
        plan.apply(&op, &inode.home.tree, inode.id.ino);
        inode.put_item(&op, &mut state);
        Ok(!is_longer)
    }

    /// Drops the data extents past the end of a regular file (I5). Must be called before each change of a file's data or
    /// size. Takes its own reservations and locks, but only if the file was not changed since it was loaded.
    pub(crate) fn drop_stale_tail(&self, inode: &Arc<Inode>) -> Result<()> {
        if inode.read()?.lacks_stale_tail {
            return Ok(());
        }
        let (_locks, mut state) = lock(inode)?;
        check_regular(&state)?;
        let size = state.item.size;
        let past = size.next_multiple_of(self.geometry.sectorsize.into())..u64::MAX;
        let extents = extents_in(&inode.home.tree, inode.id.ino, past, usize::MAX, self.geometry.sectorsize)?;
        if extents.iter().any(|extent| extent.is_data()) {
            tracing::debug!(
                "inode {} of subvolume {} has data past its end, which is dropped",
                inode.id.ino,
                inode.id.root
            );
            shrink(self, inode, &mut state, (size, None), None)?;
        }
        state.lacks_stale_tail = true;
        Ok(())
    }
}

/// Drops all data and extents of an unlinked regular file in bounded steps; its other items stay. Takes its own
/// reservations and locks. Locks `state` directly, because `Inode::write` fails if the inode is marked dead already.
pub(crate) fn drop_all_extents(fs: &Fs, inode: &Arc<Inode>) -> Result<()> {
    let _writeback = inode.writeback.lock();
    let mut state = inode.state.write();
    let _no_flush = NoFlush::new();
    shrink(fs, inode, &mut state, (0, None), None)
}

/// Drops the dirty data of an unlinked regular file. The caller drops the file's extents together with the inode's
/// other items. Locks as [`drop_all_extents`] does.
pub(crate) fn forget_all_dirty(fs: &Fs, inode: &Inode) {
    let _writeback = inode.writeback.lock();
    forget_dirty_past(fs, &mut inode.state.write(), 0);
}

/// Drops the dirty data past a size. The caller holds the inode's `writeback` and state locks.
pub(crate) fn forget_dirty_past(fs: &Fs, state: &mut InodeState, size: u64) {
    let freed = state.data.truncate(size);
    drop(state.data.take_freed(freed));
    fs.data.dequeue(&mut state.data);
    state.data.extents_changed();
}

/// Locks held in addition to the state lock while a file's extents are changed.
pub(crate) type ChangeLocks<'i> = (NoFlush, ExclusiveGuard<'i>);

/// Takes the locks for changing a file's extents.
pub(crate) fn lock(inode: &Inode) -> Result<(ChangeLocks<'_>, WriteGuard<'_, InodeState>)> {
    let writeback = inode.writeback.lock();
    let state = inode.write()?;
    Ok(((NoFlush::new(), writeback), state))
}

/// Cuts the file to `size`, and sets its times. The caller holds a [`NoFlush`] and the inode's writeback and state
/// locks, under which metadata is reserved (I2 of [`crate::writeback::delalloc`]).
#[allow(
    clippy::arithmetic_side_effects,
    reason = "the reservation holds at least the 8 items that are subtracted; sizes are at most `MAX_SIZE`"
)]
fn shrink(
    fs: &Fs,
    inode: &Arc<Inode>,
    state: &mut InodeState,
    (size, time): (u64, Option<Timespec>),
    mut space: Option<DataReservation>,
) -> Result<()> {
    let (tree, ino) = (&inode.home.tree, inode.id.ino);
    let sectorsize = u64::from(fs.geometry.sectorsize);
    let sector_end = size.next_multiple_of(sectorsize);
    // Compare with the current size, not with the size on disk: pending data may keep the size on disk below the end of
    // extents that are already in the tree.
    let cuts_sector = size < sector_end && size < state.item.size;
    // Only deleted extents lie past this offset. A search from the end of the file would pass all deleted extents again
    // in every step.
    let mut reached = u64::MAX;
    loop {
        let reservation = fs.engine.reserve_for_removal_steps(STEP + 8, STEP_MIN + 8)?;
        let step = reservation.nr_items() - 8;
        let mut plan = ExtentPlan::default();
        while plan.len() < step {
            let before = reached;
            let Some(last) = last_extent_before(tree, ino, before, fs.geometry.sectorsize)? else {
                reached = 0;
                break;
            };
            if last.end <= sector_end {
                reached = 0;
                break;
            }
            plan.drop_from(tree, &last, &(sector_end..u64::MAX))?;
            reached = last.start;
        }
        let is_last = reached == 0 || reached <= sector_end;
        let mut tail = None;
        if is_last && cuts_sector {
            tail = zeroed_tail(fs, inode, state, size, &mut space)?;
            if let Some(tail) = &tail {
                tail.plan(inode, &mut plan, fs).inspect_err(|_| tail.release(fs))?;
            }
        }
        // The file changes from here on, and nothing below fails before the change is put (I4).
        let mut unplanned = None;
        let cut = if is_last { size } else { reached.max(size) };
        if tail.is_some() {
            forget_dirty_in(fs, state, sector_end - sectorsize..sector_end);
        }
        forget_dirty_past(fs, state, cut);
        state.item.size = state.item.size.min(cut);
        state.disk_size = state.disk_size.min(cut);
        set_times(state, time);
        if is_last {
            // Raise the size on disk: the pending data that limited it may have been dropped.
            let disk_size = state.disk_size;
            state.advance_disk_size();
            // Without a plan of the holes, the size on disk is raised by a later change.
            unplanned = fs.plan_holes(inode, &mut plan, disk_size, state.disk_size).err();
            if unplanned.is_some() {
                state.disk_size = disk_size;
            }
        }
        state.item.nbytes = plan.nbytes(state.item.nbytes);
        let op = fs.engine.begin(reservation);
        plan.apply(&op, tree, ino);
        if let Some(Tail::Sector { extent, csums, quota, .. }) = &mut tail {
            std::mem::take(quota).spend();
            if !csums.is_empty() {
                op.add_csums(extent.bytenr, std::mem::take(csums));
            }
        }
        inode.put_item(&op, state);
        drop(op);
        if is_last {
            return unplanned.map_or(Ok(()), Err);
        }
    }
}

fn set_times(state: &mut InodeState, time: Option<Timespec>) {
    if let Some(time) = time {
        state.item.mtime = time;
        state.item.ctime = time;
        state.count_change();
    }
}

fn forget_dirty_in(fs: &Fs, state: &mut InodeState, range: Range<u64>) {
    let freed = state.data.discard(range);
    drop(state.data.take_freed(freed));
    fs.data.dequeue(&mut state.data);
}

/// The new content of the last sector.
enum Tail {
    /// A new extent of one sector.
    Sector { offset: u64, extent: DataExtent, csums: Vec<u8>, quota: QuotaReservation },
    /// Inline data of the new length.
    Inline { bytes: Vec<u8> },
}

impl Tail {
    #[allow(clippy::arithmetic_side_effects, reason = "sizes are at most `MAX_SIZE`, rounded up to a sector")]
    fn plan(&self, inode: &Inode, plan: &mut ExtentPlan, fs: &Fs) -> Result<()> {
        let sectorsize = fs.geometry.sectorsize;
        match self {
            Self::Sector { offset, extent, .. } => {
                let range = *offset..*offset + u64::from(sectorsize);
                plan.drop_range(&inode.home.tree, inode.id.ino, range, sectorsize)?;
                plan.insert(*offset, whole_extent(extent.bytenr, extent.len_bytes));
            }
            Self::Inline { bytes } => {
                plan.drop_range(&inode.home.tree, inode.id.ino, 0..u64::from(sectorsize), sectorsize)?;
                let mut item = whole_extent(Logical(0), bytes.len() as u64);
                item.body = FileExtentBody::Inline(bytes.clone());
                plan.insert(0, item);
            }
        }
        Ok(())
    }

    /// Releases the extent, because no item will refer to it.
    fn release(&self, fs: &Fs) {
        if let Self::Sector { extent, .. } = self {
            fs.engine.release_data(*extent);
        }
    }
}

/// Rewrites the last sector with zeros past `size` (I3), if it has data on disk. The new content includes pending data
/// of the sector; the caller then drops that data.
#[allow(clippy::arithmetic_side_effects, reason = "sizes are at most `MAX_SIZE`, rounded up to a sector")]
fn zeroed_tail(
    fs: &Fs,
    inode: &Arc<Inode>,
    state: &InodeState,
    size: u64,
    space: &mut Option<DataReservation>,
) -> Result<Option<Tail>> {
    let sectorsize = u64::from(fs.geometry.sectorsize);
    let sector = size - size % sectorsize;
    let range = sector..sector + sectorsize;
    let extents = extents_in(&inode.home.tree, inode.id.ino, range, 1, fs.geometry.sectorsize)?;
    let Some(extent) = extents.first().filter(|extent| extent.is_data()) else { return Ok(None) };
    let mut bytes = vec![0; sectorsize as usize];
    let len = (size - sector) as usize;
    fs.read_merged(inode, state, sector, &mut bytes[..len])?;
    if extent.is_inline() {
        if extent.extent.compression == Compression::None && extent.extent.ram_bytes <= size && state.data.is_clean() {
            return Ok(None);
        }
        if len <= fs.max_inline() {
            bytes.truncate(len);
            return Ok(Some(Tail::Inline { bytes }));
        }
    }
    let mut reservation = match space.take() {
        Some(space) => space,
        None => fs.engine.reserve_data(sectorsize)?,
    };
    let extent = fs.engine.allocate_data(&mut reservation, sectorsize, sectorsize, None)?;
    if let Err(error) = fs.engine.write_data(extent.bytenr, &bytes) {
        fs.engine.release_data(extent);
        return Err(error.into());
    }
    let mut csums = Vec::new();
    if !state.has_flags(InodeFlags::NODATASUM) {
        fs.geometry.csum_type.compute_sectors(&bytes, sectorsize as usize, &mut csums);
    }
    let quota = reservation.take_quota(extent.len_bytes);
    Ok(Some(Tail::Sector { offset: sector, extent, csums, quota }))
}

/// Number of items dropped in one operation.
const STEP: usize = 256;
/// Number of items dropped in one operation when space is short.
const STEP_MIN: usize = 4;
