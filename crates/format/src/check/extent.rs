//! Extent items and references to extents.
//!
//! Inline references are in ascending order of type; those of one type are in descending order of address, tree id or
//! hash.

use super::bad;
use super::item::{Check, CheckedItem};
use crate::error::FormatError;
use crate::hash::extent_data_ref_hash;
use crate::ids::{Ino, RootId, objectid};
use crate::item::{ExtentDataRef, ExtentFlags, ExtentItem, TreeBlockInfo};
use crate::key::{Key, KeyType};
use crate::node::LEVEL_MAX;
use crate::superblock::Incompat;

const WHAT: &str = "ExtentItem";

/// Checks an extent item. `extent_end` holds the end of the preceding extent in this leaf, and receives the end of this
/// extent.
pub(super) fn check_extent_item(item: &CheckedItem<'_>, extent_end: &mut u64) -> Check {
    let key = &item.key;
    let is_skinny = key.item_type == KeyType::METADATA_ITEM;
    if is_skinny && !item.ctx.incompat.contains(Incompat::SKINNY_METADATA) {
        return Err(bad(
            WHAT,
            "key type",
            key.item_type.0,
            "expected no skinny items without the skinny-metadata feature",
        ));
    }
    item.aligned(WHAT, "bytenr", key.objectid)?;
    if is_skinny && key.offset > u64::from(LEVEL_MAX) {
        return Err(bad(WHAT, "level", key.offset, "expected at most 7"));
    }
    item.min_size(WHAT, ExtentItem::HEADER_SIZE)?;
    let refs = item.u64(WHAT, 0)?;
    item.generation(WHAT, "generation", item.u64(WHAT, 8)?)?;
    let flags = ExtentFlags::from_bits_retain(item.u64(WHAT, 16)?);
    let is_data = check_kind(item, flags, is_skinny)?;
    let mut at = ExtentItem::HEADER_SIZE;
    if !is_data && !is_skinny {
        let level = item.u8(WHAT, at.saturating_add(Key::SIZE))?;
        if level > LEVEL_MAX {
            return Err(bad(WHAT, "level", level, "expected at most 7"));
        }
        at = at.saturating_add(TreeBlockInfo::SIZE);
    }
    if check_inline_refs(item, at, is_data)? > refs {
        return Err(bad(WHAT, "refs", refs, "expected at least the inline references"));
    }
    check_overlap(item, is_data, extent_end)
}

/// Checks flags and length; returns whether this is a data extent.
fn check_kind(item: &CheckedItem<'_>, flags: ExtentFlags, is_skinny: bool) -> Result<bool, FormatError> {
    let (data, tree) = (flags.contains(ExtentFlags::DATA), flags.contains(ExtentFlags::TREE_BLOCK));
    if data == tree {
        return Err(bad(WHAT, "flags", flags.bits(), "expected either data or tree block"));
    }
    let len_bytes = item.key.offset;
    if tree {
        if !is_skinny && len_bytes != u64::from(item.ctx.nodesize) {
            return Err(bad(WHAT, "length", len_bytes, "expected the node size"));
        }
        return Ok(false);
    }
    if is_skinny {
        return Err(bad(WHAT, "flags", flags.bits(), "expected a tree block in a skinny item"));
    }
    item.aligned(WHAT, "length", len_bytes)?;
    if len_bytes == 0 {
        return Err(bad(WHAT, "length", 0u64, "expected at least a sector"));
    }
    if flags.contains(ExtentFlags::FULL_BACKREF) {
        return Err(bad(WHAT, "flags", flags.bits(), "expected no full backrefs in a data extent"));
    }
    Ok(true)
}

fn check_overlap(item: &CheckedItem<'_>, is_data: bool, extent_end: &mut u64) -> Check {
    let start = item.key.objectid;
    if *extent_end > start {
        return Err(bad(WHAT, "bytenr", start, "expected no overlap with the preceding extent"));
    }
    let len_bytes = if is_data { item.key.offset } else { u64::from(item.ctx.nodesize) };
    *extent_end = start
        .checked_add(len_bytes)
        .ok_or_else(|| bad(WHAT, "length", len_bytes, "expected to end inside the address space"))?;
    Ok(())
}

