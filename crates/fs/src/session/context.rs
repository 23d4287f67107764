//! [`Context`]: how a call of any folder is admitted: the filesystem is writable, the change is counted until it ends,
//! and metadata is reserved.
//!
//! - I1. A call that makes changes first calls [`Context::reserve`], which fails on a read-only mount and announces the
//!   change to the commit thread. Later steps of the call may reserve from the engine directly.
//! - I2. While a [`ChangeGuard`] exists, the filesystem is not closed.
//! - I3. A reservation comes before the rename lock and the locks of inodes, because it may wait for writeback.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_format::RootId;
use ubtrfs_transaction::lock_rank::{self, Rank};
use ubtrfs_transaction::{Engine, MetadataReservation};

use crate::error::{Error, Result};
use crate::session::change_gate::ChangeGate;
use crate::session::commit_requests::CommitRequests;
use crate::types::InodeId;

/// The part of an open filesystem that all folders use.
#[derive(Debug)]
pub(crate) struct Context {
    engine: Arc<Engine>,
    /// Whether the mount option `ro` is set. An engine may be read-only without this option.
    is_mounted_read_only: bool,
    root: InodeId,
    /// Whether the mount shows the top level, too.
    shows_top_level: AtomicBool,
    /// Requests to the commit thread.
    pub(crate) commits: Arc<CommitRequests>,
    /// Counts running changes and syncs; closing the filesystem closes it.
    changes: ChangeGate,
}

/// What metadata is reserved for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MetadataPurpose {
    /// About this number of item changes.
    Change(usize),
    /// This number of item changes that free space. They may use space that the engine keeps free for such changes.
    Removal(usize),
    /// Item changes that free space: `most` or, if space is short, fewer, but at least `least`.
    RemovalSteps { most: usize, least: usize },
    /// The deletion of a subvolume, which may use space that other removals must leave free.
    SubvolumeDeletion,
    /// A snapshot of `source` with about `nr_items` item changes.
    Snapshot { source: RootId, nr_items: usize },
}

/// A running change (I2).
#[derive(Debug)]
pub(crate) struct ChangeGuard<'f> {
    gate: &'f ChangeGate,
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl Context {
    pub(crate) fn new(engine: Arc<Engine>, is_mounted_read_only: bool, root: InodeId) -> Self {
        let shows_top_level = AtomicBool::new(root == InodeId::root_of(RootId::FS_TREE));
        let (commits, changes) = Default::default();
        Self { engine, is_mounted_read_only, root, shows_top_level, commits, changes }
    }

    /// The root directory of the selected subvolume.
    pub(crate) fn root(&self) -> InodeId {
        self.root
    }

    /// See [`Fs::show_top_level`](crate::Fs::show_top_level).
    pub(crate) fn show_top_level(&self) {
        self.shows_top_level.store(true, Ordering::Relaxed);
    }

    /// See [`Fs::shows_top_level`](crate::Fs::shows_top_level).
    pub(crate) fn shows_top_level(&self) -> bool {
        self.shows_top_level.load(Ordering::Relaxed)
    }

    /// The directory whose `..` is the directory itself.
    pub(crate) fn topmost(&self) -> InodeId {
        if self.shows_top_level() { InodeId::root_of(RootId::FS_TREE) } else { self.root }
    }

    /// The reason why the filesystem is read-only, or `None` if it is writable.
    pub(crate) fn read_only(&self) -> Option<String> {
        self.engine.read_only()
    }

    /// Fails if the mount option `ro` is set. The engine itself refuses changes if it is read-only for another reason.
    pub(crate) fn check_mounted_writable(&self) -> Result<()> {
        if self.is_mounted_read_only { Err(Error::ReadOnlyMount) } else { Ok(()) }
    }

    /// Begins a change: the filesystem is not closed until the returned value is dropped (I2).
    pub(crate) fn begin_change(&self) -> Result<ChangeGuard<'_>> {
        self.check_mounted_writable()?;
        if self.changes.enter() { Ok(ChangeGuard { gate: &self.changes }) } else { Err(Error::Closed) }
    }

    /// Refuses further changes, and waits for those that run. The caller is not inside a change.
    pub(crate) fn end_changes(&self) {
        self.changes.close();
    }

    /// Reserves metadata (I1). May flush and commit: the caller must hold no inode lock.
    pub(crate) fn reserve(&self, purpose: MetadataPurpose) -> Result<MetadataReservation<'_>> {
        lock_rank::check_none_from(Rank::Rename, "I3: a call reserves before it takes the locks of names and inodes");
        self.check_mounted_writable()?;
        self.commits.note_change();
        let reservation = match purpose {
            MetadataPurpose::Change(nr_items) => self.engine.reserve(nr_items),
            MetadataPurpose::Removal(nr_items) => self.engine.reserve_for_removal(nr_items),
            MetadataPurpose::RemovalSteps { most, least } => self.engine.reserve_for_removal_steps(most, least),
            MetadataPurpose::SubvolumeDeletion => self.engine.reserve_for_subvolume_deletion(),
            MetadataPurpose::Snapshot { source, nr_items } => self.engine.reserve_for_snapshot(source, nr_items),
        };
        Ok(reservation?)
    }
}
