//! Keys and objectids as text. Well-known objectids print by name; the item's type decides which names apply.

use std::fmt;

use crate::ids::{RootId, objectid};
use crate::key::{Key, KeyType};

/// Prints an objectid: its name, such as `FS_TREE`, or its number.
#[derive(Clone, Copy, Debug)]
pub struct ObjectidText(
    /// The objectid.
    pub u64,
);

impl fmt::Display for ObjectidText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match objectid_name(self.0) {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

fn objectid_name(id: u64) -> Option<&'static str> {
    const TREE_LOG_FIXUP: u64 = (-7i64).cast_unsigned();
    const MULTIPLE: u64 = (-255i64).cast_unsigned();
    Some(match RootId(id) {
        RootId::ROOT_TREE => "ROOT_TREE",
        RootId::EXTENT_TREE => "EXTENT_TREE",
        RootId::CHUNK_TREE => "CHUNK_TREE",
        RootId::DEV_TREE => "DEV_TREE",
        RootId::FS_TREE => "FS_TREE",
        RootId::ROOT_TREE_DIR => "ROOT_TREE_DIR",
        RootId::CSUM_TREE => "CSUM_TREE",
        RootId::QUOTA_TREE => "QUOTA_TREE",
        RootId::UUID_TREE => "UUID_TREE",
        RootId::FREE_SPACE_TREE => "FREE_SPACE_TREE",
        RootId::BLOCK_GROUP_TREE => "BLOCK_GROUP_TREE",
        RootId::TREE_LOG => "TREE_LOG",
        RootId::TREE_RELOC => "TREE_RELOC",
        RootId::DATA_RELOC_TREE => "DATA_RELOC_TREE",
        RootId(objectid::BALANCE) => "BALANCE",
        RootId(objectid::ORPHAN) => "ORPHAN",
        RootId(TREE_LOG_FIXUP) => "LOG_FIXUP",
        RootId(objectid::EXTENT_CSUM) => "EXTENT_CSUM",
        RootId(objectid::FREE_SPACE) => "FREE_SPACE",
        RootId(objectid::FREE_INO) => "FREE_INO",
        RootId(MULTIPLE) => "MULTIPLE",
        RootId(u64::MAX) => "-1",
        _ => return None,
    })
}

/// Prints a key: `(FS_TREE ROOT_ITEM 0)`.
#[derive(Clone, Copy, Debug)]
pub struct KeyText<'a>(
    /// The key.
    pub &'a Key,
);

impl fmt::Display for KeyText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { objectid, item_type, offset } = *self.0;
        f.write_str("(")?;
        match item_type {
            KeyType::PERSISTENT_ITEM if objectid == objectid::DEV_STATS => f.write_str("DEV_STATS")?,
            KeyType::DEV_ITEM if objectid == objectid::DEV_ITEMS => f.write_str("DEV_ITEMS")?,
            KeyType::CHUNK_ITEM if objectid == objectid::FIRST_CHUNK_TREE => f.write_str("FIRST_CHUNK_TREE")?,
            KeyType::DEV_EXTENT | KeyType::PERSISTENT_ITEM => write!(f, "{objectid}")?,
            KeyType::QGROUP_RELATION => write!(f, "{}", QgroupText(objectid))?,
            KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => write!(f, "{objectid:#018x}")?,
            _ => write!(f, "{}", ObjectidText(objectid))?,
        }
        match item_type.name() {
            Some(name) => write!(f, " {name} ")?,
            None if item_type == KeyType(0) && objectid == objectid::FREE_SPACE => f.write_str(" UNTYPED ")?,
            None => write!(f, " UNKNOWN.{} ", item_type.0)?,
        }
        match item_type {
            KeyType::QGROUP_RELATION | KeyType::QGROUP_INFO | KeyType::QGROUP_LIMIT => {
                write!(f, "{}", QgroupText(offset))?;
            }
            KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => write!(f, "{offset:#018x}")?,
            KeyType::ROOT_ITEM if objectid == RootId::TREE_RELOC.0 => write!(f, "{}", ObjectidText(offset))?,
            KeyType::ROOT_ITEM => write!(f, "{offset}")?,
            _ if offset == u64::MAX => f.write_str("-1")?,
            _ => write!(f, "{offset}")?,
        }
        f.write_str(")")
    }
}

/// Prints the id of a quota group: `level/id`.
struct QgroupText(u64);

impl fmt::Display for QgroupText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0 >> 48, self.0 & 0xffff_ffff_ffff)
    }
}
