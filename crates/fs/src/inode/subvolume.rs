//! A subvolume in memory: its tree, its next inode number, its read-only state.
//!
//! - I1. If an inode existed at any time since the filesystem was opened, or exists in the last commit, no other inode
//!   gets its number. The tree log identifies inodes by number, and would take the new inode for the committed one. So
//!   the highest number is looked up when the subvolume is loaded, before any inode, orphans included, can be deleted.
//!   If the subvolume leaves memory, its highest number is kept ([`crate::inode::entered`]).

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::item::{RootFlags, RootItem};
use ubtrfs_format::{Generation, RootId, objectid};
use ubtrfs_transaction::{INODES_PER_ROW, Tree};

use crate::error::{Error, Result};
use crate::inode::bare_inodes::BareInodes;
use crate::session::change_gate::ChangeGate;
use crate::types::LAST_INO;

/// A subvolume that was entered (loaded into memory).
#[derive(Debug)]
pub(crate) struct EnteredSubvolume {
    pub(crate) id: RootId,
    pub(crate) tree: Arc<Tree>,
    /// Closed while the subvolume is read-only.
    pub(crate) changes: ChangeGate,
    /// Whether the subvolume's name is removed. The root directory of a deleted subvolume cannot be found any more, but
    /// inodes in use remain usable.
    deleted: AtomicBool,
    /// Whether the deletion has ended: no inode of the deleted subvolume is in use any more, or the filesystem is being
    /// closed. Then the subvolume's tree is dropped, and no inode of the subvolume may be used again.
    gone: AtomicBool,
    /// The highest inode number in use or given out (I1). `None` if the number was not read, because the filesystem or
    /// the subvolume has been read-only so far, or if reading the number failed.
    last_ino: Mutex<Option<u64>>,
    /// The highest inode number when the subvolume left memory; 0 if it never left. While the subvolume is read-only,
    /// `last_ino` does not tell it.
    left_ino: AtomicU64,
    /// Whether this mount has tried to delete the orphans of earlier mounts. Locked during the attempt.
    pub(crate) orphans_deleted: Mutex<bool>,
    /// The tree's generation and the highest inode number when the subvolume was entered; `None` if the running
    /// transaction had changed the tree, and may change it again without a new generation.
    entered: Option<(Generation, Option<u64>)>,
    /// The inodes of all subvolumes that are known to have no attributes.
    pub(crate) bare: Arc<BareInodes>,
    /// The time of the last use, in entered subvolumes.
    pub(crate) last_used: AtomicU64,
}

/// What stays in memory of a subvolume that left memory and had changed since it was first entered. Its orphans of
/// earlier mounts were deleted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    last_ino: u64,
}

/// The choice of numbers for new inodes. A row is a group of [`INODES_PER_ROW`] consecutive numbers; the delayed items
/// of a row's inodes share a lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewInos {
    /// The next free number.
    Next,
    /// The next free number and the rest of its row.
    RestOfRow,
    /// The next free number that begins a row.
    BeginRow,
}

/// A subvolume handle that several inodes share. The handle's reference count would bounce between processor caches if
/// all inodes shared one handle, so each directory has a handle for the inodes that are created in it.
#[derive(Debug)]
pub(crate) struct Home(Arc<EnteredSubvolume>);

impl Home {
    pub(crate) fn new(subvolume: Arc<EnteredSubvolume>) -> Arc<Self> {
        Arc::new(Self(subvolume))
    }

    /// Makes another handle for the same subvolume, with a reference count of its own.
    pub(crate) fn another(&self) -> Arc<Self> {
        Self::new(Arc::clone(&self.0))
    }
}

impl Deref for Home {
    type Target = EnteredSubvolume;

    fn deref(&self) -> &EnteredSubvolume {
        &self.0
    }
}

