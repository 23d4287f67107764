//! Block groups as users see them, and moving one of them as it is.

use ubtrfs_format::Logical;
use ubtrfs_transaction::{BlockGroup, Job, MigratedChunk, Placement};

use crate::Fs;
use crate::error::Result;

impl Fs {
    /// All block groups, by ascending address.
    pub fn block_groups(&self) -> Vec<BlockGroup> {
        self.engine.block_groups()
    }

    /// Moves a block group to another place on the devices, or gives it another number of copies, while it is in use. No
    /// tree but the chunk and device trees changes, however many snapshots share its content. Units of `job` are bytes of
    /// one copy.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::migrate_chunk`]. The block group then stays where it was.
    pub fn migrate_block_group(&self, start: Logical, placement: &Placement, job: &Job) -> Result<MigratedChunk> {
        self.check_open()?;
        Ok(self.engine.migrate_chunk(start, placement, job)?)
    }
}
