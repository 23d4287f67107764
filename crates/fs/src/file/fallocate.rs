//! fallocate: preallocation, holes, zeros.
//!
//! Preallocation gives an extent to every sector that the range touches. Punching and zeroing change the file extent
//! items of whole sectors, and write zeros as data in the partial sectors at the ends of the range.
//!
//! Invariants:
//! - I1: the inode's writeback lock (exclusively) and state lock are held while changes of its extents are planned and
//!   put.
//! - I2: a preallocated extent is at most [`MAX_PREALLOC`] bytes, has no checksums, and reads as zeros.
//! - I3: data is dropped, and the size changes, only after the space for the change is reserved.
//! - I4: the range may need more space than was reserved if another thread punches a hole in it. So the inode's locks
//!   are held from the check that the reservation suffices until the last allocation. A preallocation thus allocates no
//!   more than it reserved. Any more would be space that is reserved for dirty data of other files.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::Logical;
use ubtrfs_format::item::{FileExtentBody, InodeFlags, Timespec};
use ubtrfs_transaction::{DataExtent, DataReservation, MetadataReservation};

use crate::file::read::check_regular;
use crate::file::truncate::lock;
use crate::file::write::is_shortage;
use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::{ExtentAt, ExtentPlan, extents_in, last_extent_before, whole_extent};
use crate::session::context::MetadataPurpose;
use crate::types::MAX_SIZE;
use crate::{Error, FallocateMode, Fs, InodeId, Result};

impl Fs {
    /// Preallocates, punches or zeroes `len` bytes at `offset`.
    pub fn fallocate(&self, id: InodeId, offset: u64, len: u64, mode: FallocateMode) -> Result<()> {
        self.fallocate_if_needed(id, offset, len, mode).map(drop)
    }

