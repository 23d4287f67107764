//! An inode in memory: the single place for its current state, between the tree and the callers.
//!
//! - I1. `state.item` is the inode's current state. The `INODE_ITEM` in the tree may show a smaller size (`disk_size`)
//!   while data past that size is not on disk yet. Apart from the size, the two items are equal unless written data
//!   waits for writeback. While it waits, other fields of the item in the tree may be older too, and the dirty data
//!   keeps the inode in memory.
//! - I2. The inode's items change only while the inode's state lock is held for writing. The lock is taken before the
//!   [`TransHandle`] that puts the items begins, and is held until the handle ends.
//! - I3. Lock order: `Context::reserve` -> rename lock -> inode states by ascending [`InodeId`] -> `Engine::begin` ->
//!   shards of the inode cache. Inside an operation no code waits for a state lock, a reservation or I/O.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::{Compression, InodeFlags, InodeItem};
use ubtrfs_format::{Generation, Key, KeyType};
use ubtrfs_transaction::lock_rank::{self, Rank, RankedRwLock, ReadGuard, WriteGuard};
use ubtrfs_transaction::{TransHandle, TreeChanges, race_point};

use crate::compression::CompressionMethod;
use crate::error::{Error, Result};
use crate::inode::acl::Acl;
use crate::inode::file_data::FileData;
use crate::inode::known_names::KnownNames;
use crate::inode::subvolume::Home;
use crate::inode::writeback_lock::WritebackLock;
use crate::inode::xattr::KnownXattrs;
use crate::items::dir_item::HashedName;
use crate::types::{Attr, InodeId, mode, rdev_of_item};

/// A loaded inode.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) id: InodeId,
    pub(crate) home: Arc<Home>,
    pub(crate) state: RankedRwLock<InodeState>,
    /// Held by batches that write back data of the inode, and by all other code that changes its extents. This lock is
    /// taken before the state lock.
    pub(crate) writeback: WritebackLock,
}

/// The changeable state of an inode.
#[derive(Debug)]
pub(crate) struct InodeState {
    /// The inode as it is now; `size` is the size that callers see.
    pub(crate) item: InodeItem,
    /// The file size in the `INODE_ITEM` on disk. The data up to this size is on disk. Regular files only.
    pub(crate) disk_size: u64,
    /// Dirty data, and data under writeback. Regular files only.
    pub(crate) data: FileData,
    /// Whether no data extent lies past the end of the file (I5 of [`crate::file::truncate`]). Regular files only.
    pub(crate) lacks_stale_tail: bool,
    /// The `btrfs.compression` property.
    pub(crate) compression: CompressionProperty,
    /// Offset of the next `DIR_INDEX`, once it is known. Directories only.
    pub(crate) next_index: Option<u64>,
    /// Numbers for the next inodes that are created in this directory. Directories only.
    pub(crate) next_inos: NextInos,
    /// Handle of the subvolume for inodes created in this directory; `None` before the first such inode.
    pub(crate) home_of_new: Option<Arc<Home>>,
    /// Whether the inode has extended attributes, if known.
    pub(crate) xattrs: KnownXattrs,
    /// The names of the directory, if the directory was empty when it was loaded or created.
    pub(crate) known_names: Option<KnownNames>,
    /// Attributes that new entries inherit from this directory. `None` until the attributes are read, and again after
    /// an attribute of the directory changes.
    pub(crate) inherit: Option<Arc<InheritedAttributes>>,
    /// Whether the inode's items are being deleted or are gone; see [`Inode::write`].
    pub(crate) dead: bool,
    /// The running defragmentation of the file.
    pub(crate) rewriting: Option<Rewriting>,
    /// Whether this is the root directory of a deleted subvolume. Such a directory is empty and accepts no names.
    pub(crate) removed: bool,
}

/// Settings of a running defragmentation. Writeback during a defragmentation never overwrites the file's extents in
/// place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rewriting {
    /// Compress with this method, instead of the method that the file's flags select.
    pub(crate) compress: Option<CompressionMethod>,
}

/// Inode numbers that a directory keeps for the next inodes created in it, so that the inodes of a busy directory are
/// neighbours.
#[derive(Debug, Default)]
pub(crate) struct NextInos {
    /// The transaction in which the numbers may be used. A later transaction takes new numbers, so that its inodes have
    /// higher numbers than inodes of earlier transactions.
    pub(crate) generation: Generation,
    /// Number of inodes created in the directory in this transaction.
    pub(crate) nr_given: u64,
    /// Number of directories created in the directory in this transaction.
    pub(crate) nr_dirs: u64,
    pub(crate) numbers: Range<u64>,
}

/// The `btrfs.compression` property of an inode, read once from its attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CompressionProperty {
    /// No property: flags and mount options decide.
    #[default]
    Unset,
    /// Compress with this method at its default level, regardless of the mount options.
    Method(Compression),
}

/// Attributes that new entries inherit from their directory.
#[derive(Debug, Default)]
pub(crate) struct InheritedAttributes {
    pub(crate) default_acl: Option<Acl>,
    /// The method of the directory's `btrfs.compression` attribute.
    pub(crate) compression: Option<Compression>,
}

