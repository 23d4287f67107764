//! [`Interrupts`]: cancels a long ioctl when its process gets a signal, and all ioctls when the mount ends.
//!
//! A process that waits for an answer stays blocked until the answer arrives, even if the process is killed. If the
//! process gets a signal, the kernel sends INTERRUPT with the number of the request, once for each request.
//!
//! As on Linux, most ioctls end only by a signal that kills the process, and so Ctrl-Z or a handled signal does not end
//! a balance ([`EndsBy`]). INTERRUPT does not tell which signal arrived, so a thread watches the process from the
//! INTERRUPT on: in /proc, a thread that is being killed has a pending SIGKILL, whatever signal kills it, unless that
//! signal dumps core.
//!
//! - N1. An INTERRUPT can overtake its request, because different threads handle them. The request numbers in early
//!   INTERRUPTs are kept, at most [`EARLY_MAX`] of them. Each cancellable request looks for its number among them when
//!   it starts.
//! - N2. No ioctl outlives the connection to the kernel by more than one step of the ioctl's job: no process would get
//!   the answer, and the end of the mount waits for the ioctl.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use ubtrfs_transaction::Job;

use crate::caller::CallerGroups;

/// The signals that end an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndsBy {
    /// Signals that kill the process.
    Death,
    /// All signals.
    AnySignal,
}

/// The ioctls that run, by the numbers of their requests.
#[derive(Clone, Debug)]
pub(crate) struct Interrupts {
    groups: CallerGroups,
    shared: Arc<Mutex<InterruptState>>,
}

#[derive(Debug, Default)]
struct InterruptState {
    running: Vec<RunningRequest>,
    /// The request numbers of INTERRUPTs that arrived while no such request was running (N1).
    early: VecDeque<u64>,
    has_ended: bool,
}

#[derive(Clone, Debug)]
struct RunningRequest {
    unique: u64,
    pid: u32,
    ends_by: EndsBy,
    job: Arc<Job>,
}

/// A running ioctl, known to [`Interrupts`] until this value is dropped.
#[derive(Debug)]
pub(crate) struct Interruptible {
    interrupts: Interrupts,
    unique: u64,
    pub(crate) job: Arc<Job>,
}

impl Interrupts {
    pub(crate) fn new(groups: CallerGroups) -> Self {
        Self { groups, shared: Arc::default() }
    }

    /// Notes that the request `unique` of the thread `pid` runs. Its job is cancelled already if the mount has ended.
    pub(crate) fn start(&self, unique: u64, pid: u32, ends_by: EndsBy) -> Interruptible {
        let job = Arc::new(Job::new());
        let mut shared = self.shared.lock();
        shared.running.push(RunningRequest { unique, pid, ends_by, job: Arc::clone(&job) });
        let is_early = shared.early.iter().position(|early| *early == unique);
        if let Some(at) = is_early {
            shared.early.remove(at);
        }
        if shared.has_ended {
            job.cancel();
        }
        drop(shared);
        if is_early.is_some() {
            self.interrupt(unique);
        }
        Interruptible { interrupts: self.clone(), unique, job }
    }

    /// Handles an INTERRUPT of the request `unique`.
    pub(crate) fn interrupt(&self, unique: u64) {
        let running = {
            let mut shared = self.shared.lock();
            let found = shared.running.iter().find(|running| running.unique == unique).cloned();
            if found.is_none() {
                shared.early.truncate(EARLY_MAX - 1);
                shared.early.push_front(unique);
            }
            found
        };
        let Some(running) = running else { return };
        if running.ends_by == EndsBy::AnySignal || self.is_dying(running.pid) {
            return running.job.cancel();
        }
        let (watcher, job) = (self.clone(), Arc::clone(&running.job));
        let thread = thread::Builder::new().name("interrupt".to_owned());
        if thread.spawn(move || watcher.cancel_at_death(&running)).is_err() {
            // No thread can be started to watch the process. So cancel the job now: otherwise the process could never
            // end.
            job.cancel();
        }
    }

    /// Cancels a job when its process is being killed; returns at the latest when the job has ended.
    fn cancel_at_death(&self, watched: &RunningRequest) {
        while self.shared.lock().running.iter().any(|running| running.unique == watched.unique) {
            if self.is_dying(watched.pid) {
                return watched.job.cancel();
            }
            thread::sleep(WATCH_INTERVAL);
        }
    }

    /// Whether a thread is being killed. A thread that /proc does not show (one of another pid namespace) counts as
    /// dying, because its ioctl could otherwise never be interrupted.
    fn is_dying(&self, pid: u32) -> bool {
        self.groups.is_dying(pid).unwrap_or(true)
    }

    /// Cancels all ioctls that run.
    pub(crate) fn cancel_all(&self) {
        self.shared.lock().running.iter().for_each(|running| running.job.cancel());
    }

    /// Cancels all ioctls that run and all that start later (N2).
    pub(crate) fn end(&self) {
        self.shared.lock().has_ended = true;
        self.cancel_all();
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        self.interrupts.shared.lock().running.retain(|running| running.unique != self.unique);
    }
}

/// The largest number of early INTERRUPTs that are kept. Most early INTERRUPTs are for requests that cannot be
/// cancelled, so no request ever removes their numbers.
const EARLY_MAX: usize = 64;
/// The interval at which an interrupted process is watched.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn interrupts() -> Interrupts {
        Interrupts::new(CallerGroups::default())
    }

    #[test]
    fn an_interrupt_that_overtakes_its_request_cancels_it() {
        let interrupts = interrupts();
        interrupts.interrupt(8);
        let (other, own) = (interrupts.start(6, 0, EndsBy::AnySignal), interrupts.start(8, 0, EndsBy::AnySignal));
        assert!(!other.job.progress().is_cancelled && own.job.progress().is_cancelled);
        drop(own);
        for unique in (10..).step_by(2).take(1000) {
            interrupts.interrupt(unique);
        }
        let shared = interrupts.shared.lock();
        assert_eq!((shared.early.len(), shared.early[0], shared.running.len()), (EARLY_MAX, 2008, 1));
    }

    #[test]
    fn a_signal_that_does_not_kill_ends_only_some_requests() {
        let interrupts = interrupts();
        let own = std::process::id();
        let (balance, wait) = (interrupts.start(2, own, EndsBy::Death), interrupts.start(4, own, EndsBy::AnySignal));
        interrupts.interrupt(2);
        interrupts.interrupt(4);
        std::thread::sleep(WATCH_INTERVAL * 3);
        assert!(!balance.job.progress().is_cancelled && wait.job.progress().is_cancelled);
        interrupts.end();
        assert!(balance.job.progress().is_cancelled);
        assert!(interrupts.start(6, own, EndsBy::Death).job.progress().is_cancelled, "N2");
    }
}
