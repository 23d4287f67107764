//! The free space tree: the free ranges of every block group, as extents or as bitmaps.
//!
//! A block group has one `FREE_SPACE_INFO` (key: its start and length). A `FREE_SPACE_INFO` is followed either by one
//! empty `FREE_SPACE_EXTENT` for each free range (key: start and length), or by `FREE_SPACE_BITMAP`s that cover the
//! whole group (key: start and length covered; one bit per sector, lowest bit first, set if free). The space of
//! superblock mirrors counts as free.
//!
//! I1. `extent_count` is the number of maximal free ranges, in both forms.
//! I2. A block group changes to bitmaps when extents would take more room than bitmaps, and back when extents take
//!     clearly less ([`Thresholds`]).

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`group_end` and `load_free_space` check the ends of groups and items; free ranges lie inside their group"
)]

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{FREE_SPACE_BITMAP_BITS, FREE_SPACE_BITMAP_SIZE, FreeSpaceInfo};
use ubtrfs_format::node::ITEM_HEAD_SIZE;
use ubtrfs_format::{Corrupt, FormatError, Key, KeyType, Logical, RootId};
use ubtrfs_tree::{Batch, Cursor, NodeSource, RootPtr};

/// The free ranges of a block group, sorted and coalesced.
pub(crate) fn load_free_space(
    source: &dyn NodeSource,
    root: &RootPtr,
    start: Logical,
    len_bytes: u64,
    sectorsize: u32,
) -> Result<Vec<Range<u64>>> {
    let end = group_end(start, len_bytes)?;
    let mut cursor = Cursor::new(source, *root);
    let info_key = Key::new(start.0, KeyType::FREE_SPACE_INFO, len_bytes);
    if cursor.seek_ge(&info_key)? != Some(info_key) {
        return Err(corrupt("block group", len_bytes, "expected a FREE_SPACE_INFO of this length", start.0));
    }
    let info = decode_info(cursor.data().unwrap_or_default(), start)?;
    let uses_bitmaps = info.flags & FreeSpaceInfo::USING_BITMAPS != 0;
    let mut free = FreeRuns::default();
    let mut covered = start.0;
    while let Some(key) = cursor.next()?.filter(|key| key.objectid < end) {
        let item_end = key.objectid.checked_add(key.offset).filter(|&item_end| item_end <= end && key.offset > 0);
        let kind = if uses_bitmaps { KeyType::FREE_SPACE_BITMAP } else { KeyType::FREE_SPACE_EXTENT };
        let aligned = key.objectid.is_multiple_of(sectorsize.into()) && key.offset.is_multiple_of(sectorsize.into());
        let Some(item_end) = item_end.filter(|_| key.item_type == kind && key.objectid >= covered && aligned) else {
            let expected = "expected disjoint extents (or bitmaps, if the info says so) inside of the block group";
            return Err(corrupt("free space length", key.offset, expected, key.objectid));
        };
        if uses_bitmaps {
            let bitmap = cursor.data().unwrap_or_default();
            if key.offset > span(sectorsize) || bitmap.len() != bitmap_len(key.offset, sectorsize) {
                return Err(corrupt(
                    "bitmap size",
                    bitmap.len() as u64,
                    "expected a bit for each sector",
                    key.objectid,
                ));
            }
            free.push_bitmap(key.objectid, key.offset / u64::from(sectorsize), bitmap, sectorsize.into());
        } else {
            free.push(key.objectid..item_end);
        }
        covered = item_end;
    }
    if free.0.len() as u64 != u64::from(info.extent_count) {
        let expected = "expected the number of free ranges";
        return Err(corrupt("extent_count", info.extent_count.into(), expected, start.0));
    }
    Ok(free.0)
}