    /// Works like [`Self::fallocate`], and returns whether the file changed: a punched range that is a hole already
    /// changes nothing.
    #[allow(clippy::arithmetic_side_effects, reason = "a difference of flags")]
    pub fn fallocate_if_needed(&self, id: InodeId, offset: u64, len: u64, mode: FallocateMode) -> Result<bool> {
        let known = FallocateMode::KEEP_SIZE | FallocateMode::PUNCH_HOLE | FallocateMode::ZERO_RANGE;
        if !(mode - known).is_empty() {
            return Err(Error::NotSupported("this mode of fallocate"));
        }
        let keep_size = mode.contains(FallocateMode::KEEP_SIZE);
        if len == 0 {
            return Err(Error::InvalidArgument("the length is 0"));
        }
        let end = offset.checked_add(len).filter(|end| *end <= MAX_SIZE).ok_or(Error::FileTooBig)?;
        let inode = self.inode_to_change(id)?;
        {
            let state = inode.read()?;
            check_regular(&state)?;
            if state.has_flags(InodeFlags::IMMUTABLE) {
                return Err(Error::NotPermitted("the file is immutable"));
            }
            if state.has_flags(InodeFlags::APPEND)
                && mode.intersects(FallocateMode::PUNCH_HOLE | FallocateMode::ZERO_RANGE)
            {
                return Err(Error::NotPermitted("the file can only be appended to"));
            }
        }
        self.drop_stale_tail(&inode)?;
        match mode - FallocateMode::KEEP_SIZE {
            FallocateMode::PUNCH_HOLE if keep_size => self.punch_hole(&inode, offset..end),
            FallocateMode::PUNCH_HOLE => Err(Error::NotSupported("punching a hole without keeping the size")),
            FallocateMode::ZERO_RANGE => self.allocate_range(&inode, offset..end, keep_size, true).map(|()| true),
            none if none.is_empty() => self.allocate_range(&inode, offset..end, keep_size, false).map(|()| true),
            _ => Err(Error::NotSupported("punching and zeroing at once")),
        }
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn punch_hole(&self, inode: &Arc<Inode>, range: Range<u64>) -> Result<bool> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        // Only the partial sectors at the ends take new space. Whole sectors can be punched at a quota limit and on a
        // full filesystem.
        let edges = partial_sectors(&range, sectorsize);
        let purpose = if edges.is_empty() { MetadataPurpose::Removal(8) } else { MetadataPurpose::Change(8) };
        let (mut space, mut shortage) = (None, None);
        if !edges.is_empty() {
            match self.engine.reserve_data_for(inode.id.root, 2 * sectorsize) {
                Ok(reserved) => space = Some(reserved),
                Err(error) if is_shortage(&error) => shortage = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        drop(self.context.reserve(purpose)?);
        let (_locks, mut state, unreserved) = match shortage {
            None => {
                let (locks, state) = lock(inode)?;
                (locks, state, None)
            }
            // As for a write, the sectors need no new space if they can be overwritten in place.
            Some(error) => {
                // A sector in a hole stays as it is.
                let mut with_data = Vec::new();
                for edge in edges {
                    if self.has_data(inode, &*inode.read()?, edge.start)? {
                        with_data.push(edge);
                    }
                }
                if with_data.is_empty() {
                    let (locks, state) = lock(inode)?;
                    (locks, state, None)
                } else {
                    let Some(allocated) = self.lock_allocated(inode, &with_data)? else { return Err(error.into()) };
                    space = allocated.space;
                    (allocated.guards.0, allocated.state, Some(allocated.guards.1))
                }
            }
        };
        let state = &mut *state;
        if !self.punch_changes(inode, state, &range)? {
            return Ok(false);
        }
        let inner = range.start.next_multiple_of(sectorsize)..range.end - range.end % sectorsize;
        // If the range reaches the end of the file, the hole also covers the rest of the file's last sector.
        let size_end = state.item.size.next_multiple_of(sectorsize);
        let inner = if range.end >= state.item.size {
            inner.start..inner.end.max(size_end.min(range.end.next_multiple_of(sectorsize)))
        } else {
            inner
        };
        self.zero_edges(inode, state, &range, &inner, &mut space)?;
        drop(unreserved);
        if !inner.is_empty() {
            self.drop_data(inode, state, inner)?;
        }
        self.put_changed(inode, state, 0).map(|()| true)
    }

    /// Whether punching a hole changes a file and its times. If the range is already a hole, punching changes neither.
    /// As on Linux, a range across the end of the file always counts as a change.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn punch_changes(&self, inode: &Inode, state: &InodeState, range: &Range<u64>) -> Result<bool> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let wide = range.start - range.start % sectorsize..range.end.next_multiple_of(sectorsize);
        let size_end = state.item.size.next_multiple_of(sectorsize);
        if (range.start < size_end && range.end > size_end) || !state.data.pending_in(wide.clone()).is_empty() {
            return Ok(true);
        }
        let mut from = wide.start;
        loop {
            let extents = extents_in(&inode.home.tree, inode.id.ino, from..wide.end, STEP, self.geometry.sectorsize)?;
            if extents.iter().any(|extent| !extent.is_hole()) {
                return Ok(true);
            }
            match extents.last() {
                Some(last) if extents.len() >= STEP => from = last.end,
                _ => return Ok(false),
            }
        }
    }

    /// Allocates all of `range`. With `zero`, the range reads as zeros afterwards.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn allocate_range(&self, inode: &Arc<Inode>, range: Range<u64>, keep_size: bool, zero: bool) -> Result<()> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let wide = range.start - range.start % sectorsize..range.end.next_multiple_of(sectorsize);
        drop(self.context.reserve(MetadataPurpose::Change(8))?);
        let (mut missing, mut nr_gaps) = (0, 0);
        let (space, _locks, mut state) = loop {
            // Each round reserves as much as an earlier one, so concurrent changes cannot prolong the loop forever.
            let now = {
                let _writeback = inode.writeback.lock();
                let state = inode.read()?;
                self.missing_size(inode, &state, wide.clone(), zero)?
            };
            (missing, nr_gaps) = (missing.max(now.0), nr_gaps.max(now.1));
            let space = self.engine.reserve_data_with_items(inode.id.root, missing, nr_gaps)?;
            let (locks, state) = lock(inode)?;
            // If another thread punched a hole or shortened the file before the locks were taken, the range may need
            // more space than was reserved. Then reserve again (I4).
            let now = self.missing_size(inode, &state, wide.clone(), zero)?;
            if now.0 <= missing && now.1 <= nr_gaps {
                break (space, locks, state);
            }
        };
        let mut space = Some(space);
        let state = &mut *state;
        self.prepare_end(inode, state, wide.end.max(state.item.size), &mut space)?;
        if zero {
            let inner = range.start.next_multiple_of(sectorsize)..range.end - range.end % sectorsize;
            self.zero_edges(inode, state, &range, &inner, &mut space)?;
            if !inner.is_empty() {
                self.drop_unwritten(inode, state, inner)?;
            }
        }
        let gaps = self.missing(inode, state, wide, false)?;
        if let Some(space) = space {
            self.put_prealloc(inode, state, gaps, space)?;
        }
        self.put_changed(inode, state, if keep_size { 0 } else { range.end })
    }

