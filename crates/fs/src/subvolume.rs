//! A subvolume in memory: its tree, its next inode number, whether it takes changes.

use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::item::{RootFlags, RootItem};
use ubtrfs_format::{Ino, RootId, objectid};
use ubtrfs_transaction::Tree;

use crate::error::{Error, Result};

/// A subvolume that was entered since the filesystem was opened.
#[derive(Debug)]
pub(crate) struct Subvolume {
    pub(crate) id: RootId,
    pub(crate) tree: Arc<Tree>,
    pub(crate) read_only: bool,
    /// The last inode number in use, once it is known. Numbers are not used again while the filesystem is open.
    last_ino: Mutex<Option<u64>>,
    /// Whether unlinked inodes of an earlier time were deleted.
    pub(crate) orphans_deleted: Mutex<bool>,
}

impl Subvolume {
    pub(crate) fn new(id: RootId, tree: Arc<Tree>, item: &RootItem) -> Self {
        let read_only = RootFlags::from_bits_retain(item.flags).contains(RootFlags::RDONLY);
        Self { id, tree, read_only, last_ino: Mutex::new(None), orphans_deleted: Mutex::new(false) }
    }

    /// Fails where the subvolume is read-only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.read_only { Err(Error::ReadOnlySubvolume) } else { Ok(()) }
    }

    /// A number for a new inode.
    pub(crate) fn allocate_ino(&self) -> Result<Ino> {
        let mut last = self.last_ino.lock();
        let highest = match *last {
            Some(ino) => ino,
            None => self.tree.highest_objectid()?.max(objectid::FIRST_FREE),
        };
        if highest >= objectid::LAST_FREE {
            return Err(ubtrfs_format::Error::NoSpace.into());
        }
        *last = Some(highest + 1);
        Ok(Ino(highest + 1))
    }
}