/// The free ranges of a block group, computed from the extents in it.
pub(crate) fn free_space_from_extents(
    source: &dyn NodeSource,
    extent_root: &RootPtr,
    start: Logical,
    len_bytes: u64,
    nodesize: u32,
) -> Result<Vec<Range<u64>>> {
    let end = group_end(start, len_bytes)?;
    let mut cursor = Cursor::new(source, *extent_root);
    let mut key = cursor.seek_ge(&Key::new(start.0, KeyType::EXTENT_ITEM, 0))?;
    let mut free = FreeRuns::default();
    let mut at = start.0;
    while let Some(found) = key.filter(|key| key.objectid < end) {
        let extent_len = match found.item_type {
            KeyType::EXTENT_ITEM => Some(found.offset),
            KeyType::METADATA_ITEM => Some(nodesize.into()),
            _ => None,
        };
        if let Some(extent_len) = extent_len {
            let extent_end = found.objectid.checked_add(extent_len).filter(|&extent_end| extent_end <= end);
            let Some(extent_end) = extent_end.filter(|_| found.objectid >= at && extent_len > 0) else {
                let cause = FormatError::Value {
                    what: "extent item",
                    field: "length",
                    value: extent_len,
                    expected: "expected disjoint extents inside of the block group",
                };
                let corrupt = Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(Logical(found.objectid));
                return Err(corrupt.into());
            };
            free.push(at..found.objectid);
            at = extent_end;
        }
        key = cursor.next()?;
    }
    free.push(at..end);
    Ok(free.0)
}

/// The free space that the items of a block group must describe.
pub(crate) struct GroupFreeSpace<'a> {
    /// Start address of the block group.
    pub(crate) start: Logical,
    /// Length of the block group.
    pub(crate) len_bytes: u64,
    /// Number of free ranges.
    pub(crate) nr_ranges: u64,
    /// Returns the free ranges that overlap or touch a range, sorted.
    pub(crate) touching: &'a dyn Fn(&Range<u64>) -> Vec<Range<u64>>,
}

/// Returns the changes that make a block group's items describe `free`, where `changed` (sorted, coalesced) covers all
/// differences. Returns no changes if the items already describe `free`. The work depends on `changed`, and not on the
/// number of free ranges, unless the group changes its form.
pub(crate) fn free_space_changes(
    source: &dyn NodeSource,
    root: &RootPtr,
    free: &GroupFreeSpace<'_>,
    changed: &[Range<u64>],
    sectorsize: u32,
) -> Result<Batch> {
    let GroupFreeSpace { start, len_bytes, nr_ranges, .. } = *free;
    if changed.is_empty() {
        return Ok(Batch::new());
    }
    let whole = start.0..group_end(start, len_bytes)?;
    let info_key = Key::new(start.0, KeyType::FREE_SPACE_INFO, len_bytes);
    let mut cursor = Cursor::new(source, *root);
    let before = match cursor.seek_ge(&info_key)? {
        Some(key) if key == info_key => Some(decode_info(cursor.data().unwrap_or_default(), start)?),
        _ => None,
    };
    let flags = before.map_or(0, |info| info.flags);
    let thresholds = Thresholds::new(len_bytes, sectorsize);
    let used_bitmaps = flags & FreeSpaceInfo::USING_BITMAPS != 0;
    let uses_bitmaps = match used_bitmaps {
        true => nr_ranges >= thresholds.low,
        false => nr_ranges > thresholds.high,
    };
    let form = if uses_bitmaps { FreeSpaceInfo::USING_BITMAPS } else { 0 };
    let extent_count = u32::try_from(nr_ranges).unwrap_or(u32::MAX);
    let info = FreeSpaceInfo { extent_count, flags: flags & !FreeSpaceInfo::USING_BITMAPS | form };

    let mut changes: BTreeMap<Key, Option<Vec<u8>>> = BTreeMap::new();
    if before != Some(info) {
        changes.insert(info_key, Some(info.encode()));
    }
    let keeps_form = before.is_some() && used_bitmaps == uses_bitmaps;
    // Walking all extents of the group is cheaper than more searches than the group has extents.
    let nr_extents = nr_ranges.max(before.map_or(0, |info| info.extent_count.into()));
    let mut windows = match (keeps_form, uses_bitmaps) {
        (true, true) => changed.iter().map(|range| bitmap_bounds(range, &whole, sectorsize)).collect(),
        (true, false) if (changed.len() as u64) < nr_extents => changed.to_vec(),
        _ => vec![whole.clone()],
    };
    windows.dedup();
    for window in windows {
        let runs = (free.touching)(&window);
        let wanted: BTreeMap<Key, Vec<u8>> = if uses_bitmaps {
            bitmaps(start.0, &window, &runs, sectorsize)
        } else {
            let key = |run: &Range<u64>| Key::new(run.start, KeyType::FREE_SPACE_EXTENT, run.end - run.start);
            runs.iter().map(|run| (key(run), Vec::new())).collect()
        };
        let existing = items_near(&mut cursor, &whole, &window, keeps_form && uses_bitmaps)?;
        let gone = existing.keys().filter(|key| !wanted.contains_key(key)).map(|key| (*key, None));
        changes.extend(gone);
        let put = wanted.into_iter().filter(|(key, data)| existing.get(key) != Some(data));
        changes.extend(put.map(|(key, data)| (key, Some(data))));
    }
    Ok(changes.into_iter().map(|(key, data)| (key, data.map(Into::into))).collect())
}

