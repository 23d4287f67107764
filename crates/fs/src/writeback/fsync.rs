//! fsync and fdatasync: write a file's data, then make its items durable through the tree log.
//!
//! - I1. Data is written before the items that refer to it are put, and the log is flushed after both.
//! - I2. After fsync, the file's content, attributes and names are durable in the state that they had when fsync was
//!   called, or in a newer one. For a directory, its entries are durable, with the inodes of new entries.

use ubtrfs_transaction::LogStats;

use crate::{Fs, InodeId, Result};

impl Fs {
    /// Makes a file or directory durable, including its times; `datasync` makes no difference.
    pub fn fsync(&self, id: InodeId, _datasync: bool) -> Result<()> {
        let inode = self.inode(id)?;
        if self.options.read_only {
            return Ok(());
        }
        self.flush_inode(&inode, 0..u64::MAX)?;
        if inode.home.is_deleted() {
            // Nothing in a deleted subvolume can be reached after a crash, so there is nothing to make durable.
            return Ok(());
        }
        if self.options.notreelog {
            self.engine.commit()?;
        } else {
            self.engine.sync_inode(id.root, id.ino)?;
        }
        Ok(())
    }

    /// Counts of batches of fsyncs by their result: a log was written, nothing had to be written, or no log could be
    /// written.
    pub fn log_stats(&self) -> LogStats {
        self.engine.log_stats()
    }
}
