//! Error counters of the devices, kept in the device tree: key `(0 PERSISTENT_ITEM devid)`.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::DevStatsItem;
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use ubtrfs_space::DelayedRefs;
use ubtrfs_tree::Batch;
use ubtrfs_volumes::Volumes;

use crate::delayed::tree_view::Tree;
use crate::engine::Engine;

/// Loads the counters from the device tree.
pub(crate) fn load(volumes: &Volumes, dev_tree: &Tree) -> Result<()> {
    for device in volumes.devices() {
        if let Some(item) = dev_tree.get(&Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, device.devid.0))? {
            let stats = DevStatsItem::decode(&item).map_err(|cause| Error::from(cause).in_tree(RootId::DEV_TREE))?;
            volumes.set_stats(device.devid, &stats);
        }
    }
    Ok(())
}

impl Engine {
    /// Stores the counters that changed since the last commit.
    pub(crate) fn store_dev_stats(&self, refs: &mut DelayedRefs, transid: Generation) -> Result<()> {
        let item = |(devid, stats): (ubtrfs_format::DevId, DevStatsItem)| {
            let key = Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, devid.0);
            (key, Some(stats.encode().into()))
        };
        let mut batch: Batch = self.volumes.take_changed_stats().into_iter().map(item).collect();
        if batch.is_empty() {
            return Ok(());
        }
        batch.sort_by_key(|(key, _)| *key);
        self.apply_batch(&*self.own_tree(RootId::DEV_TREE)?, &batch, refs, transid)?;
        Ok(())
    }
}
