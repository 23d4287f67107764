//! Devices: storage of the program, files, memory
//!
//! The engine calls the functions of a device from several threads at the same time, and until the device is released.
//! A function of a device must not call this library on a filesystem that uses the device.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::Arc;

use ubtrfs::{Access, Device, FileDevice, MemoryDevice, OpenError};

use crate::border::{ErrorPlace, Given, GrowingStruct, HandleList, ResultPlace, Text, UserPointer};
use crate::callback::DeviceOfProgram;
use crate::exports::filesystem::check_flags;
use crate::failure::{CallResult, answer};
use crate::handles::{Handle, HandleKind, HandleTable};

/// A device: storage of fixed size for a filesystem.
#[derive(Debug)]
pub enum UbtrfsDevice {}

impl HandleKind for UbtrfsDevice {
    type Object = Arc<dyn Device>;
    const WHAT: &'static str = "the device";
    fn table() -> &'static HandleTable<Self::Object> {
        static TABLE: HandleTable<Arc<dyn Device>> = HandleTable::new();
        &TABLE
    }
}

/// Fills `data` with `len` bytes from `offset`. Returns 0, or a negative errno.
pub type UbtrfsReadAtFn =
    Option<unsafe extern "C" fn(user: UserPointer, data: *mut c_void, len: usize, offset: u64) -> c_int>;
/// Writes `len` bytes at `offset`. Returns 0, or a negative errno.
pub type UbtrfsWriteAtFn =
    Option<unsafe extern "C" fn(user: UserPointer, data: *const c_void, len: usize, offset: u64) -> c_int>;
/// Makes all completed writes durable. Returns 0, or a negative errno.
pub type UbtrfsFlushFn = Option<unsafe extern "C" fn(user: UserPointer) -> c_int>;
/// Learns that the content of a range is not needed any more. Returns 0, or a negative errno.
pub type UbtrfsDiscardFn = Option<unsafe extern "C" fn(user: UserPointer, offset: u64, len: u64) -> c_int>;
/// Learns that a device is not used any more. It is called once, by any thread, and `user` may be freed in it.
pub type UbtrfsReleaseFn = Option<unsafe extern "C" fn(user: UserPointer)>;

/// The device refuses writes.
pub const UBTRFS_DEVICE_READ_ONLY: u32 = 1;

/// A device of the program. Begin with `UBTRFS_DEVICE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDeviceOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// The size of the device in bytes.
    pub size_bytes: u64,
    /// `UBTRFS_DEVICE_...`, or 0.
    pub flags: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// The name in messages; or null.
    pub name: Text,
    /// The first argument of the functions.
    pub user: UserPointer,
    /// Reads bytes. A range is always inside of the device.
    pub read_at: UbtrfsReadAtFn,
    /// Writes bytes; may be null for a device that refuses writes.
    pub write_at: UbtrfsWriteAtFn,
    /// Makes writes durable; may be null for a device that refuses writes.
    pub flush: UbtrfsFlushFn,
    /// Discards a range; or null.
    pub discard: UbtrfsDiscardFn,
    /// Releases `user`; or null.
    pub release: UbtrfsReleaseFn,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers, also of functions, which
// may be null.
unsafe impl GrowingStruct for UbtrfsDeviceOptions {
    const NAME: &'static str = "ubtrfs_device_options";
}

/// Makes a device of functions of the program. Its `release` is called when the handle is closed, and the filesystems on
/// the device, their files and directories are closed, too. If this function fails, `release` is not called.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_new(
    options: Given<UbtrfsDeviceOptions>,
    device: ResultPlace<Handle<UbtrfsDevice>>,
    error: ErrorPlace,
) -> c_int {
    made(device, error, || {
        let given = options.read()?;
        check_flags(given.flags, UBTRFS_DEVICE_READ_ONLY, "the flags of ubtrfs_device_options")?;
        Ok(Arc::new(DeviceOfProgram::new(&given)?))
    })
}

/// Makes a device in memory. `size` is in bytes. Memory is allocated as the device is written to.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_in_memory(
    size: u64,
    device: ResultPlace<Handle<UbtrfsDevice>>,
    error: ErrorPlace,
) -> c_int {
    made(device, error, || Ok(Arc::new(MemoryDevice::new(size))))
}

/// Opens an image file or a block device as a device. `flags` is `UBTRFS_DEVICE_READ_ONLY` or 0.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_open(
    path: Text,
    flags: u32,
    device: ResultPlace<Handle<UbtrfsDevice>>,
    error: ErrorPlace,
) -> c_int {
    made(device, error, || {
        check_flags(flags, UBTRFS_DEVICE_READ_ONLY, "flags")?;
        let access = if flags & UBTRFS_DEVICE_READ_ONLY != 0 { Access::ReadOnly } else { Access::ReadWrite };
        file_device("open", path.path("path")?, |path| FileDevice::open(path, access))
    })
}

/// Makes a new, sparse image file of `size` bytes, and opens it as a device.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_create(
    path: Text,
    size: u64,
    device: ResultPlace<Handle<UbtrfsDevice>>,
    error: ErrorPlace,
) -> c_int {
    made(device, error, || file_device("make", path.path("path")?, |path| FileDevice::create(path, size, true)))
}

/// Returns the size of a device in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_size(device: Handle<UbtrfsDevice>, size: ResultPlace<u64>, error: ErrorPlace) -> c_int {
    answer(error, || {
        size.needed("size")?;
        size.set(device.get()?.len_bytes());
        Ok(())
    })
}

/// Closes the handle of a device. Filesystems that use the device keep it open.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_device_close(device: Handle<UbtrfsDevice>, error: ErrorPlace) -> c_int {
    answer(error, || device.take().map(drop))
}

/// The devices of a list.
pub(crate) fn devices_of(devices: HandleList<UbtrfsDevice>, nr_devices: usize) -> CallResult<Vec<Arc<dyn Device>>> {
    Ok(devices.objects(nr_devices, "devices")?.iter().map(|device| Arc::clone(&**device)).collect())
}

/// Opens an image file or a block device for an operation.
pub(crate) fn file_device(
    operation: &'static str,
    path: &Path,
    open: impl FnOnce(&Path) -> Result<FileDevice, OpenError>,
) -> CallResult<Arc<dyn Device>> {
    let device = open(path).map_err(|cause| ubtrfs::Error::of_device(operation, path, cause))?;
    Ok(Arc::new(device))
}

fn made(
    place: ResultPlace<Handle<UbtrfsDevice>>,
    error: ErrorPlace,
    make: impl FnOnce() -> CallResult<Arc<dyn Device>>,
) -> c_int {
    answer(error, || {
        place.set(Handle::NULL);
        place.needed("the place for the device")?;
        place.set(Handle::add(make()?)?);
        Ok(())
    })
}
