//! [`watched`]: lets other threads stop long work that reports to a job of its caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ubtrfs_error::start_helper;
use ubtrfs_transaction::{Job, JobProgress};

/// Runs `work` while a thread forwards progress from `inner` to `job`, and cancellation from `job` to `inner`.
pub(crate) fn watched<T>(inner: &Job, job: &Job, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let is_done = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&is_done);
        let forwards = start_helper(scope, move || {
            let mut told = JobProgress::default();
            while !done.load(Ordering::Acquire) {
                let now = inner.wait_for_change(TICK);
                job.add_total(now.total.saturating_sub(told.total));
                job.advance(now.done.saturating_sub(told.done));
                if now.step != told.step {
                    job.set_step(now.step.clone());
                }
                told = now;
                if job.progress().is_cancelled {
                    inner.cancel();
                }
            }
        });
        if !forwards.is_thread() {
            tracing::warn!("no thread shows how far the work is, and none can cancel the work");
        }
        let result = work();
        is_done.store(true, Ordering::Release);
        // Wake the forwarding thread.
        inner.advance(0);
        result
    })
}

/// The longest time until a cancellation is forwarded.
const TICK: Duration = Duration::from_millis(200);
