//! Keeps a processor awake while requests come one after the other.
//!
//! Client and server take turns, and Linux lets a thread that wakes run on an idle processor where there is one. In a virtual
//! machine that processor was halted: to wake it can take ten times as long as the request. So a thread of the lowest
//! priority turns round and round on a processor that nobody else wants, and client and server stay where they are.
//!
//! - P1. It costs nothing while little is going on: it turns as long as requests follow each other within [`QUIET`], and
//!   begins when there were [`BURST`] of them.
//! - P2. It gives way: where others kept it from running for [`CROWDED`], it rests for [`REST`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// The thread's side and that of those who take requests.
#[derive(Debug, Default)]
pub(super) struct IdlePoll {
    nr_requests: AtomicU64,
    /// The thread waits for a burst of requests.
    asleep: AtomicBool,
    stopped: AtomicBool,
    /// Known to who stops it, so that no wake-up is lost.
    thread: OnceLock<Thread>,
}

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Quiet,
    Crowded,
    Stopped,
}

impl IdlePoll {
    /// A request came.
    pub(super) fn note_request(&self) {
        let Some(thread) = self.thread.get() else { return };
        let nr = self.nr_requests.fetch_add(1, Ordering::Relaxed);
        if nr.is_multiple_of(BURST) && self.asleep.load(Ordering::Relaxed) {
            thread.unpark();
        }
    }

    /// This thread was started for [`IdlePoll::run`]. To be called by who calls [`IdlePoll::stop`].
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

    /// Keeps a processor awake until [`IdlePoll::stop`]. For one thread.
    pub(super) fn run(&self) {
        // The thread's own on Linux. Lower is always allowed.
        if let Err(errno) = rustix::process::nice(LOWEST) {
            tracing::debug!("no processor is kept awake: {errno}");
            return;
        }
        loop {
            self.wait_for_burst();
            match self.turn() {
                Ended::Quiet => {}
                // Not a sleep: who stops it waits for its end.
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
/// Longer than a request and what its client does until the next one.
const QUIET: Duration = Duration::from_micros(500);
/// A time slice of others.
const CROWDED: Duration = Duration::from_millis(3);
const REST: Duration = Duration::from_millis(100);
/// Turns between two looks: some microseconds.
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
            // One of so many is the one that wakes it.
            (0..BURST).for_each(|_| poll.note_request());
            assert_ne!(waits.join().unwrap(), Ended::Stopped);
        });
        poll.stop();
        poll.wait_for_burst();
        assert_eq!(poll.turn(), Ended::Stopped);
    }
}
