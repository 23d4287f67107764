//! Opening an image file with the engine, shared by tests.

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_testkit::Image;

/// Opens an image for reading and writing with these mount options.
#[track_caller]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
pub(crate) fn open(image: &Image, options: &str) -> Arc<Fs> {
    let options = MountOptions::parse(options).unwrap();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    Fs::open(vec![device], options).unwrap()
}
