//! Jobs: progress, pausing, cancelling

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use ubtrfs::{Job, JobProgress};

use crate::border::{ErrorPlace, ResultPlace};
use crate::failure::{CallResult, answer, status};
use crate::handles::{Handle, HandleKind, HandleTable};

/// A job: shows how far a long operation is, pauses and cancels it, from another thread. Use a job for one operation.
#[derive(Debug)]
pub enum UbtrfsJob {}

impl HandleKind for UbtrfsJob {
    type Object = Job;
    const WHAT: &'static str = "the job";
    fn table() -> &'static HandleTable<Job> {
        static TABLE: HandleTable<Job> = HandleTable::new();
        &TABLE
    }
}

/// The progress of a job.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsProgress {
    /// How much is done. The unit is the byte unless the operation says another.
    pub done: u64,
    /// All there is to do, as far as it is known; otherwise 0.
    pub total: u64,
    /// 1 if the job was cancelled, otherwise 0.
    pub is_cancelled: u32,
    /// 1 if the job is paused, otherwise 0.
    pub is_paused: u32,
}

/// Makes a job. Close it with `ubtrfs_job_close`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_new(job: ResultPlace<Handle<UbtrfsJob>>, error: ErrorPlace) -> c_int {
    answer(error, || {
        job.set(Handle::NULL);
        job.needed("the place for the job")?;
        job.set(Handle::add(Job::new())?);
        Ok(())
    })
}

/// Returns how far the operation of a job is.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_progress(
    job: Handle<UbtrfsJob>,
    progress: ResultPlace<UbtrfsProgress>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        progress.needed("progress")?;
        progress.set(progress_of(&job.get()?.progress()));
        Ok(())
    })
}

/// Waits until a job changes, at most for some milliseconds, and returns how far its operation is. It also returns early
/// without a change.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_wait(
    job: Handle<UbtrfsJob>,
    milliseconds: u32,
    progress: ResultPlace<UbtrfsProgress>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        progress.needed("progress")?;
        let patience = Duration::from_millis(milliseconds.into());
        progress.set(progress_of(&job.get()?.wait_for_change(patience)));
        Ok(())
    })
}

fn progress_of(found: &JobProgress) -> UbtrfsProgress {
    UbtrfsProgress {
        done: found.done,
        total: found.total,
        is_cancelled: found.is_cancelled.into(),
        is_paused: found.is_paused.into(),
    }
}

/// Ends the operation of a job soon: it fails with ECANCELED, except for a scrub. A signal handler must not call this.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_cancel(job: Handle<UbtrfsJob>) -> c_int {
    status(|| {
        job.get()?.cancel();
        Ok(())
    })
}

/// Pauses the operation of a job, or lets it continue if `pause` is 0. Balances, scrubs and changes of devices do not pause
/// by this; `ubtrfs_balance_pause` pauses a balance.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_pause(job: Handle<UbtrfsJob>, pause: c_int) -> c_int {
    status(|| {
        let job = job.get()?;
        if pause != 0 {
            job.pause()
        } else {
            job.resume()
        }
        Ok(())
    })
}

/// Closes a job. An operation that uses it goes on, also if it was paused.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_job_close(job: Handle<UbtrfsJob>, error: ErrorPlace) -> c_int {
    answer(error, || job.take().map(|job| job.resume()))
}

/// The job of a call, or a new one.
pub(crate) fn job_of(job: Handle<UbtrfsJob>) -> CallResult<Arc<Job>> {
    if job.is_null() { Ok(Arc::default()) } else { job.get() }
}
