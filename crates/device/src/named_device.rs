//! [`NamedDevice`]: a device opened by its name, which is a path or the URL of an export ([`is_url`](crate::is_url)).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::path::Path;

use crate::Device;
use crate::file::{Access, FileDevice};
use crate::loop_watch::TellLoopEvent;
use crate::nbd_device::{NbdDevice, is_url};
use crate::open_error::OpenError;

/// An image file, a block device, or an export of an NBD server.
#[derive(Debug)]
pub enum NamedDevice {
    /// An image file or block device.
    File(FileDevice),
    /// An export of an NBD server.
    Network(Box<NbdDevice>),
}

impl NamedDevice {
    /// Opens a device and locks it, as [`FileDevice::open`] or [`NbdDevice::open`].
    ///
    /// # Errors
    /// The device cannot be opened, or is in use.
    pub fn open(name: &Path, access: Access) -> Result<Self, OpenError> {
        match is_url(name) {
            true => NbdDevice::open(name, access).map(|device| Self::Network(Box::new(device))),
            false => FileDevice::open(name, access).map(Self::File),
        }
    }

    /// Opens a device for reading without a lock, as [`FileDevice::open_beside_writer`].
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn open_beside_writer(name: &Path) -> Result<Self, OpenError> {
        match is_url(name) {
            true => NbdDevice::open_beside_writer(name).map(|device| Self::Network(Box::new(device))),
            false => FileDevice::open_beside_writer(name).map(Self::File),
        }
    }

    /// Works like [`open`](Self::open) for a file that is open, as [`FileDevice::open_found`]. `None` stands for a URL.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_found(found: Option<impl AsFd>, name: &Path, access: Access) -> Result<Self, OpenError> {
        match found {
            Some(found) => FileDevice::open_found(found, name, access).map(Self::File),
            None => Self::open(name, access),
        }
    }

    /// Works like [`open_beside_writer`](Self::open_beside_writer) for a file that is open. `None` stands for a URL.
    ///
    /// # Errors
    /// As [`open_beside_writer`](Self::open_beside_writer).
    pub fn open_found_beside_writer(found: Option<impl AsFd>, name: &Path) -> Result<Self, OpenError> {
        match found {
            Some(found) => FileDevice::open_found_beside_writer(found, name).map(Self::File),
            None => Self::open_beside_writer(name),
        }
    }

    /// Notes that the device was found and not named ([`Device::is_found`]). Exports are always named.
    #[must_use]
    pub fn found(self) -> Self {
        match self {
            Self::File(device) => Self::File(device.found()),
            Self::Network(_) => self,
        }
    }

    /// The name given to open.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(device) => device.path(),
            Self::Network(device) => device.name(),
        }
    }

    /// The image file or block device; `None` for an export.
    pub fn file(&self) -> Option<&FileDevice> {
        match self {
            Self::File(device) => Some(device),
            Self::Network(_) => None,
        }
    }

    /// Whether the device has anything but zeros, if nobody expects other content there: in an image file, and in an export
    /// whose server tells where zeros are. Block devices are not looked at.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn has_content(&self) -> io::Result<bool> {
        match self {
            Self::File(device) if device.is_block_device() => Ok(false),
            Self::File(device) => device.has_content(),
            Self::Network(device) => device.has_content(),
        }
    }

    /// Gives an image file this size. A block device or an export must be large enough.
    ///
    /// # Errors
    /// [`OpenError::TooSmall`]; errors of the file.
    pub fn resize(&mut self, size_bytes: u64) -> Result<(), OpenError> {
        match self {
            Self::File(device) => device.resize(size_bytes),
            Self::Network(device) if size_bytes > device.len_bytes() => Err(OpenError::TooSmall {
                path: device.name().to_owned(),
                len_bytes: device.len_bytes(),
                wanted: size_bytes,
            }),
            Self::Network(_) => Ok(()),
        }
    }

    fn device(&self) -> &dyn Device {
        match self {
            Self::File(device) => device,
            Self::Network(device) => device.as_ref(),
        }
    }
}

impl From<FileDevice> for NamedDevice {
    fn from(device: FileDevice) -> Self {
        Self::File(device)
    }
}

impl Device for NamedDevice {
    fn len_bytes(&self) -> u64 {
        self.device().len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device().read_at(offset, buf)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.device().read_vectored_at(offset, bufs)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.device().write_at(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.device().write_vectored_at(offset, bufs)
    }

    fn write_durable_at(&self, offset: u64, buf: &[u8]) -> Option<io::Result<()>> {
        self.device().write_durable_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        self.device().flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.device().discard(offset, len_bytes)
    }

    fn can_discard(&self) -> bool {
        self.device().can_discard()
    }

    fn describe(&self) -> String {
        self.device().describe()
    }

    fn location(&self) -> String {
        self.device().location()
    }

    fn is_read_only(&self) -> bool {
        self.device().is_read_only()
    }

    fn is_found(&self) -> bool {
        self.device().is_found()
    }

    fn has_io_uring(&self) -> bool {
        self.device().has_io_uring()
    }

    fn grow_to_end(&self) -> io::Result<u64> {
        self.device().grow_to_end()
    }

    fn claim(&self) -> io::Result<()> {
        self.device().claim()
    }

    fn release_claim(&self) {
        self.device().release_claim();
    }

    fn pause_writes(&self) {
        self.device().pause_writes();
    }

    fn resume_writes(&self, permitted: bool) {
        self.device().resume_writes(permitted);
    }

    fn watch_loops(&self, tell: TellLoopEvent) -> io::Result<()> {
        self.device().watch_loops(tell)
    }

    fn check_in_place(&self) -> io::Result<()> {
        self.device().check_in_place()
    }
}
