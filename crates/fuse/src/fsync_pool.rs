//! Threads that wait for devices in place of those that answer requests: fsyncs that come at once share one write of the
//! tree log, which they can only do if they are all under way.
//!
//! - I1. An fsync that comes alone runs in the thread that took the request: nobody needs to be woken.
//! - I2. Each job runs once, in some thread; where no thread can be had, in the caller's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs on threads of its own, made when they are needed.
#[derive(Clone, Default)]
pub(crate) struct FsyncPool {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
    nr_running: AtomicUsize,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    nr_threads: usize,
    nr_idle: usize,
}

impl std::fmt::Debug for FsyncPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FsyncPool").finish_non_exhaustive()
    }
}

impl FsyncPool {
    /// Runs the job here if it is alone (I1), else on another thread.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let is_alone = shared.nr_running.fetch_add(1, Ordering::AcqRel) == 0;
        let counted = move || {
            let _running = Running(Arc::clone(&shared));
            job();
        };
        if is_alone {
            return counted();
        }
        let mut state = self.shared.state.lock();
        state.jobs.push_back(Box::new(counted));
        if state.nr_idle >= state.jobs.len() {
            drop(state);
            self.shared.more.notify_one();
            return;
        }
        if state.nr_threads < MAX_THREADS {
            let shared = Arc::clone(&self.shared);
            if std::thread::Builder::new().name("fsync".into()).spawn(move || work(&shared)).is_ok() {
                state.nr_threads += 1;
                return;
            }
        }
        // Threads that are busy take the job when they are done; without any, it runs here (I2).
        if state.nr_threads == 0
            && let Some(job) = state.jobs.pop_back()
        {
            drop(state);
            job();
        }
    }
}

struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.nr_running.fetch_sub(1, Ordering::AcqRel);
    }
}

fn work(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = shared.state.lock();
            continue;
        }
        state.nr_idle += 1;
        let timed_out = shared.more.wait_for(&mut state, IDLE).timed_out();
        state.nr_idle -= 1;
        if timed_out && state.jobs.is_empty() {
            state.nr_threads -= 1;
            return;
        }
    }
}

/// As many fsyncs are under way at once.
const MAX_THREADS: usize = 32;
/// A thread without a job ends after this.
const IDLE: Duration = Duration::from_secs(5);
