//! Chunks, devices, device extents and block groups.

use super::item::{Check, CheckedItem, aligned, array_at};
use super::{CheckContext, bad};
use crate::ids::{RootId, objectid};
use crate::item::{BlockGroupFlags, BlockGroupItem, ChunkItem, DevExtent, DevItem, Stripe};
use crate::key::KeyType;
use crate::profile::Profile;
use crate::superblock::Incompat;

pub(super) fn check_chunk_item(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "ChunkItem";
    if item.key.objectid != objectid::FIRST_CHUNK_TREE {
        return Err(bad(WHAT, "key objectid", item.key.objectid, "expected 256"));
    }
    item.min_size(WHAT, ChunkItem::HEADER_SIZE.saturating_add(Stripe::SIZE))?;
    let num_stripes = item.u16(WHAT, 44)?;
    if num_stripes == 0 {
        return Err(bad(WHAT, "num_stripes", 0u64, "expected at least 1"));
    }
    item.exact_size(WHAT, chunk_size(num_stripes))?;
    check_chunk(item.key.offset, item.data, item.ctx)
}

/// Size in bytes of a chunk item with this many stripes.
pub(crate) fn chunk_size(num_stripes: u16) -> usize {
    usize::from(num_stripes).saturating_mul(Stripe::SIZE).saturating_add(ChunkItem::HEADER_SIZE)
}

/// Checks a chunk that starts at `logical`. `data` starts with the chunk item; more bytes may follow.
pub(crate) fn check_chunk(logical: u64, data: &[u8], ctx: &CheckContext) -> Check {
    const WHAT: &str = "ChunkItem";
    let u64_at = |at| array_at(WHAT, data, at).map(u64::from_le_bytes);
    let length = u64_at(0)?;
    let stripe_len = u64_at(16)?;
    let flags = BlockGroupFlags::from_bits_retain(u64_at(24)?);
    let sector_size = u32::from_le_bytes(array_at(WHAT, data, 40)?);
    let num_stripes = u16::from_le_bytes(array_at(WHAT, data, 44)?);
    let sub_stripes = u16::from_le_bytes(array_at(WHAT, data, 46)?);
    aligned(ctx, WHAT, "logical", logical)?;
    if sector_size != ctx.sectorsize {
        return Err(bad(WHAT, "sector_size", sector_size, "expected the sector size"));
    }
    if length == 0 || logical.checked_add(length).is_none() {
        return Err(bad(WHAT, "length", length, "expected to end inside the address space"));
    }
    aligned(ctx, WHAT, "length", length)?;
    if stripe_len != ChunkItem::STRIPE_LEN {
        return Err(bad(WHAT, "stripe_len", stripe_len, "expected 65536"));
    }
    // The number of a 64 KiB stripe element within its chunk has 32 bits, which limits the chunk's length.
    if length >= ChunkItem::STRIPE_LEN << 32 {
        return Err(bad(WHAT, "length", length, "expected less than 2^48"));
    }
    check_profile(WHAT, flags)?;
    check_types(WHAT, flags, ctx)?;
    check_stripes(flags, num_stripes, sub_stripes)
}

/// Checks that there are no unknown bits and at most one profile.
fn check_profile(what: &'static str, flags: BlockGroupFlags) -> Check {
    let unknown = flags.difference(BlockGroupFlags::all());
    if !unknown.is_empty() {
        return Err(bad(what, "type", unknown.bits(), "unknown bit"));
    }
    if (flags & BlockGroupFlags::PROFILES).bits().count_ones() > 1 {
        return Err(bad(what, "type", flags.bits(), "expected at most one profile"));
    }
    Ok(())
}

fn check_types(what: &'static str, flags: BlockGroupFlags, ctx: &CheckContext) -> Check {
    let types = flags & BlockGroupFlags::TYPES;
    let mixed = BlockGroupFlags::DATA.union(BlockGroupFlags::METADATA);
    if types.is_empty() {
        return Err(bad(what, "type", flags.bits(), "expected data, metadata or system"));
    }
    if types.contains(BlockGroupFlags::SYSTEM) && types != BlockGroupFlags::SYSTEM {
        return Err(bad(what, "type", flags.bits(), "expected system to be the only type"));
    }
    if types == mixed && !ctx.incompat.contains(Incompat::MIXED_GROUPS) {
        return Err(bad(what, "type", flags.bits(), "expected data or metadata, not both"));
    }
    Ok(())
}

