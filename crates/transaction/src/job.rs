//! [`Job`]: the progress of a long operation, and requests to pause or cancel it.
//!
//! Balance, rescan, scrub, send and similar operations take a job from their caller. The working thread advances the
//! job and checks it between two steps. Each step takes less than a second, so a request to pause or cancel soon takes
//! effect.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::{Error, Result};

/// A long operation as other threads see it.
#[derive(Debug, Default)]
pub struct Job {
    progress: Mutex<JobProgress>,
    changed: Condvar,
}

/// The progress of a [`Job`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Units done so far. Each operation documents its unit.
    pub done: u64,
    /// All units known so far; the total grows while the operation finds more.
    pub total: u64,
    /// The current step as text for users; may be empty.
    pub step: String,
    /// Whether the operation is paused.
    pub is_paused: bool,
    /// Whether cancellation was requested.
    pub is_cancelled: bool,
}

impl Job {
    /// Makes a job that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// The current progress.
    pub fn progress(&self) -> JobProgress {
        self.progress.lock().clone()
    }

    /// Waits until the job changes, at most for `patience`, and returns its progress.
    pub fn wait_for_change(&self, patience: Duration) -> JobProgress {
        let mut progress = self.progress.lock();
        self.changed.wait_for(&mut progress, patience);
        progress.clone()
    }

    /// Adds units to the total.
    pub fn add_total(&self, units: u64) {
        self.change(|progress| progress.total = progress.total.saturating_add(units));
    }

    /// Adds units that are done.
    pub fn advance(&self, units: u64) {
        self.change(|progress| progress.done = progress.done.saturating_add(units));
    }

    /// Sets the text of the current step.
    pub fn set_step(&self, step: impl Into<String>) {
        let step = step.into();
        self.change(|progress| progress.step = step);
    }

    /// Makes the next [`Job::check`] fail.
    pub fn cancel(&self) {
        self.change(|progress| progress.is_cancelled = true);
    }

    /// Makes the next [`Job::check`] wait.
    pub fn pause(&self) {
        self.change(|progress| progress.is_paused = true);
    }

    /// Resumes a paused operation.
    pub fn resume(&self) {
        self.change(|progress| progress.is_paused = false);
    }

    /// Waits while the job is paused. The working thread calls `check` between two steps, holding no lock.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`] if the job was cancelled.
    pub fn check(&self) -> Result<()> {
        let mut progress = self.progress.lock();
        while progress.is_paused && !progress.is_cancelled {
            self.changed.wait(&mut progress);
        }
        if progress.is_cancelled { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn change(&self, change: impl FnOnce(&mut JobProgress)) {
        change(&mut self.progress.lock());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paused_work_goes_on_when_resumed_and_ends_when_cancelled() {
        let job = Job::new();
        job.add_total(2);
        job.pause();
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                while job.check().is_ok() {
                    job.advance(1);
                }
            });
            while job.progress().done == 0 {
                job.resume();
            }
            job.pause();
            job.cancel();
            assert!(work.join().is_ok());
        });
        let progress = job.progress();
        assert!(progress.done >= 1 && progress.total == 2 && progress.is_cancelled);
    }
}
