//! Devices that join the filesystem, and devices that leave it.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::DevId;
use ubtrfs_format::superblock::flags;
use ubtrfs_transaction::Job;
use uuid::Uuid;

use crate::Fs;
use crate::error::{Error, Result};
use crate::watched_job::watched;

impl Fs {
    /// Adds a device to the filesystem, and returns its id. Everything on the device is lost. `job` can cancel the wait for
    /// other changes of devices. The change is durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::add_device`].
    pub fn add_device(&self, device: Arc<dyn Device>, job: &Job) -> Result<DevId> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.add_device(device, job)?)
    }

    /// Whether this filesystem is a seed: it is never written, and other filesystems build on it.
    pub fn is_seed(&self) -> bool {
        self.engine.superblock().flags & flags::SEEDING != 0
    }

    /// Makes a filesystem on this seed, with a first device of its own, and returns the id of the device and the fsid.
    /// Everything on the device is lost, and nothing is written to the seed. The new filesystem is durable on return.
    /// To open it, pass the new device and the devices of the seed.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::make_sprout`].
    pub fn make_sprout(&self, device: Arc<dyn Device>, job: &Job) -> Result<(DevId, Uuid)> {
        Ok(self.engine.make_sprout(device, job)?)
    }

    /// Fails if a profile needs more devices than would be left without these.
    pub fn check_enough_devices_without(&self, devids: &[DevId]) -> Result<()> {
        Ok(self.engine.check_enough_devices_without(devids)?)
    }

    /// Moves everything on these devices to the remaining devices, and removes them. No data moves from one removed
    /// device to another. If extents must get other logical addresses for this, the call first waits until no send
    /// runs. `job` counts the bytes that move. The change is durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::remove_devices`]. After an error, what was moved stays in its new place.
    pub fn remove_devices(&self, devids: &[DevId], job: &Job) -> Result<()> {
        self.context.check_mounted_writable()?;
        let removal = self.removals.begin(());
        Ok(watched(&removal.job, job, || self.engine.remove_devices(devids, &removal.job))?)
    }

    /// Cancels all removals that run or wait, and returns after they have ended.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no removal runs or waits.
    pub fn cancel_removal(&self) -> Result<()> {
        if self.removals.cancel() { Ok(()) } else { Err(Error::NotRunning("no removal of a device is running")) }
    }
}
