//! [`DeviceChanges`]: new sizes of devices, new devices and removed devices, which the next commit records.
//!
//! Owns the changes, under one lock; the lock of `volumes::set` is taken under it. Also owns the lock that is held for
//! a whole change of a device. That lock comes before all other locks.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{DevItem, DevReplaceItem};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, Generation, Key, KeyType, RootId, objectid};
use ubtrfs_tree::{Batch, Value};
use ubtrfs_volumes::{GivenUpTwin, RemovedDevice};

use crate::engine::Engine;
use crate::extents::replacing::Replacing;
use crate::job::Job;

/// Changes of devices that the next commit records.
#[derive(Debug, Default)]
pub(crate) struct DeviceChanges {
    requested: Mutex<Vec<DeviceChange>>,
    /// The results of the changes that the last commits recorded.
    done: Mutex<DoneChanges>,
    /// This lock is held for a whole change, because a device has only one limit.
    alone: Mutex<()>,
    pub(crate) replacing: Replacing,
}

/// A change of a device.
#[derive(Debug)]
pub(crate) enum DeviceChange {
    /// The filesystem uses this many bytes of the device.
    Resize(DevId, u64),
    /// The device joins the filesystem. It has been wiped. The item is stored with the generation of the commit.
    Add(Arc<dyn Device>, Box<DevItem>),
    /// The first own device of a filesystem on a seed joins. It has been wiped, and is in the set of devices already.
    Sprout(Box<DevItem>),
    /// The device, which no chunk uses, leaves the filesystem.
    Remove(DevId),
    /// The twin of the device takes its place. The item is stored with the generation of the commit.
    Replace(DevId, Box<DevReplaceItem>),
    /// The replacement of the device was cancelled or has failed.
    GiveUpReplace(DevId, Box<DevReplaceItem>),
}

/// The results of the changes that a commit recorded.
#[derive(Debug, Default)]
pub(crate) struct DoneChanges {
    /// The failure of a new device, which did not join the filesystem or take the place of another device.
    pub(crate) failure: Option<Error>,
    /// Devices that have left the filesystem.
    pub(crate) removed: Vec<RemovedDevice>,
    /// New devices of replacements that were given up.
    pub(crate) given_up: Vec<GivenUpTwin>,
}

/// The changes of trees with which a commit records changes of devices.
#[derive(Debug, Default)]
pub(crate) struct RecordedDevices {
    pub(crate) chunk_batch: Batch,
    pub(crate) dev_batch: Batch,
}

impl DeviceChanges {
    /// Waits for the end of other changes, or until the job is cancelled, and keeps new changes from beginning.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`]; [`Error::Refused`] if a replacement is suspended.
    pub(crate) fn begin(&self, job: &Job) -> Result<MutexGuard<'_, ()>> {
        let alone = self.begin_beside_suspended(job)?;
        self.replacing.check_none()?;
        Ok(alone)
    }

    /// Works like [`DeviceChanges::begin`], for the change that ends a suspended replacement.
    pub(crate) fn begin_beside_suspended(&self, job: &Job) -> Result<MutexGuard<'_, ()>> {
        loop {
            job.check()?;
            if let Some(alone) = self.alone.try_lock_for(PAUSE) {
                return Ok(alone);
            }
        }
    }

    /// Makes the next commit record a change.
    pub(crate) fn request(&self, change: DeviceChange) {
        self.requested.lock().push(change);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requested.lock().is_empty() && !self.replacing.has_news()
    }

    /// The results of the last changes.
    pub(crate) fn take_done(&self) -> DoneChanges {
        std::mem::take(&mut self.done.lock())
    }
}

impl Engine {
    /// Records the requested changes: changes the devices and the superblock, and returns the changes of the chunk tree and
    /// the device tree.
    pub(crate) fn record_device_changes(
        &self,
        superblock: &mut Superblock,
        transid: Generation,
    ) -> Result<Option<RecordedDevices>> {
        let requested = std::mem::take(&mut *self.device_changes.requested.lock());
        let mut recorded = RecordedDevices::default();
        for change in requested {
            match change {
                DeviceChange::Resize(devid, len_bytes) => {
                    self.record_resize(devid, len_bytes, superblock, &mut recorded)?;
                }
                DeviceChange::Add(device, mut item) => {
                    item.generation = transid.0;
                    self.record_addition(device, &item, superblock, &mut recorded)?;
                }
                DeviceChange::Sprout(item) => {
                    count_device(superblock, &item);
                    // The items of the seed devices change too.
                    self.push_dev_items(&mut recorded.chunk_batch);
                }
                DeviceChange::Remove(devid) => self.record_removal(devid, superblock, &mut recorded)?,
                DeviceChange::GiveUpReplace(devid, item) => {
                    self.device_changes.replacing.end();
                    self.device_changes.done.lock().given_up.extend(self.volumes.give_up_twin(devid));
                    recorded.dev_batch.push(replace_item(&item));
                }
                DeviceChange::Replace(devid, item) => self.record_replacement(devid, &item, transid, &mut recorded)?,
            }
        }
        if let Some(item) = self.device_changes.replacing.record(&self.volumes) {
            recorded.dev_batch.push(replace_item(&item));
        }
        if recorded.chunk_batch.is_empty() && recorded.dev_batch.is_empty() {
            return Ok(None);
        }
        last_of_each_key(&mut recorded.chunk_batch);
        last_of_each_key(&mut recorded.dev_batch);
        Ok(Some(recorded))
    }

