//! Dirty data of one file: written data that is not in the trees yet.
//!
//! Sequential writes fill large buffers from a pool, so a write costs one copy. There are no objects per page or
//! sector.
//!
//! ```text
//!   write() ----> dirty ----start_writeback()----> writeback ----end_writeback()----> gone (extent items have it)
//!                   ^                                  |
//!                   +------------fail_writeback()------+
//! ```
//!
//! Invariants:
//! - I1: ranges start and end on sector boundaries; ranges of one map do not overlap; no range is empty.
//! - I2: readers of a dirty range get the dirty data; readers of a range that is only under writeback get the data that
//!   is being written; readers of all other ranges get the data of the file's extent items.
//! - I3: in the last sector, bytes past the end of the file are zero.
//! - I4: a range under writeback never changes; a write to it makes a new dirty range.
//! - I5: two batches never write back the same range at the same time: a range that becomes dirty while it is under
//!   writeback stays dirty until that writeback ends.

#![allow(clippy::arithmetic_side_effects, reason = "ranges of dirty data in memory: writes end at most at `MAX_SIZE`")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::Logical;
use ubtrfs_transaction::DataReservation;

use crate::inode::buf_pool::{BUF_MAX, Buf, BufPool};
use crate::inode::readahead::ReadWindow;

/// Contiguous data taken for writeback.
#[derive(Debug)]
pub(crate) struct DataRun {
    /// Offset of the run in the file.
    pub offset: u64,
    /// Buffers of the run, one after the other.
    pub bufs: Vec<Arc<Buf>>,
    /// Total length of the buffers.
    pub len_bytes: u64,
}

impl DataRun {
    /// The memory that the run's buffers take.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.bufs.iter().map(|buf| buf.size as u64).sum()
    }

    /// The file offset after the last byte of the run.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.len_bytes
    }

    /// The pieces of the buffers that cover `range` of the file; the run must contain `range`.
    pub(crate) fn pieces(&self, range: Range<u64>) -> Vec<&[u8]> {
        let mut pieces = Vec::new();
        let mut at = self.offset;
        for buf in &self.bufs {
            let end = at + buf.len() as u64;
            if at < range.end && end > range.start {
                let from = range.start.saturating_sub(at) as usize;
                let to = (range.end.min(end) - at) as usize;
                pieces.push(&buf[from..to]);
            }
            at = end;
        }
        pieces
    }
}

/// Dirty data of one file.
#[derive(Debug, Default)]
pub(crate) struct FileData {
    /// The sector size; 0 until the first write.
    sectorsize: u64,
    dirty: BTreeMap<u64, Buf>,
    writeback: BTreeMap<u64, Arc<Buf>>,
    dirty_bytes: u64,
    /// Reserved space for the dirty bytes.
    reservation: Option<DataReservation>,
    /// The inode's place in the queue of inodes with dirty data.
    pub(crate) queued: Option<u64>,
    decompressed: Mutex<Option<Decompressed>>,
    read_window: Mutex<ReadWindow>,
}

/// The compressed extent that was read last. The decompressed data is dropped whenever the file's extent items change,
/// because the extent's address may hold other data afterwards.
#[derive(Clone, Debug)]
pub(crate) struct Decompressed {
    /// The extent.
    pub bytenr: Logical,
    /// The decompressed bytes of the whole extent.
    pub bytes: Arc<Vec<u8>>,
}

impl FileData {
    /// Sets the sector size. Must be called before a write.
    pub(crate) fn set_sectorsize(&mut self, sectorsize: u32) {
        self.sectorsize = sectorsize.into();
    }

    /// Moves reserved space for `bytes` from `from` to the reservation for dirty bytes.
    pub(crate) fn add_reservation(&mut self, from: &mut DataReservation, bytes: u64) {
        match &mut self.reservation {
            Some(reservation) => reservation.take_from(from, bytes),
            none => *none = Some(from.split(bytes)),
        }
    }

