//! File extents and data checksums.

use super::bad;
use super::inode::check_prev_ino;
use super::item::{Check, CheckedItem, array_at};
use crate::ids::objectid;
use crate::item::{Compression, FileExtent};
use crate::key::KeyType;

const WHAT: &str = "FileExtent";

pub(super) fn check_file_extent(item: &CheckedItem<'_>) -> Check {
    check_prev_ino(item, WHAT)?;
    item.aligned(WHAT, "file offset", item.key.offset)?;
    item.min_size(WHAT, FileExtent::HEADER_SIZE)?;
    let ram_bytes = item.u64(WHAT, 8)?;
    let compression = item.u8(WHAT, 16)?;
    if Compression::from_disk(compression).is_none() {
        return Err(bad(WHAT, "compression", compression, "expected 0 to 3"));
    }
    let encryption = item.u8(WHAT, 17)?;
    if encryption != 0 {
        return Err(bad(WHAT, "encryption", encryption, "expected 0"));
    }
    let extent_type = item.u8(WHAT, 20)?;
    match extent_type {
        0 => check_inline(item, ram_bytes, compression),
        1 | 2 => check_regular(item, ram_bytes),
        _ => Err(bad(WHAT, "type", extent_type, "expected 0 to 2")),
    }
}

fn check_inline(item: &CheckedItem<'_>, ram_bytes: u64, compression: u8) -> Check {
    if item.key.offset != 0 {
        return Err(bad(WHAT, "file offset", item.key.offset, "expected 0 for inline data"));
    }
    // For compressed data, `ram_bytes` does not follow from the length of the item, so it is not compared here. The
    // code that decompresses the data limits the length.
    let data_len = u64::try_from(item.data.len().saturating_sub(FileExtent::HEADER_SIZE));
    if compression == 0 && data_len != Ok(ram_bytes) {
        return Err(bad(WHAT, "ram_bytes", ram_bytes, "expected the length of the inline data"));
    }
    Ok(())
}

fn check_regular(item: &CheckedItem<'_>, ram_bytes: u64) -> Check {
    item.exact_size(WHAT, FileExtent::REGULAR_SIZE)?;
    item.aligned(WHAT, "ram_bytes", ram_bytes)?;
    let disk_bytenr = item.u64(WHAT, 21)?;
    let disk_num_bytes = item.u64(WHAT, 29)?;
    item.aligned(WHAT, "disk_bytenr", disk_bytenr)?;
    item.aligned(WHAT, "disk_num_bytes", disk_num_bytes)?;
    item.aligned(WHAT, "offset", item.u64(WHAT, 37)?)?;
    let num_bytes = item.u64(WHAT, 45)?;
    item.aligned(WHAT, "num_bytes", num_bytes)?;
    if item.key.offset.checked_add(num_bytes).is_none() {
        return Err(bad(WHAT, "num_bytes", num_bytes, "expected to end below 2^64"));
    }
    if disk_bytenr.checked_add(disk_num_bytes).is_none() {
        return Err(bad(WHAT, "disk_num_bytes", disk_num_bytes, "expected to end inside the address space"));
    }
    let prev = item.prev_of(KeyType::EXTENT_DATA).filter(|(prev, _)| prev.objectid == item.key.objectid);
    match prev.and_then(|(prev, data)| extent_end(prev.offset, data, item.ctx.sectorsize)) {
        Some(end) if end > item.key.offset => {
            Err(bad(WHAT, "file offset", item.key.offset, "expected no overlap with the preceding extent"))
        }
        _ => Ok(()),
    }
}

/// The file offset at which a checked extent ends.
fn extent_end(offset: u64, data: &[u8], sectorsize: u32) -> Option<u64> {
    if data.get(20) == Some(&0) {
        let ram_bytes = u64::from_le_bytes(array_at(WHAT, data, 8).ok()?);
        return offset.checked_add(ram_bytes)?.checked_next_multiple_of(sectorsize.into());
    }
    offset.checked_add(u64::from_le_bytes(array_at(WHAT, data, 45).ok()?))
}

pub(super) fn check_csum(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "CsumItem";
    if item.key.objectid != objectid::EXTENT_CSUM {
        return Err(bad(WHAT, "key objectid", item.key.objectid, "expected the checksum objectid"));
    }
    item.aligned(WHAT, "start", item.key.offset)?;
    item.multiple_size(WHAT, item.ctx.csum_type.size())?;
    if csum_end(item, item.key.offset, item.data.len()).is_none() {
        return Err(bad(WHAT, "start", item.key.offset, "expected to end inside the address space"));
    }
    let prev = item.prev_of(KeyType::EXTENT_CSUM);
    match prev.and_then(|(prev, data)| csum_end(item, prev.offset, data.len())) {
        Some(end) if end > item.key.offset => {
            Err(bad(WHAT, "start", item.key.offset, "expected no overlap with the preceding range"))
        }
        _ => Ok(()),
    }
}

fn csum_end(item: &CheckedItem<'_>, start: u64, len_bytes: usize) -> Option<u64> {
    let nr_sectors = u64::try_from(len_bytes.checked_div(item.ctx.csum_type.size())?).ok()?;
    start.checked_add(nr_sectors.checked_mul(item.ctx.sectorsize.into())?)
}
