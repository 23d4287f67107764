//! Devices that join and leave a filesystem, or get another size.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::DevId;
use ubtrfs_fs::{Job, ReplaceReport, ReplaceRequest};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::in_use::DeviceClaim;

impl Filesystem {
    /// Adds a device, and returns its number. Everything on the device is lost. New block groups use it at once; what
    /// there is already stays where it is until a [`balance`](Self::balance).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ubtrfs::{Filesystem, Job, MemoryDevice};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// let devid = fs.add_device(Arc::new(MemoryDevice::new(256 << 20)), &Job::new())?;
    /// assert_eq!(devid, 2);
    /// fs.remove_devices(&[1], &Job::new())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the device is too small, or is read-only; `ReadOnlyFilesystem`; an error of the device.
    pub fn add_device(&self, device: Arc<dyn Device>, job: &Job) -> Result<u64> {
        let name = device.describe();
        let claim = DeviceClaim::new([device.as_ref()], true);
        let added = claim.and_then(|_claim| self.engine().add_device(Arc::clone(&device), job));
        Ok(added.while_doing("add device", std::path::Path::new(&name))?.0)
    }

    /// Moves everything on these devices to the others, and removes them. `job` counts the bytes that move. After an
    /// error, what was moved stays in its new place.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// // The last device cannot be removed.
    /// assert!(fs.remove_devices(&[1], &ubtrfs::Job::new()).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `StorageFull` if the others have not enough space; `InvalidInput` if a device is unknown, or too few would be left
    /// for a profile; ECANCELED.
    pub fn remove_devices(&self, devids: &[u64], job: &Job) -> Result<()> {
        let devids: Vec<DevId> = devids.iter().map(|devid| DevId(*devid)).collect();
        self.engine().remove_devices(&devids, job).while_doing("remove devices of", self.device_name())
    }

    /// Copies a device to a new one, which takes its place. Content that is bad on the old device, or is missing with it,
    /// comes from the others. `job` counts bytes of the old device.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ubtrfs::{Filesystem, Job, MemoryDevice};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/f", "text")?;
    /// let report = fs.replace_device(1, Arc::new(MemoryDevice::new(512 << 20)), &Job::new())?;
    /// assert!(report.files.is_empty() && fs.read("/f")? == b"text");
    /// // The new device is larger.
    /// fs.resize_device(1, 512 << 20, &Job::new())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the device is unknown, or the new one is too small; EINPROGRESS if a replacement or a balance
    /// runs; ECANCELED; an error of the new device. After an error, the old device is in its place.
    pub fn replace_device(&self, devid: u64, new: Arc<dyn Device>, job: &Job) -> Result<ReplaceReport> {
        let claim = DeviceClaim::new([new.as_ref()], true);
        let request = ReplaceRequest { devid: DevId(devid), device: Arc::clone(&new), avoids_source: false };
        let replaced = claim.and_then(|_claim| self.engine().replace_device(&request, job));
        replaced.while_doing("replace a device of", self.device_name())
    }

    /// Sets the bytes of a device that the filesystem uses. What lies behind them moves first; `job` counts its bytes.
    ///
    /// ```
    /// use ubtrfs::{Filesystem, Job};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(1 << 30)?;
    /// let least = fs.min_device_size(1)?;
    /// fs.resize_device(1, least.max(512 << 20), &Job::new())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the device is unknown, or too small; `StorageFull` if there is not enough space below the new end;
    /// ECANCELED.
    pub fn resize_device(&self, devid: u64, size_bytes: u64, job: &Job) -> Result<()> {
        self.engine().resize_device(DevId(devid), size_bytes, job).while_doing("resize", self.device_name())
    }

    /// The smallest size to which [`resize_device`](Self::resize_device) surely shrinks a device.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(1 << 30)?;
    /// assert!(fs.min_device_size(1)? < 1 << 30);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the device is unknown.
    pub fn min_device_size(&self, devid: u64) -> Result<u64> {
        self.engine().min_device_size(DevId(devid)).while_doing("measure", self.device_name())
    }
}
