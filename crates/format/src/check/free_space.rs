//! Free space tree items and the headers of the free space cache (v1).

use super::bad;
use super::item::{Check, CheckedItem};
use crate::ids::objectid;
use crate::item::{FreeSpaceHeader, FreeSpaceInfo};
use crate::key::KeyType;

pub(super) fn check_info(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "FreeSpaceInfo";
    check_range(item, WHAT)?;
    item.exact_size(WHAT, FreeSpaceInfo::SIZE)?;
    let flags = item.u32(WHAT, 4)?;
    if flags & !FreeSpaceInfo::USING_BITMAPS != 0 {
        return Err(bad(WHAT, "flags", flags, "expected 0 or 1"));
    }
    Ok(())
}

pub(super) fn check_extent(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "FreeSpaceExtent";
    check_range(item, WHAT)?;
    item.exact_size(WHAT, 0)?;
    check_overlap(item, WHAT)
}

pub(super) fn check_bitmap(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "FreeSpaceBitmap";
    check_range(item, WHAT)?;
    let bits = item.key.offset.checked_div(u64::from(item.ctx.sectorsize)).unwrap_or_default();
    let expected = bits.div_ceil(8);
    if u64::try_from(item.data.len()) != Ok(expected) {
        return Err(item.bad_size(WHAT, "expected a bit for each sector"));
    }
    check_overlap(item, WHAT)
}

/// Checks the key of a free space tree item, which is `(start, type, length)`.
fn check_range(item: &CheckedItem<'_>, what: &'static str) -> Check {
    item.aligned(what, "start", item.key.objectid)?;
    item.aligned(what, "length", item.key.offset)?;
    if item.key.offset == 0 || item.key.objectid.checked_add(item.key.offset).is_none() {
        return Err(bad(what, "length", item.key.offset, "expected to end inside the address space"));
    }
    Ok(())
}

fn check_overlap(item: &CheckedItem<'_>, what: &'static str) -> Check {
    let free = [KeyType::FREE_SPACE_EXTENT, KeyType::FREE_SPACE_BITMAP];
    let prev = item.prev.filter(|(prev, _)| free.contains(&prev.item_type));
    match prev.and_then(|(prev, _)| prev.objectid.checked_add(prev.offset)) {
        Some(end) if end > item.key.objectid => {
            Err(bad(what, "start", item.key.objectid, "expected no overlap with the preceding range"))
        }
        _ => Ok(()),
    }
}

/// Checks items of type 0: headers of free space caches, `(FREE_SPACE 0 block group)`, in the root tree.
pub(super) fn check_cache_header(item: &CheckedItem<'_>) -> Check {
    if item.key.objectid != objectid::FREE_SPACE {
        return Ok(());
    }
    item.exact_size("FreeSpaceHeader", FreeSpaceHeader::SIZE)
}
