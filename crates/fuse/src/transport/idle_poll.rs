//! Keeps a processor awake while requests follow each other closely.
//!
//! Client and server take turns. Linux runs a waking thread on an idle processor if there is one. In a virtual machine,
//! an idle processor is halted, and waking it can take ten times as long as the request. So a thread of the lowest
//! priority spins on an otherwise idle processor, and client and server stay on their processors.
//!
//! - P1. Polling costs nothing while few requests arrive: the thread starts to spin after [`BURST`] requests, and stops
//!   after [`QUIET`] without a request.
//! - P2. The spinning thread yields to other threads: if they kept it from running for [`CROWDED`], it sleeps for
//!   [`REST`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// State shared by the spinning thread and the threads that take requests.
#[derive(Debug, Default)]
pub(super) struct IdlePoll {
    nr_requests: AtomicU64,
    /// Whether the spinning thread is parked until a burst of requests.
    asleep: AtomicBool,
    stopped: AtomicBool,
    /// The spinning thread. Set by the thread that calls [`IdlePoll::stop`], so that `stop` always finds a thread to
    /// wake.
    thread: OnceLock<Thread>,
}

/// The reason why the thread stopped spinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Quiet,
    Crowded,
    Stopped,
}

impl IdlePoll {
    /// Counts a request.
    pub(super) fn note_request(&self) {
        let Some(thread) = self.thread.get() else { return };
        let nr = self.nr_requests.fetch_add(1, Ordering::Relaxed);
        if nr.is_multiple_of(BURST) && self.asleep.load(Ordering::Relaxed) {
            thread.unpark();
        }
    }

    /// Remembers the thread that runs [`IdlePoll::run`]. Must be called by the thread that calls [`IdlePoll::stop`].
    pub(super) fn started(&self, thread: &Thread) {
        let _ = self.thread.set(thread.clone());
    }

    /// Ends [`IdlePoll::run`].
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Keeps a processor awake until [`IdlePoll::stop`]. Only one thread may run this function.
    pub(super) fn run(&self) {
        // On Linux, nice sets the priority of the calling thread alone. Lowering the priority is always allowed.
        if let Err(errno) = rustix::process::nice(LOWEST) {
            tracing::debug!("no processor is kept awake: {errno}");
            return;
        }
        loop {
            self.wait_for_burst();
            match self.turn() {
                Ended::Quiet => {}
                // Park instead of sleeping, so that `stop` can wake this thread: whoever closes the connection waits
                // until this thread has ended.
                Ended::Crowded => std::thread::park_timeout(REST),
                Ended::Stopped => return,
            }
        }
    }

    fn wait_for_burst(&self) {
        let before = self.nr_requests.load(Ordering::Relaxed);
        self.asleep.store(true, Ordering::Relaxed);
        while self.nr_requests.load(Ordering::Relaxed) < before + BURST && !self.stopped.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.asleep.store(false, Ordering::Relaxed);
    }

    fn turn(&self) -> Ended {
        let mut nr_seen = self.nr_requests.load(Ordering::Relaxed);
        let mut last_look = Instant::now();
        let mut last_request = last_look;
        loop {
            (0..SPINS).for_each(|_| std::hint::spin_loop());
            let now = Instant::now();
            let nr = self.nr_requests.load(Ordering::Relaxed);
            if nr != nr_seen {
                (nr_seen, last_request) = (nr, now);
            }
            if self.stopped.load(Ordering::Acquire) {
                return Ended::Stopped;
            } else if now - last_look > CROWDED {
                return Ended::Crowded;
            } else if now - last_request > QUIET {
                return Ended::Quiet;
            }
            last_look = now;
        }
    }
}

const LOWEST: i32 = 19;
const BURST: u64 = 16;
/// Longer than one request and the client's work until the next one.
const QUIET: Duration = Duration::from_micros(500);
/// About one time slice of another thread.
const CROWDED: Duration = Duration::from_millis(3);
const REST: Duration = Duration::from_millis(100);
/// Spins between two checks of the clock: a few microseconds.
const SPINS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_for_a_burst_turns_until_it_is_quiet_and_ends() {
        let poll = IdlePoll::default();
        poll.note_request();
        assert_eq!(poll.nr_requests.load(Ordering::Relaxed), 0, "nobody is there to hear it");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                poll.wait_for_burst();
                poll.turn()
            });
            poll.started(waits.thread());
            while !poll.asleep.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            (0..BURST - 1).for_each(|_| poll.note_request());
            assert!(!waits.is_finished() && poll.asleep.load(Ordering::Relaxed), "that is no burst");
            // Every `BURST`th request wakes the thread.
            (0..BURST).for_each(|_| poll.note_request());
            assert_ne!(waits.join().unwrap(), Ended::Stopped);
        });
        poll.stop();
        poll.wait_for_burst();
        assert_eq!(poll.turn(), Ended::Stopped);
    }
}