impl InodeState {
    pub(crate) fn new(item: InodeItem) -> Self {
        Self {
            disk_size: item.size,
            lacks_stale_tail: item.nbytes == 0,
            item,
            data: FileData::default(),
            compression: CompressionProperty::default(),
            next_index: None,
            next_inos: NextInos::default(),
            home_of_new: None,
            xattrs: KnownXattrs::unknown(),
            known_names: None,
            inherit: None,
            dead: false,
            rewriting: None,
            removed: false,
        }
    }

    pub(crate) fn file_type_bits(&self) -> u32 {
        self.item.mode & mode::TYPE
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.file_type_bits() == mode::DIRECTORY
    }

    pub(crate) fn is_regular(&self) -> bool {
        self.file_type_bits() == mode::REGULAR
    }

    pub(crate) fn has_flags(&self, flags: InodeFlags) -> bool {
        self.item.flags().intersects(flags)
    }

    /// Whether this is a directory with many known names. The cache does not evict such a directory, because the known
    /// names could not be collected again. The memory for known names has a budget of its own.
    pub(crate) fn knows_many_names(&self) -> bool {
        self.item.nlink > 0 && self.known_names.as_ref().is_some_and(KnownNames::is_large)
    }

    /// Whether a directory is known not to have the name. If this returns false, the tree must be searched.
    pub(crate) fn lacks_name(&self, name: HashedName<'_>) -> bool {
        self.known_names.as_ref().is_some_and(|names| names.lacks(name.hash))
    }

    /// Increments the inode's change counter, which NFS servers use to detect changes. The counter wraps, because the
    /// number that is read from disk may be the maximum.
    pub(crate) fn count_change(&mut self) {
        self.item.sequence = self.item.sequence.wrapping_add(1);
    }

    /// The item to put: the current item, with the size on disk (I1).
    pub(crate) fn disk_item(&self) -> InodeItem {
        let mut item = self.item.clone();
        if self.is_regular() {
            item.size = self.disk_size;
        }
        item
    }

    /// The attributes for `stat`. `new_bytes` is the pending data that has no extent yet; see
    /// [`Fs::blocks_are_final`](crate::Fs::blocks_are_final).
    pub(crate) fn attr(&self, id: InodeId, sectorsize: u32, (new_bytes, blocks_are_final): (u64, bool)) -> Attr {
        Attr { blocks_are_final, ..attr_of_item(id, &self.item, sectorsize, new_bytes) }
    }
}

/// The attributes of an inode with this item. `new_bytes` is the pending data that has no extent yet.
pub(crate) fn attr_of_item(id: InodeId, item: &InodeItem, sectorsize: u32, new_bytes: u64) -> Attr {
    let round = |bytes: u64| bytes.checked_next_multiple_of(u64::from(sectorsize)).unwrap_or(bytes);
    Attr {
        id,
        size: item.size,
        blocks: round(item.nbytes).saturating_add(round(new_bytes)) / 512,
        blocks_are_final: new_bytes == 0,
        mode: item.mode,
        nlink: item.nlink,
        uid: item.uid,
        gid: item.gid,
        rdev: rdev_of_item(item),
        atime: item.atime,
        mtime: item.mtime,
        ctime: item.ctime,
        otime: item.otime,
        flags: item.flags,
        generation: item.generation,
        blksize: sectorsize,
    }
}

impl Inode {
    pub(crate) fn new(id: InodeId, home: Arc<Home>, state: InodeState) -> Self {
        let key = (id.root.0, id.ino.0);
        Self { id, home, state: RankedRwLock::new(Rank::Inode, key, state), writeback: WritebackLock::new(key) }
    }

    /// The key of the inode's item.
    pub(crate) fn item_key(&self) -> Key {
        Key::new(self.id.ino.0, KeyType::INODE_ITEM, 0)
    }

    /// The last key that an item of the inode can have.
    pub(crate) fn last_key(&self) -> Key {
        Key::new(self.id.ino.0, KeyType(u8::MAX), u64::MAX)
    }

    /// Locks the state for reading. Fails if the inode was deleted.
    pub(crate) fn read(&self) -> Result<ReadGuard<'_, InodeState>> {
        race_point();
        let state = self.state.read();
        if state.dead { Err(Error::Stale) } else { Ok(state) }
    }

    /// Locks the state for writing. Fails if the inode was deleted.
    pub(crate) fn write(&self) -> Result<WriteGuard<'_, InodeState>> {
        race_point();
        let state = self.state.write();
        if state.dead { Err(Error::Stale) } else { Ok(state) }
    }

    /// Puts the `INODE_ITEM` of `state` with the transid of the operation (I2).
    pub(crate) fn put_item(&self, op: &TransHandle<'_>, state: &mut InodeState) {
        self.put_item_among(&mut op.changes(&self.home.tree), state);
    }

    /// Puts the `INODE_ITEM` of `state` together with other changes of a tree (I2).
    pub(crate) fn put_item_among(&self, changes: &mut TreeChanges<'_>, state: &mut InodeState) {
        let key = (self.id.root.0, self.id.ino.0);
        lock_rank::check_held_at(Rank::Inode, key, "I2: an inode's items change under its state lock");
        let is_within = !state.is_regular() || state.disk_size <= state.item.size;
        debug_assert!(is_within, "I1: {} bytes on disk of {}", state.disk_size, state.item.size);
        state.item.transid = changes.generation();
        changes.put(self.item_key(), state.disk_item().encode_array());
    }
}
