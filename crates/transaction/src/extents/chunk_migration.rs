//! Recording chunks that moved to other places on the devices, or got another number of copies.
//!
//! A moved chunk keeps its logical addresses, so no tree block and no reference changes, however many snapshots share
//! them, and quotas have nothing to account. [`Engine::migrate_chunk`] copies the chunk at the speed of the devices
//! while other threads read, write and allocate in the chunk (`volumes::migration`). After the copy, a commit records
//! the new chunk item, device extents and profile. A crash before the commit of a migration is durable leaves the chunk
//! where it was. The block group is claimed meanwhile ([`crate::extents::block_group_claims`]).
//!
//! Invariants:
//! - M1. The copy is complete before a commit records it, and `volumes` writes to the old and the new place until that
//!   commit is durable.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevExtent, Stripe};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{Key, KeyType, Logical, RootId, objectid};
use ubtrfs_tree::Batch;

use crate::engine::Engine;
use crate::extents::chunk_alloc::replace_system_chunk;

/// The changes of the chunk tree and the device tree with which a commit records migrations.
#[derive(Debug, Default)]
pub(crate) struct RecordedMigrations {
    pub(crate) chunks: Vec<Logical>,
    pub(crate) chunk_batch: Batch,
    pub(crate) dev_batch: Batch,
}

impl Engine {
    /// Fails if the superblock has no room for the item of a system chunk.
    pub(crate) fn check_system_chunk_fits(&self, start: Logical, target: &ChunkItem) -> Result<()> {
        if !target.flags.contains(BlockGroupFlags::SYSTEM) {
            return Ok(());
        }
        let fits = replace_system_chunk(&mut self.superblock(), &chunk_key(start), &target.encode());
        fits.map_err(|_| Error::Refused {
            what: "the superblock has no room for the item of the converted system chunk".to_owned(),
            hint: "first reduce the number of system chunks: ubtrfs balance start -s --force",
        })
    }

    /// Records copied migrations in the running commit: returns the changes of the chunk tree and the device tree, and
    /// changes system chunks in `superblock`.
    pub(crate) fn record_migrations(&self, superblock: &mut Superblock) -> Result<Option<RecordedMigrations>> {
        let mut recorded = RecordedMigrations::default();
        for start in self.claims.copied() {
            let (Some((_, chunk)), Some(target)) = (self.volumes.chunk_at(start), self.volumes.migration_target(start))
            else {
                continue;
            };
            let mut changed = superblock.clone();
            let listed = match target.flags.contains(BlockGroupFlags::SYSTEM) {
                true => replace_system_chunk(&mut changed, &chunk_key(start), &target.encode()),
                false => Ok(()),
            };
            match listed.and_then(|()| self.volumes.record_migration(start)) {
                Ok(target) => {
                    *superblock = changed;
                    self.record_migration(start, &chunk, &target, &mut recorded)?;
                }
                Err(error) => self.claims.note_failure(start, error),
            }
        }
        if recorded.chunks.is_empty() {
            return Ok(None);
        }
        self.push_dev_items(&mut recorded.chunk_batch);
        recorded.chunk_batch.sort_by_key(|(key, _)| *key);
        recorded.dev_batch.sort_by_key(|(key, _)| *key);
        Ok(Some(recorded))
    }

    fn record_migration(
        &self,
        start: Logical,
        chunk: &ChunkItem,
        target: &ChunkItem,
        recorded: &mut RecordedMigrations,
    ) -> Result<()> {
        recorded.chunk_batch.push((chunk_key(start), Some(target.encode().into())));
        let is_in = |stripe: &Stripe, item: &ChunkItem| {
            item.stripes.iter().any(|other| (other.devid, other.offset) == (stripe.devid, stripe.offset))
        };
        let dev_extent = DevExtent {
            chunk_tree: RootId::CHUNK_TREE.0,
            chunk_objectid: objectid::FIRST_CHUNK_TREE,
            chunk_offset: start.0,
            length: target.length,
            chunk_tree_uuid: self.chunk_tree_uuid,
        };
        let fresh = target.stripes.iter().filter(|stripe| !is_in(stripe, chunk)).map(|stripe| (stripe, true));
        let left = chunk.stripes.iter().filter(|stripe| !is_in(stripe, target)).map(|stripe| (stripe, false));
        for (stripe, is_fresh) in fresh.chain(left) {
            let key = Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0);
            recorded.dev_batch.push((key, is_fresh.then(|| dev_extent.encode().into())));
            if let Some(mut item) = self.volumes.dev_item(stripe.devid) {
                let used = item.bytes_used;
                let changed = if is_fresh { used.checked_add(target.length) } else { used.checked_sub(target.length) };
                item.bytes_used = changed.unwrap_or(used);
                self.volumes.set_dev_item(&item)?;
            }
        }
        self.note_profile(target.flags);
        self.space.set_profile(start, target.flags);
        recorded.chunks.push(start);
        Ok(())
    }

    /// Ends the migrations that a durable commit recorded.
    pub(crate) fn finish_migrations(&self, chunks: &[Logical]) -> Result<()> {
        for &start in chunks {
            self.volumes.finish_migration(start)?;
            self.claims.end(start);
        }
        Ok(())
    }
}

fn chunk_key(start: Logical) -> Key {
    Key::new(objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, start.0)
}
