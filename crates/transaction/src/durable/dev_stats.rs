//! Resetting the error counters of devices.

use ubtrfs_error::Result;
use ubtrfs_format::DevId;
use ubtrfs_format::item::DevStatsItem;

use crate::engine::Engine;

impl Engine {
    /// Sets the error counters of all devices to 0, durable on return. Returns the counters before.
    pub fn reset_device_stats(&self, of: Option<DevId>) -> Result<Vec<(DevId, DevStatsItem)>> {
        self.check_writable()?;
        let before = self.volumes.reset_stats(of);
        self.commit()?;
        Ok(before)
    }
}