fn check_stripes(flags: BlockGroupFlags, num_stripes: u16, sub_stripes: u16) -> Check {
    let fits = |profile: &Profile| profile.allows_stripes(num_stripes.into());
    let profile = Profile::of(flags);
    if !profile.is_some_and(fits) {
        return Err(bad("ChunkItem", "num_stripes", num_stripes, "expected a number that the profile allows"));
    }
    // Linux checks the field of this profile only.
    if flags.contains(BlockGroupFlags::RAID10) && profile.is_some_and(|profile| profile.sub_stripes != sub_stripes) {
        return Err(bad("ChunkItem", "sub_stripes", sub_stripes, "expected 2 for RAID10"));
    }
    Ok(())
}

pub(super) fn check_dev_item(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "DevItem";
    if item.key.objectid != objectid::DEV_ITEMS {
        return Err(bad(WHAT, "key objectid", item.key.objectid, "expected 1"));
    }
    item.exact_size(WHAT, DevItem::SIZE)?;
    let devid = item.u64(WHAT, 0)?;
    if devid != item.key.offset {
        return Err(bad(WHAT, "devid", devid, "expected the offset of its key"));
    }
    // A device that is being removed has 0 in both fields, so 0 is accepted.
    let (total_bytes, bytes_used) = (item.u64(WHAT, 8)?, item.u64(WHAT, 16)?);
    if bytes_used > total_bytes {
        return Err(bad(WHAT, "bytes_used", bytes_used, "expected at most total_bytes"));
    }
    Ok(())
}

pub(super) fn check_dev_extent(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "DevExtent";
    item.exact_size(WHAT, DevExtent::SIZE)?;
    item.aligned(WHAT, "physical", item.key.offset)?;
    let chunk_tree = item.u64(WHAT, 0)?;
    if chunk_tree != RootId::CHUNK_TREE.0 {
        return Err(bad(WHAT, "chunk_tree", chunk_tree, "expected 3"));
    }
    let chunk_objectid = item.u64(WHAT, 8)?;
    if chunk_objectid != objectid::FIRST_CHUNK_TREE {
        return Err(bad(WHAT, "chunk_objectid", chunk_objectid, "expected 256"));
    }
    item.aligned(WHAT, "chunk_offset", item.u64(WHAT, 16)?)?;
    let length = item.u64(WHAT, 24)?;
    item.aligned(WHAT, "length", length)?;
    if length == 0 || item.key.offset.checked_add(length).is_none() {
        return Err(bad(WHAT, "length", length, "expected to end below 2^64"));
    }
    let prev = item.prev_of(KeyType::DEV_EXTENT).filter(|(prev, _)| prev.objectid == item.key.objectid);
    if let Some((prev, data)) = prev {
        let prev_length = u64::from_le_bytes(array_at(WHAT, data, 24)?);
        if prev.offset.saturating_add(prev_length) > item.key.offset {
            return Err(bad(WHAT, "physical", item.key.offset, "expected no overlap with the preceding device extent"));
        }
    }
    Ok(())
}

pub(super) fn check_block_group(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "BlockGroupItem";
    item.exact_size(WHAT, BlockGroupItem::SIZE)?;
    item.aligned(WHAT, "start", item.key.objectid)?;
    let length = item.key.offset;
    if length == 0 || item.key.objectid.checked_add(length).is_none() {
        return Err(bad(WHAT, "length", length, "expected to end inside the address space"));
    }
    item.aligned(WHAT, "length", length)?;
    let used = item.u64(WHAT, 0)?;
    if used > length {
        return Err(bad(WHAT, "used", used, "expected at most its length"));
    }
    let chunk_objectid = item.u64(WHAT, 8)?;
    if chunk_objectid != objectid::FIRST_CHUNK_TREE && !item.ctx.incompat.contains(Incompat::EXTENT_TREE_V2) {
        return Err(bad(WHAT, "chunk_objectid", chunk_objectid, "expected 256"));
    }
    let flags = BlockGroupFlags::from_bits_retain(item.u64(WHAT, 16)?);
    check_profile(WHAT, flags)?;
    check_types(WHAT, flags, item.ctx)
}
