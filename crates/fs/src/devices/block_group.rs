//! Lists block groups, and moves one of them without changing its logical addresses.

use std::sync::Arc;

use ubtrfs_format::Logical;
use ubtrfs_format::item::ChunkItem;
use ubtrfs_transaction::{BlockGroup, ChunkPlacement, Job, MigratedChunk};

use crate::Fs;
use crate::error::Result;

impl Fs {
    /// All block groups, by ascending address.
    pub fn block_groups(&self) -> Vec<BlockGroup> {
        self.engine.block_groups()
    }

    /// The chunk of the block group that starts at this address.
    pub fn chunk_at(&self, start: Logical) -> Option<Arc<ChunkItem>> {
        self.engine.chunk_at(start)
    }

    /// Moves a block group to another place on the devices, or changes its number of copies, while it is in use. Only
    /// the chunk and device trees change, however many snapshots share the content. `job` counts each byte of the block
    /// group once, regardless of the number of copies.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::migrate_chunk`]. After an error, the block group is unchanged.
    pub fn migrate_block_group(&self, start: Logical, placement: &ChunkPlacement, job: &Job) -> Result<MigratedChunk> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.migrate_chunk(start, placement, job)?)
    }
}
