//! Emptying one block group.

use ubtrfs_transaction::{Job, RelocatedGroup};

use crate::{Fs, Result};

impl Fs {
    /// Moves all extents out of the block group that starts at `start`, and removes the group.
    ///
    /// # Errors
    ///
    /// As for [`Engine::relocate_block_group`](ubtrfs_transaction::Engine::relocate_block_group).
    pub fn relocate_block_group(&self, start: ubtrfs_format::Logical, job: &Job) -> Result<RelocatedGroup> {
        self.context.check_mounted_writable()?;
        let _moving = self.subvolumes.sends.begin_move(job)?;
        Ok(self.engine.relocate_block_group(start, job)?)
    }
}
