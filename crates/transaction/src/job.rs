//! [`Job`]: the progress of long work, and the requests to pause or stop it.
//!
//! Balance, rescan of quotas, scrub, send and the like take a job from their caller. The thread that works advances it and
//! asks it between two steps, so each step is short: less than a second.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::{Error, Result};

/// Long work as other threads see it.
#[derive(Debug, Default)]
pub struct Job {
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// How far a [`Job`] is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Units done so far. The work says what a unit is.
    pub done: u64,
    /// All units, as far as known; grows while more are found.
    pub total: u64,
    /// The present step, for people; may be empty.
    pub step: String,
    /// Whether the work waits until it is resumed.
    pub is_paused: bool,
    /// Whether the work was asked to stop.
    pub is_cancelled: bool,
}

impl Job {
    /// A job that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// How far the work is.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// Waits until the job changes, at most for `patience`, and returns how far it is.
    pub fn wait_for_change(&self, patience: Duration) -> Progress {
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

    /// Names the present step.
    pub fn set_step(&self, step: impl Into<String>) {
        let step = step.into();
        self.change(|progress| progress.step = step);
    }

    /// Asks the work to stop at its next [`Job::check`].
    pub fn cancel(&self) {
        self.change(|progress| progress.is_cancelled = true);
    }

    /// Asks the work to wait at its next [`Job::check`].
    pub fn pause(&self) {
        self.change(|progress| progress.is_paused = true);
    }

    /// Lets paused work go on.
    pub fn resume(&self) {
        self.change(|progress| progress.is_paused = false);
    }

    /// To be called by the work between two steps, holding no lock: waits while the job is paused.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`] if the work is to stop.
    pub fn check(&self) -> Result<()> {
        let mut progress = self.progress.lock();
        while progress.is_paused && !progress.is_cancelled {
            self.changed.wait(&mut progress);
        }
        if progress.is_cancelled { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
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
