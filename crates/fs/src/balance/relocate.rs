//! Emptying one block group, and waiting for threads that use old addresses.
//!
//! Invariants:
//! - I1. A thread that reads an extent looks it up and reads it under the file's state lock. A thread that replaces an
//!   extent looks it up and replaces it under the file's state lock or writeback lock. So when a thread has taken both
//!   locks of every inode in memory, one inode after the other, no other thread still uses an address that it looked up
//!   before.

use ubtrfs_transaction::{Job, RelocatedGroup};

use crate::{Fs, Result};

impl Fs {
    /// Moves all extents out of the block group that starts at `start`, and removes the group.
    ///
    /// # Errors
    ///
    /// As for [`Engine::relocate_block_group`](ubtrfs_transaction::Engine::relocate_block_group).
    pub fn relocate_block_group(&self, start: ubtrfs_format::Logical, job: &Job) -> Result<RelocatedGroup> {
        self.check_open()?;
        let _moving = self.subvolumes.sends.begin_move(job)?;
        Ok(self.engine.relocate_block_group(start, job)?)
    }

    /// Waits until all threads that looked up addresses of data before this call have finished using them (I1), and
    /// drops data cached by address.
    pub(crate) fn wait_for_extent_users(&self) {
        for inode in self.inodes.all() {
            let _writeback = inode.writeback.lock();
            inode.state.write().data.extents_changed();
        }
    }
}