impl EnteredSubvolume {
    /// Enters a subvolume: loads it into memory. `committed` is the generation of a commit before this call.
    /// `takes_changes` is whether the filesystem is writable. If the filesystem is writable, the highest inode number is
    /// read from the tree, so the caller must not have changed anything in the subvolume since the filesystem was opened,
    /// or continue from what it left ([`Self::continue_from`], I1).
    pub(crate) fn enter(
        id: RootId,
        tree: Arc<Tree>,
        item: &RootItem,
        committed: Generation,
        takes_changes: bool,
        bare: Arc<BareInodes>,
    ) -> Self {
        let generation = tree.root_generation();
        let read_only = RootFlags::from_bits_retain(item.flags).contains(RootFlags::RDONLY);
        let last_ino = (takes_changes && !read_only).then(|| highest_ino(&tree)).and_then(|highest| {
            // A failure is only logged: the highest inode number is needed to create inodes, not to read existing ones.
            highest
                .inspect_err(|error| tracing::warn!("subvolume {id}: finding its highest inode number failed: {error}"))
                .ok()
        });
        Self {
            id,
            entered: Some((generation, last_ino)).filter(|_| generation <= committed),
            tree,
            changes: ChangeGate::new(read_only),
            deleted: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            last_ino: Mutex::new(last_ino),
            left_ino: AtomicU64::new(0),
            orphans_deleted: Mutex::new(false),
            bare,
            last_used: AtomicU64::new(0),
        }
    }

    /// Continues where the subvolume was when it left memory. Called before the subvolume is used.
    pub(crate) fn continue_from(&self, left: Left) {
        let mut last = self.last_ino.lock();
        *last = last.map(|last| last.max(left.last_ino));
        self.left_ino.store(left.last_ino, Ordering::Relaxed);
        *self.orphans_deleted.lock() = true;
    }

    /// Whether the subvolume can be entered again from what is in the trees, and from the returned number. The caller
    /// makes sure that no thread uses the subvolume.
    pub(crate) fn may_leave(&self) -> Option<Option<Left>> {
        if self.is_deleted() || !self.tree.is_settled() || self.tree.is_marked_read_only() != self.is_read_only() {
            return None;
        }
        let last_ino = *self.last_ino.try_lock()?;
        if last_ino.is_none() && !self.is_read_only() {
            // The highest number could not be read, and inodes may have been deleted since (I1).
            return None;
        }
        let is_unchanged = self.entered == Some((self.tree.root_generation(), last_ino));
        Some(last_ino.filter(|_| !is_unchanged).map(|last_ino| Left { last_ino }))
    }

    /// Whether the subvolume is read-only.
    pub(crate) fn is_read_only(&self) -> bool {
        self.changes.is_closed()
    }

    /// Makes the subvolume read-only or writable. If the highest inode number is not known yet, it is looked up when
    /// the subvolume becomes writable, and is at least what it was when the subvolume left memory. That is early enough,
    /// because a read-only subvolume does not change (I1). Making
    /// the subvolume read-only waits for running changes, so the caller must hold no lock that a change takes.
    pub(crate) fn set_read_only(&self, read_only: bool) -> Result<()> {
        let mut last = self.last_ino.lock();
        if !read_only && last.is_none() {
            *last = Some(highest_ino(&self.tree)?.max(self.left_ino.load(Ordering::Relaxed)));
        }
        drop(last);
        if read_only {
            self.changes.close();
        } else {
            self.changes.open();
        }
        Ok(())
    }

    /// Whether the subvolume's name is removed.
    pub(crate) fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::SeqCst)
    }

    pub(crate) fn mark_deleted(&self) {
        self.deleted.store(true, Ordering::SeqCst);
    }

    /// Whether the subvolume's inodes must not be used any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    pub(crate) fn mark_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Fails if the subvolume is read-only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_read_only() { Err(Error::ReadOnlySubvolume) } else { Ok(()) }
    }

    /// Allocates numbers for new inodes.
    #[allow(clippy::arithmetic_side_effects, reason = "a number is at most `LAST_INO`, and 256 numbers follow it")]
    pub(crate) fn allocate_inos(&self, which: NewInos) -> Result<Range<u64>> {
        let mut last = self.last_ino.lock();
        let highest = last.ok_or_else(|| {
            Error::Engine(ubtrfs_error::Error::Refused {
                what: format!(
                    "subvolume {}: its highest inode number could not be read, so no inodes can be created",
                    self.id
                ),
                hint: "examine the filesystem with `ubtrfs check`",
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
                // The range is one number, which begins a row.
                let first = next.next_multiple_of(INODES_PER_ROW);
                (first, first + 1)
            }
        };
        let end = end.min(LAST_INO + 1);
        assert!(first > highest && first < end, "I1: the numbers {first}..{end} were given out before");
        *last = Some(end - 1);
        Ok(first..end)
    }
}

/// Returns the highest number in use, or the root directory's if the tree is empty.
fn highest_ino(tree: &Tree) -> ubtrfs_error::Result<u64> {
    Ok(tree.highest_objectid()?.unwrap_or(objectid::FIRST_FREE))
}
