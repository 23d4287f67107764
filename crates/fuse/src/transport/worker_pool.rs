//! The threads that take requests from one queue, called a worker pool.
//!
//! - C1. While threads step aside to wait, at least one other thread takes requests, as long as threads can be started.
//! - C2. While a thread waits for the kernel, the kernel may have to send requests to the server first. The last thread
//!   of a queue must not wait for the kernel ([`WorkerPlace::aside_for_kernel`]).
//! - C3. When a thread that replaced a waiting thread is no longer needed, it rests; after a while without work, it
//!   ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Counts the threads of one queue, and decides which of them take requests, rest or end.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    base: usize,
    state: Mutex<WorkerCounts>,
    called: Condvar,
    /// Whether there are more threads than needed. The flag is read without a lock after every request.
    is_crowded: AtomicBool,
}

#[derive(Debug)]
struct WorkerCounts {
    /// Threads that take or handle requests, including threads that stepped aside.
    nr_serving: usize,
    nr_aside: usize,
    nr_resting: usize,
    /// Resting threads that were called back and have not woken yet.
    nr_called: usize,
    is_closed: bool,
}

impl WorkerPool {
    /// Makes a worker pool of `base` threads, which the caller starts.
    pub(crate) fn new(base: usize) -> Self {
        let state = WorkerCounts { nr_serving: base, nr_aside: 0, nr_resting: 0, nr_called: 0, is_closed: false };
        Self { base, state: Mutex::new(state), called: Condvar::new(), is_crowded: AtomicBool::new(false) }
    }

    /// Whether this thread takes another request (true) or ends (C3). Must be called after each request. The thread may
    /// rest in this call.
    pub(crate) fn goes_on(&self) -> bool {
        !self.is_crowded.load(Ordering::Relaxed) || self.rest()
    }

    fn rest(&self) -> bool {
        let mut state = self.state.lock();
        if state.is_closed || !self.is_crowded(&state) {
            return true;
        }
        state.nr_serving -= 1;
        state.nr_resting += 1;
        self.is_crowded.store(self.is_crowded(&state), Ordering::Relaxed);
        self.called.wait_while_for(&mut state, |state| state.nr_called == 0 && !state.is_closed, IDLE);
        state.nr_resting -= 1;
        if state.nr_called > 0 {
            state.nr_called -= 1;
            return true;
        }
        false
    }

    /// Wakes all resting threads after the connection is gone.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.called.notify_all();
    }

    fn is_crowded(&self, state: &WorkerCounts) -> bool {
        state.nr_serving - state.nr_aside > self.base
    }

    /// Steps aside. If all other threads have stepped aside too, calls back a resting thread or starts a new thread to
    /// replace this thread. Returns whether a thread is left to take requests.
    fn step_aside(&self, grow: &dyn Fn() -> bool) -> bool {
        let mut state = self.state.lock();
        state.nr_aside += 1;
        if state.nr_aside < state.nr_serving {
            return true;
        }
        if state.nr_resting > state.nr_called {
            state.nr_called += 1;
            self.called.notify_one();
        } else if !grow() {
            return false;
        }
        state.nr_serving += 1;
        true
    }

    fn step_back(&self) {
        let mut state = self.state.lock();
        state.nr_aside -= 1;
        self.is_crowded.store(self.is_crowded(&state), Ordering::Relaxed);
    }
}

/// The thread of a worker pool on which a handler runs.
pub struct WorkerPlace<'a> {
    pub(super) pool: &'a WorkerPool,
    /// Starts another thread of the worker pool.
    pub(super) grow: &'a dyn Fn() -> bool,
    /// Called with true when the thread steps aside and with false when it steps back. While it is aside, the thread
    /// may run on every processor: its work may be long, and threads that it starts inherit its processors.
    pub(super) roam: &'a dyn Fn(bool),
}

impl WorkerPlace<'_> {
    /// Does work that waits for a device, while another thread receives requests.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.pool.step_aside(self.grow);
        let _back = StepBack(self);
        (self.roam)(true);
        work()
    }

    /// Does work that waits for the kernel, which may first have to send requests. Does nothing and returns `None` if
    /// no thread would be left to receive these requests (C2).
    pub fn aside_for_kernel<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let is_replaced = self.pool.step_aside(self.grow);
        let _back = StepBack(self);
        (self.roam)(true);
        is_replaced.then(work)
    }
}

impl std::fmt::Debug for WorkerPlace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerPlace").field("pool", self.pool).finish_non_exhaustive()
    }
}

struct StepBack<'a, 'p>(&'a WorkerPlace<'p>);

impl Drop for StepBack<'_, '_> {
    fn drop(&mut self) {
        (self.0.roam)(false);
        self.0.pool.step_back();
    }
}

/// How long a thread rests without work before it ends.
const IDLE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn one_worker_always_takes_requests() {
        let pool = WorkerPool::new(2);
        let started = Cell::new(0);
        let grow = || {
            started.set(started.get() + 1);
            started.get() <= 1
        };
        let place = WorkerPlace { pool: &pool, grow: &grow, roam: &|_| {} };
        let nested = place.aside_for_kernel(|| {
            assert_eq!(started.get(), 0, "the other one is there");
            place.aside_for_kernel(|| {
                assert_eq!(started.get(), 1, "one was started");
                place.aside_for_kernel(|| unreachable!("C2"))
            })
        });
        assert_eq!(nested, Some(Some(None)));
        assert_eq!(started.get(), 2);
        assert_eq!(pool.state.lock().nr_aside, 0);
        assert!(place.aside(|| true), "what waits for a device only is always done");
    }

    #[test]
    fn a_thread_runs_everywhere_only_while_it_is_aside() {
        let (pool, places) = (WorkerPool::new(2), std::cell::RefCell::new(Vec::new()));
        let roam = |is_aside| places.borrow_mut().push(is_aside);
        let place = WorkerPlace { pool: &pool, grow: &|| true, roam: &roam };
        place.aside(|| assert_eq!(*places.borrow(), [true]));
        assert_eq!(*places.borrow(), [true, false]);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| place.aside(|| panic!("in a test"))));
        assert!(panicked.is_err());
        assert_eq!(*places.borrow(), [true, false, true, false]);
    }

    #[test]
    fn surplus_workers_rest_until_they_are_needed() {
        let pool = WorkerPool::new(1);
        let place = WorkerPlace { pool: &pool, grow: &|| true, roam: &|_| {} };
        place.aside(|| assert!(pool.goes_on(), "two serve, one of them aside"));
        std::thread::scope(|scope| {
            let resting = scope.spawn(|| pool.goes_on());
            while pool.state.lock().nr_resting == 0 {
                std::thread::yield_now();
            }
            let no_thread = WorkerPlace { pool: &pool, grow: &|| unreachable!("someone rests"), roam: &|_| {} };
            no_thread.aside(|| assert!(resting.join().unwrap(), "C1: called back"));
            let closing = scope.spawn(|| pool.goes_on());
            while pool.state.lock().nr_resting == 0 {
                std::thread::yield_now();
            }
            pool.close();
            assert!(!closing.join().unwrap());
        });
    }
}
