//! fsync and fdatasync: a file's data is written, then its items are made durable by the tree log.
//!
//! - I1. Data is written before the items that refer to it are put, and the log's flush comes after both.
//! - I2. What was promised: the file's content, attributes and names as they were when fsync was called, or later ones;
//!   of a directory, its entries, with the inodes of those that are new.

use ubtrfs_transaction::LogStats;

use crate::{Fs, InodeId, Result};

impl Fs {
    /// Makes a file or directory durable. Times are durable too, with `datasync` as well.
    pub fn fsync(&self, id: InodeId, _datasync: bool) -> Result<()> {
        let inode = self.inode(id)?;
        if self.options.read_only {
            return Ok(());
        }
        self.flush_inode(&inode, 0..u64::MAX)?;
        if inode.home.is_deleted() {
            // After a crash nobody could get at it.
            return Ok(());
        }
        if self.options.notreelog {
            self.engine.commit()?;
        } else {
            self.engine.sync_inode(id.root, id.ino)?;
        }
        Ok(())
    }

    /// How often fsync wrote a log, and how often it committed.
    pub fn log_stats(&self) -> LogStats {
        self.engine.log_stats()
    }
}
