//! The csum tree: one checksum for every sector of checksummed data.
//!
//! An item `(EXTENT_CSUM EXTENT_CSUM bytenr)` holds the checksums of consecutive sectors from `bytenr` on. Items do not
//! overlap, and no item covers data without checksums.
//!
//! Changes are made in one sweep in address order. One item is *open*: checksums are appended to it, up to the size
//! limit. The open item is put into the batch when it has reached that limit, when the next change starts above
//! `Sweep::consumed`, when the rest of a cut item needs an item of its own, and at the end of the sweep.
//!
//! I1. Existing items that start below `Sweep::consumed` and may have changed are in the open item or in the batch.
//! I2. The open item ends at or below `consumed`, or at the end of the last inserted run.
//! I3. No item grows beyond `max_csums` checksums. Items with more checksums, made by kernels with larger pages, are
//! only cut.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`CsumLayout::check` checks the ends of items from disk; the other ranges are allocated extents"
)]

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::csum::CsumType;
use ubtrfs_format::node::{ITEM_HEAD_SIZE, LeafBuilder, hex};
use ubtrfs_format::{Corrupt, FormatError, Key, KeyType, Logical, RootId, objectid};
use ubtrfs_tree::{Batch, Cursor, NodeSource, RootPtr};

use crate::delayed::sector_csums::SectorCsums;

/// Compares a sector with its stored checksum.
pub(crate) fn verify_sector(csum_type: CsumType, stored: Option<&[u8]>, sector: &[u8]) -> Result<(), FormatError> {
    let computed = csum_type.compute(sector);
    let computed = &computed[..csum_type.size()];
    if stored == Some(computed) {
        return Ok(());
    }
    let found = stored.map_or_else(|| "missing".to_owned(), hex);
    Err(FormatError::Checksum { what: "data sector", found, computed: hex(computed) })
}

/// Returns the changes that first delete the checksums of the ranges `remove`, and then insert `insert` (address of the
/// first sector -> checksums of consecutive sectors) in place of existing checksums.
pub(crate) fn csum_changes(
    source: &dyn NodeSource,
    root: &RootPtr,
    insert: &BTreeMap<u64, Vec<u8>>,
    remove: &[Range<u64>],
    csum_size: usize,
    sectorsize: u32,
    nodesize: u32,
) -> Result<Batch> {
    let layout = CsumLayout { csum_size, sectorsize: sectorsize.into(), max_csums: max_csums(nodesize, csum_size) };
    let mut sweep = Sweep {
        layout,
        cursor: Cursor::new(source, *root),
        passed_end: false,
        open: None,
        consumed: 0,
        changes: BTreeMap::new(),
    };
    for edit in edits(insert, remove, layout) {
        sweep.apply(edit)?;
    }
    sweep.flush();
    Ok(sweep.changes.into_iter().map(|(start, data)| (csum_key(start), data.map(Into::into))).collect())
}

/// The checksums of a range of sectors.
pub(crate) fn lookup_csums(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    len_bytes: u64,
    csum_size: usize,
    sectorsize: u32,
) -> Result<SectorCsums> {
    let layout = CsumLayout { csum_size, sectorsize: sectorsize.into(), max_csums: 0 };
    let nr_sectors = len_bytes.div_ceil(layout.sectorsize) as usize;
    let mut csums = SectorCsums::absent(nr_sectors, csum_size);
    let end = bytenr.0.saturating_add(nr_sectors as u64 * layout.sectorsize);
    let mut cursor = Cursor::new(source, *root);
    let mut key = cursor.seek_le(&csum_key(bytenr.0))?;
    if key.is_none() {
        key = cursor.seek_ge(&csum_key(bytenr.0))?;
    }
    while let Some(found) = key.filter(|key| *key < csum_key(end)) {
        if is_csum_key(&found) {
            let data = cursor.data().unwrap_or_default();
            let item_end = layout.check(found.offset, data)?;
            let from = found.offset.max(bytenr.0);
            let to = item_end.min(end);
            if from < to {
                let first = ((from - bytenr.0) / layout.sectorsize) as usize;
                let part = &data[layout.bytes(from - found.offset)..layout.bytes(to - found.offset)];
                csums.set_run(first, part);
            }
        }
        key = cursor.next()?;
    }
    Ok(csums)
}

/// Maximum number of checksums in an item, as in the kernel: a leaf with the item has room for a second item head and
/// one more checksum, and the number is at most the number of bytes of a page.
fn max_csums(nodesize: u32, csum_size: usize) -> usize {
    const PAGE_SIZE: usize = 4096;
    ((LeafBuilder::capacity(nodesize as usize) - 2 * ITEM_HEAD_SIZE) / csum_size - 1).min(PAGE_SIZE)
}

#[derive(Clone, Copy, Debug)]
struct CsumLayout {
    csum_size: usize,
    sectorsize: u64,
    max_csums: usize,
}

/// One step of the sweep: deletes the checksums in the range and inserts `csums`, if any, in their place.
struct Edit<'a> {
    range: Range<u64>,
    csums: Option<&'a [u8]>,
}

