//! Headers, internal nodes, and the layout of leaves.

use super::item::{Check, CheckedItem, aligned};
use super::{CheckContext, bad, chunk, dir, extent, file_extent, free_space, inode, misc, root};
use crate::error::{Corrupt, FormatError};
use crate::ids::{Generation, RootId};
use crate::item::{QgroupInfo, QgroupLimit};
use crate::key::{Key, KeyType};
use crate::node::{HEADER_FLAG_WRITTEN, HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, LEVEL_MAX, NodeView};
use crate::superblock::Incompat;

const HEADER: &str = "tree block header";

pub(super) fn check_header(view: &NodeView<'_>, ctx: &CheckContext) -> Check {
    let size = u64::try_from(view.raw().len()).unwrap_or(u64::MAX);
    if size != u64::from(ctx.nodesize) {
        return Err(bad("tree block", "size", size, "expected the node size"));
    }
    let expected = &ctx.expected;
    if let Some(bytenr) = expected.bytenr.filter(|&bytenr| bytenr != view.bytenr()) {
        return Err(mismatch("bytenr", view.bytenr().0, bytenr.0));
    }
    aligned(ctx, HEADER, "bytenr", view.bytenr().0)?;
    if !ctx.has_fsid(view.fsid()) {
        return Err(FormatError::Mismatch {
            what: HEADER,
            field: "fsid",
            found: view.fsid().to_string().into(),
            expected: ctx.node_fsid.to_string().into(),
        });
    }
    if view.level() > LEVEL_MAX {
        return Err(bad(HEADER, "level", view.level(), "expected at most 7"));
    }
    if let Some(level) = expected.level.filter(|&level| level != view.level()) {
        return Err(mismatch("level", view.level(), level));
    }
    if let Some(generation) = expected.generation.filter(|&generation| generation != view.generation()) {
        return Err(mismatch("generation", view.generation().0, generation.0));
    }
    if let Some(Generation(limit)) = ctx.generation_limit.filter(|&limit| view.generation() > limit) {
        return Err(FormatError::Mismatch {
            what: HEADER,
            field: "generation",
            found: view.generation().to_string().into(),
            expected: format!("at most {limit}").into(),
        });
    }
    if ctx.verify_csum && view.flags() & HEADER_FLAG_WRITTEN == 0 {
        return Err(bad(HEADER, "flags", view.flags(), "expected to be marked as written"));
    }
    check_owner(view.owner(), ctx)?;
    let capacity = view.raw().len().saturating_sub(HEADER_SIZE);
    let head_size = if view.is_leaf() { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
    if view.nritems().saturating_mul(head_size) > capacity {
        let nritems = u64::try_from(view.nritems()).unwrap_or(u64::MAX);
        return Err(bad(HEADER, "nritems", nritems, "expected at most what fits into the block"));
    }
    match expected.first_key {
        Some(_) if view.nritems() == 0 => {
            Err(bad(HEADER, "nritems", 0u64, "expected at least 1 in a block that is not a root"))
        }
        Some(key) if view.key(0) != Some(key) => Err(FormatError::Mismatch {
            what: "tree block",
            field: "first key",
            found: view.key(0).unwrap_or_default().to_string().into(),
            expected: key.to_string().into(),
        }),
        _ => Ok(()),
    }
}

/// Checks the owner. Subvolumes share blocks with each other; every other tree, except relocation trees, owns all its
/// blocks.
fn check_owner(owner: RootId, ctx: &CheckContext) -> Check {
    let Some(tree) = ctx.expected.tree else { return Ok(()) };
    let fits = match tree {
        // The blocks of a relocation tree belong to the tree that it relocates, so any owner is accepted.
        RootId::TREE_RELOC => true,
        _ if tree.is_subvolume() => owner.is_subvolume(),
        _ => owner == tree,
    };
    if fits {
        return Ok(());
    }
    Err(mismatch("owner", owner.0, tree.0))
}

#[cold]
fn mismatch(field: &'static str, found: impl ToString, expected: impl ToString) -> FormatError {
    FormatError::Mismatch {
        what: HEADER,
        field,
        found: found.to_string().into(),
        expected: expected.to_string().into(),
    }
}

pub(super) fn check_internal(view: &NodeView<'_>, ctx: &CheckContext) -> Result<(), Corrupt> {
    if view.nritems() == 0 {
        return Err(bad(HEADER, "nritems", 0u64, "expected at least 1 in an internal node").into());
    }
    let mut prev = None;
    for slot in 0..view.nritems() {
        check_pointer(view, ctx, slot, prev).map_err(|cause| Corrupt::new(cause).in_slot(slot))?;
        prev = view.key(slot);
    }
    Ok(())
}

fn check_pointer(view: &NodeView<'_>, ctx: &CheckContext, slot: usize, prev: Option<Key>) -> Check {
    let short = FormatError::Short { what: "tree block", need: usize::MAX, have: view.raw().len() };
    let (Some(key), Some((bytenr, generation))) = (view.key(slot), view.child(slot)) else { return Err(short) };
    if bytenr.0 == 0 {
        return Err(bad("node pointer", "blockptr", 0u64, "expected an address"));
    }
    aligned(ctx, "node pointer", "blockptr", bytenr.0)?;
    if let Some(limit) = ctx.generation_limit.filter(|&limit| generation > limit) {
        return Err(FormatError::Mismatch {
            what: "node pointer",
            field: "generation",
            found: generation.to_string().into(),
            expected: format!("at most {limit}").into(),
        });
    }
    check_order(prev, key)
}

fn check_order(prev: Option<Key>, key: Key) -> Check {
    match prev {
        Some(prev) if prev >= key => Err(FormatError::KeyOrder { prev, key }),
        _ => Ok(()),
    }
}

pub(super) fn check_leaf(view: &NodeView<'_>, ctx: &CheckContext) -> Result<(), Corrupt> {
    let owner = view.owner();
    if view.nritems() == 0 {
        return Ok(check_empty(owner, ctx)?);
    }
    // Item data is contiguous: the data of slot 0 ends at the end of the block, and the data of each next slot
    // ends where the data of the preceding slot starts.
    let mut data_end = view.raw().len();
    let heads_end = view.nritems().saturating_mul(ITEM_HEAD_SIZE).saturating_add(HEADER_SIZE);
    let mut prev: Option<(Key, &[u8])> = None;
    let mut extent_end = 0;
    for slot in 0..view.nritems() {
        let here = |cause| Corrupt::new(cause).in_slot(slot);
        let outside = || here(bad("leaf item", "data range", size_of_slot(view, slot), "expected inside the block"));
        let key = view.key(slot).ok_or_else(outside)?;
        check_order(prev.map(|(key, _)| key), key).map_err(here)?;
        let range = view.item_range(slot).ok_or_else(outside)?;
        if range.end != data_end {
            let end = u64::try_from(range.end).unwrap_or(u64::MAX);
            return Err(here(bad(
                "leaf item",
                "data end",
                end,
                "expected the start of the preceding item's data, or the block's end",
            )));
        }
        if range.start < heads_end {
            let start = u64::try_from(range.start).unwrap_or(u64::MAX);
            return Err(here(bad("leaf item", "data start", start, "expected no overlap with the item heads")));
        }
        data_end = range.start;
        let data = view.item(slot).ok_or_else(outside)?;
        let item = CheckedItem { ctx, owner, key, data, prev };
        check_item(&item, &mut extent_end).map_err(here)?;
        prev = Some((key, data));
    }
    Ok(())
}

fn size_of_slot(view: &NodeView<'_>, slot: usize) -> u64 {
    view.item_range(slot).map_or(u64::MAX, |range| u64::try_from(range.len()).unwrap_or(u64::MAX))
}

/// Checks that an empty leaf belongs to a tree that can be empty.
fn check_empty(owner: RootId, ctx: &CheckContext) -> Check {
    let always_filled = match owner {
        RootId::ROOT_TREE | RootId::CHUNK_TREE | RootId::DEV_TREE | RootId::FS_TREE | RootId::DATA_RELOC_TREE => true,
        RootId::EXTENT_TREE => !ctx.incompat.contains(Incompat::EXTENT_TREE_V2),
        RootId(0) => return Err(bad(HEADER, "owner", 0u64, "expected a tree")),
        _ => false,
    };
    if always_filled {
        return Err(bad(HEADER, "nritems", 0u64, "expected at least 1: this tree is never empty"));
    }
    Ok(())
}

fn check_item(item: &CheckedItem<'_>, extent_end: &mut u64) -> Check {
    match item.key.item_type {
        KeyType::INODE_ITEM => inode::check_inode_item(item),
        KeyType::INODE_REF => inode::check_inode_ref(item),
        KeyType::INODE_EXTREF => inode::check_inode_extref(item),
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => dir::check_dir_item(item),
        KeyType::DIR_LOG_INDEX | KeyType::DIR_LOG_ITEM => item.exact_size("DirLogItem", 8),
        KeyType::ORPHAN_ITEM => misc::check_orphan(item),
        KeyType::EXTENT_DATA => file_extent::check_file_extent(item),
        KeyType::EXTENT_CSUM => file_extent::check_csum(item),
        KeyType::ROOT_ITEM => root::check_root_item(item),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => root::check_root_ref(item),
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent::check_extent_item(item, extent_end),
        KeyType::TREE_BLOCK_REF | KeyType::SHARED_BLOCK_REF | KeyType::SHARED_DATA_REF => extent::check_keyed_ref(item),
        KeyType::EXTENT_DATA_REF => extent::check_keyed_data_ref(item),
        KeyType::BLOCK_GROUP_ITEM => chunk::check_block_group(item),
        KeyType::FREE_SPACE_INFO => free_space::check_info(item),
        KeyType::FREE_SPACE_EXTENT => free_space::check_extent(item),
        KeyType::FREE_SPACE_BITMAP => free_space::check_bitmap(item),
        KeyType::CHUNK_ITEM => chunk::check_chunk_item(item),
        KeyType::DEV_ITEM => chunk::check_dev_item(item),
        KeyType::DEV_EXTENT => chunk::check_dev_extent(item),
        KeyType::RAID_STRIPE => extent::check_raid_stripe(item),
        KeyType::QGROUP_STATUS => misc::check_qgroup_status(item),
        KeyType::QGROUP_INFO => item.exact_size("QgroupInfo", QgroupInfo::SIZE),
        KeyType::QGROUP_LIMIT => item.exact_size("QgroupLimit", QgroupLimit::SIZE),
        KeyType::QGROUP_RELATION => item.exact_size("QgroupRelation", 0),
        KeyType::PERSISTENT_ITEM => misc::check_persistent(item),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => item.multiple_size("UuidItem", 8),
        KeyType(0) => free_space::check_cache_header(item),
        _ => Ok(()),
    }
}