/// Returns the changes that delete a block group's items.
pub(crate) fn remove_free_space(
    source: &dyn NodeSource,
    root: &RootPtr,
    start: Logical,
    len_bytes: u64,
) -> Result<Batch> {
    Ok(group_keys(source, root, start, len_bytes)?.into_iter().map(|key| (key, None)).collect())
}

/// Numbers of free ranges at which a block group changes its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Thresholds {
    /// A group with more extents than this number changes to bitmaps.
    high: u64,
    /// A group whose bitmaps hold fewer free ranges than this number changes to extents.
    low: u64,
}

impl Thresholds {
    /// An extent takes an item head; a bitmap takes an item head and its bytes. The gap between the thresholds keeps
    /// groups from changing back and forth.
    fn new(len_bytes: u64, sectorsize: u32) -> Self {
        let bitmap_bytes = (ITEM_HEAD_SIZE + FREE_SPACE_BITMAP_SIZE) as u64;
        let high = len_bytes.div_ceil(span(sectorsize)) * bitmap_bytes / ITEM_HEAD_SIZE as u64;
        Self { high, low: high.saturating_sub(100) }
    }
}

/// Sorted ranges that are joined as they are added.
#[derive(Default)]
struct FreeRuns(Vec<Range<u64>>);

impl FreeRuns {
    fn push(&mut self, run: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ if run.is_empty() => {}
            _ => self.0.push(run),
        }
    }

    fn push_bitmap(&mut self, start: u64, nr_sectors: u64, bitmap: &[u8], sectorsize: u64) {
        let sectors = |index: u64, count: u64| start + index * sectorsize..start + (index + count) * sectorsize;
        for (byte, index) in bitmap.iter().zip((0..nr_sectors).step_by(8)) {
            let here = (nr_sectors - index).min(8);
            match byte {
                0 => {}
                0xff => self.push(sectors(index, here)),
                _ => (0..here).filter(|bit| byte >> bit & 1 != 0).for_each(|bit| self.push(sectors(index + bit, 1))),
            }
        }
    }
}

/// The bitmaps of the part `window` of the block group at `start`. The window ends at bounds of bitmaps. The last
/// bitmap of a group covers the rest of the group.
fn bitmaps(start: u64, window: &Range<u64>, free: &[Range<u64>], sectorsize: u32) -> BTreeMap<Key, Vec<u8>> {
    let (span, sector) = (span(sectorsize), u64::from(sectorsize));
    let first = (window.start - start) / span;
    let part = |index: u64| {
        let at = window.start + index * span;
        (at, span.min(window.end - at))
    };
    let mut maps: Vec<Vec<u8>> = (0..(window.end - window.start).div_ceil(span))
        .map(|index| vec![0; bitmap_len(part(index).1, sectorsize)])
        .collect();
    for run in free {
        let (from, to) = (run.start.max(window.start), run.end.min(window.end));
        for number in (from - start) / sector..(to.max(from) - start) / sector {
            let (map, bit) = (number / FREE_SPACE_BITMAP_BITS - first, number % FREE_SPACE_BITMAP_BITS);
            maps[map as usize][(bit / 8) as usize] |= 1 << (bit % 8);
        }
    }
    let key = |(at, len_bytes)| Key::new(at, KeyType::FREE_SPACE_BITMAP, len_bytes);
    maps.into_iter().zip(0..).map(|(map, index)| (key(part(index)), map)).collect()
}

