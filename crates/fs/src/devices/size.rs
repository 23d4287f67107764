//! The sizes of devices, and discarding their free space.

use std::ops::Range;

use ubtrfs_format::DevId;
use ubtrfs_transaction::Job;

use crate::Fs;
use crate::error::{Error, Result};
use crate::watched_job::watched;

impl Fs {
    /// The size of the filesystem on a device, and the size of the device itself, both in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the filesystem has no device with this id, or if the device's size cannot be read.
    pub fn device_size(&self, devid: DevId) -> Result<(u64, u64)> {
        Ok(self.engine.device_size(devid)?)
    }

    /// The smallest size to which a device can be shrunk by moving whole block groups. Smaller sizes may work too,
    /// because [`Self::resize_device`] also moves extents into the free space of other block groups.
    pub fn min_device_size(&self, devid: DevId) -> Result<u64> {
        Ok(self.engine.min_device_size(devid)?)
    }

    /// Discards free space on the devices: free ranges of at least `min_bytes` in this range of logical addresses, and
    /// all space outside of block groups. Returns the bytes discarded on the devices. `job` counts the bytes examined.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::trim`].
    pub fn trim(&self, range: &Range<u64>, min_bytes: u64, job: &Job) -> Result<u64> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.trim(range, min_bytes, job)?)
    }

    /// Sets the size of the filesystem on a device, in bytes. Shrinking moves everything past the new end to places
    /// below the new end. If extents must get other logical addresses for this, the call first waits until no send
    /// runs. `job` counts the bytes that move. The new size is durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::resize_device`]. After an error, the size is unchanged, but chunks and
    /// extents that were moved stay in their new places.
    pub fn resize_device(&self, devid: DevId, len_bytes: u64, job: &Job) -> Result<()> {
        self.context.check_mounted_writable()?;
        let resize = self.resizes.begin(());
        Ok(watched(&resize.job, job, || self.engine.resize_device(devid, len_bytes, &resize.job))?)
    }

    /// Cancels all resizes that run or wait, and returns after they have ended.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no resize runs or waits.
    pub fn cancel_resize(&self) -> Result<()> {
        if self.resizes.cancel() { Ok(()) } else { Err(Error::NotRunning("no resize is running")) }
    }
}
