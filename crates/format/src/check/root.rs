//! Root items and the names of subvolumes.

use super::bad;
use super::inode::{check_name, check_name_len};
use super::item::{Check, CheckedItem};
use crate::ids::RootId;
use crate::item::{RootFlags, RootItem};
use crate::node::LEVEL_MAX;

pub(super) fn check_root_item(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "RootItem";
    if item.key.objectid == 0 {
        return Err(bad(WHAT, "key objectid", 0u64, "expected a tree"));
    }
    if item.key.objectid == RootId::TREE_RELOC.0 && item.key.offset == 0 {
        return Err(bad(WHAT, "key offset", 0u64, "expected the tree that is relocated"));
    }
    // Root items of Linux before 3.6 lack the last fields.
    let has_v2 = item.data.len() != RootItem::SIZE_V1;
    if has_v2 {
        item.exact_size(WHAT, RootItem::SIZE)?;
    }
    item.generation(WHAT, "generation", item.u64(WHAT, 160)?)?;
    item.aligned(WHAT, "bytenr", item.u64(WHAT, 176)?)?;
    item.generation(WHAT, "last_snapshot", item.u64(WHAT, 200)?)?;
    if has_v2 {
        item.generation(WHAT, "generation_v2", item.u64(WHAT, 239)?)?;
    }
    let flags = RootFlags::from_bits_retain(item.u64(WHAT, 208)?);
    let unknown = flags.difference(RootFlags::all());
    if !unknown.is_empty() {
        return Err(bad(WHAT, "flags", unknown.bits(), "unknown flag"));
    }
    let drop_level = item.u8(WHAT, 237)?;
    if drop_level > LEVEL_MAX {
        return Err(bad(WHAT, "drop_level", drop_level, "expected at most 7"));
    }
    let level = item.u8(WHAT, 238)?;
    if level > LEVEL_MAX {
        return Err(bad(WHAT, "level", level, "expected at most 7"));
    }
    Ok(())
}

pub(super) fn check_root_ref(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "RootRef";
    // Layout of the item: dirid (8 bytes), sequence (8), name_len (2), name.
    let name_len = usize::from(item.u16(WHAT, 16)?);
    check_name_len(WHAT, name_len)?;
    check_name(WHAT, item.bytes(WHAT, 18, name_len)?)?;
    item.exact_size(WHAT, name_len.saturating_add(18))
}
