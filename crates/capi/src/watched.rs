//! Devices that are read for a job: its progress, and its end.
//!
//! The checker of crate `ubtrfs` cannot be cancelled. So a cancelled job makes all further reads fail. The checker takes
//! them for failures of the device, and ends soon, because it waits for no device any more. What it finds then is not told.

use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use ubtrfs::{Device, Job};

/// A device that is only read. The job counts the bytes.
#[derive(Debug)]
pub(crate) struct WatchedDevice {
    device: Arc<dyn Device>,
    job: Arc<Job>,
    was_refused: Arc<AtomicBool>,
}

impl WatchedDevice {
    /// Watches the reads of a device. `was_refused` is set when a read is refused, because the job was cancelled.
    pub(crate) fn new(device: Arc<dyn Device>, job: &Arc<Job>, was_refused: &Arc<AtomicBool>) -> Self {
        Self { device, job: Arc::clone(job), was_refused: Arc::clone(was_refused) }
    }

    /// Reads `len` bytes. Waits while the job is paused.
    fn watch(&self, len: usize, read: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.job.check().is_err() {
            self.was_refused.store(true, Ordering::Release);
            return Err(Errno::CANCELED.into());
        }
        read()?;
        self.job.advance(len as u64);
        Ok(())
    }
}

impl Device for WatchedDevice {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.watch(buf.len(), || self.device.read_at(offset, buf))
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let len = bufs.iter().map(|buf| buf.len()).sum();
        self.watch(len, || self.device.read_vectored_at(offset, bufs))
    }

    fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        Err(Errno::ROFS.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Err(Errno::ROFS.into())
    }

    fn can_discard(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn location(&self) -> String {
        self.device.location()
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn is_found(&self) -> bool {
        self.device.is_found()
    }

    fn has_io_uring(&self) -> bool {
        self.device.has_io_uring()
    }
}
