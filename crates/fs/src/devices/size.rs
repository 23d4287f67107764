//! The sizes of devices, and discarding their free space.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::DevId;
use ubtrfs_transaction::Job;

use crate::Fs;
use crate::error::{Error, Result};
use crate::watched_job::watched;

/// The resizes that run or wait.
#[derive(Debug, Default)]
pub(crate) struct ResizeJobs {
    jobs: Mutex<Vec<Arc<Job>>>,
    /// Notified when a resize ends.
    ended: Condvar,
}

/// A resize that ends when this value is dropped.
struct Resize<'r> {
    resizes: &'r ResizeJobs,
    job: Arc<Job>,
}

impl ResizeJobs {
    fn begin(&self) -> Resize<'_> {
        let job = Arc::new(Job::new());
        self.jobs.lock().push(Arc::clone(&job));
        Resize { resizes: self, job }
    }

    /// Cancels the resizes and waits for their end. Returns false if there is none.
    fn cancel(&self) -> bool {
        let mut jobs = self.jobs.lock();
        let cancelled: Vec<Arc<Job>> = jobs.clone();
        cancelled.iter().for_each(|job| job.cancel());
        while cancelled.iter().any(|cancelled| jobs.iter().any(|job| Arc::ptr_eq(job, cancelled))) {
            self.ended.wait(&mut jobs);
        }
        !cancelled.is_empty()
    }
}

impl Drop for Resize<'_> {
    fn drop(&mut self) {
        self.resizes.jobs.lock().retain(|job| !Arc::ptr_eq(job, &self.job));
        self.resizes.ended.notify_all();
    }
}

impl Fs {
    /// The size of the filesystem on a device, and the size of the device itself, both in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the filesystem has no device with this id, or if the device's size cannot be read.
    pub fn device_size(&self, devid: DevId) -> Result<(u64, u64)> {
        Ok(self.engine.device_size(devid)?)
    }

    /// The smallest size to which a device can be shrunk by moving whole block groups. Smaller sizes may work too,
    /// because [`Self::resize_device`] also moves extents into the free space of other block groups.
    pub fn min_device_size(&self, devid: DevId) -> Result<u64> {
        Ok(self.engine.min_device_size(devid)?)
    }

    /// Discards free space on the devices: free ranges of at least `min_bytes` in this range of logical addresses, and
    /// all space outside of block groups. Returns the bytes discarded on the devices. `job` counts the bytes examined.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::trim`].
    pub fn trim(&self, range: &Range<u64>, min_bytes: u64, job: &Job) -> Result<u64> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.trim(range, min_bytes, job)?)
    }

    /// Sets the size of the filesystem on a device, in bytes. Shrinking moves everything past the new end to places
    /// below the new end. If extents must get other logical addresses for this, the call first waits until no send
    /// runs. `job` counts the bytes that move. The new size is durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::resize_device`]. After an error, the size is unchanged, but chunks and
    /// extents that were moved stay in their new places.
    pub fn resize_device(&self, devid: DevId, len_bytes: u64, job: &Job) -> Result<()> {
        self.context.check_mounted_writable()?;
        let resize = self.resizes.begin();
        Ok(watched(&resize.job, job, || self.engine.resize_device(devid, len_bytes, &resize.job))?)
    }

    /// Cancels all resizes that run or wait, and returns after they have ended.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if there is none.
    pub fn cancel_resize(&self) -> Result<()> {
        if self.resizes.cancel() { Ok(()) } else { Err(Error::NotRunning("no resize is running")) }
    }
}