    /// Takes space for `bytes`, or as much as there is, out of the reservation for dirty bytes.
    pub(crate) fn take_reservation(&mut self, bytes: u64) -> Option<DataReservation> {
        let reservation = self.reservation.as_mut()?;
        if bytes >= reservation.covered() { self.reservation.take() } else { Some(reservation.split(bytes)) }
    }

    /// Takes the space of `bytes` that were dirty and are not any more. Some of these bytes may have had no reservation
    /// ([`Self::unreserved_bytes`]), so the data that is still dirty keeps the space that it may need.
    pub(crate) fn take_freed(&mut self, bytes: u64) -> Option<DataReservation> {
        if self.dirty_bytes == 0 {
            return self.reservation.take();
        }
        Some(self.reservation.as_mut()?.split_keeping(bytes, self.dirty_bytes))
    }

    /// The decompressed extent at `bytenr`, if it is the extent that is kept.
    pub(crate) fn decompressed(&self, bytenr: Logical) -> Option<Decompressed> {
        self.decompressed.lock().clone().filter(|last| last.bytenr == bytenr)
    }

    /// Keeps a decompressed extent for the next read.
    pub(crate) fn remember_decompressed(&self, last: Decompressed) {
        *self.decompressed.lock() = Some(last);
    }

    /// Drops data that was read from extent items. Must be called whenever the file's extent items change.
    pub(crate) fn extents_changed(&mut self) {
        *self.decompressed.get_mut() = None;
        *self.read_window.get_mut() = ReadWindow::default();
    }

    /// The read-ahead state.
    pub(crate) fn read_window(&self) -> &Mutex<ReadWindow> {
        &self.read_window
    }

    /// Whether no data is pending.
    pub(crate) fn is_clean(&self) -> bool {
        debug_assert!(
            !self.dirty.is_empty() || self.dirty_bytes == 0,
            "I1: {} dirty bytes in no range",
            self.dirty_bytes
        );
        self.dirty.is_empty() && self.writeback.is_empty()
    }

    /// Whether some data waits for writeback. Data under writeback does not count.
    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Whether a batch is writing data of the file.
    pub(crate) fn has_writeback(&self) -> bool {
        !self.writeback.is_empty()
    }

