//! Sharing extents between files, and copying data that cannot be shared.
//!
//! Invariants:
//! - I1: the writeback and state locks of both inodes are held from the search for the source's extents until the last
//!   item is put. The locks are taken in ascending order of the inodes' ids. The source has no pending data in its
//!   range.
//! - I2: shared ranges are whole sectors. The one exception is the source's last sector, which may become the last
//!   sector of the destination.
//! - I3: one operation both removes a range of the destination and puts the shared extents there, so no commit or log
//!   shows zeros in place of data.
//! - I4: pending data of the destination is dropped only after space for its replacement is reserved. A copy that fails
//!   leaves the rest of the range unchanged, and leaves no extent past the end of the file.
//! - I5: cloning and deduplication change no access time, as on Linux. Only [`Fs::copy_range`] updates the access time
//!   of the source, and only if it copied bytes through memory.
//! - I6: data of the source that is dirty without a reservation needs extents that no other file shares
//!   ([`crate::writeback::data_path::DataPath::unreserved`]). It may be anywhere in these extents, so all of it is
//!   written back before extents of the source are shared.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::InodeFlags;
use ubtrfs_transaction::lock_rank::WriteGuard;

use ubtrfs_transaction::{QuotaReservation, race_point};

use crate::file::read::check_regular;
use crate::file::write::check_may_write;
use crate::inode::state::{Inode, InodeState};
use crate::inode::writeback_lock::ExclusiveGuard;
use crate::inode::xattr::check_may_change;
use crate::items::file_extent::{ExtentAt, ExtentPlan, extents_in, part_of};
use crate::session::context::MetadataPurpose;
use crate::types::MAX_SIZE;
use crate::writeback::no_flush::NoFlush;
use crate::{Error, Fs, InodeId, Result};

impl Fs {
    /// Copies `len` bytes, by reference if both offsets are aligned. Returns the number of bytes copied: fewer if the
    /// source ends, or if copying fails after some bytes.
    pub fn copy_range(&self, src: InodeId, src_off: u64, dst: InodeId, dst_off: u64, len: u64) -> Result<u64> {
        check_may_write(&*self.inode_to_change(dst)?.read()?, dst_off)?;
        self.copy_range_opened(src, src_off, dst, dst_off, len)
    }