    fn record_resize(
        &self,
        devid: DevId,
        len_bytes: u64,
        superblock: &mut Superblock,
        recorded: &mut RecordedDevices,
    ) -> Result<()> {
        let Some(mut item) = self.volumes.dev_item(devid) else { return Ok(()) };
        let others = superblock.total_bytes.saturating_sub(item.total_bytes);
        superblock.total_bytes = others.saturating_add(len_bytes);
        item.total_bytes = len_bytes;
        self.volumes.set_dev_item(&item)?;
        recorded.chunk_batch.push((item_key(devid), Some(item.encode().into())));
        Ok(())
    }

    /// A device that fails here does not join, and the commit continues.
    fn record_addition(
        &self,
        device: Arc<dyn Device>,
        item: &DevItem,
        superblock: &mut Superblock,
        recorded: &mut RecordedDevices,
    ) -> Result<()> {
        let committed = self.superblock();
        if let Err(error) = self.volumes.add_device(device, item, &committed) {
            self.device_changes.done.lock().failure = Some(error);
            return Ok(());
        }
        count_device(superblock, item);
        recorded.chunk_batch.push((item_key(item.devid), Some(item.encode().into())));
        // A record of an earlier device with this id would mark the new device as stale.
        self.delete_record(item.devid, recorded)
    }

    fn record_removal(&self, devid: DevId, superblock: &mut Superblock, recorded: &mut RecordedDevices) -> Result<()> {
        let Some(item) = self.volumes.dev_item(devid) else { return Ok(()) };
        let Some(removed) = self.volumes.remove_device(devid)? else { return Ok(()) };
        superblock.num_devices = superblock.num_devices.saturating_sub(1);
        superblock.total_bytes = superblock.total_bytes.saturating_sub(item.total_bytes);
        recorded.chunk_batch.push((item_key(devid), None));
        self.device_changes.done.lock().removed.push(removed);
        self.delete_record(devid, recorded)
    }

    /// A twin that failed does not take the device's place, and the commit continues.
    fn record_replacement(
        &self,
        devid: DevId,
        replaced: &DevReplaceItem,
        transid: Generation,
        recorded: &mut RecordedDevices,
    ) -> Result<()> {
        match self.volumes.promote_twin(devid, transid) {
            Ok(old) => self.device_changes.done.lock().removed.push(old),
            Err(error) => {
                self.device_changes.done.lock().failure = Some(error);
                return Ok(());
            }
        }
        if let Some(item) = self.volumes.dev_item(devid) {
            recorded.chunk_batch.push((item_key(devid), Some(item.encode().into())));
        }
        self.device_changes.replacing.end();
        recorded.dev_batch.push(replace_item(replaced));
        self.delete_record(devid, recorded)
    }

    /// Deletes the record of a device from the device tree, if it has one.
    fn delete_record(&self, devid: DevId, recorded: &mut RecordedDevices) -> Result<()> {
        let key = Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, devid.0);
        if self.own_tree(RootId::DEV_TREE)?.get(&key)?.is_some() {
            recorded.dev_batch.push((key, None));
        }
        Ok(())
    }
}

/// How long a wait for other changes lasts between two tests for a cancellation.
const PAUSE: Duration = Duration::from_millis(100);

fn item_key(devid: DevId) -> Key {
    Key::new(objectid::DEV_ITEMS, KeyType::DEV_ITEM, devid.0)
}

fn replace_item(item: &DevReplaceItem) -> (Key, Option<Value>) {
    (Key::new(0, KeyType::DEV_REPLACE, 0), Some(item.encode().into()))
}

fn count_device(superblock: &mut Superblock, item: &DevItem) {
    superblock.num_devices = superblock.num_devices.saturating_add(1);
    superblock.total_bytes = superblock.total_bytes.saturating_add(item.total_bytes);
}

/// Sorts a batch, and keeps the last change of each key.
fn last_of_each_key(batch: &mut Batch) {
    batch.sort_by_key(|(key, _)| *key);
    batch.dedup_by(|next, last| {
        let is_same = next.0 == last.0;
        if is_same {
            std::mem::swap(next, last);
        }
        is_same
    });
}