struct Sweep<'s> {
    layout: CsumLayout,
    /// The cursor is at or before the first item that starts at or after `consumed`, or it has no position.
    cursor: Cursor<'s>,
    /// Whether no item follows the cursor.
    passed_end: bool,
    open: Option<OpenItem>,
    /// Existing items below this address are in the open item or in the batch, or stay unchanged (I1).
    consumed: u64,
    /// The new bytes of items by their start; `None` if the item is deleted.
    changes: BTreeMap<u64, Option<Vec<u8>>>,
}

struct OpenItem {
    start: u64,
    csums: Vec<u8>,
    /// Whether the disk has an item at `start`.
    exists: bool,
    changed: bool,
}

impl CsumLayout {
    /// Number of checksum bytes for `len_bytes` bytes of data.
    fn bytes(&self, len_bytes: u64) -> usize {
        (len_bytes / self.sectorsize) as usize * self.csum_size
    }

    /// Bytes of data that these checksums cover.
    fn covered(&self, csums: &[u8]) -> u64 {
        (csums.len() / self.csum_size) as u64 * self.sectorsize
    }

    /// Checks an item on disk, and returns the end of the range that the item covers.
    fn check(&self, start: u64, csums: &[u8]) -> Result<u64> {
        let whole = !csums.is_empty() && csums.len().is_multiple_of(self.csum_size);
        let end = start.checked_add(self.covered(csums));
        end.filter(|_| whole && start.is_multiple_of(self.sectorsize)).ok_or_else(|| {
            let expected = "expected whole checksums of sectors inside of the address space";
            let cause = FormatError::Value { what: "csum item", field: "size", value: csums.len() as u64, expected };
            Error::from(Corrupt::new(cause).in_tree(RootId::CSUM_TREE).at(Logical(start)))
        })
    }
}

impl Sweep<'_> {
    /// Applies one edit. Edits come in address order and are disjoint.
    fn apply(&mut self, edit: Edit<'_>) -> Result<()> {
        if edit.range.start > self.consumed {
            self.move_to(edit.range.start, edit.csums.is_some())?;
        }
        let tail = self.cut(&edit.range)?;
        if let Some(csums) = edit.csums {
            self.append(edit.range.start, csums);
        }
        match tail {
            Some(tail) => self.put_tail(edit.range.end, &tail, edit.csums.is_some()),
            None if edit.csums.is_some() => self.join_right(edit.range.end)?,
            None => {}
        }
        self.consumed = self.consumed.max(edit.range.end);
        Ok(())
    }

    /// Flushes the open item, and opens the existing item that covers `start` or, if `touching`, ends at `start`.
    fn move_to(&mut self, start: u64, touching: bool) -> Result<()> {
        self.flush();
        self.consumed = start;
        self.passed_end = false;
        let Some(key) = self.cursor.seek_le(&csum_key(start))?.filter(is_csum_key) else { return Ok(()) };
        let csums = self.cursor.data().unwrap_or_default();
        let end = self.layout.check(key.offset, csums)?;
        if end > start || (touching && end == start) {
            self.open = Some(OpenItem { start: key.offset, csums: csums.to_vec(), exists: true, changed: false });
            self.consumed = end;
        }
        Ok(())
    }

    /// Removes the checksums of a range from the open item and from the items after it. If the last cut item reaches
    /// past the range, returns its checksums past the range.
    fn cut(&mut self, range: &Range<u64>) -> Result<Option<Vec<u8>>> {
        let mut tail = None;
        let layout = self.layout;
        if let Some(open) = &mut self.open {
            let end = open.start + layout.covered(&open.csums);
            if end > range.start {
                if end > range.end {
                    tail = Some(open.csums[layout.bytes(range.end - open.start)..].to_vec());
                }
                open.csums.truncate(layout.bytes(range.start - open.start));
                open.changed = true;
            }
        }
        while self.consumed < range.end {
            let found = self.first_from(self.consumed)?;
            let Some(key) = found.filter(|key| is_csum_key(key) && key.offset < range.end) else { break };
            let csums = self.cursor.data().unwrap_or_default();
            let end = layout.check(key.offset, csums)?;
            if end > range.end {
                tail = Some(csums[layout.bytes(range.end - key.offset)..].to_vec());
            }
            self.changes.insert(key.offset, None);
            self.consumed = end;
        }
        Ok(tail)
    }

    /// Appends checksums to the open item if it ends at `start`. When an item is full, opens a new item.
    fn append(&mut self, mut start: u64, mut csums: &[u8]) {
        let layout = self.layout;
        while !csums.is_empty() {
            let room = self.open.as_ref().filter(|open| open.start + layout.covered(&open.csums) == start);
            let room = room.map_or(0, |open| layout.max_csums.saturating_sub(open.csums.len() / layout.csum_size));
            if room == 0 {
                self.open_new(start);
                continue;
            }
            let (now, later) = csums.split_at(csums.len().min(room * layout.csum_size));
            if let Some(open) = &mut self.open {
                open.csums.extend_from_slice(now);
                open.changed = true;
            }
            start += layout.covered(now);
            csums = later;
        }
    }

    /// Puts back the rest of a cut item. If the item of the inserted checksums has room for all of the rest, appends
    /// the rest to that item.
    fn put_tail(&mut self, start: u64, tail: &[u8], inserted: bool) {
        let open_len = self.open.as_ref().filter(|_| inserted).map(|open| open.csums.len() + tail.len());
        if open_len.is_none_or(|len| len > self.layout.max_csums * self.layout.csum_size) {
            self.open_new(start);
        }
        if let Some(open) = &mut self.open {
            open.csums.extend_from_slice(tail);
            open.changed = true;
        }
    }

    /// Joins the open item with the existing item that starts at its end, if both fit into one item.
    fn join_right(&mut self, end: u64) -> Result<()> {
        if self.consumed > end {
            return Ok(());
        }
        if self.first_from(end)? != Some(csum_key(end)) {
            return Ok(());
        }
        let csums = self.cursor.data().unwrap_or_default();
        let right_end = self.layout.check(end, csums)?;
        let Some(open) = &mut self.open else { return Ok(()) };
        if open.csums.len() + csums.len() <= self.layout.max_csums * self.layout.csum_size {
            open.csums.extend_from_slice(csums);
            self.changes.insert(end, None);
            self.consumed = right_end;
        }
        Ok(())
    }

    /// The first existing item from `at` on. `at` must not be below `consumed`.
    fn first_from(&mut self, at: u64) -> Result<Option<Key>> {
        const STEPS_MAX: usize = 4;
        let wanted = csum_key(at);
        for _ in 0..STEPS_MAX {
            match self.cursor.key() {
                _ if self.passed_end => return Ok(None),
                Some(key) if key >= wanted => return Ok(Some(key)),
                Some(_) => self.passed_end = self.cursor.next()?.is_none(),
                None => break,
            }
        }
        let found = self.cursor.seek_ge(&wanted)?;
        self.passed_end = found.is_none();
        Ok(found)
    }

    fn open_new(&mut self, start: u64) {
        self.flush();
        self.open = Some(OpenItem { start, csums: Vec::new(), exists: false, changed: true });
    }

    fn flush(&mut self) {
        let Some(open) = self.open.take().filter(|open| open.changed) else { return };
        if !open.csums.is_empty() {
            self.changes.insert(open.start, Some(open.csums));
        } else if open.exists {
            self.changes.insert(open.start, None);
        }
    }
}