    /// Bytes of dirty ranges. Ranges under writeback do not count.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes
    }

    /// Bytes that became dirty without a reservation, because they go to extents of the file
    /// ([`crate::writeback::data_path::DataPath::unreserved`]).
    pub(crate) fn unreserved_bytes(&self) -> u64 {
        self.dirty_bytes.saturating_sub(self.reservation.as_ref().map_or(0, DataReservation::bytes))
    }

    /// The start of the first pending (dirty or under writeback) range that ends after `offset`.
    pub(crate) fn first_pending_after(&self, offset: u64) -> Option<u64> {
        let dirty = ranges_from(&self.dirty, offset).next().map(|(start, _)| start);
        let writeback = ranges_from(&self.writeback, offset).next().map(|(start, _)| start);
        dirty.into_iter().chain(writeback).min()
    }

    /// The size on disk once `runs`, which were just taken for writeback, are written. `from` is the current size on
    /// disk, and `size` the size of the file. The result is the start of the first pending data that is not in `runs`
    /// (at least `from`), or `size` if there is no such data.
    pub(crate) fn reach_with(&self, runs: &[DataRun], from: u64, size: u64) -> u64 {
        if from >= size {
            return from;
        }
        let dirty = ranges_from(&self.dirty, from).next().map(|(start, _)| start);
        let mut own = runs.iter().peekable();
        let others = ranges_from(&self.writeback, from).map(|(start, _)| start).find(|start| {
            while own.next_if(|run| run.end() <= *start).is_some() {}
            own.peek().is_none_or(|run| *start < run.offset)
        });
        dirty.into_iter().chain(others).min().unwrap_or(size).clamp(from, size)
    }

    /// The pending ranges that overlap `range`, as one sorted list without overlaps.
    pub(crate) fn pending_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = ranges_from(&self.dirty, range.start)
            .take_while(|(start, _)| *start < range.end)
            .chain(ranges_from(&self.writeback, range.start).take_while(|(start, _)| *start < range.end))
            .map(|(start, end)| start.max(range.start)..end.min(range.end))
            .collect();
        found.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(found.len());
        for range in found {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        merged
    }

    /// Whether the sector at `sector` (its offset) is dirty.
    pub(crate) fn is_dirty(&self, sector: u64) -> bool {
        covering(&self.dirty, sector).is_some()
    }

    /// The first and the last sector of `range`. A sector is returned only if the range covers just a part of it, and
    /// if it is not dirty. The caller must pass the other bytes of the returned sectors to [`Self::write`].
    pub(crate) fn partial_sectors(&self, range: Range<u64>) -> (Option<u64>, Option<u64>) {
        let wide = self.widen(range.clone());
        let first = (wide.start < range.start && !self.is_dirty(wide.start)).then_some(wide.start);
        let last = wide.end - self.sectorsize;
        let last = (wide.end > range.end && !self.is_dirty(last)).then_some(last);
        (first, last)
    }

    /// Puts `data` at `offset`. For sectors that [`Self::partial_sectors`] returned, `before` holds the bytes of the
    /// first sector that precede the data, and `after` the bytes of the last sector that follow it. Returns how many
    /// bytes became dirty.
    pub(crate) fn write(&mut self, pool: &Arc<BufPool>, offset: u64, data: &[u8], before: &[u8], after: &[u8]) -> u64 {
        let end = offset + data.len() as u64;
        let dirty_before = self.dirty_bytes;
        let mut at = offset;
        while at < end {
            let rest = &data[(at - offset) as usize..];
            if let Some((start, buf)) = covering_mut(&mut self.dirty, at) {
                let from = (at - start) as usize;
                let len = rest.len().min(buf.bytes.len() - from);
                buf.bytes[from..from + len].copy_from_slice(&rest[..len]);
                at += len as u64;
                continue;
            }
            let head = (at % self.sectorsize) as usize;
            let start = at - head as u64;
            let gap_end = self.dirty.range(at..).next().map_or(end, |(next, _)| end.min(*next));
            let (buf, room) = self.buffer_at(pool, start, head + (gap_end - at) as usize);
            let len = ((gap_end - at) as usize).min(room - head);
            let tail = (head + len).next_multiple_of(self.sectorsize as usize) - head - len;
            let Some(buf) = self.dirty.get_mut(&buf) else { unreachable!("buffer_at made it") };
            if head > 0 {
                buf.bytes.extend_from_slice(&before[before.len() - head..]);
            }
            buf.bytes.extend_from_slice(&rest[..len]);
            buf.bytes.extend_from_slice(&after[..tail]);
            self.dirty_bytes += (head + len + tail) as u64;
            at += len as u64;
        }
        self.check_ranges(&(offset..end));
        self.dirty_bytes - dirty_before
    }

    /// Takes over a buffer as the data at `offset`, padded with zeros to whole sectors. Returns how many bytes became
    /// dirty. Gives the buffer back if it does not begin at a sector, or if part of its range is dirty already.
    pub(crate) fn adopt(&mut self, offset: u64, mut buf: Buf) -> Result<u64, Buf> {
        let range = self.widen(offset..offset + buf.len() as u64);
        if range.start < offset
            || range.is_empty()
            || ranges_from(&self.dirty, offset).next().is_some_and(|(start, _)| start < range.end)
        {
            return Err(buf);
        }
        let len_bytes = range.end - range.start;
        buf.bytes.resize(len_bytes as usize);
        self.dirty.insert(offset, buf);
        self.dirty_bytes += len_bytes;
        self.check_ranges(&range);
        Ok(len_bytes)
    }

    /// Finds or makes the buffer that takes the data at `start`. Returns the start of the buffer, and how many bytes
    /// can be appended to it: whole sectors, at most `want` rounded up.
    fn buffer_at(&mut self, pool: &Arc<BufPool>, start: u64, want: usize) -> (u64, usize) {
        let want = want.next_multiple_of(self.sectorsize as usize);
        let mut new_size = want.min(BUF_MAX);
        if let Some((before, buf)) = self.dirty.range_mut(..start).next_back()
            && *before + buf.len() as u64 == start
        {
            let room = BUF_MAX - buf.len();
            if room > 0 {
                let len = want.min(room);
                buf.make_room(len);
                return (*before, len);
            }
            // The preceding buffer is full, so the writer is probably sequential and will fill the whole next buffer
            // too.
            new_size = BUF_MAX;
        }
        let buf = pool.take(new_size);
        self.dirty.insert(start, buf);
        (start, want.min(BUF_MAX))
    }

    /// Copies the file's pending bytes from `offset` on into `out`. Returns the ranges that are not pending: extent
    /// items hold them, or they are holes.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Vec<Range<u64>> {
        let range = offset..offset + out.len() as u64;
        if self.is_clean() {
            return vec![range];
        }
        let mut copy = |start: u64, buf: &[u8]| {
            let from = start.max(range.start);
            let to = (start + buf.len() as u64).min(range.end);
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&buf[(from - start) as usize..(to - start) as usize]);
        };
        for (start, _) in ranges_from(&self.writeback, range.start).take_while(|(start, _)| *start < range.end) {
            copy(start, &self.writeback[&start]);
        }
        for (start, _) in ranges_from(&self.dirty, range.start).take_while(|(start, _)| *start < range.end) {
            copy(start, &self.dirty[&start]);
        }
        let mut gaps = Vec::new();
        let mut at = range.start;
        for pending in self.pending_in(range.clone()) {
            if pending.start > at {
                gaps.push(at..pending.start);
            }
            at = pending.end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Zeroes the dirty bytes of `range`.
    pub(crate) fn zero(&mut self, range: Range<u64>) {
        let starts: Vec<u64> = ranges_from(&self.dirty, range.start)
            .take_while(|(start, _)| *start < range.end)
            .map(|(start, _)| start)
            .collect();
        for start in starts {
            if let Some(buf) = self.dirty.get_mut(&start) {
                let from = range.start.saturating_sub(start) as usize;
                let to = ((range.end - start) as usize).min(buf.bytes.len());
                buf.bytes[from..to].fill(0);
            }
        }
    }

    /// Drops the dirty sectors of `range`, which must be aligned. Returns how many bytes were dropped.
    pub(crate) fn discard(&mut self, range: Range<u64>) -> u64 {
        if self.dirty.is_empty() {
            return 0;
        }
        debug_assert!(range.start.is_multiple_of(self.sectorsize), "I1");
        debug_assert!(range.end == u64::MAX || range.end.is_multiple_of(self.sectorsize), "I1");
        let before = self.dirty_bytes;
        let starts: Vec<u64> = ranges_from(&self.dirty, range.start)
            .take_while(|(start, _)| *start < range.end)
            .map(|(start, _)| start)
            .collect();
        for start in starts {
            let Some(mut buf) = self.dirty.remove(&start) else { continue };
            let end = start + buf.len() as u64;
            self.dirty_bytes -= end - start;
            if end > range.end {
                let tail = &buf[(range.end - start) as usize..];
                let mut after = buf.pool.take(tail.len());
                after.bytes.extend_from_slice(tail);
                self.dirty_bytes += end - range.end;
                self.dirty.insert(range.end, after);
            }
            if start < range.start {
                buf.bytes.truncate((range.start - start) as usize);
                self.dirty_bytes += range.start - start;
                self.dirty.insert(start, buf);
            }
        }
        self.check_ranges(&range);
        before - self.dirty_bytes
    }

    /// Drops dirty data past `size`, and zeroes the rest of the sector that contains `size`. Returns how many dirty
    /// bytes were dropped.
    pub(crate) fn truncate(&mut self, size: u64) -> u64 {
        if self.dirty.is_empty() {
            return 0;
        }
        let sector_end = size.next_multiple_of(self.sectorsize);
        self.zero(size..sector_end);
        self.discard(sector_end..u64::MAX)
    }

    /// Takes the dirty buffers that overlap `range` for writeback, as whole buffers, until they hold at least
    /// `max_bytes`. A buffer that overlaps a range under writeback stays dirty (I5).
    pub(crate) fn start_writeback(&mut self, range: Range<u64>, max_bytes: u64) -> Vec<DataRun> {
        let is_alone = self.writeback.is_empty();
        let mut runs: Vec<DataRun> = Vec::new();
        let mut taken = 0;
        let mut at = range.start;
        while taken < max_bytes {
            let Some((start, end)) = ranges_from(&self.dirty, at).next() else { break };
            if start >= range.end {
                break;
            }
            if !is_alone && ranges_from(&self.writeback, start).next().is_some_and(|(other, _)| other < end) {
                at = end;
                continue;
            }
            let Some(buf) = self.dirty.remove(&start) else { break };
            let len_bytes = buf.len() as u64;
            let buf = Arc::new(buf);
            let other = self.writeback.insert(start, Arc::clone(&buf));
            assert!(other.is_none(), "I5: the data at {start} is under writeback already");
            self.dirty_bytes -= len_bytes;
            taken += len_bytes;
            at = start + len_bytes;
            match runs.last_mut() {
                Some(run) if run.end() == start => {
                    run.bufs.push(buf);
                    run.len_bytes += len_bytes;
                }
                _ => runs.push(DataRun { offset: start, bufs: vec![buf], len_bytes }),
            }
        }
        self.check_ranges(&range);
        runs
    }

    /// Drops a run after its extent items were put.
    pub(crate) fn end_writeback(&mut self, run: &DataRun) {
        let mut at = run.offset;
        for buf in &run.bufs {
            let ended = self.writeback.remove(&at);
            assert!(ended.is_some_and(|other| Arc::ptr_eq(&other, buf)), "I4: the data at {at} is not under writeback");
            at += buf.len() as u64;
        }
    }

    /// Undoes [`Self::end_writeback`].
    pub(crate) fn resume_writeback(&mut self, runs: &[DataRun]) {
        for run in runs {
            let mut at = run.offset;
            for buf in &run.bufs {
                let other = self.writeback.insert(at, Arc::clone(buf));
                assert!(other.is_none(), "I5: the data at {at} is under writeback already");
                at += buf.len() as u64;
            }
        }
    }

    /// Makes a failed run dirty again. Two kinds of parts do not become dirty: parts that newer dirty data replaces,
    /// and the ranges in `put` (in ascending order), whose items were put. Returns how many bytes are dirty again.
    pub(crate) fn fail_writeback(&mut self, run: DataRun, put: &[Range<u64>]) -> u64 {
        let (start, end) = (run.offset, run.end());
        let mut at = start;
        let before = self.dirty_bytes;
        for shared in run.bufs {
            let ended = self.writeback.remove(&at);
            assert!(
                ended.is_some_and(|other| Arc::ptr_eq(&other, &shared)),
                "I4: the data at {at} is not under writeback"
            );
            let pool = Arc::clone(&shared.pool);
            let len = shared.len() as u64;
            let mut from = at;
            let mut newer: Vec<Range<u64>> = ranges_from(&self.dirty, at)
                .take_while(|(start, _)| *start < at + len)
                .map(|(start, end)| start..end)
                .collect();
            let first = put.partition_point(|range| range.end <= at);
            newer.extend(put[first..].iter().take_while(|range| range.start < at + len).cloned());
            newer.sort_unstable_by_key(|range| range.start);
            newer.push(at + len..at + len);
            for range in newer {
                if from < range.start {
                    let piece = &shared[(from - at) as usize..(range.start - at) as usize];
                    let mut buf = pool.take(piece.len());
                    buf.bytes.extend_from_slice(piece);
                    self.dirty_bytes += piece.len() as u64;
                    self.dirty.insert(from, buf);
                }
                from = from.max(range.end);
            }
            at += len;
        }
        self.check_ranges(&(start..end));
        self.dirty_bytes - before
    }

    /// Checks I1 for the ranges that overlap `around`.
    fn check_ranges(&self, around: &Range<u64>) {
        if !cfg!(debug_assertions) {
            return;
        }
        let dirty = ranges_from(&self.dirty, around.start).take_while(|(start, _)| *start < around.end);
        let writeback = ranges_from(&self.writeback, around.start).take_while(|(start, _)| *start < around.end);
        for ranges in [dirty.collect::<Vec<_>>(), writeback.collect()] {
            for (start, end) in &ranges {
                assert!(start < end, "I1: an empty range at {start}");
                let is_aligned = start.is_multiple_of(self.sectorsize) && end.is_multiple_of(self.sectorsize);
                assert!(is_aligned, "I1: {start}..{end} are not whole sectors");
            }
            let is_apart = ranges.is_sorted_by(|(_, end), (next, _)| end <= next);
            assert!(is_apart, "I1: ranges overlap: {ranges:?}");
        }
    }

    fn widen(&self, range: Range<u64>) -> Range<u64> {
        range.start - range.start % self.sectorsize..range.end.next_multiple_of(self.sectorsize)
    }
}

