//! A subvolume in memory: its tree, its next inode number, whether it takes changes.
//!
//! - I1. A number that an inode has had since the filesystem was opened, or has in the last commit, is not given to
//!   another one: the tree log knows inodes by their numbers, and takes one that the last commit has for the same inode.
//!   So the highest number is looked up when the subvolume is entered, before anything can be deleted, its orphans too.

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
    /// The last inode number that was in use (I1); unknown where nothing is made here, or the tree's end is damaged.
    last_ino: Mutex<Option<u64>>,
    /// Whether unlinked inodes of an earlier time were deleted.
    pub(crate) orphans_deleted: Mutex<bool>,
}

impl Subvolume {
    /// Enters a subvolume. With `takes_changes`, nothing may have been changed in it since the filesystem was opened (I1).
    pub(crate) fn enter(id: RootId, tree: Arc<Tree>, item: &RootItem, takes_changes: bool) -> Self {
        let read_only = RootFlags::from_bits_retain(item.flags).contains(RootFlags::RDONLY);
        let last_ino = (takes_changes && !read_only).then(|| tree.highest_objectid()).and_then(|highest| {
            // What is there can be read all the same.
            highest.inspect_err(|error| tracing::warn!("subvolume {id}: looking for its last inode: {error}")).ok()
        });
        Self { id, tree, read_only, last_ino: Mutex::new(last_ino), orphans_deleted: Mutex::new(false) }
    }

    /// Fails where the subvolume is read-only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.read_only { Err(Error::ReadOnlySubvolume) } else { Ok(()) }
    }

    /// A number for a new inode.
    pub(crate) fn allocate_ino(&self) -> Result<Ino> {
        let mut last = self.last_ino.lock();
        let highest = last.ok_or_else(|| {
            Error::Engine(ubtrfs_format::Error::Refused {
                what: format!("subvolume {}: its last inode could not be read when it was entered", self.id),
                hint: "look at it with `ubtrfs check`",
            })
        })?;
        if highest >= objectid::LAST_FREE {
            return Err(ubtrfs_format::Error::NoSpace.into());
        }
        *last = Some(highest + 1);
        Ok(Ino(highest + 1))
    }
}
