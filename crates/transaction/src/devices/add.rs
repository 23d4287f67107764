//! Devices that join the filesystem.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::DevId;
use ubtrfs_format::item::DevItem;

use crate::devices::size::DEVICE_LEN_MIN;
use crate::engine::Engine;
use crate::extents::device_items::DeviceChange;
use crate::job::Job;

impl Engine {
    /// Adds a device to the filesystem, and returns its id. Everything on the device is lost. The change is durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the device is smaller than [`DEVICE_LEN_MIN`] or cannot be written; [`Error::Io`] if the device
    /// fails; [`Error::Cancelled`] while the call waits for another change of devices; an error of a commit. After an error
    /// the device has not joined, but may have lost its content.
    pub fn add_device(&self, device: Arc<dyn Device>, job: &Job) -> Result<DevId> {
        self.check_writable()?;
        self.check_not_held()?;
        let _alone = self.device_changes.begin(job)?;
        self.refuse_own_device(device.as_ref())?;
        let item = self.volumes.new_dev_item(device.as_ref())?;
        check_new_device(device.as_ref(), &item)?;
        let others = self.devices();
        let total = others.iter().fold(item.total_bytes, |sum, other| sum.saturating_add(other.total_bytes));
        if total > TOTAL_BYTES_MAX {
            return Err(Error::Refused {
                what: format!("with {} the filesystem would have {total} bytes", device.describe()),
                hint: "give a smaller device: all together have at most 8 EiB",
            });
        }
        ubtrfs_volumes::wipe(device.as_ref(), device.len_bytes())?;
        let devid = item.devid;
        self.device_changes.request(DeviceChange::Add(device, Box::new(item)));
        self.commit()?;
        self.update_unallocated();
        self.device_changes.take_done().failure.map_or(Ok(devid), Err)
    }
}

impl Engine {
    /// Whether this object is a device of the filesystem, or the new device of a running replacement.
    pub fn uses_device(&self, device: &dyn Device) -> bool {
        self.volumes.uses(device)
    }

    /// Fails for a new device that is a device of the filesystem already.
    pub(super) fn refuse_own_device(&self, device: &dyn Device) -> Result<()> {
        match self.uses_device(device) {
            true => Err(Error::Refused {
                what: format!("{} is a device of this filesystem already", device.describe()),
                hint: "give another device",
            }),
            false => Ok(()),
        }
    }
}

/// Fails for a new device that is too small or refuses writes.
pub(super) fn check_new_device(device: &dyn Device, item: &DevItem) -> Result<()> {
    if item.total_bytes < DEVICE_LEN_MIN {
        return Err(Error::Refused {
            what: format!("{} has {} bytes, which is too small", device.describe(), device.len_bytes()),
            hint: "give a device of at least 32M; for an image file: truncate -s SIZE IMAGE",
        });
    }
    check_can_be_written(device)
}

/// The most bytes of all devices together, so that sums of sizes have 64 bits.
const TOTAL_BYTES_MAX: u64 = 1 << 63;

/// Fails for a new device that refuses writes.
pub(super) fn check_can_be_written(device: &dyn Device) -> Result<()> {
    if !device.is_read_only() {
        return Ok(());
    }
    Err(Error::Refused { what: format!("{} cannot be written", device.describe()), hint: "give another device" })
}
