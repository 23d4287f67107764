//! File extent items: finding them, and planning replacements of file ranges.
//!
//! Changes are planned first; planning may read the tree. Then the changes are put in an operation; putting reads
//! nothing.
//!
//! Invariants:
//! - I1: items of one file do not overlap; each item except an inline one starts and ends on a sector boundary.
//! - I2: an inline item starts at offset 0 and covers its length, rounded up to whole sectors.
//! - I3: lengths, overflow and alignment of every value from disk are checked before use.
//! - I4: items of a file are read under the inode's writeback lock or state lock, and put under both locks, so a plan
//!   stays valid until it is put.

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, RegularExtent};
use ubtrfs_format::{Corrupt, FormatError, Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_transaction::lock_rank::{self, Rank};
use ubtrfs_transaction::{TransHandle, Tree};

use crate::Result;
use crate::compression::MAX_UNCOMPRESSED;

/// A file extent item, and the sector-aligned file range that it covers.
#[derive(Clone, Debug)]
pub(crate) struct ExtentAt {
    pub start: u64,
    pub end: u64,
    pub extent: FileExtent,
}

impl ExtentAt {
    /// Whether the item is an explicit hole.
    pub(crate) fn is_hole(&self) -> bool {
        matches!(&self.extent.body, FileExtentBody::Regular(regular) if regular.disk_bytenr.0 == 0)
    }

    /// Whether the data is stored in the item.
    pub(crate) fn is_inline(&self) -> bool {
        matches!(self.extent.body, FileExtentBody::Inline(_))
    }

    /// Whether the extent is allocated but not written.
    pub(crate) fn is_prealloc(&self) -> bool {
        matches!(self.extent.body, FileExtentBody::Prealloc(_))
    }

    /// Whether the item holds data: it is neither a hole nor preallocated.
    pub(crate) fn is_data(&self) -> bool {
        !self.is_hole() && !self.is_prealloc()
    }
}

/// The key of the extent item at `offset`.
pub(crate) fn extent_key(ino: Ino, offset: u64) -> Key {
    Key::new(ino.0, KeyType::EXTENT_DATA, offset)
}

/// Up to `limit` items that overlap `range`, in order.
pub(crate) fn extents_in(
    tree: &Tree,
    ino: Ino,
    range: Range<u64>,
    limit: usize,
    sectorsize: u32,
) -> Result<Vec<ExtentAt>> {
    let mut found = Vec::new();
    if range.is_empty() {
        return Ok(found);
    }
    let mut from = range.start;
    if let Some((key, item)) = tree.last_le(&extent_key(ino, range.start), &extent_key(ino, 0))? {
        let extent = decode(tree, &key, &item, sectorsize)?;
        if extent.end > range.start {
            from = extent.end;
            found.push(extent);
        }
    }
    if from < range.end && found.len() < limit {
        let last = extent_key(ino, range.end.saturating_sub(1));
        for (key, item) in tree.range(&extent_key(ino, from), &last, limit.saturating_sub(found.len()))? {
            found.push(decode(tree, &key, &item, sectorsize)?);
        }
    }
    check_order(tree, ino, &found)?;
    Ok(found)
}

/// The last item that starts before `end`.
pub(crate) fn last_extent_before(tree: &Tree, ino: Ino, end: u64, sectorsize: u32) -> Result<Option<ExtentAt>> {
    let Some(last) = end.checked_sub(1) else { return Ok(None) };
    let Some((key, item)) = tree.last_le(&extent_key(ino, last), &extent_key(ino, 0))? else { return Ok(None) };
    decode(tree, &key, &item, sectorsize).map(Some)
}

/// Decodes and checks an item (I1 to I3).
pub(crate) fn decode(tree: &Tree, key: &Key, item: &[u8], sectorsize: u32) -> Result<ExtentAt> {
    decode_of(tree.id(), key, item, sectorsize)
}

/// The target of a symbolic link, from its extent; `None` if a symbolic link cannot have this extent. The target ends
/// at the first zero byte, which mkfs.btrfs --rootdir stores behind it.
pub(crate) fn link_target(body: FileExtentBody) -> Option<Vec<u8>> {
    let FileExtentBody::Inline(mut target) = body else { return None };
    let end = target.iter().position(|byte| *byte == 0).unwrap_or(target.len());
    target.truncate(end);
    Some(target)
}

/// Decodes and checks an item of this tree (I1 to I3).
pub(crate) fn decode_of(tree: RootId, key: &Key, item: &[u8], sectorsize: u32) -> Result<ExtentAt> {
    let sectorsize = u64::from(sectorsize);
    let bad = |field, value, expected| -> crate::Error {
        Corrupt::new(FormatError::Value { what: "file extent", field, value, expected }).in_tree(tree).into()
    };
    let extent = FileExtent::decode(item).map_err(|cause| Corrupt::new(cause).in_tree(tree))?;
    let start = key.offset;
    if extent.encryption != 0 || extent.other_encoding != 0 {
        return Err(bad("encoding", u64::from(extent.encryption), "expected 0"));
    }
    let compressed = extent.compression != Compression::None;
    let len = match &extent.body {
        FileExtentBody::Inline(data) => {
            if start != 0 {
                return Err(bad("offset of inline data", start, "expected 0"));
            }
            let fits = if compressed { MAX_UNCOMPRESSED as u64 } else { data.len() as u64 };
            if extent.ram_bytes == 0 || extent.ram_bytes > fits {
                return Err(bad("ram_bytes", extent.ram_bytes, "expected the length of the inline data"));
            }
            extent.ram_bytes.next_multiple_of(sectorsize)
        }
        FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => {
            let RegularExtent { disk_bytenr, disk_num_bytes, offset, num_bytes } = *regular;
            for (field, value) in [
                ("file offset", start),
                ("disk_bytenr", disk_bytenr.0),
                ("disk_num_bytes", disk_num_bytes),
                ("offset", offset),
                ("num_bytes", num_bytes),
            ] {
                if !value.is_multiple_of(sectorsize) {
                    return Err(bad(field, value, "expected a multiple of the sector size"));
                }
            }
            let covered = offset.checked_add(num_bytes).ok_or_else(|| bad("offset", offset, "expected no overflow"))?;
            if num_bytes == 0 {
                return Err(bad("num_bytes", 0, "expected more than 0"));
            }
            if disk_bytenr.0 != 0 {
                if compressed {
                    let most = MAX_UNCOMPRESSED as u64;
                    if extent.ram_bytes > most || disk_num_bytes > most || disk_num_bytes == 0 {
                        return Err(bad("ram_bytes", extent.ram_bytes, "expected at most 128 KiB compressed"));
                    }
                    if covered > extent.ram_bytes.next_multiple_of(sectorsize) {
                        return Err(bad("num_bytes", num_bytes, "expected to end inside the extent"));
                    }
                } else if covered > disk_num_bytes {
                    return Err(bad("num_bytes", num_bytes, "expected to end inside the extent"));
                }
                if disk_bytenr.0.checked_add(disk_num_bytes).is_none() {
                    return Err(bad("disk_num_bytes", disk_num_bytes, "expected no overflow"));
                }
            }
            num_bytes
        }
    };
    let end = start.checked_add(len).ok_or_else(|| bad("num_bytes", len, "expected no overflow"))?;
    Ok(ExtentAt { start, end, extent })
}

fn check_order(tree: &Tree, ino: Ino, extents: &[ExtentAt]) -> Result<()> {
    match extents.windows(2).find(|pair| pair[0].end > pair[1].start) {
        None => Ok(()),
        Some(pair) => {
            let cause = FormatError::Value {
                what: "file extent",
                field: "file offset",
                value: pair[1].start,
                expected: "expected to start after the extent before it",
            };
            tracing::error!("inode {ino}: extents at {} and {} overlap", pair[0].start, pair[1].start);
            Err(Corrupt::new(cause).in_tree(tree.id()).into())
        }
    }
}

/// Bytes that an item adds to its inode's `nbytes`.
fn counted_bytes(extent: &FileExtent) -> u64 {
    match &extent.body {
        FileExtentBody::Inline(_) => extent.ram_bytes,
        FileExtentBody::Regular(regular) if regular.disk_bytenr.0 == 0 => 0,
        FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => regular.num_bytes,
    }
}

/// An uncompressed extent of `len_bytes`, all of which the file uses.
pub(crate) fn whole_extent(bytenr: Logical, len_bytes: u64) -> FileExtent {
    FileExtent {
        generation: Generation(0),
        ram_bytes: len_bytes,
        compression: Compression::None,
        encryption: 0,
        other_encoding: 0,
        body: FileExtentBody::Regular(RegularExtent {
            disk_bytenr: bytenr,
            disk_num_bytes: len_bytes,
            offset: 0,
            num_bytes: len_bytes,
        }),
    }
}

/// An item for `range`, a part of the range of the item `at`. The item must not be inline.
#[allow(clippy::arithmetic_side_effects, reason = "`range` is a part of the item, whose numbers were checked (I3)")]
pub(crate) fn part_of(at: &ExtentAt, range: Range<u64>) -> FileExtent {
    let mut part = at.extent.clone();
    match &mut part.body {
        FileExtentBody::Inline(_) => {}
        FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => {
            regular.num_bytes = range.end - range.start;
            if regular.disk_bytenr.0 == 0 {
                regular.offset = 0;
                part.ram_bytes = regular.num_bytes;
            } else {
                regular.offset += range.start - at.start;
            }
        }
    }
    part
}

/// Changes to the extent items of one file.
#[derive(Debug, Default)]
pub(crate) struct ExtentPlan {
    /// Changes by file offset; `None` deletes the item. An item of generation 0 gets the operation's generation.
    changes: BTreeMap<u64, Option<FileExtent>>,
    bytes_removed: u64,
    bytes_added: u64,
}

#[allow(
    clippy::arithmetic_side_effects,
    reason = "the numbers of each item were checked (I3), and items do not overlap (I1)"
)]
impl ExtentPlan {
    /// Number of items that are put or deleted.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether nothing changes.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The inode's `nbytes` after this plan, given the value before.
    pub(crate) fn nbytes(&self, before: u64) -> u64 {
        // `before` comes from disk and may be any number, so the sum saturates.
        before.saturating_add(self.bytes_added).saturating_sub(self.bytes_removed)
    }

