//! The devices that this process uses: no device object belongs to two filesystems, or twice to one.
//!
//! Two filesystems that write on one device destroy each other's data. Image files and block devices are locked, also
//! against other processes. An object of the program has no lock, so objects are compared here by their address.
//!
//! - U1. While a call opens, makes or adds devices, they are claimed. Afterwards the engine tells which devices it uses:
//!   they change as devices are added and removed.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use ubtrfs_device::Device;
use ubtrfs_fs::{Error as FsError, Fs};

/// Everything in this process that uses devices.
static USERS: Mutex<DeviceUsers> = Mutex::new(DeviceUsers { open: Vec::new(), claims: Vec::new() });

struct DeviceUsers {
    open: Vec<Weak<Fs>>,
    claims: Vec<ClaimedDevice>,
}

struct ClaimedDevice {
    address: usize,
    is_written: bool,
}

/// Devices that a running call uses. Its caller keeps them in their places.
pub(crate) struct DeviceClaim {
    addresses: Vec<usize>,
}

fn address(device: &dyn Device) -> usize {
    std::ptr::from_ref(device).cast::<()>().addr()
}

impl DeviceClaim {
    /// Claims devices to write on them, or only to read them. Several readers may have a device.
    ///
    /// Fails with [`FsError::Busy`] if another call or an open filesystem uses one, and with
    /// [`FsError::InvalidArgument`] if one is given twice.
    pub(crate) fn new<'d>(
        devices: impl IntoIterator<Item = &'d dyn Device>,
        is_written: bool,
    ) -> Result<Self, FsError> {
        let devices: Vec<&dyn Device> = devices.into_iter().collect();
        let addresses: Vec<usize> = devices.iter().map(|device| address(*device)).collect();
        let mut sorted = addresses.clone();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(FsError::InvalidArgument("a device is given twice"));
        }
        // Dropped without the lock, because the last handle of a filesystem closes it.
        let open: Vec<Arc<Fs>>;
        let mut users = USERS.lock();
        users.open.retain(|fs| fs.strong_count() > 0);
        open = users.open.iter().filter_map(Weak::upgrade).collect();
        let excludes = |other_writes: bool| is_written || other_writes;
        let is_claimed =
            users.claims.iter().any(|claim| excludes(claim.is_written) && addresses.contains(&claim.address));
        let is_open = || {
            let excluded = |fs: &&Arc<Fs>| excludes(!fs.options().read_only);
            open.iter().filter(excluded).any(|fs| devices.iter().any(|device| fs.uses_device(*device)))
        };
        if is_claimed || is_open() {
            drop(users);
            return Err(FsError::Busy("this program has it open already; close it first"));
        }
        users.claims.extend(addresses.iter().map(|address| ClaimedDevice { address: *address, is_written }));
        drop(users);
        Ok(Self { addresses })
    }

    /// Ends the claim of devices with which a filesystem was opened.
    pub(crate) fn opened(self, fs: &Arc<Fs>) {
        USERS.lock().open.push(Arc::downgrade(fs));
    }
}

impl Drop for DeviceClaim {
    fn drop(&mut self) {
        let mut users = USERS.lock();
        for address in &self.addresses {
            if let Some(at) = users.claims.iter().position(|claim| claim.address == *address) {
                users.claims.swap_remove(at);
            }
        }
    }
}
