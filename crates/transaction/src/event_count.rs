//! [`EventCount`]: threads wait for the next event of a kind.
//!
//! ```text
//! loop { seen = events.current(); if (the state is as wanted) { break } events.wait(seen) }
//! ```
//!
//! Owns the number of events, under a lock. No other lock is taken under this lock.
//!
//! - I1. An event is counted after its effects. So a thread that reads the number of events, then looks at the state, and
//!   then waits for another number misses no event.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::race::race_point;

/// The number of events so far.
#[derive(Debug, Default)]
pub struct EventCount {
    count: Mutex<u64>,
    counted: Condvar,
}

impl EventCount {
    /// Counts an event whose effects other threads can see (I1), and wakes the threads that wait for one.
    pub fn note(&self) {
        let mut count = self.count.lock();
        *count = count.wrapping_add(1);
        self.counted.notify_all();
    }

    /// The number of events so far.
    pub fn current(&self) -> u64 {
        *self.count.lock()
    }

    /// Waits for an event after the first `seen` ones.
    pub fn wait(&self, seen: u64) {
        race_point();
        self.counted.wait_while(&mut self.count.lock(), |count| *count == seen);
    }

    /// Waits for an event after the first `seen` ones, but at most for `patience`.
    pub fn wait_for(&self, seen: u64, patience: Duration) {
        race_point();
        self.counted.wait_while_for(&mut self.count.lock(), |count| *count == seen, patience);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    /// A wait that misses an event lasts until its patience ends.
    #[test]
    fn no_event_is_missed() {
        let (patience, rounds) = (Duration::from_secs(60), 2000);
        let (events, done) = (EventCount::default(), AtomicU64::new(0));
        let wait_for_all = || {
            loop {
                let seen = events.current();
                if done.load(Ordering::Relaxed) == rounds {
                    return;
                }
                let begun = Instant::now();
                events.wait_for(seen, patience);
                assert!(begun.elapsed() < patience && events.current() != seen, "I1");
            }
        };
        std::thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(wait_for_all)));
            for _ in 0..rounds {
                done.fetch_add(1, Ordering::Relaxed);
                events.note();
                std::thread::yield_now();
            }
        });
    }
}