    /// Copies as `copy_range` does, into a file that is open for writing. Any offset may be written, even if the file
    /// became append-only after it was opened.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    pub fn copy_range_opened(&self, src: InodeId, src_off: u64, dst: InodeId, dst_off: u64, len: u64) -> Result<u64> {
        let source = self.inode(src)?;
        let target = self.inode_to_change(dst)?;
        check_regular(&*source.read()?)?;
        check_regular(&*target.read()?)?;
        check_mutable(&*target.read()?)?;
        let size = source.read()?.item.size;
        let len = len.min(size.saturating_sub(src_off));
        let dst_end = dst_off.checked_add(len).filter(|end| *end <= MAX_SIZE).ok_or(Error::FileTooBig)?;
        if len == 0 {
            return Ok(0);
        }
        if src == dst && src_off < dst_end && dst_off < src_off + len {
            return Err(Error::InvalidArgument("the ranges overlap"));
        }
        let sectorsize = u64::from(self.geometry.sectorsize);
        let aligned = src_off.is_multiple_of(sectorsize) && dst_off.is_multiple_of(sectorsize);
        let mut done = 0;
        if aligned {
            let dst_size = target.read()?.item.size;
            let to_end = src_off + len == size && dst_end >= dst_size;
            let shared = if to_end { len } else { len - len % sectorsize };
            match shared {
                0 => {}
                _ => match self.share(&source, src_off, &target, dst_off, shared, None) {
                    Ok(len) => done = len,
                    // Sharing is not possible, because only one of the files has checksums or the source became
                    // shorter. Copy instead.
                    Err(Error::InvalidArgument(_)) => {}
                    Err(error) => return Err(error),
                },
            }
        }
        match self.copy_all(&source, src_off + done, dst, dst_off + done, len - done) {
            Ok(copied) => {
                if copied > 0 {
                    self.touch_atime(&source);
                }
                Ok(done + copied)
            }
            Err(_) if done > 0 => Ok(done),
            Err(error) => Err(error),
        }
    }

    /// Shares `len` bytes (0: up to the end) of one file with another, as FICLONERANGE does.
    pub fn clone_range(&self, src: InodeId, src_off: u64, dst: InodeId, dst_off: u64, len: u64) -> Result<()> {
        let source = self.inode(src)?;
        let target = self.inode_to_change(dst)?;
        check_regular(&*source.read()?)?;
        check_regular(&*target.read()?)?;
        check_may_change(&*target.read()?)?;
        let sectorsize = u64::from(self.geometry.sectorsize);
        let size = source.read()?.item.size;
        let len = if len == 0 { up_to_end(size, src_off)? } else { len };
        let (src_end, dst_end) = check_ranges((src, src_off), (dst, dst_off), len, sectorsize)?;
        if len == 0 {
            return Ok(());
        }
        if src_end > size {
            return Err(Error::InvalidArgument("the source ends before the range does"));
        }
        if !src_end.is_multiple_of(sectorsize) && (src_end != size || dst_end < target.read()?.item.size) {
            return Err(Error::InvalidArgument("the range's end is not a multiple of the sector size"));
        }
        if dst_end > MAX_SIZE {
            return Err(Error::FileTooBig);
        }
        self.share_all(&source, src_off, &target, dst_off, len, None)
    }

    /// Shares a piece if both files have equal content there. Every change of a file's content changes the sequence
    /// number in its inode item. So the contents are still equal if neither file's sequence number changes between the
    /// comparison and the sharing.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    pub(crate) fn dedupe_piece(
        &self,
        source: &Arc<Inode>,
        src_off: u64,
        target: &Arc<Inode>,
        dst_off: u64,
        len: u64,
    ) -> Result<bool> {
        let sequences = || {
            let of_source = source.read()?.item.sequence;
            Ok::<_, Error>((of_source, target.read()?.item.sequence))
        };
        for _ in 0..MAX_TRIES {
            let before = sequences()?;
            let mut same = 0;
            while same < len {
                let read = |inode, offset| {
                    let mut buf = vec![0; (len - same).min(COPY_PIECE) as usize];
                    let read = self.read_keeping_atime(inode, offset + same, &mut buf)?;
                    buf.truncate(read);
                    Ok::<_, Error>(buf)
                };
                if read(source, src_off)? != read(target, dst_off)? {
                    return Ok(false);
                }
                same += COPY_PIECE;
            }
            match self.share_all(source, src_off, target, dst_off, len, Some(before)) {
                Err(Error::Busy(_)) => {}
                done => return done.map(|()| true),
            }
        }
        Err(Error::Busy("the files are being written"))
    }

    /// Copies bytes through memory, and does not update the source's access time (I5).
    fn copy_piece(&self, source: &Arc<Inode>, src_off: u64, dst: InodeId, dst_off: u64, len: u64) -> Result<u64> {
        let mut buf = vec![0; len.min(COPY_PIECE) as usize];
        let read = self.read_keeping_atime(source, src_off, &mut buf)?;
        Ok(self.write_opened(dst, dst_off, &buf[..read], false)? as u64)
    }

    /// Calls [`Fs::share`] until the whole range is shared.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    fn share_all(
        &self,
        source: &Arc<Inode>,
        src_off: u64,
        target: &Arc<Inode>,
        dst_off: u64,
        len: u64,
        same_at: Option<(u64, u64)>,
    ) -> Result<()> {
        let mut done = 0;
        while done < len {
            match self.share(source, src_off + done, target, dst_off + done, len - done, same_at)? {
                0 => return Err(Error::InvalidArgument("the source became shorter")),
                shared => done += shared,
            }
        }
        Ok(())
    }

    /// Shares a range. Inline data cannot be shared: it is copied, or stays as it is for deduplication. Returns the
    /// number of bytes done, which is lower than `len` if an error occurs after some bytes. Both offsets must be
    /// sector-aligned. The end of the source's range must be aligned too, unless it is the end of the source and the
    /// target's range does not end before the end of the target. For deduplication, `same_at` holds the sequence
    /// numbers that the files had when their content was found equal. With `same_at`, the call fails with
    /// [`Error::Busy`] if a sequence number has changed since, and changes no times.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    fn share(
        &self,
        source: &Arc<Inode>,
        src_off: u64,
        target: &Arc<Inode>,
        dst_off: u64,
        len: u64,
        same_at: Option<(u64, u64)>,
    ) -> Result<u64> {
        self.drop_stale_tail(target)?;
        let sectorsize = u64::from(self.geometry.sectorsize);
        let wide_len = len.next_multiple_of(sectorsize);
        let src_range = src_off..src_off + wide_len;
        let dst_range = dst_off..dst_off + wide_len;
        drop(self.context.reserve(MetadataPurpose::Change(16))?);
        // If both files are in one subvolume, its quota counts the extents already, so only the items need quota.
        let data_bytes = if source.id.root == target.id.root { 0 } else { wide_len };
        let nr_items = wide_len.div_ceil(sectorsize).min(STEP as u64);
        let mut quota = self.engine.reserve_shared_quota(target.id.root, data_bytes, nr_items)?;
        // I6
        let mut unreserved = None;
        for _ in 0..MAX_TRIES {
            let flushed = if unreserved.is_some() { 0..u64::MAX } else { src_range.clone() };
            self.flush_inode(source, flushed)?;
            let mut space = Some(match same_at {
                // Deduplication shares existing sectors, so the quota limit is not checked.
                Some(_) => self.engine.reserve_data(2 * sectorsize)?,
                None => self.engine.reserve_data_for(target.id.root, 2 * sectorsize)?,
            });
            let mut locked = LockedPair::lock(source, target)?;
            let source_state = locked.source_state();
            if !source_state.data.pending_in(src_range.clone()).is_empty() {
                // The source was written again since the flush, so flush it once more.
                continue;
            }
            if unreserved.is_none() && source_state.data.unreserved_bytes() > 0 {
                drop((locked, space));
                unreserved = Some(self.data.unreserved.write());
                continue;
            }
            if source_state.item.size < src_off + len {
                return Err(Error::InvalidArgument("the source became shorter"));
            }
            let nodatasum = |state: &InodeState| state.has_flags(InodeFlags::NODATASUM);
            let src_nodatasum = nodatasum(source_state);
            let src_sequence = source_state.item.sequence;
            let state = locked.target_state();
            if same_at.is_some_and(|same_at| same_at != (src_sequence, state.item.sequence)) {
                return Err(Error::Busy("the files are being written"));
            }
            check_mutable(state)?;
            if src_nodatasum != nodatasum(state) {
                return Err(Error::InvalidArgument("only one of the files has checksums"));
            }
            let first = extents_in(&source.home.tree, source.id.ino, src_range.clone(), 1, self.geometry.sectorsize)?;
            if first.first().is_some_and(ExtentAt::is_inline) {
                if same_at.is_some() {
                    // Inline data cannot be shared, and the content of the range is equal already.
                    return Ok(len);
                }
                drop((locked, unreserved));
                return self.copy_all(source, src_off, target.id, dst_off, len);
            }
            self.prepare_end(target, state, dst_off, &mut space)?;
            // Reserve before data is dropped (I4).
            let reservation = self.engine.reserve_for_removal(SIZE_ITEMS)?;
            let mut reached = dst_off;
            let shared = self.share_items(source, src_range, target, state, dst_range, (&mut reached, &mut quota));
            if reached > dst_off {
                let mut plan = ExtentPlan::default();
                self.plan_size(target, state, reached.min(dst_off + len), &mut plan)?;
                match same_at {
                    Some(_) => self.put_untouched(target, state, plan, reservation),
                    None => self.put_planned(target, state, plan, reservation),
                }
            }
            quota.spend();
            return match shared {
                Err(_) if reached > dst_off => Ok((reached - dst_off).min(len)),
                shared => shared.map(|()| len),
            };
        }
        Err(Error::Busy("the source is being written"))
    }

    /// Copies up to `len` bytes. Returns the number of bytes copied. Fails only if no byte was copied.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    fn copy_all(&self, source: &Arc<Inode>, src_off: u64, dst: InodeId, dst_off: u64, len: u64) -> Result<u64> {
        let mut done = 0;
        while done < len {
            match self.copy_piece(source, src_off + done, dst, dst_off + done, len - done) {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Makes the target's items refer to the source's extents, which must not be inline. `reached` is set to the end
    /// of the completed part of the range, also after an error. `quota` has room for the items of the first step; the
    /// room for later steps is added to it.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    fn share_items(
        &self,
        source: &Arc<Inode>,
        src_range: Range<u64>,
        target: &Arc<Inode>,
        state: &mut InodeState,
        dst_range: Range<u64>,
        (reached, quota): (&mut u64, &mut QuotaReservation),
    ) -> Result<()> {
        let sectorsize = self.geometry.sectorsize;
        let tree = &target.home.tree;
        let place = |at: u64| dst_range.start + (at - src_range.start);
        let mut from = src_range.start;
        while from < src_range.end {
            let extents = extents_in(&source.home.tree, source.id.ino, from..src_range.end, STEP, sectorsize)?;
            let last = extents.last().filter(|_| extents.len() == STEP);
            let mut to = last.map_or(src_range.end, |last| last.end.min(src_range.end));
            let replaced = extents_in(tree, target.id.ino, place(from)..place(to), STEP, sectorsize)?;
            if let Some(last) = replaced.last().filter(|_| replaced.len() == STEP) {
                to = to.min(src_range.start + (last.end - dst_range.start));
            }
            // I3
            let mut plan = ExtentPlan::default();
            plan.drop_range(tree, target.id.ino, place(from)..place(to), sectorsize)?;
            let mut prealloc = false;
            for at in extents.iter().filter(|at| at.start < to && !at.is_hole()) {
                let part = at.start.max(from)..at.end.min(to);
                prealloc |= at.is_prealloc();
                plan.insert(place(part.start), part_of(at, part));
            }
            let on_disk = place(from)..place(to).min(state.disk_size.next_multiple_of(u64::from(sectorsize)));
            if !self.geometry.no_holes && !on_disk.is_empty() {
                plan.fill_holes(tree, target.id.ino, on_disk, sectorsize)?;
            }
            let step = place(from)..place(to);
            from = to;
            if plan.is_empty() {
                self.drop_pending(state, step.clone());
                *reached = step.end;
                continue;
            }
            if *reached > dst_range.start {
                let more = self.engine.try_reserve_items_quota(target.id.root, plan.len() as u64);
                quota.merge(more.ok_or(ubtrfs_error::Error::QuotaExceeded)?);
            }
            race_point();
            let reservation = self.engine.reserve(plan.len() + 4)?;
            // Drop the data only after space is reserved (I4).
            self.drop_pending(state, step.clone());
            *reached = step.end;
            if prealloc {
                state.item.flags |= InodeFlags::PREALLOC.bits();
            }
            state.item.nbytes = plan.nbytes(state.item.nbytes);
            let op = self.engine.begin(reservation);
            plan.apply(&op, tree, target.id.ino);
            target.put_item(&op, state);
        }
        Ok(())
    }
}

