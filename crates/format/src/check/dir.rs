//! Directory entries and extended attributes.

use super::bad;
use super::inode::{check_inode_key, check_name, check_name_len, check_prev_ino};
use super::item::{Check, CheckedItem};
use crate::hash::name_hash;
use crate::item::{DirItem, FileType};
use crate::key::{Key, KeyType};
use crate::node::item_len_max;

/// Bit of the type byte for an encrypted name.
const ENCRYPTED: u8 = 0x80;

pub(super) fn check_dir_item(item: &CheckedItem<'_>) -> Check {
    let is_xattr = item.key.item_type == KeyType::XATTR_ITEM;
    let what = match item.key.item_type {
        KeyType::XATTR_ITEM => "XattrItem",
        KeyType::DIR_INDEX => "DirIndex",
        _ => "DirItem",
    };
    check_prev_ino(item, what)?;
    let mut at: usize = 0;
    loop {
        let location = item.key_at(what, at)?;
        check_location(what, &location, is_xattr)?;
        let data_len = usize::from(item.u16(what, at.saturating_add(25))?);
        let name_len = usize::from(item.u16(what, at.saturating_add(27))?);
        let file_type = item.u8(what, at.saturating_add(29))? & !ENCRYPTED;
        match FileType::from_disk(file_type) {
            Some(known) if (known == FileType::Xattr) == is_xattr => {}
            _ => return Err(bad(what, "type", file_type, "expected a type that belongs in this item")),
        }
        check_name_len(what, name_len)?;
        if !is_xattr && data_len != 0 {
            return Err(bad(what, "data_len", u64::try_from(data_len).unwrap_or(u64::MAX), "expected 0"));
        }
        let name_and_data = name_len.saturating_add(data_len);
        if name_and_data > size_max(item) {
            let size = u64::try_from(name_and_data).unwrap_or(u64::MAX);
            return Err(bad(what, "size of name and data", size, "expected at most what fits into a leaf"));
        }
        let name_at = at.saturating_add(DirItem::HEADER_SIZE);
        let name = item.bytes(what, name_at, name_len)?;
        if !is_xattr {
            check_name(what, name)?;
        }
        if item.key.item_type != KeyType::DIR_INDEX && name_hash(name) != item.key.offset {
            return Err(bad(what, "key offset", item.key.offset, "expected the hash of the name"));
        }
        at = name_at.saturating_add(name_and_data);
        item.min_size(what, at)?;
        if at == item.data.len() {
            return Ok(());
        }
    }
}

/// Maximum number of bytes of an entry's name and value: an item with only this entry fills a leaf.
fn size_max(item: &CheckedItem<'_>) -> usize {
    let nodesize = usize::try_from(item.ctx.nodesize).unwrap_or(usize::MAX);
    item_len_max(nodesize).saturating_sub(DirItem::HEADER_SIZE)
}

fn check_location(what: &'static str, location: &Key, is_xattr: bool) -> Check {
    if is_xattr {
        if *location == Key::MIN {
            return Ok(());
        }
        return Err(bad(what, "location objectid", location.objectid, "expected an empty key"));
    }
    match location.item_type {
        KeyType::INODE_ITEM => check_inode_key(what, location),
        KeyType::ROOT_ITEM if crate::RootId(location.objectid).is_subvolume() => Ok(()),
        KeyType::ROOT_ITEM => Err(bad(what, "location objectid", location.objectid, "expected a subvolume")),
        KeyType(other) => Err(bad(what, "location type", other, "expected INODE_ITEM or ROOT_ITEM")),
    }
}
