//! The label, the space by kind and device, and free space of which devices are told.

use ubtrfs_fs::{Job, SpaceUsage};

use crate::Filesystem;
use crate::error::{Result, ResultExt};

impl Filesystem {
    /// How the space is used: by type and profile of block groups, and by device.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// let usage = fs.space_usage();
    /// assert_eq!(usage.devices[0].total, 256 << 20);
    /// ```
    pub fn space_usage(&self) -> SpaceUsage {
        self.engine().space_usage()
    }

    /// Sets the label: at most 255 bytes, none of which is 0. An empty label removes the old one.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.set_label("backup")?;
    /// assert_eq!(fs.label(), b"backup");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for other labels; `ReadOnlyFilesystem`.
    pub fn set_label(&self, label: impl AsRef<[u8]>) -> Result<()> {
        self.engine().set_label(label.as_ref()).while_doing("label", self.device_name())
    }

    /// Tells the devices which space is free, and returns the number of bytes. Free ranges of fewer than `min_bytes` are
    /// left out. `job` counts bytes that were looked at.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// assert!(fs.trim(0, &ubtrfs::Job::new())? > 100 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// EOPNOTSUPP if no device takes discards; ECANCELED.
    pub fn trim(&self, min_bytes: u64, job: &Job) -> Result<u64> {
        self.engine().trim(&(0..u64::MAX), min_bytes, job).while_doing("trim", self.device_name())
    }
}
