//! The tree log: changes of inodes that fsync makes durable without a commit, in Linux's format.
//!
//! ```text
//! superblock.log_root -> log root tree: (TREE_LOG ROOT_ITEM subvolume) -> log tree of the subvolume:
//!     the items of logged inodes under their own keys, DIR_LOG_INDEX ranges, EXTENT_CSUM items of their data
//! ```
//!
//! A log belongs to the commit before it: the superblock keeps its generation g, and blocks of the log carry g + 1.
//! When the filesystem is opened, [`load`] reads the log. Then `fs` interprets each item of the log, changes the trees
//! of commit g accordingly, and commits.
//!
//! - [`write`]: the order in which a log is made and written; [`crate::durable::fsync`] calls it.
//! - [`collect`]: the items of an inode's log, and the changes that a log cannot express and that therefore force a
//!   commit.
//! - [`extents`]: the file extents and checksums in the log.
//! - [`log_tree`]: the trees of the log, with their blocks in memory and on the devices.
//! - [`load`]: loading the log that is on the devices at open.
//!
//! Crash argument. A log is written in this order: file data (earlier, by writeback) and log blocks -> flush -> primary
//! superblock with `log_root` -> flush. (1) Blocks of a log are never overwritten while the superblock on the devices
//! may refer to them: a changed block takes a new address, and the old address is reused only when a newer superblock
//! is durable. So if the power is cut before the new superblock is written, the old log is intact, if there was one.
//! (2) Everything that the superblock refers to was flushed before the superblock was written. (3) The extent tree
//! records neither the log blocks nor the data of a log. The addresses of log blocks and logged data stay allocated in
//! memory until the commit that drops the log is durable, and all these addresses lie in chunks that the commit before
//! the log recorded. (4) A commit writes a superblock without a log. The fields for the log and for the roots lie in
//! one sector, so the log ends at the moment at which its changes are in the trees. Superblock mirrors keep the roots
//! of the commit: the mirrors are read only if the primary is lost.
//!
//! Invariants:
//! - I1. The log is changed and written under the commit lock, so it always belongs to the last commit. While the log
//!   is written, the trees' nodes are the nodes of that commit. After rows were applied without a commit, no log is
//!   written until the next commit.
//! - I2. A log shows each logged inode at one moment, when no operation is half done: inodes that were logged before
//!   and changed since are logged again. So a log acts like a commit of the logged inodes only.
//! - I3. Everything that a log leaves out can stay as in the last commit. If leaving an inode out of the log would lose
//!   or duplicate a name, that inode is logged too, or a commit replaces the log.
//!
//! Owns the found log and the log's state. Lock order: commit lock -> the log's state -> gate -> views and shards. No
//! lock is taken under the lock of the found log.

mod collect;
mod extents;
mod load;
mod log_tree;
pub(crate) mod write;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::{Generation, Key, Logical, RootId};
use ubtrfs_space::{Extent, RangeSet, Space};
use ubtrfs_tree::Value;

pub use load::FoundLog;
pub(crate) use load::load;

use crate::delayed::tree_view::Tree;
use crate::handle::trans_handle::TransHandle;
use crate::lock_rank::{self, Rank, RankedMutex};
use log_tree::{LogBlocks, LogTree};

/// The log of the running transaction.
#[derive(Debug)]
pub(crate) struct TreeLog {
    found: Mutex<Option<FoundLog>>,
    /// The state changes only under the commit lock (I1).
    state: RankedMutex<LogContent>,
    /// The last transaction with an fsync.
    last_used: AtomicU64,
    /// The last transaction in which a directory moved.
    dir_moved: AtomicU64,
}

/// The content of the log.
#[derive(Debug, Default)]
struct LogContent {
    subvolumes: BTreeMap<RootId, SubvolumeLog>,
    roots: LogTree,
    blocks: LogBlocks,
    /// Whether only a commit can satisfy an fsync, because the log in memory differs from the log on the devices, or
    /// the trees' nodes are not the nodes of the last commit.
    needs_commit: bool,
}

/// The log of one subvolume.
#[derive(Debug, Default)]
struct SubvolumeLog {
    tree: LogTree,
    /// All items of the log tree.
    items: BTreeMap<Key, Value>,
    item_bytes: u64,
    inodes: HashMap<u64, LoggedInode>,
    /// The data whose checksums are in the log.
    csums: RangeSet,
}

/// An inode whose items are in the log, either in their current state or as they were when the log was last written.
#[derive(Clone, Copy, Debug, Default)]
struct LoggedInode {
    /// Whether the directory entries that changed since the last commit are logged too.
    entries: bool,
    /// End of the file in bytes, rounded up to a sector, when the file's extents were last logged.
    end: Option<u64>,
}

impl TreeLog {
    pub(crate) fn new(found: Option<FoundLog>) -> Self {
        Self {
            found: Mutex::new(found),
            state: RankedMutex::new(Rank::TreeLog, LogContent::default()),
            last_used: AtomicU64::new(0),
            dir_moved: AtomicU64::new(0),
        }
    }

    pub(crate) fn take_found(&self) -> Option<FoundLog> {
        self.found.lock().take()
    }

    pub(crate) fn found_trees(&self) -> Vec<(RootId, Arc<Tree>)> {
        self.found.lock().as_ref().map(|found| found.trees.clone()).unwrap_or_default()
    }

    pub(crate) fn found_blocks(&self) -> Vec<Logical> {
        self.found.lock().as_ref().map(|found| found.blocks().to_vec()).unwrap_or_default()
    }

    /// Keeps a block of a log on the devices from being overwritten before the next commit is durable.
    pub(crate) fn keep_until_commit(&self, block: Logical, len_bytes: u64) {
        self.state.lock().blocks.keep(Extent::new(block, len_bytes));
    }

    /// Notes that there is an fsync in this transaction.
    pub(crate) fn note_used(&self, transid: Generation) {
        self.last_used.store(transid.0, Ordering::Relaxed);
    }

    /// Notes that a directory was renamed in this transaction: a log cannot express the new paths of the files below
    /// the directory.
    pub(crate) fn note_dir_moved(&self, transid: Generation) {
        self.dir_moved.store(transid.0, Ordering::Release);
    }

    /// Notes that trees change before the next commit: until that commit, each fsync commits instead of writing a log.
    /// The caller holds the commit lock.
    pub(crate) fn require_commit(&self) {
        lock_rank::check_held(Rank::Commit, "I1: the log changes under the commit lock");
        self.state.lock().needs_commit = true;
    }

    /// Whether there was an fsync in this transaction or in the transaction before.
    pub(crate) fn was_used_lately(&self, running: Generation) -> bool {
        let last_used = self.last_used.load(Ordering::Relaxed);
        last_used != 0 && last_used.saturating_add(1) >= running.0
    }

    /// Drops the log after a durable commit, whose superblock refers to no log. The caller holds the commit lock.
    pub(crate) fn forget(&self, space: &Space) {
        lock_rank::check_held(Rank::Commit, "I1: the log changes under the commit lock");
        let state = std::mem::take(&mut *self.state.lock());
        state.blocks.release(space);
    }
}

impl TransHandle<'_> {
    /// Notes that the operation moves a directory: later fsyncs of this transaction commit, so that files below the
    /// directory are found under their new path.
    pub fn note_directory_moved(&self) {
        self.engine.tree_log.note_dir_moved(self.generation());
    }
}