/// The smallest range that covers this part of a block group with whole bitmaps.
fn bitmap_bounds(range: &Range<u64>, group: &Range<u64>, sectorsize: u32) -> Range<u64> {
    let span = span(sectorsize);
    let from = group.start + (range.start - group.start) / span * span;
    let to = group.start + (range.end - group.start).div_ceil(span) * span;
    from..to.min(group.end)
}

/// Bytes of space that a bitmap of full length covers.
fn span(sectorsize: u32) -> u64 {
    FREE_SPACE_BITMAP_BITS * u64::from(sectorsize)
}

/// Bytes of a bitmap for this many bytes of space.
fn bitmap_len(covered_bytes: u64, sectorsize: u32) -> usize {
    // At most 256 bytes, because callers check that a bitmap covers at most a span.
    (covered_bytes / u64::from(sectorsize)).div_ceil(8) as usize
}

/// The items of a block group, valid or not, that overlap a window, and the extents that touch it. Leaves out the info
/// item that a valid group has.
fn items_near(
    cursor: &mut Cursor<'_>,
    group: &Range<u64>,
    window: &Range<u64>,
    are_bitmaps: bool,
) -> Result<BTreeMap<Key, Vec<u8>>> {
    let info_key = Key::new(group.start, KeyType::FREE_SPACE_INFO, group.end - group.start);
    let mut items = BTreeMap::new();
    let mut key = if window.start == group.start {
        cursor.seek_ge(&Key::new(group.start, KeyType::FREE_SPACE_INFO, 0))?
    } else {
        cursor.seek_le(&Key::new(window.start, KeyType::FREE_SPACE_BITMAP, u64::MAX))?
    };
    while let Some(found) = key.filter(|key| key.objectid <= window.end && key.objectid < group.end) {
        let end = found.objectid.saturating_add(found.offset);
        let is_near = match are_bitmaps {
            true => found.objectid < window.end && window.start < end,
            false => window.start <= end,
        };
        let is_free_space = (KeyType::FREE_SPACE_INFO..=KeyType::FREE_SPACE_BITMAP).contains(&found.item_type);
        if is_near && is_free_space && found != info_key {
            items.insert(found, cursor.data().unwrap_or_default().to_vec());
        }
        key = cursor.next()?;
    }
    Ok(items)
}

/// The keys of the free space items of a block group, valid or not.
fn group_keys(source: &dyn NodeSource, root: &RootPtr, start: Logical, len_bytes: u64) -> Result<Vec<Key>> {
    let end = group_end(start, len_bytes)?;
    let mut cursor = Cursor::new(source, *root);
    let mut keys = Vec::new();
    let mut key = cursor.seek_ge(&Key::new(start.0, KeyType::FREE_SPACE_INFO, 0))?;
    while let Some(found) = key.filter(|key| key.objectid < end) {
        if (KeyType::FREE_SPACE_INFO..=KeyType::FREE_SPACE_BITMAP).contains(&found.item_type) {
            keys.push(found);
        }
        key = cursor.next()?;
    }
    Ok(keys)
}

fn decode_info(raw: &[u8], start: Logical) -> Result<FreeSpaceInfo> {
    FreeSpaceInfo::decode(raw).map_err(|cause| Error::from(cause).in_tree(RootId::FREE_SPACE_TREE).at(start))
}

fn group_end(start: Logical, len_bytes: u64) -> Result<u64> {
    let end = start.0.checked_add(len_bytes);
    end.ok_or_else(|| corrupt("block group", len_bytes, "expected an end inside of the address space", start.0))
}

fn corrupt(field: &'static str, value: u64, expected: &'static str, at: u64) -> Error {
    let cause = FormatError::Value { what: "free space tree", field, value, expected };
    Corrupt::new(cause).in_tree(RootId::FREE_SPACE_TREE).at(Logical(at)).into()
}

#[cfg(test)]
mod tests;
