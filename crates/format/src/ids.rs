//! Newtypes for numbers that must not be mixed: addresses, tree ids, device ids, generations.
//!
//! Source: the btrfs on-disk format page ("Objectids", "Basic structures").

use std::fmt;

use crate::error::FormatError;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

newtype!(
    /// A logical byte address (bytenr), as tree pointers and file extents hold it. The chunk map translates logical
    /// addresses to device addresses.
    Logical
);
newtype!(
    /// A byte offset on one device.
    Physical
);
newtype!(
    /// The objectid of a tree (root). Tree 5 and the trees from 256 on are subvolumes; other well-known trees have
    /// small or negative ids.
    RootId
);
newtype!(
    /// An inode number inside one subvolume (an objectid).
    Ino
);
newtype!(
    /// A device id, unique in one filesystem.
    DevId
);
newtype!(
    /// A transaction id.
    Generation
);

impl DevId {
    /// The id of the new device of a replacement that is not complete. Source: observed in superblocks of Linux.
    pub const REPLACEMENT_TARGET: Self = Self(0);
}

macro_rules! address {
    ($name:ident, $space:literal) => {
        impl $name {
            /// The address `len_bytes` further on, or `None` past `u64::MAX`.
            pub fn checked_add(self, len_bytes: u64) -> Option<Self> {
                self.0.checked_add(len_bytes).map(Self)
            }

            /// The end of the range of `len_bytes` bytes that starts at this address. Meant for lengths that are read
            /// from disk.
            ///
            /// # Errors
            ///
            /// [`FormatError::Value`] for `field` of `what`, with the value `len_bytes`, if the end is past `u64::MAX`.
            pub fn end(self, what: &'static str, field: &'static str, len_bytes: u64) -> Result<Self, FormatError> {
                let expected = concat!("expected to end inside the ", $space);
                self.checked_add(len_bytes).ok_or(FormatError::Value { what, field, value: len_bytes, expected })
            }

            /// The address `offset` bytes further on, inside a range whose end was checked when it was read. A result
            /// past `u64::MAX` is a bug: the call panics in debug builds, and returns the last address otherwise.
            pub fn advance(self, offset: u64) -> Self {
                debug_assert!(self.0.checked_add(offset).is_some(), "{self} + {offset} lies in a checked range");
                Self(self.0.saturating_add(offset))
            }

            /// Bytes from `start` to this address, or `None` if `start` is greater.
            pub fn offset_from(self, start: Self) -> Option<u64> {
                self.0.checked_sub(start.0)
            }
        }
    };
}
address!(Logical, "address space");
address!(Physical, "device");

impl RootId {
    /// Tree of tree roots.
    pub const ROOT_TREE: Self = Self(1);
    /// Extent references.
    pub const EXTENT_TREE: Self = Self(2);
    /// Chunks and device items.
    pub const CHUNK_TREE: Self = Self(3);
    /// Device extents and statistics.
    pub const DEV_TREE: Self = Self(4);
    /// The top-level subvolume.
    pub const FS_TREE: Self = Self(5);
    /// The directory holding the name of the default subvolume; an objectid in the root tree.
    pub const ROOT_TREE_DIR: Self = Self(6);
    /// Data checksums.
    pub const CSUM_TREE: Self = Self(7);
    /// Quota groups.
    pub const QUOTA_TREE: Self = Self(8);
    /// Subvolumes by UUID.
    pub const UUID_TREE: Self = Self(9);
    /// Free space of every block group.
    pub const FREE_SPACE_TREE: Self = Self(10);
    /// Block group items, with the block-group-tree feature.
    pub const BLOCK_GROUP_TREE: Self = Self(11);
    /// RAID stripe extents.
    pub const RAID_STRIPE_TREE: Self = Self(12);
    /// Tree log.
    pub const TREE_LOG: Self = Self((-6i64).cast_unsigned());
    /// Relocated tree blocks.
    pub const TREE_RELOC: Self = Self((-8i64).cast_unsigned());
    /// Relocated data extents.
    pub const DATA_RELOC_TREE: Self = Self((-9i64).cast_unsigned());

    /// First objectid free for subvolumes and inodes.
    pub const FIRST_FREE: Self = Self(256);
    /// Last objectid free for subvolumes.
    pub const LAST_FREE: Self = Self((-256i64).cast_unsigned());

    /// Whether this tree holds inodes: the top level, a subvolume, or the data relocation tree.
    pub fn is_fs_tree(self) -> bool {
        self == Self::FS_TREE || self == Self::DATA_RELOC_TREE || (Self::FIRST_FREE..=Self::LAST_FREE).contains(&self)
    }

    /// Whether this is a tree that users see: the top level or a subvolume.
    pub fn is_subvolume(self) -> bool {
        self == Self::FS_TREE || (Self::FIRST_FREE..=Self::LAST_FREE).contains(&self)
    }
}

/// Well-known objectids that are not tree ids.
pub mod objectid {
    /// A snapshot has an empty directory in place of each subvolume nested in its source. Linux shows this inode number
    /// for such a directory. Never on disk.
    pub const EMPTY_SUBVOL_DIR: u64 = 2;
    /// Device statistics in the device tree.
    pub const DEV_STATS: u64 = 0;
    /// Device items in the chunk tree.
    pub const DEV_ITEMS: u64 = 1;
    /// Chunk items in the chunk tree.
    pub const FIRST_CHUNK_TREE: u64 = 256;
    /// Balance state in the root tree.
    pub const BALANCE: u64 = (-4i64).cast_unsigned();
    /// Orphan items of unlinked open inodes and of subvolumes being deleted.
    pub const ORPHAN: u64 = (-5i64).cast_unsigned();
    /// Data checksums.
    pub const EXTENT_CSUM: u64 = (-10i64).cast_unsigned();
    /// Free space cache headers (v1) in the root tree.
    pub const FREE_SPACE: u64 = (-11i64).cast_unsigned();
    /// Reserved for the cache of free inode numbers.
    pub const FREE_INO: u64 = (-12i64).cast_unsigned();
    /// First inode number of a subvolume: its root directory.
    pub const FIRST_FREE: u64 = 256;
    /// Last inode number of a subvolume.
    pub const LAST_FREE: u64 = (-256i64).cast_unsigned();
}

impl Ino {
    /// The root directory of every subvolume.
    pub const ROOT_DIR: Self = Self(objectid::FIRST_FREE);
}