    /// Drops `range` (sector-aligned) from all of the file's items. The ranges dropped in one plan must not overlap.
    pub(crate) fn drop_range(&mut self, tree: &Tree, ino: Ino, range: Range<u64>, sectorsize: u32) -> Result<()> {
        // Most ranges have no item, or lie in a single item. One lookup finds out whether that is so.
        match last_extent_before(tree, ino, range.end, sectorsize)? {
            Some(last) if last.end > range.start && last.start > range.start => {}
            Some(last) if last.end > range.start => return self.drop_from(tree, &last, &range),
            _ => return Ok(()),
        }
        let mut from = range.start;
        while from < range.end {
            let extents = extents_in(tree, ino, from..range.end, STEP, sectorsize)?;
            let Some(last) = extents.last() else { break };
            from = last.end;
            let is_all = extents.len() < STEP;
            for at in &extents {
                self.drop_from(tree, at, &range)?;
            }
            if is_all {
                break;
            }
        }
        Ok(())
    }

    /// Drops `range` from one item.
    pub(crate) fn drop_from(&mut self, tree: &Tree, at: &ExtentAt, range: &Range<u64>) -> Result<()> {
        // An earlier drop of this plan may have split the item. Then the rest of the item is an entry of the plan, and
        // `range` is dropped from that entry instead of the item in the tree.
        let (at, known) = self.current(at, range);
        if at.is_inline() && (range.start > at.start || range.end < at.end) {
            return Err(Corrupt::new(FormatError::Value {
                what: "file extent",
                field: "inline length",
                value: at.extent.ram_bytes,
                expected: "expected at most one sector",
            })
            .in_tree(tree.id())
            .into());
        }
        if known {
            self.bytes_added -= counted_bytes(&at.extent);
        } else {
            self.bytes_removed += counted_bytes(&at.extent);
        }
        self.changes.insert(at.start, None);
        if at.start < range.start {
            self.insert(at.start, part_of(&at, at.start..range.start));
        }
        if at.end > range.end {
            self.insert(range.end, part_of(&at, range.end..at.end));
        }
        Ok(())
    }

