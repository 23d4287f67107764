//! File extents in a log: for each range of a file that changed since the last commit, the log has the current extents.
//!
//! For each logged extent, a replay drops the file's extents in the logged extent's range and then puts the logged
//! extent; for an explicit hole, a replay only drops extents. So for each changed range, the log holds all extents that
//! overlap it, each as a whole, and holes for the gaps between them.
//!
//! Invariants:
//! - I1. Extents of a file in the log do not overlap. Each logged extent is a current extent of the file, or a hole.
//! - I2. Past the end of the file, the log has all extents and no holes, because a replay first truncates the file at
//!   its end.
//! - I3. The checksums of an address do not change within a transaction, so each checksum goes into the log once.

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_error::Error;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, InodeFlags, InodeItem, RegularExtent};
use ubtrfs_format::{FormatError, Generation, Key, KeyType, Logical, objectid};
use ubtrfs_tree::Value;

use super::collect::{Collector, LogStop, value_of};

/// The range of an extent in its file, the extent, and its item.
type ChangedExtent = (Range<u64>, FileExtent, Value);

impl Collector<'_> {
    /// Logs the extents of an inode around `offsets`, the file offsets of changed items.
    pub(super) fn extents(&mut self, ino: u64, item: &InodeItem, offsets: Vec<u64>) -> Result<(), LogStop> {
        if offsets.len() > MAX_CHANGES {
            return Err(LogStop::Commit("too many extents changed"));
        }
        let sectorsize = u64::from(self.engine.geometry().sectorsize);
        let end = item.size.checked_next_multiple_of(sectorsize).unwrap_or(u64::MAX);
        let mut ranges = Vec::with_capacity(offsets.len().saturating_mul(2));
        for offset in offsets {
            let key = extent_key(ino, offset);
            if let Some(raw) = self.committed(&key)? {
                ranges.push(self.range_of(offset, &FileExtent::decode(&raw)?));
            }
            if let Some(raw) = self.tree.get(&key)? {
                ranges.push(self.range_of(offset, &FileExtent::decode(&raw)?));
            }
            if let Some(raw) = self.log.items.get(&key) {
                ranges.push(self.range_of(offset, &FileExtent::decode(raw)?));
            }
        }
        // The log has holes only before the end of the file (I2). So if the end moved, log the range between the old
        // and the new end: a file that grew needs holes there, a file that shrank must lose them.
        if let Some(logged) = self.log.inodes.get_mut(&ino)
            && let Some(before) = logged.end.replace(end)
            && before != end
        {
            ranges.push(before.min(end)..before.max(end));
        }
        if item.flags().contains(InodeFlags::PREALLOC)
            && let Some((last, _, _)) = self.last_before(ino, 0..u64::MAX)?
            && last.end > end
        {
            ranges.push(end..last.end);
        }
        // Walk through the file once: the log is up to date below `done`, and no extent crosses `done`.
        let mut done = 0;
        for range in merged(ranges) {
            if range.end > done {
                done = self.log_range(ino, range.start.max(done)..range.end, done, end)?;
            }
        }
        Ok(())
    }

    fn range_of(&self, offset: u64, extent: &FileExtent) -> Range<u64> {
        let len = match &extent.body {
            FileExtentBody::Inline(_) => extent.ram_bytes,
            FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => regular.num_bytes,
        };
        let sectorsize = u64::from(self.engine.geometry().sectorsize);
        offset..offset.saturating_add(len.checked_next_multiple_of(sectorsize).unwrap_or(u64::MAX))
    }

    /// The last extent that starts in a range of offsets.
    fn last_before(&self, ino: u64, starts: Range<u64>) -> Result<Option<ChangedExtent>, LogStop> {
        let Some(last) = starts.end.checked_sub(1) else { return Ok(None) };
        let Some((key, raw)) = self.tree.last_le(&extent_key(ino, last), &extent_key(ino, starts.start))? else {
            return Ok(None);
        };
        let extent = FileExtent::decode(&raw)?;
        Ok(Some((self.range_of(key.offset, &extent), extent, value_of(raw))))
    }

    /// The extents that overlap a range. Extents that start before `done` must also end at or before `done`.
    fn extents_in(&self, ino: u64, range: &Range<u64>, done: u64) -> Result<Vec<ChangedExtent>, LogStop> {
        let mut found = Vec::new();
        if range.is_empty() {
            return Ok(found);
        }
        found.extend(self.last_before(ino, done..range.start)?.filter(|(before, _, _)| before.end > range.start));
        let last = extent_key(ino, range.end.saturating_sub(1));
        for (key, raw) in self.tree.range(&extent_key(ino, range.start), &last, usize::MAX)? {
            let extent = FileExtent::decode(&raw)?;
            found.push((self.range_of(key.offset, &extent), extent, value_of(raw)));
        }
        Ok(found)
    }

    /// The ranges of the file's logged extents that overlap a range.
    fn logged_in(&self, ino: u64, range: &Range<u64>) -> Result<Vec<Range<u64>>, LogStop> {
        let before = self.log.items.range(extent_key(ino, 0)..extent_key(ino, range.start)).next_back();
        let inside = self.log.items.range(extent_key(ino, range.start)..extent_key(ino, range.end));
        let mut found = Vec::new();
        for (key, raw) in before.into_iter().chain(inside) {
            let logged = self.range_of(key.offset, &FileExtent::decode(raw)?);
            if logged.end > range.start {
                found.push(logged);
            }
        }
        Ok(found)
    }

    /// Updates a range of a file in the log, widened to whole extents. Before the call, the log is up to date up to
    /// `done`; after the call, up to the returned offset. `end` is the end of the file.
    fn log_range(&mut self, ino: u64, mut range: Range<u64>, done: u64, end: u64) -> Result<u64, LogStop> {
        // Widen the range to whole extents, both current and logged (I1).
        let extents = loop {
            let extents = self.extents_in(ino, &range, done)?;
            let logged = self.logged_in(ino, &range)?;
            let all = extents.iter().map(|(range, _, _)| range).chain(&logged);
            let wide = all.fold(range.clone(), |wide, one| wide.start.min(one.start)..wide.end.max(one.end));
            if wide == range {
                break extents;
            }
            range = wide;
        };
        let mut wanted: BTreeMap<u64, Value> = BTreeMap::new();
        let mut at = range.start;
        for (place, extent, value) in &extents {
            self.hole(&mut wanted, at..place.start.min(end));
            self.csums(extent)?;
            wanted.insert(place.start, value.clone());
            at = place.end;
        }
        self.hole(&mut wanted, at..range.end.min(end));
        let stale = self.log.items.range(extent_key(ino, range.start)..extent_key(ino, range.end));
        let stale: Vec<Key> = stale.map(|(key, _)| *key).filter(|key| !wanted.contains_key(&key.offset)).collect();
        stale.into_iter().for_each(|key| self.set(key, None));
        wanted.into_iter().for_each(|(offset, value)| self.set(extent_key(ino, offset), Some(value)));
        Ok(range.end)
    }

    fn hole(&self, wanted: &mut BTreeMap<u64, Value>, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let num_bytes = range.end.saturating_sub(range.start);
        let hole = FileExtent {
            generation: Generation(self.engine.committed_generation().0.saturating_add(1)),
            ram_bytes: num_bytes,
            compression: Compression::None,
            encryption: 0,
            other_encoding: 0,
            body: FileExtentBody::Regular(RegularExtent {
                disk_bytenr: Logical(0),
                disk_num_bytes: 0,
                offset: 0,
                num_bytes,
            }),
        };
        wanted.insert(range.start, hole.encode().into());
    }

    /// Logs those checksums of an extent that the csum tree does not have yet.
    fn csums(&mut self, extent: &FileExtent) -> Result<(), LogStop> {
        let FileExtentBody::Regular(regular) = &extent.body else { return Ok(()) };
        if regular.disk_bytenr.0 == 0 {
            return Ok(());
        }
        let (offset, len) = match extent.compression {
            Compression::None => (regular.offset, regular.num_bytes),
            _ => (0, regular.disk_num_bytes),
        };
        // The tree checker bounds the extent, but not the part of it that the item refers to.
        let start = regular.disk_bytenr.checked_add(offset);
        let Some((start, end)) = start.and_then(|start| Some((start, start.checked_add(len)?))) else {
            let expected = "expected a part that ends inside of the address space";
            let cause = FormatError::Value { what: "FileExtent", field: "offset", value: regular.offset, expected };
            return Err(Error::from(cause).in_tree(self.tree.id()).into());
        };
        // The length of a crafted extent may be huge, so look only at sectors that have checksums.
        let gaps = self.log.csums.gaps(start.0..end.0);
        let parts = gaps.iter().flat_map(|gap| self.engine.ledger.csum_parts(gap)).collect();
        merged(parts).into_iter().for_each(|part| self.csums_in(part));
        Ok(())
    }

    /// Logs the checksums of a range of sectors.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "the range was cut to sectors with checksums, so it is not empty and ends inside of the address space"
    )]
    fn csums_in(&mut self, range: Range<u64>) {
        let geometry = self.engine.geometry();
        let (sectorsize, csum_size) = (u64::from(geometry.sectorsize), geometry.csum_type.size());
        let len = range.end - range.start;
        let csums = self.engine.ledger.lookup_csums(Logical(range.start), len);
        let mut run: Vec<u8> = Vec::new();
        let mut first = 0;
        for index in 0..=csums.len() {
            let csum = csums.get(index);
            if run.len() >= CSUM_ITEM_BYTES || csum.is_none() {
                if !run.is_empty() {
                    let start = range.start + first as u64 * sectorsize;
                    let key = Key::new(objectid::EXTENT_CSUM, KeyType::EXTENT_CSUM, start);
                    let end = start + (run.len() / csum_size) as u64 * sectorsize;
                    self.set(key, Some(std::mem::take(&mut run).into()));
                    self.log.csums.insert(start..end);
                }
                first = index + usize::from(csum.is_none());
            }
            run.extend_from_slice(csum.unwrap_or_default());
        }
    }
}

/// Sorts ranges and joins ranges that touch or overlap.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn extent_key(ino: u64, offset: u64) -> Key {
    Key::new(ino, KeyType::EXTENT_DATA, offset)
}

/// If more file extent items of an inode changed than this number, a commit is made instead of a log.
const MAX_CHANGES: usize = 20_000;
/// Bytes of checksums at which an item is full.
const CSUM_ITEM_BYTES: usize = 2048;