/// Turns insertions and removals into disjoint edits in address order. Insertions take precedence over removals, and
/// adjacent removals are joined.
fn edits<'a>(insert: &'a BTreeMap<u64, Vec<u8>>, remove: &[Range<u64>], layout: CsumLayout) -> Vec<Edit<'a>> {
    let mut edits: Vec<Edit<'a>> = Vec::with_capacity(insert.len() + remove.len());
    let mut inserted_upto = 0;
    for (&start, csums) in insert {
        assert!(csums.len().is_multiple_of(layout.csum_size), "csums come whole");
        let end = start + layout.covered(csums);
        // If insertions overlap, the insertion that starts first takes precedence.
        let from = start.max(inserted_upto).min(end);
        if from < end {
            edits.push(Edit { range: from..end, csums: Some(&csums[layout.bytes(from - start)..]) });
            inserted_upto = end;
        }
    }
    let nr_inserted = edits.len();
    let mut next = 0;
    for range in joined(remove) {
        let mut at = range.start;
        while next < nr_inserted && edits[next].range.end <= at {
            next += 1;
        }
        let mut overlapped = next;
        while at < range.end {
            let inserted = edits[..nr_inserted].get(overlapped).map(|edit| edit.range.clone());
            match inserted.filter(|inserted| inserted.start < range.end) {
                Some(inserted) => {
                    if at < inserted.start {
                        edits.push(Edit { range: at..inserted.start, csums: None });
                    }
                    at = at.max(inserted.end);
                    overlapped += 1;
                }
                None => {
                    edits.push(Edit { range: at..range.end, csums: None });
                    at = range.end;
                }
            }
        }
    }
    edits.sort_unstable_by_key(|edit| edit.range.start);
    edits
}

/// Sorts the ranges and joins ranges that touch or overlap. A csum item covers many extents, and without joining, the
/// item would be copied once for each extent.
fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    sorted.dedup_by(|range, before| {
        let touches = range.start <= before.end;
        if touches {
            before.end = before.end.max(range.end);
        }
        touches
    });
    sorted
}

fn csum_key(bytenr: u64) -> Key {
    Key::new(objectid::EXTENT_CSUM, KeyType::EXTENT_CSUM, bytenr)
}

fn is_csum_key(key: &Key) -> bool {
    key.objectid == objectid::EXTENT_CSUM && key.item_type == KeyType::EXTENT_CSUM
}

#[cfg(test)]
mod tests;