    /// The bytes of data space that an allocation needs, and the number of the ranges that [`Self::missing`] returns. The
    /// bytes are those of these ranges, and of the sectors that [`Self::prepare_end`] and [`Self::zero_edges`] may make
    /// dirty. They are no more than needed, so all space that `df` shows can be preallocated.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn missing_size(&self, inode: &Inode, state: &InodeState, range: Range<u64>, zero: bool) -> Result<(u64, u64)> {
        let gaps = self.missing(inode, state, range, zero)?;
        let (size, sectorsize) = (state.item.size, u64::from(self.geometry.sectorsize));
        let has_partial_end = size > 0 && (size <= sectorsize || !size.is_multiple_of(sectorsize));
        let nr_sectors = 2 * (u64::from(has_partial_end) + u64::from(zero));
        let bytes: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        Ok((bytes + nr_sectors * sectorsize, gaps.len() as u64))
    }

    /// Returns the parts of a range that have neither an extent nor pending data; with `zero`, also the parts that have
    /// data.
    fn missing(&self, inode: &Inode, state: &InodeState, range: Range<u64>, zero: bool) -> Result<Vec<Range<u64>>> {
        let mut gaps = Vec::new();
        let mut push = |gap: Range<u64>| {
            if gap.is_empty() {
                return;
            }
            let mut from = gap.start;
            let pending = if zero { Vec::new() } else { state.data.pending_in(gap.clone()) };
            for pending in pending {
                if from < pending.start {
                    gaps.push(from..pending.start);
                }
                from = pending.end;
            }
            if from < gap.end {
                gaps.push(from..gap.end);
            }
        };
        let mut at = range.start;
        let mut seen = range.start;
        while seen < range.end {
            let extents = extents_in(&inode.home.tree, inode.id.ino, seen..range.end, STEP, self.geometry.sectorsize)?;
            let is_last = extents.len() < STEP;
            for extent in extents {
                seen = extent.end;
                if extent.is_hole() || (zero && extent.is_data()) {
                    continue;
                }
                push(at..extent.start);
                at = extent.end;
            }
            if is_last {
                break;
            }
        }
        push(at..range.end.max(at));
        Ok(gaps)
    }

    /// Fills the ranges in `gaps` with preallocated extents.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn put_prealloc(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        gaps: Vec<Range<u64>>,
        mut space: DataReservation,
    ) -> Result<()> {
        let (tree, ino) = (&inode.home.tree, inode.id.ino);
        let sectorsize = u64::from(self.geometry.sectorsize);
        for gap in gaps {
            let mut at = gap.start;
            while at < gap.end {
                let want = (gap.end - at).min(MAX_PREALLOC);
                let extent = self.engine.allocate_data(&mut space, want, sectorsize.min(want), None)?;
                let range = at..at + extent.len_bytes;
                let mut put = || -> Result<()> {
                    let mut plan = ExtentPlan::default();
                    plan.drop_range(tree, ino, range.clone(), self.geometry.sectorsize)?;
                    plan.insert(range.start, prealloc_extent(extent));
                    let reservation = self.engine.reserve(plan.len() + 4)?;
                    state.item.nbytes = plan.nbytes(state.item.nbytes);
                    state.item.flags |= InodeFlags::PREALLOC.bits();
                    let op = self.engine.begin(reservation);
                    plan.apply(&op, tree, ino);
                    inode.put_item(&op, state);
                    space.take_quota(extent.len_bytes).spend();
                    Ok(())
                };
                put().inspect_err(|_| self.engine.release_data(extent))?;
                at = range.end;
            }
        }
        Ok(())
    }

    /// Zeroes the bytes of `range` outside of `inner`, if their sectors hold data.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn zero_edges(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        range: &Range<u64>,
        inner: &Range<u64>,
        space: &mut Option<DataReservation>,
    ) -> Result<()> {
        let size = state.item.size;
        let edges = match inner.start < inner.end {
            true => [range.start..inner.start, inner.end..range.end],
            false => {
                // The range has no whole sector: it lies within one sector, or in two neighbouring sectors.
                let middle = range.start.next_multiple_of(u64::from(self.geometry.sectorsize)).min(range.end);
                [range.start..middle, middle..range.end]
            }
        };
        for edge in edges {
            let edge = edge.start..edge.end.min(size);
            if edge.start >= edge.end || !self.has_data(inode, state, edge.start)? {
                continue;
            }
            let zeros = vec![0; (edge.end - edge.start) as usize];
            self.write_dirty(inode, state, edge.start, &zeros, space)?;
        }
        Ok(())
    }

    /// Whether the sector at `offset` may hold bytes other than zeros.
    #[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn has_data(&self, inode: &Inode, state: &InodeState, offset: u64) -> Result<bool> {
        if !state.data.pending_in(offset..offset + 1).is_empty() {
            return Ok(true);
        }
        let extents = extents_in(&inode.home.tree, inode.id.ino, offset..offset + 1, 1, self.geometry.sectorsize)?;
        Ok(extents.first().is_some_and(ExtentAt::is_data))
    }

    /// Drops all data and extents in `range` (sector-aligned), in steps from its end.
    pub(crate) fn drop_data(&self, inode: &Arc<Inode>, state: &mut InodeState, range: Range<u64>) -> Result<()> {
        self.drop_matching(inode, state, range, |_| true)
    }

    /// Drops the dirty data in `range` (sector-aligned). The caller holds the writeback lock exclusively, so no data is
    /// under writeback, and changes the extents of the range next.
    pub(crate) fn drop_pending(&self, state: &mut InodeState, range: Range<u64>) {
        let freed = state.data.discard(range);
        drop(state.data.take_freed(freed));
        self.data.dequeue(&mut state.data);
        state.data.extents_changed();
    }

    /// Drops the data in `range`; preallocated extents, which read as zeros, stay.
    fn drop_unwritten(&self, inode: &Arc<Inode>, state: &mut InodeState, range: Range<u64>) -> Result<()> {
        self.drop_matching(inode, state, range, |extent| !extent.is_prealloc())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "counts of items")]
    fn drop_matching(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        range: Range<u64>,
        matches: impl Fn(&ExtentAt) -> bool,
    ) -> Result<()> {
        let (tree, ino) = (&inode.home.tree, inode.id.ino);
        let mut before = range.end;
        loop {
            let mut plan = ExtentPlan::default();
            let mut is_last = false;
            let after = before;
            let mut nr_seen = 0;
            while nr_seen < STEP {
                let last = last_extent_before(tree, ino, before, self.geometry.sectorsize)?;
                let Some(last) = last.filter(|last| last.end > range.start) else {
                    is_last = true;
                    before = range.start;
                    break;
                };
                nr_seen += 1;
                before = last.start;
                if matches(&last) {
                    plan.drop_from(tree, &last, &range)?;
                }
            }
            is_last |= before <= range.start;
            let on_disk = before.max(range.start)
                ..after.min(state.disk_size.next_multiple_of(u64::from(self.geometry.sectorsize)));
            if !self.geometry.no_holes && !on_disk.is_empty() {
                plan.fill_holes(tree, ino, on_disk, self.geometry.sectorsize)?;
            }
            let reservation = match plan.is_empty() {
                true => None,
                false => Some(self.engine.reserve_for_removal(plan.len() + 4)?),
            };
            // Drop the data only after space is reserved (I3).
            self.drop_pending(state, before.max(range.start)..after);
            if let Some(reservation) = reservation {
                state.item.nbytes = plan.nbytes(state.item.nbytes);
                let op = self.engine.begin(reservation);
                plan.apply(&op, tree, ino);
                inode.put_item(&op, state);
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// Puts the inode item of a file that was just changed, with new times and a size of at least `size`.
    #[allow(clippy::arithmetic_side_effects, reason = "a count of items")]
    fn put_changed(&self, inode: &Arc<Inode>, state: &mut InodeState, size: u64) -> Result<()> {
        let sizes = (state.item.size, state.disk_size);
        let mut plan = ExtentPlan::default();
        let planned = self.plan_size(inode, state, size, &mut plan);
        let reserved = planned.and_then(|()| Ok(self.engine.reserve_for_removal(plan.len() + 4)?));
        // If there is no space for the change, the file keeps its size.
        let reservation = reserved.inspect_err(|_| (state.item.size, state.disk_size) = sizes)?;
        self.put_planned(inode, state, plan, reservation);
        Ok(())
    }

    /// Raises the size of a file to at least `size`, and plans the items that the new size needs. After an error, the
    /// sizes are as before.
    pub(crate) fn plan_size(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        size: u64,
        plan: &mut ExtentPlan,
    ) -> Result<()> {
        let sizes = (state.item.size, state.disk_size);
        state.item.size = state.item.size.max(size);
        state.advance_disk_size();
        self.plan_holes(inode, plan, sizes.1, state.disk_size)
            .inspect_err(|_| (state.item.size, state.disk_size) = sizes)
    }

    /// Puts planned items and the inode item with new times.
    pub(crate) fn put_planned(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        plan: ExtentPlan,
        reservation: MetadataReservation<'_>,
    ) {
        let time = Timespec::now();
        state.item.mtime = time;
        state.item.ctime = time;
        self.put_untouched(inode, state, plan, reservation);
    }

    /// Puts planned items and the inode item; the inode's times stay.
    pub(crate) fn put_untouched(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        plan: ExtentPlan,
        reservation: MetadataReservation<'_>,
    ) {
        state.count_change();
        let op = self.engine.begin(reservation);
        plan.apply(&op, &inode.home.tree, inode.id.ino);
        inode.put_item(&op, state);
    }
}

/// The sectors that a range covers in part.
#[allow(clippy::arithmetic_side_effects, reason = "the range ends at most at `MAX_SIZE`, rounded up to a sector")]
fn partial_sectors(range: &Range<u64>, sectorsize: u64) -> Vec<Range<u64>> {
    let ends = [range.start, range.end].into_iter().filter(|end| !end.is_multiple_of(sectorsize));
    let mut sectors: Vec<_> = ends.map(|end| end - end % sectorsize..end.next_multiple_of(sectorsize)).collect();
    sectors.dedup();
    sectors
}

fn prealloc_extent(extent: DataExtent) -> ubtrfs_format::item::FileExtent {
    let mut item = whole_extent(Logical(extent.bytenr.0), extent.len_bytes);
    if let FileExtentBody::Regular(regular) = item.body {
        item.body = FileExtentBody::Prealloc(regular);
    }
    item
}

/// Maximum length of a preallocated extent.
const MAX_PREALLOC: u64 = 256 << 20;
/// Number of extent items in one lookup or operation.
const STEP: usize = 256;
