//! Keeps a processor awake while requests follow each other closely.
//!
//! Client and server take turns. Linux moves the client to another processor that is idle, and each turn then wakes an
//! idle processor. Waking takes as long as the request; in a virtual machine, up to ten times as long. So a thread of
//! the lowest priority spins on an otherwise idle processor, and client and server stay where they are.
//!
//! - P1. Polling costs nothing while few requests arrive, or requests that take long (fsync): the thread starts to spin
//!   after [`BURST`] requests within [`DENSE`], and stops after [`QUIET`] without a request.
//! - P2. The spinning thread yields to other threads: if it did not run for [`CROWDED`] because of other threads, it
//!   sleeps for [`REST`].
//! - P3. With [`IdlePolling::Auto`], the thread spins only if waking is slow on this machine (measured when serving
//!   begins), and for at most one [`SHARE`]th of the elapsed time. Time that was not used is saved for later bursts, up
//!   to [`SAVED_MAX`]. Without rings, only requests of a lone client count, because the threads that read /dev/fuse are
//!   gathered only for such a client. With rings, a request is served where its client runs, but an answer may move the
//!   client to an idle processor, most often while other threads of the server (writeback) run now and then. If there
//!   are two processors, polling leaves no idle processor to which the client could move. With rings on more
//!   processors, waking is slow from [`SLOW_WAKE_OF_MANY`] on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Whether an idle processor is kept awake while requests follow each other closely.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdlePolling {
    /// Never.
    Off,
    /// Always.
    On,
    /// Spin only if waking a processor is slow on this machine, and for a limited share of the time (P3).
    #[default]
    Auto,
}

/// State shared by the spinning thread and the threads that take requests.
#[derive(Debug, Default)]
pub(super) struct IdlePoll {
    nr_requests: AtomicU64,
    /// Whether the spinning thread is parked until a burst of requests.
    asleep: AtomicBool,
    stopped: AtomicBool,
    /// The spinning thread. [`IdlePoll::started`] sets this field on the thread that later calls [`IdlePoll::stop`], so
    /// `stop` finds it set.
    thread: OnceLock<Thread>,
}

/// The reason why the thread stopped spinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpinEnd {
    Quiet,
    Crowded,
    /// The time that the thread may spin is used up (P3).
    Spent,
    Stopped,
}

/// The time that the thread may spin (P3).
#[derive(Debug)]
struct Budget {
    saved: Duration,
    /// When `saved` was computed.
    at: Instant,
}

impl Budget {
    fn full(now: Instant) -> Self {
        Self { saved: SAVED_MAX, at: now }
    }

    /// The time that the thread may spin from `now` on.
    fn at(&mut self, now: Instant) -> Duration {
        self.saved = SAVED_MAX.min(self.saved + now.saturating_duration_since(self.at) / SHARE);
        self.at = now;
        self.saved
    }

    fn spend(&mut self, spun: Duration) {
        self.saved = self.saved.saturating_sub(spun);
    }
}

impl IdlePoll {
    /// Counts a request. Every [`BURST`]th request wakes the spinning thread if it is parked.
    pub(super) fn note_request(&self) {
        let Some(thread) = self.thread.get() else { return };
        let nr = self.nr_requests.fetch_add(1, Ordering::Relaxed);
        if nr.is_multiple_of(BURST) && self.asleep.load(Ordering::Relaxed) {
            thread.unpark();
        }
    }

    /// Remembers `thread`, which runs [`IdlePoll::run`]. Must be called on the thread that later calls
    /// [`IdlePoll::stop`].
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

    /// Waits for bursts of requests and spins during them (P1 to P3), until [`IdlePoll::stop`]. Returns at once if
    /// `polling` is off, or is `Auto` and waking is fast. `nr_queues` is the number of processors with rings; 0 without
    /// rings. Only one thread may run this method.
    pub(super) fn run(&self, polling: IdlePolling, nr_queues: usize) {
        let slow = if nr_queues <= 2 { SLOW_WAKE } else { SLOW_WAKE_OF_MANY };
        if polling == IdlePolling::Off || polling == IdlePolling::Auto && wake_time() < slow {
            return;
        }
        // On Linux, `nice` sets the priority of the calling thread alone. Lowering the priority is always allowed.
        if let Err(errno) = rustix::process::nice(LOWEST) {
            tracing::debug!("no processor is kept awake: {errno}");
            return;
        }
        let mut budget = (polling == IdlePolling::Auto).then(|| Budget::full(Instant::now()));
        loop {
            self.wait_for_burst();
            let started = Instant::now();
            let limit = budget.as_mut().map_or(Duration::MAX, |budget| budget.at(started));
            let ended = self.turn(limit);
            if let Some(budget) = &mut budget {
                budget.spend(started.elapsed());
            }
            match ended {
                SpinEnd::Quiet => {}
                // Park instead of sleeping, so that `stop` can wake this thread: closing the connection waits until
                // this thread has ended.
                SpinEnd::Crowded => std::thread::park_timeout(REST),
                SpinEnd::Spent => std::thread::park_timeout(SAVED_MAX),
                SpinEnd::Stopped => return,
            }
        }
    }

