//! [`DeviceJobs`]: long work on devices that runs or waits, so that other callers can see and cancel it.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ubtrfs_transaction::Job;

use crate::error::Result;

/// The jobs of one kind that run or wait, and what is known about each.
#[derive(Debug)]
pub(crate) struct DeviceJobs<T> {
    running: Mutex<Vec<Arc<DeviceJob<T>>>>,
    /// Notified when a job ends.
    ended: Condvar,
}

/// A job, and what is known about it.
#[derive(Debug)]
pub(crate) struct DeviceJob<T> {
    pub(crate) job: Job,
    pub(crate) about: T,
}

/// A job that ends when this value is dropped.
pub(crate) struct ActiveJob<J, T>
where
    J: std::ops::Deref<Target = DeviceJobs<T>>,
{
    jobs: J,
    own: Arc<DeviceJob<T>>,
}

impl<T> Default for DeviceJobs<T> {
    fn default() -> Self {
        Self { running: Mutex::default(), ended: Condvar::default() }
    }
}

impl<T> DeviceJobs<T> {
    pub(crate) fn begin(&self, about: T) -> ActiveJob<&Self, T> {
        ActiveJob { jobs: self, own: add(&mut self.running.lock(), about) }
    }

    /// Begins a job of a thread of its own.
    pub(crate) fn begin_shared(self: &Arc<Self>, about: T) -> ActiveJob<Arc<Self>, T> {
        ActiveJob { jobs: Arc::clone(self), own: add(&mut self.running.lock(), about) }
    }

    /// Begins a job if `check` allows it for each of the other jobs.
    pub(crate) fn begin_beside(&self, about: T, check: impl Fn(&T) -> Result<()>) -> Result<ActiveJob<&Self, T>> {
        let mut running = self.running.lock();
        running.iter().try_for_each(|other| check(&other.about))?;
        Ok(ActiveJob { jobs: self, own: add(&mut running, about) })
    }

    /// The jobs, the first one first.
    pub(crate) fn running(&self) -> Vec<Arc<DeviceJob<T>>> {
        self.running.lock().clone()
    }

    /// Cancels the jobs and waits for their end. Returns false if there is no job.
    pub(crate) fn cancel(&self) -> bool {
        let mut running = self.running.lock();
        let cancelled = running.clone();
        cancelled.iter().for_each(|cancelled| cancelled.job.cancel());
        while cancelled.iter().any(|cancelled| running.iter().any(|other| Arc::ptr_eq(other, cancelled))) {
            self.ended.wait(&mut running);
        }
        !cancelled.is_empty()
    }
}

fn add<T>(running: &mut Vec<Arc<DeviceJob<T>>>, about: T) -> Arc<DeviceJob<T>> {
    let own = Arc::new(DeviceJob { job: Job::new(), about });
    running.push(Arc::clone(&own));
    own
}

impl<J, T> std::ops::Deref for ActiveJob<J, T>
where
    J: std::ops::Deref<Target = DeviceJobs<T>>,
{
    type Target = DeviceJob<T>;

    fn deref(&self) -> &DeviceJob<T> {
        &self.own
    }
}

impl<J, T> Drop for ActiveJob<J, T>
where
    J: std::ops::Deref<Target = DeviceJobs<T>>,
{
    fn drop(&mut self) {
        self.jobs.running.lock().retain(|job| !Arc::ptr_eq(job, &self.own));
        self.jobs.ended.notify_all();
    }
}
