//! Scrub: everything is read and compared with its checksums.

use ubtrfs_format::DevId;
use ubtrfs_fs::{Job, ScrubReport, ScrubStart};

use crate::Filesystem;
use crate::error::{Result, ResultExt};

/// Options of [`Filesystem::scrub`].
///
/// ```
/// use ubtrfs::manage::ScrubOptions;
///
/// // Look, and change nothing; read at most 100 MB in a second from each device.
/// let options = ScrubOptions { repair: false, bytes_per_sec: 100_000_000, ..ScrubOptions::default() };
/// # assert!(options.devices.is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubOptions {
    /// The devices; all that can be read if this is empty.
    pub devices: Vec<u64>,
    /// Overwrite what is bad with a good copy.
    pub repair: bool,
    /// The highest rate for each device; 0 means no limit.
    pub bytes_per_sec: u64,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        Self { devices: Vec::new(), repair: true, bytes_per_sec: 0 }
    }
}

impl Filesystem {
    /// Reads everything on the devices, and repairs what is bad and has a good copy. `job` counts bytes of the devices.
    /// The report names files with bad content, and how each device ended.
    ///
    /// ```
    /// use ubtrfs::manage::ScrubOptions;
    /// use ubtrfs::{Filesystem, Job};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/f", vec![1; 1 << 20])?;
    /// let report = fs.scrub(&ScrubOptions::default(), &Job::new())?;
    /// assert!(report.files.is_empty() && report.devices[0].counts.uncorrectable_errors == 0);
    /// assert!(report.devices[0].counts.data_bytes_scrubbed >= 1 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if a device is unknown, missing or failed; EINPROGRESS if a scrub runs; EOPNOTSUPP if a block group
    /// has parity.
    pub fn scrub(&self, options: &ScrubOptions, job: &Job) -> Result<ScrubReport> {
        self.sync()?;
        let all = || {
            let devices = self.engine().space_usage().devices;
            devices.into_iter().filter(|device| device.state.is_usable()).map(|device| device.devid).collect()
        };
        let devids: Vec<DevId> = match options.devices.is_empty() {
            true => all(),
            false => options.devices.iter().map(|devid| DevId(*devid)).collect(),
        };
        let start = |devid| ScrubStart { devid, start: 0, limit: options.bytes_per_sec, io_priority: None };
        let starts: Vec<ScrubStart> = devids.into_iter().map(start).collect();
        self.engine().scrub(&starts, options.repair, job).while_doing("scrub", self.device_name())
    }

    /// Ends the scrub that another thread runs, and waits until it has ended.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// assert!(fs.cancel_scrub().is_err());
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if no scrub runs.
    pub fn cancel_scrub(&self) -> Result<()> {
        self.engine().cancel_scrub().while_doing("cancel the scrub of", self.device_name())
    }
}
