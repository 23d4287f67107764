//! The sizes of devices.

use ubtrfs_format::DevId;
use ubtrfs_transaction::Job;

use crate::Fs;
use crate::error::Result;

impl Fs {
    /// The bytes that the filesystem uses of a device, and the bytes that the device has.
    ///
    /// # Errors
    ///
    /// Fails if there is no such device, or it does not tell its size.
    pub fn device_size(&self, devid: DevId) -> Result<(u64, u64)> {
        Ok(self.engine.device_size(devid)?)
    }

    /// Sets the bytes that the filesystem uses of a device. When it shrinks, all that lies behind the new end moves
    /// before it. Units of `job` are bytes that move. Durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::resize_device`]. The size is then what it was.
    pub fn resize_device(&self, devid: DevId, len_bytes: u64, job: &Job) -> Result<()> {
        self.check_open()?;
        Ok(self.engine.resize_device(devid, len_bytes, job)?)
    }
}