/// The ranges of a map that end after `offset`, in order.
fn ranges_from<B: AsRef<Buf>>(map: &BTreeMap<u64, B>, offset: u64) -> impl Iterator<Item = (u64, u64)> {
    let bytes = |buf: &B| buf.as_ref().len() as u64;
    let first = map
        .range(..offset)
        .next_back()
        .map(|(start, buf)| (*start, *start + bytes(buf)))
        .filter(|(_, end)| *end > offset);
    first.into_iter().chain(map.range(offset..).map(move |(start, buf)| (*start, *start + bytes(buf))))
}

fn covering(map: &BTreeMap<u64, Buf>, offset: u64) -> Option<(u64, &Buf)> {
    let (start, buf) = map.range(..=offset).next_back()?;
    (*start + buf.len() as u64 > offset).then_some((*start, buf))
}

fn covering_mut(map: &mut BTreeMap<u64, Buf>, offset: u64) -> Option<(u64, &mut Buf)> {
    let (start, buf) = map.range_mut(..=offset).next_back()?;
    (*start + buf.len() as u64 > offset).then_some((*start, buf))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECTOR: u64 = 4096;
    const SPACE: usize = 3 << 20;

    /// The expected pending data, with an entry per byte: `None` for a byte that is not dirty, or not under writeback.
    struct Model {
        dirty: Vec<Option<u8>>,
        writeback: Vec<Option<u8>>,
    }

    #[derive(Clone, Debug)]
    enum Op {
        Write { offset: usize, len: usize, byte: u8 },
        Adopt { offset: usize, len: usize, byte: u8 },
        Zero { offset: usize, len: usize },
        Discard { sector: usize, nr_sectors: usize },
        Truncate { size: usize },
        Start { sector: usize, max: u64 },
        End,
        Fail,
    }

    fn op() -> impl Strategy<Value = Op> {
        let len = prop_oneof![1usize..9000, 1usize..1_500_000, Just(4096usize), Just(131_072usize)];
        let offset = prop_oneof![0usize..SPACE, (0usize..SPACE / 4096).prop_map(|s| s * 4096), 0usize..20_000];
        prop_oneof![
            6 => (offset.clone(), len.clone(), any::<u8>()).prop_map(|(offset, len, byte)| Op::Write { offset, len, byte }),
            3 => (offset.clone(), len.clone(), any::<u8>()).prop_map(|(offset, len, byte)| Op::Adopt { offset, len, byte }),
            1 => (offset.clone(), len).prop_map(|(offset, len)| Op::Zero { offset, len }),
            1 => (0usize..SPACE / 4096, 0usize..300).prop_map(|(sector, nr_sectors)| Op::Discard { sector, nr_sectors }),
            1 => offset.prop_map(|size| Op::Truncate { size }),
            2 => (0usize..SPACE / 4096, 0u64..3_000_000).prop_map(|(sector, max)| Op::Start { sector, max }),
            1 => Just(Op::End),
            1 => Just(Op::Fail),
        ]
    }

    fn check(data: &FileData, model: &Model) {
        let merged: Vec<Option<u8>> = model.dirty.iter().zip(&model.writeback).map(|(d, w)| d.or(*w)).collect();
        let mut out = vec![0xee; SPACE];
        let gaps = data.read(0, &mut out);
        let mut covered = vec![true; SPACE];
        for gap in &gaps {
            covered[gap.start as usize..gap.end as usize].fill(false);
        }
        for (at, byte) in merged.iter().enumerate() {
            assert_eq!(covered[at], byte.is_some(), "at {at}");
            assert_eq!(out[at], byte.unwrap_or(0xee), "at {at}");
        }
        assert_eq!(data.dirty_bytes(), model.dirty.iter().flatten().count() as u64);
        let mut end = 0;
        for (start, buf) in &data.dirty {
            assert!(*start >= end && !buf.is_empty() && start % SECTOR == 0, "I1");
            assert!((buf.len() as u64).is_multiple_of(SECTOR) && buf.len() <= BUF_MAX && buf.len() <= buf.size, "I1");
            end = start + buf.len() as u64;
        }
        let first = merged[10_000..].iter().position(Option::is_some).map(|at| at as u64 + 10_000);
        match data.first_pending_after(10_000) {
            Some(start) if start > 10_000 => assert_eq!(first, Some(start)),
            Some(_) => assert_eq!(first, Some(10_000)),
            None => assert_eq!(first, None),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        #[test]
        fn dirty_ranges_match_a_byte_vector(ops in prop::collection::vec(op(), 1..40)) {
            let pool = BufPool::new(8 << 20);
            let mut data = FileData::default();
            data.set_sectorsize(4096);
            let mut model = Model { dirty: vec![None; SPACE], writeback: vec![None; SPACE] };
            let mut runs: Vec<DataRun> = Vec::new();
            for op in ops {
                match op {
                    Op::Write { offset, len, byte } => {
                        let end = (offset + len).min(SPACE);
                        let bytes: Vec<u8> = (offset..end).map(|at| byte.wrapping_add((at / 7) as u8)).collect();
                        let (first, last) = data.partial_sectors(offset as u64..end as u64);
                        let wide_start = offset / 4096 * 4096;
                        let wide_end = end.next_multiple_of(4096);
                        prop_assert_eq!(
                            first.is_some(), wide_start < offset && model.dirty[wide_start].is_none());
                        prop_assert_eq!(last.is_some(), wide_end > end && model.dirty[wide_end - 1].is_none());
                        let before = vec![0xb0; offset - wide_start];
                        let after = vec![0xa0; wide_end - end];
                        let grown = data.write(&pool, offset as u64, &bytes, &before, &after);
                        let was = model.dirty.iter().flatten().count();
                        if model.dirty[wide_start].is_none() {
                            model.dirty[wide_start..offset].fill(Some(0xb0));
                        }
                        if model.dirty[wide_end - 1].is_none() {
                            model.dirty[end..wide_end].fill(Some(0xa0));
                        }
                        for (at, byte) in (offset..end).zip(bytes) {
                            model.dirty[at] = Some(byte);
                        }
                        prop_assert_eq!(grown as usize, model.dirty.iter().flatten().count() - was);
                    }
                    Op::Adopt { offset, len, byte } => {
                        let len = len.min(SPACE - offset).min(BUF_MAX);
                        let buf = pool.filled(len, 4096, |bytes| {
                            bytes.fill(byte);
                            Ok::<(), ()>(())
                        });
                        let end = (offset + len).next_multiple_of(4096);
                        let dirty = &mut model.dirty[offset..end];
                        let fits = offset % 4096 == 0 && dirty.iter().all(Option::is_none);
                        match data.adopt(offset as u64, buf.unwrap()) {
                            Ok(grown) => {
                                prop_assert!(fits);
                                prop_assert_eq!(grown as usize, dirty.len());
                                dirty.fill(Some(0));
                                dirty[..len].fill(Some(byte));
                            }
                            Err(buf) => {
                                prop_assert!(!fits);
                                prop_assert_eq!(buf.len(), len);
                            }
                        }
                    }
                    Op::Zero { offset, len } => {
                        let end = (offset + len).min(SPACE);
                        data.zero(offset as u64..end as u64);
                        for byte in model.dirty[offset..end].iter_mut().flatten() {
                            *byte = 0;
                        }
                    }
                    Op::Discard { sector, nr_sectors } => {
                        let start = sector * 4096;
                        let end = (start + nr_sectors * 4096).min(SPACE);
                        data.discard(start as u64..end as u64);
                        model.dirty[start..end].fill(None);
                    }
                    Op::Truncate { size } if runs.is_empty() => {
                        data.truncate(size as u64);
                        let end = size.next_multiple_of(4096);
                        for byte in model.dirty[size..end].iter_mut().flatten() {
                            *byte = 0;
                        }
                        model.dirty[end..].fill(None);
                    }
                    Op::Start { sector, max } => {
                        let more = data.start_writeback(sector as u64 * SECTOR..u64::MAX, max);
                        for run in &more {
                            let range = run.offset as usize..run.end() as usize;
                            let joined = run.pieces(run.offset..run.end()).concat();
                            prop_assert_eq!(joined.len() as u64, run.len_bytes);
                            for (at, byte) in range.zip(joined) {
                                prop_assert_eq!(model.dirty[at], Some(byte));
                                prop_assert_eq!(model.writeback[at], None, "I5");
                                model.writeback[at] = model.dirty[at].take();
                            }
                        }
                        runs.extend(more);
                    }
                    Op::End => for run in runs.drain(..) {
                        data.end_writeback(&run);
                        model.writeback[run.offset as usize..run.end() as usize].fill(None);
                    },
                    Op::Fail => for run in runs.drain(..) {
                        for at in run.offset as usize..run.end() as usize {
                            let byte = model.writeback[at].take();
                            model.dirty[at] = model.dirty[at].or(byte);
                        }
                        data.fail_writeback(run, &[]);
                    },
                    Op::Truncate { .. } => {}
                }
                check(&data, &model);
            }
            drop((data, runs));
            prop_assert_eq!(pool.used_bytes(), 0);
        }
    }

    #[test]
    fn sequential_writes_fill_large_buffers() {
        let pool = BufPool::new(64 << 20);
        let mut data = FileData::default();
        data.set_sectorsize(4096);
        for at in 0..128u64 {
            data.write(&pool, at * 131_072, &[at as u8; 131_072], &[], &[]);
        }
        assert_eq!(data.dirty.len(), 16);
        let runs = data.start_writeback(0..u64::MAX, u64::MAX);
        assert_eq!((runs.len(), runs[0].len_bytes), (1, 16 << 20));
        assert!(!data.has_dirty() && !data.is_clean());
        data.end_writeback(&runs[0]);
        assert!(data.is_clean());
        drop(runs);
        assert_eq!(pool.used_bytes(), 0);
        assert_eq!(pool.idle_bytes(), 16 << 20 | 0xe_0000);
    }
}