/// Checks all inline references from `at` on; returns the sum of their counts.
fn check_inline_refs(item: &CheckedItem<'_>, mut at: usize, is_data: bool) -> Result<u64, FormatError> {
    let mut refs: u64 = 0;
    let mut last_type = KeyType(0);
    let mut last_sequence = u64::MAX;
    while at < item.data.len() {
        let item_type = KeyType(item.u8(WHAT, at)?);
        let body = at.saturating_add(1);
        let offset = item.u64(WHAT, body)?;
        let mut sequence = offset;
        let (size, count) = match item_type {
            KeyType::TREE_BLOCK_REF if !is_data => (8, 1),
            KeyType::SHARED_BLOCK_REF if !is_data => {
                item.aligned(WHAT, "shared block ref", offset)?;
                (8, 1)
            }
            KeyType::EXTENT_DATA_REF if is_data => {
                let (hash, count) = check_data_ref(item, WHAT, body)?;
                sequence = hash;
                (ExtentDataRef::SIZE, count)
            }
            KeyType::SHARED_DATA_REF if is_data => {
                item.aligned(WHAT, "shared data ref", offset)?;
                let count = item.u32(WHAT, body.saturating_add(8))?;
                check_count(WHAT, count)?;
                (12, count)
            }
            KeyType::EXTENT_OWNER_REF if item.ctx.incompat.contains(Incompat::SIMPLE_QUOTA) => (8, 0),
            KeyType(other) => {
                return Err(bad(WHAT, "inline ref type", other, "expected a type that belongs to this kind of extent"));
            }
        };
        if item_type < last_type {
            return Err(bad(WHAT, "inline ref type", item_type.0, "expected types to ascend"));
        }
        if item_type == last_type && sequence > last_sequence {
            return Err(bad(WHAT, "inline ref", sequence, "expected to descend within a type"));
        }
        (last_type, last_sequence) = (item_type, sequence);
        refs = refs.saturating_add(count.into());
        at = body.saturating_add(size);
    }
    item.min_size(WHAT, at)?;
    Ok(refs)
}

/// Checks an `EXTENT_DATA_REF` body at `at`; returns its hash and count.
fn check_data_ref(item: &CheckedItem<'_>, what: &'static str, at: usize) -> Result<(u64, u32), FormatError> {
    let root = RootId(item.u64(what, at)?);
    let objectid = item.u64(what, at.saturating_add(8))?;
    let offset = item.u64(what, at.saturating_add(16))?;
    let count = item.u32(what, at.saturating_add(24))?;
    // The root tree may refer to data too, because it holds the files of the free space cache (v1).
    if !root.is_fs_tree() && root != RootId::ROOT_TREE {
        return Err(bad(what, "data ref root", root.0, "expected a tree with files"));
    }
    let numbers = objectid::FIRST_FREE..=objectid::LAST_FREE;
    if !numbers.contains(&objectid) && objectid != objectid::FREE_INO {
        return Err(bad(what, "data ref objectid", objectid, "expected an inode number"));
    }
    item.aligned(what, "data ref offset", offset)?;
    check_count(what, count)?;
    Ok((extent_data_ref_hash(root, Ino(objectid), offset), count))
}

fn check_count(what: &'static str, count: u32) -> Check {
    if count == 0 {
        return Err(bad(what, "count", 0u64, "expected at least 1"));
    }
    Ok(())
}

/// Checks keyed `TREE_BLOCK_REF`, `SHARED_BLOCK_REF` and `SHARED_DATA_REF` items.
pub(super) fn check_keyed_ref(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "extent ref item";
    item.aligned(WHAT, "bytenr", item.key.objectid)?;
    if item.key.item_type != KeyType::TREE_BLOCK_REF {
        item.aligned(WHAT, "parent", item.key.offset)?;
    }
    if item.key.item_type == KeyType::SHARED_DATA_REF {
        item.exact_size(WHAT, 4)?;
        return check_count(WHAT, item.u32(WHAT, 0)?);
    }
    item.exact_size(WHAT, 0)
}

/// Checks keyed `EXTENT_DATA_REF` items. The key's offset is not checked: it is the hash, or a greater number if hashes
/// collide.
pub(super) fn check_keyed_data_ref(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "ExtentDataRef";
    item.aligned(WHAT, "bytenr", item.key.objectid)?;
    item.multiple_size(WHAT, ExtentDataRef::SIZE)?;
    for at in (0..item.data.len()).step_by(ExtentDataRef::SIZE) {
        check_data_ref(item, WHAT, at)?;
    }
    Ok(())
}

/// Checks `RAID_STRIPE` items: pairs of devid and physical address.
pub(super) fn check_raid_stripe(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "RaidStripe";
    item.aligned(WHAT, "logical", item.key.objectid)?;
    if !item.ctx.incompat.contains(Incompat::RAID_STRIPE_TREE) {
        return Err(bad(
            WHAT,
            "key type",
            item.key.item_type.0,
            "expected no stripe items without the raid-stripe-tree feature",
        ));
    }
    item.multiple_size(WHAT, 16)
}