/// The locks of both inodes (I1).
struct LockedPair<'i> {
    first_state: WriteGuard<'i, InodeState>,
    second_state: Option<WriteGuard<'i, InodeState>>,
    source_is_first: bool,
    _writeback: (ExclusiveGuard<'i>, Option<ExclusiveGuard<'i>>),
    _no_flush: NoFlush,
}

impl<'i> LockedPair<'i> {
    /// Locks both inodes; a single inode, given twice, is locked once.
    fn lock(source: &'i Inode, target: &'i Inode) -> Result<Self> {
        if source.id == target.id {
            let writeback = source.writeback.lock();
            let first_state = source.write()?;
            let writeback = (writeback, None);
            let _no_flush = NoFlush::new();
            return Ok(Self {
                first_state,
                second_state: None,
                source_is_first: true,
                _writeback: writeback,
                _no_flush,
            });
        }
        let source_is_first = source.id < target.id;
        let (first, second) = if source_is_first { (source, target) } else { (target, source) };
        let first_writeback = first.writeback.lock();
        let second_writeback = second.writeback.lock();
        let first_state = first.write()?;
        let second_state = Some(second.write()?);
        let writeback = (first_writeback, Some(second_writeback));
        Ok(Self { first_state, second_state, source_is_first, _writeback: writeback, _no_flush: NoFlush::new() })
    }

