//! Inode items and the names that refer to inodes.

use super::bad;
use super::item::{Check, CheckedItem};
use crate::error::FormatError;
use crate::ids::{RootId, objectid};
use crate::item::{InodeFlags, InodeItem, NAME_LEN_MAX, is_entry_name};
use crate::key::Key;

const TYPE_MASK: u32 = 0o170_000;

pub(super) fn check_inode_item(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "InodeItem";
    check_inode_key(WHAT, &item.key)?;
    item.exact_size(WHAT, InodeItem::SIZE)?;
    item.generation(WHAT, "generation", item.u64(WHAT, 0)?)?;
    item.generation(WHAT, "transid", item.u64(WHAT, 8)?)?;
    let nlink = item.u32(WHAT, 40)?;
    let mode = item.u32(WHAT, 52)?;
    if mode & !(TYPE_MASK | 0o7777) != 0 {
        return Err(bad(WHAT, "mode", mode, "expected no bits above the file type"));
    }
    if crate::item::FileType::from_mode(mode).is_none() {
        return Err(bad(WHAT, "mode", mode, "expected a known file type"));
    }
    if mode & TYPE_MASK == 0o040_000 && nlink > 1 {
        return Err(bad(WHAT, "nlink", nlink, "expected at most 1 for a directory"));
    }
    let flags = InodeFlags::from_bits_retain(item.u64(WHAT, 64)?);
    let unknown = flags.difference(InodeFlags::all()).bits();
    // Unknown flags in the upper half forbid only writing.
    let refused = if item.ctx.read_only { unknown & u64::from(u32::MAX) } else { unknown };
    if refused != 0 {
        return Err(bad(WHAT, "flags", refused, "unknown flag"));
    }
    Ok(())
}

/// Checks the key of an inode item, or the location of a directory entry that refers to an inode.
pub(super) fn check_inode_key(what: &'static str, key: &Key) -> Check {
    let numbers = objectid::FIRST_FREE..=objectid::LAST_FREE;
    if !numbers.contains(&key.objectid) && key.objectid != RootId::ROOT_TREE_DIR.0 && key.objectid != objectid::FREE_INO
    {
        return Err(bad(what, "inode number", key.objectid, "expected 256 to -256, 6 or -12"));
    }
    if key.offset != 0 {
        return Err(bad(what, "key offset", key.offset, "expected 0"));
    }
    Ok(())
}

/// Checks that the preceding item in the leaf, if any, belongs to the same inode. Only leaves of subvolumes are
/// checked, because a log tree may lack the inode's other items.
pub(super) fn check_prev_ino(item: &CheckedItem<'_>, what: &'static str) -> Check {
    let Some((prev, _)) = item.prev else { return Ok(()) };
    if !item.owner.is_subvolume() || prev.objectid == item.key.objectid {
        return Ok(());
    }
    Err(bad(what, "key objectid", item.key.objectid, "expected an inode item of that number to precede it"))
}

pub(super) fn check_inode_ref(item: &CheckedItem<'_>) -> Check {
    check_prev_ino(item, "InodeRef")?;
    // Layout of an entry: index (8 bytes), name_len (2), name.
    check_names(item, "InodeRef", 8, 10)
}

pub(super) fn check_inode_extref(item: &CheckedItem<'_>) -> Check {
    check_prev_ino(item, "InodeExtref")?;
    // Layout of an entry: parent (8 bytes), index (8), name_len (2), name.
    check_names(item, "InodeExtref", 16, 18)
}

fn check_names(item: &CheckedItem<'_>, what: &'static str, len_at: usize, head: usize) -> Check {
    let mut at: usize = 0;
    loop {
        let name_len = usize::from(item.u16(what, at.saturating_add(len_at))?);
        check_name_len(what, name_len)?;
        let name = item.bytes(what, at.saturating_add(head), name_len)?;
        // The root directory of a tree is its own parent, and its reference to itself has the name "..".
        if !(name == b".." && item.key.objectid == item.key.offset) {
            check_name(what, name)?;
        }
        at = at.saturating_add(head).saturating_add(name_len);
        if at == item.data.len() {
            return Ok(());
        }
        item.min_size(what, at)?;
    }
}

/// Checks that a directory entry may have this name. Programs join names to paths, so a name with a slash, or the name
/// `..`, could lead out of the directory.
pub(super) fn check_name(what: &'static str, name: &[u8]) -> Result<(), FormatError> {
    if is_entry_name(name) {
        return Ok(());
    }
    let wrong = name.iter().find(|byte| matches!(byte, b'/' | 0)).or(name.first());
    Err(bad(
        what,
        "name",
        wrong.copied().unwrap_or(0),
        "expected a name other than '.' and '..', without slash or zero byte",
    ))
}

pub(super) fn check_name_len(what: &'static str, name_len: usize) -> Result<(), FormatError> {
    if (1..=NAME_LEN_MAX).contains(&name_len) {
        return Ok(());
    }
    Err(bad(what, "name_len", u64::try_from(name_len).unwrap_or(u64::MAX), "expected 1 to 255"))
}
