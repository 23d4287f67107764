//! A subvolume in memory: its tree, its next inode number, whether it takes changes.
//!
//! - I1. A number that an inode has had since the filesystem was opened, or has in the last commit, is not given to
//!   another one: the tree log knows inodes by their numbers, and takes one that the last commit has for the same inode.
//!   So the highest number is looked up when the subvolume is entered, before anything can be deleted, its orphans too.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::item::{RootFlags, RootItem};
use ubtrfs_format::{RootId, objectid};
use ubtrfs_transaction::{INODES_PER_ROW, Tree};

use crate::error::{Error, Result};
use crate::types::LAST_INO;

/// A subvolume that was entered since the filesystem was opened.
#[derive(Debug)]
pub(crate) struct Subvolume {
    pub(crate) id: RootId,
    pub(crate) tree: Arc<Tree>,
    read_only: AtomicBool,
    /// Its name is gone: nobody finds its root directory any more, who has inodes of it goes on.
    deleted: AtomicBool,
    /// Nobody has any; its tree is being dropped.
    gone: AtomicBool,
    /// The last inode number that was in use or given out (I1); unknown where nothing is made here, or the tree's end is damaged.
    last_ino: Mutex<Option<u64>>,
    /// Whether unlinked inodes of an earlier time were deleted.
    pub(crate) orphans_deleted: Mutex<bool>,
}

/// Which numbers new inodes get. What belongs to inodes of a row shares locks ([`INODES_PER_ROW`]).
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewInos {
    /// The first that is not given out.
    Next,
    /// The first and what follows it in its row.
    RestOfRow,
    /// The first that begins a row.
    BeginRow,
}

/// A handle of a subvolume that inodes share. Handles are counted, and two processors that count in one place wait for each
/// other: so each directory has one for the inodes that are made in it.
#[derive(Debug)]
pub(crate) struct Home(Arc<Subvolume>);

impl Home {
    pub(crate) fn new(subvolume: Arc<Subvolume>) -> Arc<Self> {
        Arc::new(Self(subvolume))
    }

    /// Another handle, counted apart.
    pub(crate) fn another(&self) -> Arc<Self> {
        Self::new(Arc::clone(&self.0))
    }
}

impl Deref for Home {
    type Target = Subvolume;

    fn deref(&self) -> &Subvolume {
        &self.0
    }
}

impl Subvolume {
    /// Enters a subvolume. With `takes_changes`, nothing may have been changed in it since the filesystem was opened (I1).
    pub(crate) fn enter(id: RootId, tree: Arc<Tree>, item: &RootItem, takes_changes: bool) -> Self {
        let read_only = RootFlags::from_bits_retain(item.flags).contains(RootFlags::RDONLY);
        let last_ino = (takes_changes && !read_only).then(|| highest_ino(&tree)).and_then(|highest| {
            // What is there can be read all the same.
            highest.inspect_err(|error| tracing::warn!("subvolume {id}: looking for its last inode: {error}")).ok()
        });
        Self {
            id,
            tree,
            read_only: AtomicBool::new(read_only),
            deleted: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            last_ino: Mutex::new(last_ino),
            orphans_deleted: Mutex::new(false),
        }
    }

    /// Whether it takes no changes.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Acquire)
    }

    /// It takes changes from here on, or none. What takes none has had none since it was entered (I1).
    pub(crate) fn set_read_only(&self, read_only: bool) -> Result<()> {
        let mut last = self.last_ino.lock();
        if !read_only && last.is_none() {
            *last = Some(highest_ino(&self.tree)?);
        }
        self.read_only.store(read_only, Ordering::Release);
        Ok(())
    }

    /// Whether its name is gone.
    pub(crate) fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::SeqCst)
    }

    pub(crate) fn mark_deleted(&self) {
        self.deleted.store(true, Ordering::SeqCst);
    }

    /// Whether nobody may have its inodes any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    pub(crate) fn mark_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Fails where the subvolume is read-only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only() { Err(Error::ReadOnlySubvolume) } else { Ok(()) }
    }

    /// Numbers for new inodes.
    pub(crate) fn allocate_inos(&self, which: NewInos) -> Result<Range<u64>> {
        let mut last = self.last_ino.lock();
        let highest = last.ok_or_else(|| {
            Error::Engine(ubtrfs_error::Error::Refused {
                what: format!("subvolume {}: its last inode could not be read when it was entered", self.id),
                hint: "look at it with `ubtrfs check`",
            })
        })?;
        if highest >= LAST_INO {
            return Err(ubtrfs_error::Error::NoSpace.into());
        }
        let next = highest + 1;
        let (first, end) = match which {
            NewInos::Next => (next, next + 1),
            NewInos::RestOfRow => (next, (next / INODES_PER_ROW + 1) * INODES_PER_ROW),
            NewInos::BeginRow => {
                // The last number begins one.
                let first = next.next_multiple_of(INODES_PER_ROW);
                (first, first + 1)
            }
        };
        let end = end.min(LAST_INO + 1);
        *last = Some(end - 1);
        Ok(first..end)
    }
}

/// The last number in use; the root directory's where the tree says nothing.
fn highest_ino(tree: &Tree) -> ubtrfs_error::Result<u64> {
    Ok(tree.highest_objectid()?.unwrap_or(objectid::FIRST_FREE))
}
