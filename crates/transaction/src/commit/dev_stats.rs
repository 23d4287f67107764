//! Records of the devices, kept in the device tree: key `(0 PERSISTENT_ITEM devid)`. A record has the error counters, and
//! the generation from which on the device may lack changes.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::DeviceRecord;
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use ubtrfs_space::DelayedRefs;
use ubtrfs_tree::Batch;
use ubtrfs_volumes::Volumes;

use crate::delayed::tree_view::Tree;
use crate::engine::Engine;

/// Loads the records from the device tree.
///
/// # Errors
///
/// Fails if a device was written apart from the others.
pub(crate) fn load(volumes: &Volumes, dev_tree: &Tree) -> Result<()> {
    for device in volumes.devices() {
        if let Some(item) = dev_tree.get(&Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, device.devid.0))? {
            let record = DeviceRecord::decode(&item).map_err(|cause| Error::from(cause).in_tree(RootId::DEV_TREE))?;
            volumes.add_record(device.devid, &record)?;
        }
    }
    Ok(())
}

impl Engine {
    /// Stores the records that changed since the last commit.
    pub(crate) fn store_dev_stats(&self, refs: &mut DelayedRefs, transid: Generation) -> Result<()> {
        let item = |(devid, record): (ubtrfs_format::DevId, DeviceRecord)| {
            let key = Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, devid.0);
            (key, Some(record.encode().into()))
        };
        let committed = Generation(transid.0.saturating_sub(1));
        let mut batch: Batch = self.volumes.take_changed_records(committed).into_iter().map(item).collect();
        if batch.is_empty() {
            return Ok(());
        }
        batch.sort_by_key(|(key, _)| *key);
        self.apply_batch(&*self.own_tree(RootId::DEV_TREE)?, &batch, refs, transid)?;
        Ok(())
    }
}