    /// The item that holds `range` after the changes planned so far, and whether this plan put the item.
    fn current(&self, at: &ExtentAt, range: &Range<u64>) -> (ExtentAt, bool) {
        let entry = self.changes.range(at.start..=range.start.max(at.start)).next_back();
        let Some((start, Some(extent))) = entry else { return (at.clone(), false) };
        let end = start + extent.num_bytes();
        if end > range.start.max(at.start) && end <= at.end {
            (ExtentAt { start: *start, end, extent: extent.clone() }, true)
        } else {
            (at.clone(), false)
        }
    }

    /// Adds an item. The item's range must have been dropped before.
    pub(crate) fn insert(&mut self, offset: u64, extent: FileExtent) {
        self.bytes_added += counted_bytes(&extent);
        self.changes.insert(offset, Some(extent));
    }

    /// Adds explicit holes where `range` (sector-aligned) has no items after this plan. Filesystems without the
    /// no-holes feature need explicit holes: there, extent items must cover every file up to its size.
    pub(crate) fn fill_holes(&mut self, tree: &Tree, ino: Ino, range: Range<u64>, sectorsize: u32) -> Result<()> {
        let sector = u64::from(sectorsize);
        let mut covered: Vec<Range<u64>> = Vec::new();
        let mut from = range.start;
        while from < range.end {
            let extents = extents_in(tree, ino, from..range.end, STEP, sectorsize)?;
            let Some(last) = extents.last() else { break };
            from = last.end;
            covered
                .extend(extents.iter().filter(|at| !self.changes.contains_key(&at.start)).map(|at| at.start..at.end));
            if extents.len() < STEP {
                break;
            }
        }
        for (start, change) in &self.changes {
            if let Some(extent) = change {
                covered.push(*start..start + extent.num_bytes().next_multiple_of(sector));
            }
        }
        covered.sort_by_key(|range| range.start);
        let mut at = range.start;
        let mut holes = Vec::new();
        for piece in covered {
            if piece.start >= range.end {
                break;
            }
            if piece.start > at {
                holes.push(at..piece.start);
            }
            at = at.max(piece.end);
        }
        if at < range.end {
            holes.push(at..range.end);
        }
        for hole in holes {
            let mut extent = whole_extent(Logical(0), hole.end - hole.start);
            if let FileExtentBody::Regular(regular) = &mut extent.body {
                regular.disk_num_bytes = 0;
            }
            self.insert(hole.start, extent);
        }
        Ok(())
    }

    /// Checks that the items of the plan do not overlap (I1).
    fn check_disjoint(&self) {
        if cfg!(debug_assertions) {
            let mut end = 0;
            for (start, extent) in self.changes.iter().filter_map(|(start, change)| Some((*start, change.as_ref()?))) {
                assert!(start >= end, "I1: an item at {start} begins before {end}, the end of the item before");
                end = start.saturating_add(extent.num_bytes());
            }
        }
    }

    /// Puts the changes into an operation.
    pub(crate) fn apply(self, op: &TransHandle<'_>, tree: &Tree, ino: Ino) {
        self.check_disjoint();
        let inode = (tree.id().0, ino.0);
        lock_rank::check_held_at(Rank::Writeback, inode, "I4: extents change under the writeback lock");
        lock_rank::check_held_at(Rank::Inode, inode, "I4: extents change under the state lock");
        for (offset, change) in self.changes {
            let key = extent_key(ino, offset);
            match change {
                None => op.delete(tree, key),
                Some(mut extent) => {
                    if extent.generation.0 == 0 {
                        extent.generation = op.generation();
                    }
                    op.put(tree, key, extent.encode());
                }
            }
        }
    }
}

/// Number of items read at once.
const STEP: usize = 256;
