//! The tree log: what fsync makes durable without a commit, in Linux's format.
//!
//! ```text
//! superblock.log_root -> log root tree: (TREE_LOG ROOT_ITEM subvolume) -> log tree of the subvolume:
//!     the items of logged inodes under their own keys, DIR_LOG_INDEX ranges, EXTENT_CSUM items of their data
//! ```
//!
//! A log belongs to the commit before it: the superblock keeps its generation g, blocks of the log carry g + 1. Who opens
//! the filesystem merges the log into the trees of commit g ([`load`], then `fs` by the items' meaning) and commits.
//!
//! - [`sync`]: fsyncs that join each other, and the order of writes.
//! - [`collect`]: which items make an inode's log; what a log cannot tell, for which there is a commit instead.
//! - [`extents`]: the file extents and checksums among them.
//! - [`log_tree`]: the trees, their blocks in memory and on the devices.
//! - [`load`]: a log that is found when a filesystem is opened.
//!
//! Crash argument. A log is written in this order: the files' data (before, by their writeback) and the log's blocks ->
//! flush -> the primary superblock with `log_root` -> flush. (1) Blocks of a log are never overwritten while the
//! superblock on the devices may refer to them: a changed block takes a new address, and the old one may be used again
//! only when a newer superblock is durable. So a cut before the superblock leaves the old log or none, whole. (2) What
//! the superblock refers to was flushed before it was written. (3) Neither the blocks nor the data are in the extent tree,
//! so nobody but this log gives them out: the addresses stay allocated in memory until the commit that drops the log is
//! durable, and all lie in chunks that the commit before the log has recorded. (4) A commit writes a superblock without a
//! log, in one sector with the new roots: the log and what it stands for change over at once. Mirrors of the superblock
//! stay those of the commit: they are asked only where the primary is lost.
//!
//! Invariants:
//! - I1. The log is changed and written under the commit lock, so it always belongs to the last commit, and the trees'
//!   nodes show that commit while it is written. From when rows are applied without a commit until there is one, no log
//!   is written.
//! - I2. What is written shows each logged inode as it is at one moment, at which no operation is half done: who was
//!   logged before and changed since is logged again. So a log is a commit of some inodes.
//! - I3. Whatever a log leaves out can stay as the last commit has it: where that would lose or duplicate a name, the other
//!   inodes concerned are logged too, or there is a commit instead.
//!
//! Lock order: commit lock -> the log's state -> gate -> views and shards. The queue's lock is a leaf.

mod collect;
mod extents;
mod load;
mod log_tree;
mod sync;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::{Generation, Key, Logical, RootId};
use ubtrfs_space::{Extent, RangeSet, Space};
use ubtrfs_tree::Value;

pub use load::FoundLog;
pub(crate) use load::load;

use crate::delayed::tree_view::Tree;
use log_tree::{LogBlocks, LogTree};
use sync::Queue;

/// How often fsync could log, and how often it had to commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Logs written; several fsyncs may share one.
    pub written: u64,
    /// Times that there was nothing to write.
    pub unchanged: u64,
    /// Commits in place of a log.
    pub commits: u64,
}

/// The log of the running transaction.
#[derive(Debug, Default)]
pub(crate) struct TreeLog {
    found: Mutex<Option<FoundLog>>,
    /// Changed under the commit lock (I1).
    state: Mutex<LogState>,
    /// The last transaction in which anything was fsynced.
    last_used: AtomicU64,
    /// The last transaction in which a directory moved.
    dir_moved: AtomicU64,
    queue: Mutex<Queue>,
    finished: Condvar,
    written: AtomicU64,
    unchanged: AtomicU64,
    commits: AtomicU64,
}

/// What the log holds.
#[derive(Debug, Default)]
struct LogState {
    subvolumes: BTreeMap<RootId, SubvolumeLog>,
    roots: LogTree,
    blocks: LogBlocks,
    /// The log in memory is not what is on the devices, or the trees' nodes are not those of the last commit: nothing but
    /// a commit helps.
    spoiled: bool,
}

/// What is logged of one subvolume.
#[derive(Debug, Default)]
struct SubvolumeLog {
    tree: LogTree,
    /// All items of the tree.
    items: BTreeMap<Key, Value>,
    item_bytes: u64,
    inodes: HashMap<u64, LoggedInode>,
    /// The data whose checksums are in it.
    csums: RangeSet,
}

/// An inode whose items are in the log, as they are now or were at the last write of the log.
#[derive(Clone, Copy, Debug, Default)]
struct LoggedInode {
    /// With the entries that changed since the last commit.
    entries: bool,
    /// End of the file, in whole sectors, that the log knows its extents up to.
    end: Option<u64>,
}

impl TreeLog {
    pub(crate) fn new(found: Option<FoundLog>) -> Self {
        Self { found: Mutex::new(found), ..Self::default() }
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

    /// A block of a log on the devices must not be overwritten before the next commit is durable.
    pub(crate) fn keep_until_commit(&self, block: Logical, len_bytes: u64) {
        self.state.lock().blocks.keep(Extent::new(block, len_bytes));
    }

    /// A directory was renamed in this transaction: a log does not tell where the files below it are found.
    pub(crate) fn note_dir_moved(&self, transid: Generation) {
        self.dir_moved.store(transid.0, Ordering::Release);
    }

    /// Trees change before the next commit: there is a commit for each fsync until then. The caller holds the commit lock.
    pub(crate) fn spoil(&self) {
        self.state.lock().spoiled = true;
    }

    /// Whether there was an fsync in this transaction or the one before it.
    pub(crate) fn was_used_lately(&self, running: Generation) -> bool {
        let last_used = self.last_used.load(Ordering::Relaxed);
        last_used != 0 && last_used + 1 >= running.0
    }

    /// A commit is durable: its superblock has no log. The caller holds the commit lock.
    pub(crate) fn forget(&self, space: &Space) {
        let state = std::mem::take(&mut *self.state.lock());
        state.blocks.release(space);
    }

    pub(crate) fn stats(&self) -> LogStats {
        LogStats {
            written: self.written.load(Ordering::Relaxed),
            unchanged: self.unchanged.load(Ordering::Relaxed),
            commits: self.commits.load(Ordering::Relaxed),
        }
    }
}