    fn source_state(&self) -> &InodeState {
        match &self.second_state {
            Some(second) if !self.source_is_first => second,
            _ => &self.first_state,
        }
    }

    fn target_state(&mut self) -> &mut InodeState {
        match &mut self.second_state {
            Some(second) if self.source_is_first => second,
            _ => &mut self.first_state,
        }
    }
}

/// The length of a range that extends to the end of the file.
pub(crate) fn up_to_end(size: u64, offset: u64) -> Result<u64> {
    size.checked_sub(offset).ok_or(Error::InvalidArgument("the source ends before the range does"))
}

/// Checks what cloning and deduplication require of their ranges: aligned offsets, and no overlap. Returns the ends of
/// both ranges. Empty ranges need not be aligned.
pub(crate) fn check_ranges(
    (src, src_off): (InodeId, u64),
    (dst, dst_off): (InodeId, u64),
    len: u64,
    sectorsize: u64,
) -> Result<(u64, u64)> {
    let end = |offset: u64| offset.checked_add(len).ok_or(Error::InvalidArgument("the range is too long"));
    let (src_end, dst_end) = (end(src_off)?, end(dst_off)?);
    if len > 0 && !(src_off.is_multiple_of(sectorsize) && dst_off.is_multiple_of(sectorsize)) {
        return Err(Error::InvalidArgument("the offsets are not multiples of the sector size"));
    }
    if src == dst && src_off < dst_end && dst_off < src_end {
        return Err(Error::InvalidArgument("the ranges overlap"));
    }
    Ok((src_end, dst_end))
}

/// Fails if the file is immutable: a copy must not change it, even if the file was opened for writing before.
fn check_mutable(state: &InodeState) -> Result<()> {
    if state.has_flags(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the file is immutable"));
    }
    Ok(())
}

/// Bytes compared and shared in one step.
pub(crate) const DEDUPE_PIECE: u64 = 16 << 20;
/// Bytes copied in one step.
const COPY_PIECE: u64 = 1 << 20;
/// Number of items reserved for the new size of the destination.
const SIZE_ITEMS: usize = 16;
/// Number of items shared in one operation.
const STEP: usize = 128;
/// Maximum number of attempts to share a range, or to deduplicate a piece, while other threads write to the files.
const MAX_TRIES: usize = 16;
