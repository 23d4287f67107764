//! Checking a filesystem without changing it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_check::{Options, Problem, Report};
use ubtrfs_device::{Access, Device, FileDevice};

use crate::error::{Result, ResultExt};

/// Checks the filesystem on these devices, without writing to them. Calls `tell` with each problem as it is found.
///
/// The checker shares only the disk format, the devices and the chunk map with the engine. So its verdict on a
/// filesystem that the engine wrote is independent of the engine.
///
/// ```
/// use std::sync::Arc;
/// use ubtrfs::{CheckOptions, Device, Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
/// Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;
/// let options = CheckOptions { data_csums: true, ..CheckOptions::default() };
/// let report = ubtrfs::check(vec![device], options, &mut |problem| eprintln!("{problem}"))?;
/// assert!(report.is_clean());
/// # Ok(()) }
/// ```
///
/// # Errors
/// Fails if nothing could be checked: there is no superblock, features are unknown, or a device is truncated.
pub fn check(devices: Vec<Arc<dyn Device>>, options: Options, tell: &mut dyn FnMut(Problem)) -> Result<Report> {
    let device = PathBuf::from(devices.first().map(|device| device.describe()).unwrap_or_default());
    ubtrfs_check::check(devices, options, &(), tell).while_doing("check", &device)
}

/// Checks the filesystem on image files or block devices, as [`check()`] does. Nothing else may write to them meanwhile.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let scratch = tempfile::tempdir()?;
/// # let image = scratch.path().join("disk.img");
/// ubtrfs::Filesystem::make_image(&image, 256 << 20)?.close()?;
/// let report = ubtrfs::check_images(&[&image], ubtrfs::CheckOptions::default(), &mut |problem| eprintln!("{problem}"))?;
/// assert!(report.is_clean());
/// # Ok(()) }
/// ```
///
/// # Errors
/// `NotFound`; `ResourceBusy` if a device is open for writing; as for [`check()`].
pub fn check_images(paths: &[impl AsRef<Path>], options: Options, tell: &mut dyn FnMut(Problem)) -> Result<Report> {
    let open = |path: &Path| -> Result<Arc<dyn Device>> {
        Ok(Arc::new(FileDevice::open(path, Access::ReadOnly).while_doing("check", path)?))
    };
    let devices: Vec<_> = paths.iter().map(|path| open(path.as_ref())).collect::<Result<_>>()?;
    check(devices, options, tell)
}
