//! Devices of an open filesystem: adding, removing, replacing, sizes
//!
//! Devices have ids, which `ubtrfs_space` lists. A new device is given by its handle: that of an image file or block device
//! (`ubtrfs_device_open`, `ubtrfs_device_create`), or that of storage of the program (`ubtrfs_device_new`). The filesystem
//! keeps the device, so its handle may be closed afterwards. A device that a filesystem uses must not be given again.

use std::ffi::c_int;
use std::sync::Arc;

use ubtrfs::Device;
use ubtrfs::manage::ReplaceReport;

use crate::border::{Address, ErrorPlace, NumberList, OwnedAddress, ResultPlace};
use crate::exports::device::UbtrfsDevice;
use crate::exports::filesystem::UbtrfsFs;
use crate::exports::job::{UbtrfsJob, job_of};
use crate::exports::scrub::{UbtrfsDamagedFile, UbtrfsScrubCounts, counts_of, damaged_file};
use crate::failure::{CallResult, answer};
use crate::handles::Handle;
use crate::memory::{KeptTexts, give_struct};

/// The result of a replacement.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsReplaceReport {
    /// What was read, and the errors.
    pub counts: UbtrfsScrubCounts,
    /// Files with data that has no good copy, at most 1000; or null.
    pub files: Address<UbtrfsDamagedFile>,
    /// The number of `files`.
    pub nr_files: usize,
    /// Bytes of tree blocks without a good copy.
    pub lost_block_bytes: u64,
    /// Not used: 0.
    pub more: [u64; 3],
}

/// Adds a device, and returns its id in `devid`, which may be null. Everything on the device is lost. New block groups use
/// it at once; what there is stays where it is until a balance. `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_add_device(
    fs: Handle<UbtrfsFs>,
    device: Handle<UbtrfsDevice>,
    job: Handle<UbtrfsJob>,
    devid: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        devid.set(fs.get()?.add_device(shared(device)?, &*job_of(job)?)?);
        Ok(())
    })
}

/// Moves everything on some devices to the others, and removes these devices. Fails with ENOSPC if the others have not
/// enough space, and with EINVAL if a profile needs more devices. After a failure, what was moved stays in its new place.
/// `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_remove_devices(
    fs: Handle<UbtrfsFs>,
    devids: NumberList,
    nr_devids: usize,
    job: Handle<UbtrfsJob>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let devids = devids.numbers(nr_devids, "devids")?;
        Ok(fs.get()?.remove_devices(&devids, &*job_of(job)?)?)
    })
}

/// Copies a device to a new one, which takes its place and its id. Content that is bad on the old device, or is missing with
/// it, comes from the others. Everything on the new device is lost. If it is larger, `ubtrfs_resize_device` uses its rest.
/// Free `report` with `ubtrfs_free`. `job` and `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_replace_device(
    fs: Handle<UbtrfsFs>,
    devid: u64,
    device: Handle<UbtrfsDevice>,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<OwnedAddress<UbtrfsReplaceReport>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        report.set(OwnedAddress::NULL);
        let found = fs.get()?.replace_device(devid, shared(device)?, &*job_of(job)?)?;
        if report.is_given() {
            report.set(shown(&found));
        }
        Ok(())
    })
}

/// Sets the bytes of a device that the filesystem uses. What lies behind them moves first. `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_resize_device(
    fs: Handle<UbtrfsFs>,
    devid: u64,
    size: u64,
    job: Handle<UbtrfsJob>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || Ok(fs.get()?.resize_device(devid, size, &*job_of(job)?)?))
}

/// Returns the smallest size to which `ubtrfs_resize_device` surely shrinks a device.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_min_device_size(
    fs: Handle<UbtrfsFs>,
    devid: u64,
    size: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        size.needed("size")?;
        size.set(fs.get()?.min_device_size(devid)?);
        Ok(())
    })
}

/// The device of a handle.
fn shared(device: Handle<UbtrfsDevice>) -> CallResult<Arc<dyn Device>> {
    Ok(Arc::clone(&*device.get()?))
}

fn shown(found: &ReplaceReport) -> OwnedAddress<UbtrfsReplaceReport> {
    let mut texts = KeptTexts::default();
    let files = found.files.iter();
    let files: Vec<UbtrfsDamagedFile> = files
        .map(|(id, path, damage)| damaged_file((id.root.0, id.ino.0), path.as_deref(), damage, &mut texts))
        .collect();
    let report = UbtrfsReplaceReport {
        counts: counts_of(&found.counts),
        files: Address::of_list(&files),
        nr_files: files.len(),
        lost_block_bytes: found.lost_block_bytes,
        more: [0; 3],
    };
    give_struct(report, (files, texts))
}
