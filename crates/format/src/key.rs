//! Keys, by which every tree is ordered.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | objectid |
//! | 8 | 1 | item type |
//! | 9 | 8 | offset |

use std::fmt;

/// The type byte of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyType(pub u8);

macro_rules! key_types {
    ($($name:ident = $value:literal),* $(,)?) => {
        impl KeyType {
            $(#[doc = concat!("`", stringify!($name), "` (", stringify!($value), ").")]
              pub const $name: Self = Self($value);)*

            /// The type's name as btrfs-progs prints it, if it is a known type.
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $($value => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

key_types! {
    INODE_ITEM = 1, INODE_REF = 12, INODE_EXTREF = 13, XATTR_ITEM = 24, VERITY_DESC_ITEM = 36, VERITY_MERKLE_ITEM = 37,
    ORPHAN_ITEM = 48, DIR_LOG_ITEM = 60, DIR_LOG_INDEX = 72, DIR_ITEM = 84, DIR_INDEX = 96, EXTENT_DATA = 108,
    EXTENT_CSUM = 128, ROOT_ITEM = 132, ROOT_BACKREF = 144, ROOT_REF = 156, EXTENT_ITEM = 168, METADATA_ITEM = 169,
    EXTENT_OWNER_REF = 172, TREE_BLOCK_REF = 176, EXTENT_DATA_REF = 178, SHARED_BLOCK_REF = 182, SHARED_DATA_REF = 184,
    BLOCK_GROUP_ITEM = 192, FREE_SPACE_INFO = 198, FREE_SPACE_EXTENT = 199, FREE_SPACE_BITMAP = 200, DEV_EXTENT = 204,
    DEV_ITEM = 216, CHUNK_ITEM = 228, RAID_STRIPE = 230, QGROUP_STATUS = 240, QGROUP_INFO = 242, QGROUP_LIMIT = 244,
    QGROUP_RELATION = 246, TEMPORARY_ITEM = 248, PERSISTENT_ITEM = 249, DEV_REPLACE = 250, UUID_KEY_SUBVOL = 251,
    UUID_KEY_RECEIVED_SUBVOL = 252, STRING_ITEM = 253,
}

/// A key: `(objectid, type, offset)`. Keys are compared by these parts in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The number of the object that the item belongs to: an inode number, a bytenr, a tree id, ...
    pub objectid: u64,
    /// The item's type.
    pub item_type: KeyType,
    /// A number whose meaning depends on the type.
    pub offset: u64,
}

impl Key {
    /// Size of a key on disk in bytes.
    pub const SIZE: usize = 17;
    /// The smallest key.
    pub const MIN: Self = Self { objectid: 0, item_type: KeyType(0), offset: 0 };
    /// The largest key.
    pub const MAX: Self = Self { objectid: u64::MAX, item_type: KeyType(u8::MAX), offset: u64::MAX };

    /// Builds a key from its three parts.
    pub const fn new(objectid: u64, item_type: KeyType, offset: u64) -> Self {
        Self { objectid, item_type, offset }
    }

    /// Reads the 17 bytes of a key.
    pub fn decode(raw: &[u8; Self::SIZE]) -> Self {
        let [o0, o1, o2, o3, o4, o5, o6, o7, item_type, f0, f1, f2, f3, f4, f5, f6, f7] = *raw;
        Self {
            objectid: u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            item_type: KeyType(item_type),
            offset: u64::from_le_bytes([f0, f1, f2, f3, f4, f5, f6, f7]),
        }
    }

    /// Encodes the key as its 17 bytes on disk.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut raw = [0; Self::SIZE];
        raw[..8].copy_from_slice(&self.objectid.to_le_bytes());
        raw[8] = self.item_type.0;
        raw[9..].copy_from_slice(&self.offset.to_le_bytes());
        raw
    }

    /// The next larger key, or `None` for [`Key::MAX`].
    pub fn successor(&self) -> Option<Self> {
        let mut next = *self;
        if let Some(offset) = next.offset.checked_add(1) {
            next.offset = offset;
            return Some(next);
        }
        next.offset = 0;
        if let Some(item_type) = next.item_type.0.checked_add(1) {
            next.item_type = KeyType(item_type);
            return Some(next);
        }
        next.item_type = KeyType(0);
        next.objectid = next.objectid.checked_add(1)?;
        Some(next)
    }

    /// The next smaller key, or `None` for [`Key::MIN`].
    pub fn predecessor(&self) -> Option<Self> {
        let mut prev = *self;
        if let Some(offset) = prev.offset.checked_sub(1) {
            prev.offset = offset;
            return Some(prev);
        }
        prev.offset = u64::MAX;
        if let Some(item_type) = prev.item_type.0.checked_sub(1) {
            prev.item_type = KeyType(item_type);
            return Some(prev);
        }
        prev.item_type = KeyType(u8::MAX);
        prev.objectid = prev.objectid.checked_sub(1)?;
        Some(prev)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.item_type.name() {
            Some(name) => write!(f, "({} {} {})", self.objectid, name, self.offset),
            None => write!(f, "({} UNKNOWN.{} {})", self.objectid, self.item_type.0, self.offset),
        }
    }
}
