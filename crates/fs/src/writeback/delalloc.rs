//! Writeback of dirty data: the choice of files, and turning a batch of them into extents and items.
//!
//! ```text
//!   batch of inodes --prepare--> jobs (runs under writeback, cut into units) --write_out--> on disk --finish--> items
//! ```
//!
//! Many small files share one allocation and one device write. Writers that exceed the filesystem's memory for dirty
//! data ([`crate::mount::memory_budget`]) write data back themselves, their own data first.
//!
//! Invariants:
//! - I1: each inode with pending data (dirty or under writeback) is in the queue of [`crate::writeback::data_path`],
//!   which keeps it in memory.
//! - I2: lock order: writeback lock of an inode ([`crate::inode::writeback_lock`]) -> its state lock -> operation. A
//!   batch waits for at most one writeback lock, the lock of its first inode. All other code that takes several
//!   writeback locks takes them in ascending order of [`InodeId`](crate::InodeId). Space and metadata are reserved
//!   before locks are taken, or under [`NoFlush`], which allows commits (they need no inode locks) but no writeback (it
//!   needs inode locks).
//! - I3: data is on disk before an item refers to it; an inode's size on disk grows only over data that is on disk.
//! - I4: data that could not be written is dirty again, and keeps its reserved space.
//! - I5: an inode leaves the queue when none of its data is pending. So a pass through the queue also finds data that
//!   other threads are writing, and waits for it.
//! - I6: data that cannot be written stops no other write or commit; its file's fsync fails
//!   ([`crate::writeback::errors`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ubtrfs_format::item::{FileExtentBody, InodeFlags};
use ubtrfs_format::{Generation, RootId};
use ubtrfs_transaction::lock_rank::WriteGuard;
use ubtrfs_transaction::{DataReservation, MetadataReservation, QuotaReservation, ReclaimReason, Span, race_point};

use crate::inode::file_data::DataRun;
use crate::inode::state::{CompressionProperty, Inode, InodeState};
use crate::inode::writeback_lock::{BatchGuard, Wait};
use crate::items::file_extent::{ExtentPlan, extent_key, part_of};
use crate::writeback::no_flush::NoFlush;
use crate::writeback::ordered_data::{self, FileUnits, UnitTarget, WritebackUnit};
use crate::writeback::writeback_job::WritebackJob;
use crate::{Error, Fs, Result};

impl Fs {
    /// Writes back all data that is dirty now, without a commit.
    pub fn flush_data(&self) -> Result<()> {
        self.flush_all_data()
    }

    /// Writes back all data that is dirty now, and waits for data that other threads are writing. Data that cannot be
    /// written does not stop the writeback of other data; the first error is returned. The caller must hold no inode
    /// lock.
    pub(crate) fn flush_all_data(&self) -> Result<()> {
        self.flush_tagged(None)
    }