    fn wait_for_burst(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        let (mut before, mut since) = (self.nr_requests.load(Ordering::Relaxed), Instant::now());
        while !self.stopped.load(Ordering::Acquire) {
            let nr = self.nr_requests.load(Ordering::Relaxed);
            if nr >= before + BURST {
                if since.elapsed() < DENSE {
                    break;
                }
                (before, since) = (nr, Instant::now());
            }
            std::thread::park();
        }
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Spins for at most `limit`.
    fn turn(&self, limit: Duration) -> SpinEnd {
        let mut nr_seen = self.nr_requests.load(Ordering::Relaxed);
        let mut last_look = Instant::now();
        let started = last_look;
        let mut last_request = last_look;
        loop {
            (0..SPINS).for_each(|_| std::hint::spin_loop());
            let now = Instant::now();
            let nr = self.nr_requests.load(Ordering::Relaxed);
            if nr != nr_seen {
                (nr_seen, last_request) = (nr, now);
            }
            if self.stopped.load(Ordering::Acquire) {
                return SpinEnd::Stopped;
            } else if now - last_look > CROWDED {
                return SpinEnd::Crowded;
            } else if now - last_request > QUIET {
                return SpinEnd::Quiet;
            } else if now - started > limit {
                return SpinEnd::Spent;
            }
            last_look = now;
        }
    }
}

/// The time that a sleeping thread takes to run after another thread woke it: the median of some tries.
fn wake_time() -> Duration {
    let (woken_at, started) = (AtomicU64::new(0), Instant::now());
    let nanos = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut times: Vec<u64> = std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut times = Vec::with_capacity(WAKE_TRIES);
            while times.len() < WAKE_TRIES {
                std::thread::park();
                match woken_at.swap(0, Ordering::AcqRel) {
                    0 => {}
                    at => times.push(nanos().saturating_sub(at)),
                }
            }
            times
        });
        while !sleeper.is_finished() {
            // Sleep long enough that the processor of the other thread goes idle.
            std::thread::sleep(WAKE_PAUSE);
            woken_at.store(nanos().max(1), Ordering::Release);
            sleeper.thread().unpark();
        }
        sleeper.join().unwrap_or_default()
    });
    times.sort_unstable();
    times.get(times.len() / 2).map_or(Duration::ZERO, |nanos| Duration::from_nanos(*nanos))
}

const WAKE_TRIES: usize = 15;
const WAKE_PAUSE: Duration = Duration::from_micros(500);
/// A wake-up that takes at least this long is slow: the two wake-ups of a request take half as long as the request.
const SLOW_WAKE: Duration = Duration::from_micros(3);
/// With rings on more than two processors, a wake-up that takes at least this long is slow. An idle processor wakes
/// faster, unless a hypervisor has halted it.
const SLOW_WAKE_OF_MANY: Duration = Duration::from_micros(30);
/// The thread may spin for one `SHARE`th of the elapsed time (P3).
const SHARE: u32 = 4;
/// The longest time that the thread spins at once. Between bursts, unused time is saved up to this limit.
const SAVED_MAX: Duration = Duration::from_secs(5);
const LOWEST: i32 = 19;
const BURST: u64 = 16;
/// The longest time of a burst. Requests that are answered from memory take a tenth of it.
const DENSE: Duration = Duration::from_millis(2);
/// The thread stops spinning after this time without a request (P1). The time is longer than one request together with
/// the client's work before its next request.
const QUIET: Duration = Duration::from_micros(500);
/// If the spinning thread does not run for this long, other threads need the processor (P2). The time is about one time
/// slice.
const CROWDED: Duration = Duration::from_millis(3);
const REST: Duration = Duration::from_millis(100);
/// Number of spins between two checks of the clock. This many spins take a few microseconds.
const SPINS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poll_waits_for_a_burst_turns_until_quiet_and_ends() {
        let poll = IdlePoll::default();
        poll.note_request();
        assert_eq!(poll.nr_requests.load(Ordering::Relaxed), 0, "nobody is there to hear it");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                poll.wait_for_burst();
                poll.turn(Duration::MAX)
            });
            poll.started(waits.thread());
            while !poll.asleep.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            (0..BURST - 1).for_each(|_| poll.note_request());
            assert!(!waits.is_finished() && poll.asleep.load(Ordering::Relaxed), "that is no burst");
            for _ in 0..4 {
                std::thread::sleep(DENSE * 10);
                (0..BURST).for_each(|_| poll.note_request());
            }
            assert!(!waits.is_finished() && poll.asleep.load(Ordering::Relaxed), "these are too far apart");
            // Every `BURST`th request wakes the thread.
            while poll.asleep.load(Ordering::Relaxed) {
                poll.note_request();
            }
            assert_ne!(waits.join().unwrap(), SpinEnd::Stopped);
        });
        poll.stop();
        poll.wait_for_burst();
        assert_eq!(poll.turn(Duration::MAX), SpinEnd::Stopped);
    }
    #[test]
    fn a_share_of_the_time_may_be_spent() {
        let start = Instant::now();
        let mut budget = Budget::full(start);
        assert_eq!(budget.at(start + SAVED_MAX), SAVED_MAX, "no more is saved");
        budget.spend(SAVED_MAX);
        assert_eq!(budget.at(start + SAVED_MAX), Duration::ZERO);
        assert_eq!(budget.at(start + SAVED_MAX * 2), SAVED_MAX / SHARE);
        let poll = IdlePoll::default();
        poll.nr_requests.store(1, Ordering::Relaxed);
        let spun = Instant::now();
        assert!(matches!(poll.turn(Duration::from_micros(200)), SpinEnd::Spent | SpinEnd::Crowded));
        assert!(spun.elapsed() >= Duration::from_micros(200) || cfg!(miri));
    }

    #[test]
    fn waking_takes_a_measurable_time() {
        let time = wake_time();
        assert!(time > Duration::from_nanos(100) && time < Duration::from_secs(1), "{time:?}");
    }
}
