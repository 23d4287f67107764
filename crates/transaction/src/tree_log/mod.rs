//! The tree log: what fsync makes durable without a commit, in Linux's format.

mod load;

use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::{Logical, RootId};
use ubtrfs_space::{Extent, Space};

pub use load::FoundLog;
pub(crate) use load::load;

use crate::tree_view::Tree;

/// The log of the running transaction.
#[derive(Debug, Default)]
pub(crate) struct TreeLog {
    found: Mutex<Option<FoundLog>>,
    /// Blocks that only a log refers to: free when the next commit is durable.
    kept: Mutex<Vec<Extent>>,
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
        self.kept.lock().push(Extent::new(block, len_bytes));
    }

    /// A commit is durable: its superblock has no log.
    pub(crate) fn forget(&self, space: &Space) {
        for extent in std::mem::take(&mut *self.kept.lock()) {
            space.release(extent);
        }
    }
}