    /// Writes back the data of one subvolume, or of all subvolumes, that is dirty now. Writes only little of the data
    /// that becomes dirty during the call, however fast writers are. Batches of many files are written until as many
    /// bytes are written as were dirty when the call began. Then each file that may still have data that was dirty at
    /// the time of the call is written in one pass. For a single subvolume, files with at least [`OWN_BYTES`] of dirty
    /// data are written first, each in one pass, because writers may be active in the subvolume all the time. The
    /// caller must hold no inode lock.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    pub(crate) fn flush_tagged(&self, of: Option<RootId>) -> Result<()> {
        let tagged = self.data.queued().into_iter().filter(|inode| of.is_none_or(|root| inode.id.root == root));
        let tagged = tagged.map(|inode| {
            let bytes = inode.state.read().data.dirty_bytes();
            (inode, bytes)
        });
        let (large, others): (Vec<_>, Vec<_>) = tagged.partition(|(_, bytes)| of.is_some() && *bytes >= OWN_BYTES);
        let mut result = Ok(());
        for (inode, _) in large {
            result = result.and(self.flush_inode(&inode, 0..u64::MAX));
        }
        let mut bytes: u64 = others.iter().map(|(_, bytes)| bytes).sum();
        let mut rest = Vec::new();
        let mut waiting: Vec<_> = others.into_iter().rev().map(|(inode, _)| inode).collect();
        while !waiting.is_empty() && bytes > 0 {
            let batch = waiting.split_off(waiting.len().saturating_sub(BATCH_INODES));
            let batch: Vec<_> = batch.into_iter().rev().collect();
            let written = self.write_batch(&batch, 0..u64::MAX, BATCH_BYTES, BatchMode::together(Wait::Never))?;
            for (inode, is_done) in batch.iter().zip(written.done) {
                if !is_done {
                    waiting.push(Arc::clone(inode));
                }
            }
            // A file larger than one batch may have more data than the part that failed.
            let has_more = |place: &&usize| batch[**place].state.read().data.dirty_bytes() > BATCH_BYTES;
            rest.extend(written.failed.iter().filter(has_more).map(|place| Arc::clone(&batch[*place])));
            bytes = bytes.saturating_sub(written.bytes + written.failed_bytes);
            let has_moved = written.bytes + written.failed_bytes > 0;
            result = result.and(written.failure.map_or(Ok(()), Err));
            if !has_moved && let Some(inode) = waiting.pop() {
                result = result.and(self.flush_inode(&inode, 0..u64::MAX));
            }
        }
        waiting.iter().chain(&rest).fold(result, |result, inode| result.and(self.flush_inode(inode, 0..u64::MAX)))
    }

    /// Writes back the data in `range` that is dirty now. If the range reaches past the end of the file, the size on
    /// disk is at least the current size afterwards. The caller must hold no inode lock.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    pub(crate) fn flush_inode(&self, inode: &Arc<Inode>, range: Range<u64>) -> Result<()> {
        let inodes = [Arc::clone(inode)];
        let last = {
            let state = inode.state.read();
            let last = state.data.pending_in(range.clone()).last().map(|last| last.end);
            // Data that becomes dirty from here on must not keep the size on disk below the current size.
            last.map(|end| end.max(state.item.size))
        };
        let Some(last) = last else { return Ok(()) };
        let range = range.start..range.end.min(last);
        let mut at = range.start;
        let mut nr_retries = 0;
        let mut result = Ok(());
        while at < range.end {
            let how = BatchMode { wait: Wait::ForAll, may_inline: nr_retries < MAX_INLINE_RETRIES };
            let written = self.write_batch(&inodes, at..range.end, BATCH_BYTES, how)?;
            result = result.and(written.failure.map_or(Ok(()), Err));
            if written.retry {
                nr_retries += 1;
                continue;
            }
            match written.end {
                Some(end) => at = end,
                None => break,
            }
        }
        result
    }

    /// Writes back about `target_bytes` of dirty data. Skips inodes whose writeback locks are taken or whose data could
    /// not be written before. Returns the number of bytes written.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    pub(crate) fn flush_some(&self, target_bytes: u64, state: ReclaimReason) -> Result<u64> {
        let mut total = 0;
        let most = target_bytes.min(self.data.pool.used_bytes().saturating_mul(2));
        while total < most {
            let inodes = self.data.queued_healthy(BATCH_INODES);
            let how = BatchMode::together(Wait::Never);
            let written = self.write_batch(&inodes, 0..u64::MAX, BATCH_BYTES.min(most - total), how)?;
            // Continue even if all data of the batch failed: the failed inodes have left the healthy part of the queue,
            // so the next batch consists of other inodes.
            if written.bytes + written.failed_bytes == 0 {
                break;
            }
            total += written.bytes;
        }
        self.engine.stats().reclaimed(state, most, total);
        Ok(total)
    }

    /// Writes data back on a writeback thread, until little dirty data is left.
    pub(crate) fn flush_background(&self) -> Result<()> {
        while self.data.should_continue() {
            if self.flush_some(BATCH_BYTES, ReclaimReason::Background)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Writes some data back if the memory for dirty data is used up. Called before a write, without inode locks.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    pub(crate) fn throttle(&self, inode: &Arc<Inode>) -> Result<()> {
        if self.data.should_write() {
            self.data.threads.wake();
        }
        if !self.data.is_over_limit() {
            return Ok(());
        }
        let own_bytes = inode.state.read().data.dirty_bytes();
        if own_bytes >= OWN_BYTES || (own_bytes > 0 && self.data.errors.is_failing(inode.id)) {
            let how = BatchMode::together(Wait::ForExclusive);
            let written = self.write_batch(&[Arc::clone(inode)], 0..u64::MAX, WRITER_BYTES, how)?;
            // Do not accept more data that cannot be written: it would take memory that other files need.
            written.failure.map_or(Ok(()), Err)?;
        }
        let mut waited = Duration::ZERO;
        while waited < PATIENCE {
            let seen = self.data.ended_batches.current();
            if !self.data.is_over_limit() {
                break;
            }
            if self.flush_some(WRITER_BYTES, ReclaimReason::Writer)? == 0 {
                if self.data.has_only_failed_data() {
                    break;
                }
                // Other threads are writing all data that can be written, or hold the locks of its inodes. Nobody tells
                // when a lock gets free, so look again after a while.
                let begun = Instant::now();
                self.data.ended_batches.wait_for(seen, WAIT);
                waited += begun.elapsed();
            }
        }
        Ok(())
    }

    /// Writes back up to about `max_bytes` of the inodes' data in `range`. `how` says how to wait for the first inode's
    /// writeback lock; other inodes are skipped if their locks are taken. Data that cannot be written is reported in
    /// [`BatchResult`] and does not stop the writeback of other inodes. An error means that nothing can be written at all.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    fn write_batch(
        &self,
        inodes: &[Arc<Inode>],
        range: Range<u64>,
        max_bytes: u64,
        how: BatchMode,
    ) -> Result<BatchResult> {
        let _no_flush = NoFlush::new();
        let mut written = BatchResult { done: vec![false; inodes.len()], ..BatchResult::default() };
        let mut jobs: Vec<Option<WritebackJob<'_>>> = Vec::new();
        // The index in `inodes` of each job's inode.
        let mut places = Vec::new();
        let mut taken = 0;
        for (index, inode) in inodes.iter().enumerate() {
            if taken >= max_bytes {
                break;
            }
            let wait = if index == 0 { how.wait } else { Wait::Never };
            let Some((guard, mut state)) = lock_for_batch(inode, wait) else { continue };
            // A thread that panics during a writeback releases the writeback lock before its work is complete. Then the
            // filesystem is read-only, so write nothing.
            if let Err(error) = self.engine.check_writable() {
                // Giving up a job takes the lock of its inode.
                drop((state, guard));
                jobs.into_iter().flatten().for_each(|job| self.give_up(job));
                return Err(error.into());
            }
            let others_write = state.data.has_writeback();
            let job = self.prepare(inode, &mut state, range.clone(), max_bytes - taken, guard, how.may_inline);
            written.done[index] = !state.data.has_dirty() && !others_write;
            drop(state);
            if let Some(job) = job {
                taken += job.bytes;
                written.end = job.runs.last().map(DataRun::end);
                jobs.push(Some(job));
                places.push(index);
            }
        }
        if jobs.is_empty() {
            return Ok(written);
        }
        let _span = self.engine.stats().span(Span::WriteData);
        let _in_place = jobs.iter().flatten().any(|job| job.in_place).then(|| self.data.in_place.read());
        let _writing = self.data.start_writing(jobs.iter().flatten().flat_map(|job| &job.runs));
        self.write_writable(&mut jobs, &mut written);
        for (job, place) in jobs.into_iter().zip(places) {
            let Some(job) = job else {
                written.failed.push(place);
                continue;
            };
            let (inode, bytes) = (job.inode, job.bytes);
            match self.finish(job) {
                Ok(Finished::Written(bytes)) => written.bytes += bytes,
                Ok(Finished::Retry) => (written.retry, written.done[place]) = (true, false),
                Err(error) => {
                    written.failed.push(place);
                    self.note_failure(inode, bytes, error, &mut written);
                }
            }
        }
        // Inodes that failed count as done, because a retry now would fail again.
        written.failed.iter().for_each(|place| written.done[*place] = true);
        match self.engine.check_writable() {
            Err(error) if written.failure.is_some() => Err(error.into()),
            _ => Ok(written),
        }
    }

    /// Writes the data of each job in `group` whose data can be written, and gives up the other jobs. If writing the
    /// whole group fails, its halves are tried separately, because the error of a joint write does not tell whose data
    /// the device refuses.
    fn write_writable<'i>(&self, group: &mut [Option<WritebackJob<'i>>], written: &mut BatchResult) {
        let Err(error) = self.write_jobs(group) else { return };
        if group.len() > 1 && self.engine.check_writable().is_ok() {
            let (first, second) = group.split_at_mut(group.len() / 2);
            self.write_writable(first, written);
            self.write_writable(second, written);
            return;
        }
        let mut error = Some(error);
        for job in group.iter_mut().filter_map(Option::take) {
            let (inode, bytes) = (job.inode, job.bytes);
            self.give_up(job);
            if let Some(error) = error.take() {
                self.note_failure(inode, bytes, error, written);
            }
        }
    }

    /// Notes that an inode's data, which is dirty again, could not be written.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    fn note_failure(&self, inode: &Arc<Inode>, bytes: u64, error: Error, written: &mut BatchResult) {
        written.failed_bytes += bytes;
        // If the whole filesystem became read-only, the failure does not concern this file alone, so it is not recorded
        // for the file.
        if self.engine.check_writable().is_ok() {
            self.data.errors.note(inode.id, &error);
            let mut state = inode.state.write();
            if !state.data.is_clean() {
                self.data.enqueue_failed(inode, &mut state.data);
            } else {
                self.data.errors.note_clean(inode.id);
            }
        }
        written.failure.get_or_insert(error);
    }

    fn prepare<'i>(
        &self,
        inode: &'i Arc<Inode>,
        state: &mut InodeState,
        range: Range<u64>,
        max_bytes: u64,
        guard: BatchGuard<'i>,
        may_inline: bool,
    ) -> Option<WritebackJob<'i>> {
        if state.dead {
            state.data.discard(0..u64::MAX);
            state.data.take_reservation(u64::MAX);
        }
        let has_unreserved = state.data.unreserved_bytes() > 0;
        // A defragmentation writes to new extents, for which data without a reservation has no space.
        let is_rewritten = state.rewriting.is_some() && !has_unreserved;
        let is_alone = !guard.is_exclusive() || !state.data.has_writeback();
        assert!(is_alone, "I1 of writeback_lock: another task writes the data of {:?}", inode.id);
        let runs = state.data.start_writeback(range, max_bytes);
        assert!(runs.is_empty() || state.data.queued.is_some(), "I1: inode {:?} is not in the queue", inode.id);
        if runs.is_empty() {
            self.data.dequeue(&mut state.data);
            return None;
        }
        let bytes = runs.iter().map(|run| run.len_bytes).sum();
        let policy = self.policy(state);
        let inline = may_inline.then(|| self.inline_data(state, &runs, &policy)).flatten();
        Some(WritebackJob {
            inode,
            reservation: state.data.take_reservation(bytes),
            promised: 0,
            quota: QuotaReservation::default(),
            has_unreserved,
            in_place: guard.is_exclusive() && state.has_flags(IN_PLACE) && !is_rewritten,
            overwrite: state.has_flags(InodeFlags::NODATACOW),
            may_be_new: state.item.nbytes == 0,
            start_failed: false,
            reach: state.data.reach_with(&runs, state.disk_size, state.item.size),
            runs,
            units: Vec::new(),
            nr_put: 0,
            bytes,
            policy,
            inline,
            guard,
        })
    }

    /// Cuts all jobs into units and writes the units. After an error, each job has its reservation and quota again.
    fn write_jobs(&self, jobs: &mut [Option<WritebackJob<'_>>]) -> Result<()> {
        let mut reservation = self.engine.empty_data_reservation();
        let result = self.try_write_jobs(jobs, &mut reservation);
        if result.is_err() {
            for job in jobs.iter_mut().flatten().filter(|job| job.inline.is_none() && job.reservation.is_none()) {
                let mut own = reservation.split(job.promised);
                own.add_quota(std::mem::take(&mut job.quota));
                job.reservation = Some(own);
            }
        }
        result
    }

    #[allow(clippy::arithmetic_side_effects, reason = "ranges of units are not empty")]
    fn try_write_jobs(&self, jobs: &mut [Option<WritebackJob<'_>>], reservation: &mut DataReservation) -> Result<()> {
        for job in jobs.iter_mut().flatten() {
            if job.inline.is_some() {
                continue;
            }
            if let Some(mut one) = job.reservation.take() {
                job.promised = one.bytes();
                job.quota = one.take_quota(u64::MAX);
                reservation.merge(one);
            }
            job.cut(self)?;
        }
        let mut batches: Vec<FileUnits<'_>> = jobs
            .iter_mut()
            .flatten()
            .filter(|job| job.inline.is_none())
            .map(|job| FileUnits {
                runs: &job.runs,
                units: std::mem::take(&mut job.units),
                policy: job.policy,
                start_failed: AtomicBool::new(false),
            })
            .collect();
        if batches.is_empty() {
            return Ok(());
        }
        ordered_data::compress(&mut batches, self.geometry.sectorsize);
        let result = ordered_data::write_out(&self.engine, &mut batches, reservation, &self.data.hint);
        let written: Vec<(Vec<WritebackUnit>, bool)> =
            batches.into_iter().map(|batch| (batch.units, batch.start_failed.into_inner())).collect();
        result?;
        for (job, (units, start_failed)) in jobs.iter_mut().flatten().filter(|job| job.inline.is_none()).zip(written) {
            if job.has_unreserved {
                // The job may have got the space of other data, and data in place used none of it. The rest of
                // `reservation` belongs to other jobs.
                let new = units.iter().filter(|unit| unit.is_new()).map(|unit| unit.range.end - unit.range.start);
                job.reservation = Some(reservation.split(job.promised.saturating_sub(new.sum())));
            }
            (job.units, job.start_failed) = (units, start_failed);
        }
        Ok(())
    }

    /// Puts the items of a job whose data is on disk.
    fn finish(&self, mut job: WritebackJob<'_>) -> Result<Finished> {
        match self.put_items(&mut job) {
            Ok(true) => Ok(Finished::Written(job.bytes)),
            Ok(false) => {
                self.give_up(job);
                Ok(Finished::Retry)
            }
            Err(error) => {
                let mut reservation = job.reservation.take().unwrap_or_else(|| self.engine.empty_data_reservation());
                for unit in job.units[job.nr_put..].iter().filter(|unit| unit.is_new()) {
                    let (bytenr, len_bytes) = (unit.bytenr(), unit.disk_len());
                    let extent = ubtrfs_transaction::DataExtent { bytenr, len_bytes };
                    self.engine.release_data_promised(extent, &mut reservation);
                }
                job.reservation = Some(reservation);
                self.give_up(job);
                Err(error)
            }
        }
    }

    /// Puts the job's items. If space cannot be reserved for all items at once, puts them in several operations. A
    /// reservation is an estimate, which is larger than the space that the items use. A commit between two operations
    /// replaces the estimate by this space, so later items find room. Returns false if the file changed, so that the
    /// job's inline data is no longer the whole content of the file.
    fn put_items(&self, job: &mut WritebackJob<'_>) -> Result<bool> {
        let inode = job.inode;
        let _extents = inode.writeback.extents();
        loop {
            let (mut plan, reservation, end) = self.reserve_items(job)?;
            let is_last = end == job.units.len();
            race_point();
            let mut state = inode.state.write();
            let state = &mut *state;
            if let Some(inline) = &job.inline
                && (state.item.size != inline.size || state.data.has_dirty())
            {
                return Ok(false);
            }
            if is_last {
                for run in &job.runs {
                    state.data.end_writeback(run);
                }
                let disk_size = state.disk_size;
                // The size on disk does not shrink, even if data below it has become dirty since the job was prepared:
                // an earlier fsync may have returned, after which this size must survive a crash.
                state.disk_size = disk_size.max(job.reach.min(state.item.size));
                state.advance_disk_size();
                assert!(state.disk_size >= disk_size, "I3: the size on disk shrinks from {disk_size}");
                let unreserved = state.data.unreserved_bytes();
                if unreserved > 0
                    && let Some(unused) = &mut job.reservation
                {
                    state.data.add_reservation(unused, unreserved);
                }
                if let Err(error) = self.plan_holes(inode, &mut plan, disk_size, state.disk_size) {
                    state.disk_size = disk_size;
                    state.data.resume_writeback(&job.runs);
                    return Err(error);
                }
            }
            state.item.nbytes = plan.nbytes(state.item.nbytes);
            if job.start_failed && !job.policy.force && state.compression == CompressionProperty::Unset {
                state.item.flags |= InodeFlags::NOCOMPRESS.bits();
            }
            state.data.extents_changed();
            let op = self.engine.begin(reservation);
            plan.apply(&op, &inode.home.tree, inode.id.ino);
            job.put_csums(&op, self.geometry, end);
            inode.put_item(&op, state);
            if is_last {
                std::mem::take(&mut job.quota).spend();
            }
            drop(op);
            job.nr_put = end;
            if is_last {
                self.data.dequeue(&mut state.data);
                return Ok(true);
            }
        }
    }

    /// Reserves space for the items of as many of the job's next units as possible. If the space is not enough for one
    /// unit, which may replace many extents, halves the unit. Returns the plan, the reservation, and the index in the
    /// job after the last unit whose items they cover.
    #[allow(clippy::arithmetic_side_effects, reason = "counts of items and units")]
    fn reserve_items(&self, job: &mut WritebackJob<'_>) -> Result<(ExtentPlan, MetadataReservation<'_>, usize)> {
        let mut end = job.units.len();
        let mut plan = self.plan_items(job, end)?;
        let most = plan.len() + EXTRA_ITEMS;
        let least = match job.units.get(job.nr_put).map(|unit| &unit.target) {
            Some(UnitTarget::Plain { .. }) => FEW_ITEMS,
            Some(_) => self.plan_items(job, job.nr_put + 1)?.len() + EXTRA_ITEMS,
            None => most,
        };
        let reservation = self.engine.reserve_for_writeback_steps(most, least.min(most))?;
        while plan.len() + EXTRA_ITEMS > reservation.nr_items() {
            match end - job.nr_put {
                0 => break,
                1 if ordered_data::halve(&mut job.units, job.nr_put, self.geometry) => {}
                1 => break,
                nr_units => end = job.nr_put + nr_units / 2,
            }
            plan = self.plan_items(job, end)?;
        }
        Ok((plan, reservation, end))
    }

    /// Plans the items of the job's next units up to `end`.
    fn plan_items(&self, job: &WritebackJob<'_>, end: usize) -> Result<ExtentPlan> {
        let (tree, ino) = (&job.inode.home.tree, job.inode.id.ino);
        let sectorsize = self.geometry.sectorsize;
        let mut plan = ExtentPlan::default();
        let is_new = job.may_be_new
            && job.nr_put == 0
            && tree.first_ge(&extent_key(ino, 0), &extent_key(ino, u64::MAX))?.is_none();
        if let Some(inline) = &job.inline {
            if !is_new {
                plan.drop_range(tree, ino, 0..u64::from(sectorsize), sectorsize)?;
            }
            plan.insert(0, inline.file_extent());
            return Ok(plan);
        }
        for unit in &job.units[job.nr_put..end] {
            match &unit.target {
                UnitTarget::Plain { .. } | UnitTarget::Compressed { .. } => {
                    if !is_new {
                        plan.drop_range(tree, ino, unit.range.clone(), sectorsize)?;
                    }
                    plan.insert(unit.range.start, unit.file_extent());
                }
                UnitTarget::InPlace { at } if at.is_prealloc() => {
                    plan.drop_from(tree, at, &unit.range)?;
                    let mut part = part_of(at, unit.range.clone());
                    if let FileExtentBody::Prealloc(regular) = part.body {
                        part.body = FileExtentBody::Regular(regular);
                    }
                    part.generation = Generation(0);
                    plan.insert(unit.range.start, part);
                }
                UnitTarget::InPlace { .. } => {}
            }
        }
        Ok(plan)
    }

    /// Adds explicit holes for the range by which the size on disk grows, if the filesystem needs explicit holes.
    pub(crate) fn plan_holes(&self, inode: &Inode, plan: &mut ExtentPlan, from: u64, to: u64) -> Result<()> {
        if self.geometry.no_holes || to <= from {
            return Ok(());
        }
        let sectorsize = u64::from(self.geometry.sectorsize);
        let range = from.next_multiple_of(sectorsize)..to.next_multiple_of(sectorsize);
        plan.fill_holes(&inode.home.tree, inode.id.ino, range, self.geometry.sectorsize)
    }

    /// Makes the job's data dirty again (I4), except for units whose items were put.
    #[allow(clippy::arithmetic_side_effects, reason = "counts, and bytes of dirty data in memory")]
    fn give_up(&self, job: WritebackJob<'_>) {
        let mut state = job.inode.state.write();
        let mut bytes = 0;
        let put: Vec<_> = job.units[..job.nr_put].iter().map(|unit| unit.range.clone()).collect();
        for run in job.runs {
            bytes += state.data.fail_writeback(run, &put);
        }
        let mut reservation = job.reservation.unwrap_or_else(|| self.engine.empty_data_reservation());
        reservation.add_quota(job.quota);
        state.data.add_reservation(&mut reservation, bytes);
        self.data.enqueue(job.inode, &mut state.data);
    }
}

impl InodeState {
    /// Raises the size on disk to the start of the first pending data past it, or to the file's size if there is no
    /// such data (I3).
    pub(crate) fn advance_disk_size(&mut self) {
        self.disk_size = match self.data.first_pending_after(self.disk_size) {
            None => self.item.size,
            Some(start) => self.disk_size.max(start.min(self.item.size)),
        };
        assert!(self.disk_size <= self.item.size, "I3: more is on disk than the file has");
    }
}

/// Takes an inode's locks for a batch, exclusively if the batch may write into existing extents of the file.
fn lock_for_batch(inode: &Inode, wait: Wait) -> Option<(BatchGuard<'_>, WriteGuard<'_, InodeState>)> {
    let guard = inode.writeback.lock_for_batch(wait, false)?;
    let state = inode.state.write();
    if guard.is_exclusive() || !state.has_flags(IN_PLACE) {
        return Some((guard, state));
    }
    drop((state, guard));
    let guard = inode.writeback.lock_for_batch(wait, true)?;
    Some((guard, inode.state.write()))
}

#[derive(Clone, Copy)]
struct BatchMode {
    wait: Wait,
    may_inline: bool,
}

impl BatchMode {
    fn together(wait: Wait) -> Self {
        Self { wait, may_inline: true }
    }
}

/// The outcome of a batch.
#[derive(Default)]
struct BatchResult {
    bytes: u64,
    /// Bytes that could not be written, with the first error in `failure`.
    failed_bytes: u64,
    failure: Option<Error>,
    /// Indexes of the inodes whose data could not be written.
    failed: Vec<usize>,
    /// For each inode, whether all of its pending data is now in the trees or could not be written.
    done: Vec<bool>,
    /// File offset at the end of the last run that was taken for writeback.
    end: Option<u64>,
    /// Whether some data was left dirty because its file changed in the meantime.
    retry: bool,
}

enum Finished {
    Written(u64),
    Retry,
}

/// Approximate number of bytes written back in one batch.
const BATCH_BYTES: u64 = 16 << 20;
/// Approximate number of bytes that a writer over the memory limit writes back in one batch.
const WRITER_BYTES: u64 = 4 << 20;
/// Flags of files whose data may be written into existing extents.
pub(crate) const IN_PLACE: InodeFlags = InodeFlags::NODATACOW.union(InodeFlags::PREALLOC);
const BATCH_INODES: usize = 4096;
/// A writer over the memory limit first writes back data of its own file, if the file has at least this much dirty
/// data. [`Fs::flush_tagged`] writes such files of a single subvolume in passes of their own.
const OWN_BYTES: u64 = 1 << 20;
/// A writer over the limit waits at most this time for writeback by other threads, then continues.
const PATIENCE: Duration = Duration::from_secs(1);
/// Number of attempts to write a small file inline while other threads change it: an inline extent must hold the whole
/// file as it is when its item is put. After these attempts, the data becomes a regular extent, which may hold an older
/// state.
const MAX_INLINE_RETRIES: u32 = 16;
/// Interval at which a waiting writer looks for data whose inode was locked.
const WAIT: Duration = Duration::from_millis(10);
/// Number of items reserved in addition to the planned ones, for the inode, checksums and explicit holes.
const EXTRA_ITEMS: usize = 8;
/// Number of items that suffice for one sector: its new extent, and the remaining parts of the extent around it.
const FEW_ITEMS: usize = 16;

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use ubtrfs_device::{Device, MemoryDevice};
    use ubtrfs_transaction::Flusher;

    use super::*;
    use crate::file::extent_map::FileExtentKind;
    use crate::{Caller, InodeId, MountOptions, NewInode};

    fn file_on_new_filesystem() -> (Arc<Fs>, InodeId) {
        let device = Arc::new(MemoryDevice::new(128 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device as Arc<dyn Device>], MountOptions::default()).unwrap();
        let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        (fs, id)
    }

    #[test]
    fn a_small_file_that_is_never_at_rest_becomes_a_regular_extent() {
        let device = Arc::new(MemoryDevice::new(128 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let open = || Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
        let fs = open();
        let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        let kinds = || fs.extents(id).unwrap().iter().map(|extent| extent.kind).collect::<Vec<_>>();
        for round in 1..4 {
            fs.write(id, 0, &[round; 200]).unwrap();
            let how = BatchMode { wait: Wait::ForAll, may_inline: false };
            let written = fs.write_batch(&[fs.inode(id).unwrap()], 0..u64::MAX, BATCH_BYTES, how).unwrap();
            assert!(written.failure.is_none() && !written.retry && written.bytes > 0);
            assert_eq!(kinds(), [FileExtentKind::Data]);
            fs.write(id, 0, &[round + 10; 100]).unwrap();
            fs.fsync(id, false).unwrap();
            assert_eq!(kinds(), [FileExtentKind::Inline], "inline again once it is at rest");
        }
        fs.write(id, 0, &[9; 50]).unwrap();
        let how = BatchMode { wait: Wait::ForAll, may_inline: false };
        fs.write_batch(&[fs.inode(id).unwrap()], 0..u64::MAX, BATCH_BYTES, how).unwrap();
        let content = [[9; 50].as_slice(), &[13; 50], &[3; 100]].concat();
        fs.close().unwrap();
        let fs = open();
        assert_eq!(fs.read(id, 0, 4096).unwrap(), content);
        fs.close().unwrap();
    }

    #[cfg(debug_assertions)]
    #[test]
    fn inline_data_whose_items_find_no_space_keeps_its_reservation() {
        let (fs, id) = file_on_new_filesystem();
        fs.write(id, 0, &[1; 200]).unwrap();
        let inode = fs.inode(id).unwrap();
        let write = || {
            let how = BatchMode::together(Wait::ForAll);
            fs.write_batch(&[Arc::clone(&inode)], 0..u64::MAX, BATCH_BYTES, how).unwrap()
        };
        ubtrfs_transaction::refuse_reservation_after(0);
        let written = write();
        assert!(ubtrfs_transaction::end_refusal() && written.failure.is_some());
        // The file can still grow, and then its data needs the space.
        assert_eq!(inode.state.read().data.unreserved_bytes(), 0);
        assert!(write().failure.is_none());
        assert_eq!(fs.extents(id).unwrap()[0].kind, FileExtentKind::Inline);
        fs.close().unwrap();
    }

    /// Extents count as shared once `close` has run, and a batch that was prepared before would find no space for its
    /// data then.
    #[test]
    fn data_that_a_batch_writes_in_place_is_awaited_before_its_extents_count_as_shared() {
        let (fs, id) = file_on_new_filesystem();
        fs.fallocate(id, 0, 64 << 10, crate::FallocateMode::empty()).unwrap();
        fs.write(id, 0, &[1; 64 << 10]).unwrap();
        let inode = fs.inode(id).unwrap();
        let (guard, mut state) = lock_for_batch(&inode, Wait::ForAll).unwrap();
        let job = fs.prepare(&inode, &mut state, 0..u64::MAX, BATCH_BYTES, guard, true).unwrap();
        assert!(job.in_place && state.data.unreserved_bytes() == 0, "all of it is under writeback");
        drop(state);
        let is_closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let closer = scope.spawn(|| {
                fs.with_space_for_all_data(&mut || {
                    is_closed.store(true, Ordering::SeqCst);
                    Ok(())
                })
            });
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!is_closed.load(Ordering::SeqCst), "the batch still writes");
            let mut jobs = [Some(job)];
            fs.write_writable(&mut jobs, &mut BatchResult::default());
            let [Some(job)] = jobs else { panic!("the data was not written") };
            fs.finish(job).unwrap();
            closer.join().unwrap().unwrap();
        });
        fs.close().unwrap();
    }
}
