//! [`ChangeGate`]: admits changes while it is open, and waits for running changes when it closes.
//!
//! A check before each change is not enough to make a subvolume or the filesystem read-only: an operation that has
//! passed the check may make its change later. So each operation is counted as inside the gate before the check, and
//! leaves the gate when it ends.
//!
//! - I1. When [`ChangeGate::close`] returns, no change is inside, and no change enters until [`ChangeGate::open`].
//! - I2. Closing waits for other threads, so its caller must hold no lock that a change takes, and must not be inside
//!   the gate.
//! - I3. No thread that closes the gate misses the last change that leaves. A change counts itself as left before it
//!   looks for closing threads, and a closing thread makes itself known before it counts the changes. So if the change
//!   finds no closing thread, that thread finds the change gone. Otherwise the change wakes the thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ubtrfs_transaction::lock_rank::{self, Rank};
use ubtrfs_transaction::{EventCount, PerThread, race_point};

/// The gate. Every operation passes it, so each thread has counters of its own, which avoids contention.
#[derive(Debug, Default)]
pub(crate) struct ChangeGate {
    closed: AtomicBool,
    /// Numbers of changes that entered and left; their difference is the number inside. A change may leave on another
    /// thread than it entered on.
    entered: PerThread<AtomicU64>,
    left: PerThread<AtomicU64>,
    /// The number of threads that close the gate.
    nr_closing: AtomicUsize,
    /// Changes that left while a thread closes the gate.
    departures: EventCount,
}

impl ChangeGate {
    /// Makes a gate, which is closed if `closed` is true and open otherwise.
    pub(crate) fn new(closed: bool) -> Self {
        Self { closed: AtomicBool::new(closed), ..Self::default() }
    }

    /// Whether no change may enter.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Enters, unless the gate is closed. Each successful call must be followed by a call of [`ChangeGate::leave`].
    #[must_use]
    pub(crate) fn enter(&self) -> bool {
        // Count this change before the check: either the check finds the gate closed, or `close` finds the change in
        // the count and waits for it.
        self.entered.current().fetch_add(1, Ordering::SeqCst);
        if self.is_closed() {
            self.leave();
            return false;
        }
        true
    }

    /// Leaves.
    pub(crate) fn leave(&self) {
        self.left.current().fetch_add(1, Ordering::SeqCst);
        debug_assert!(self.nr_inside() >= 0, "I1: a change left that was not inside");
        race_point();
        if self.nr_closing.load(Ordering::SeqCst) > 0 {
            self.departures.note();
        }
    }

    /// Closes the gate, and waits for the changes inside (I1, I2). Returns whether the gate was open.
    pub(crate) fn close(&self) -> bool {
        lock_rank::check_none_from(Rank::Subvolumes, "I2: changes that run may need this lock");
        let was_open = !self.closed.swap(true, Ordering::SeqCst);
        self.nr_closing.fetch_add(1, Ordering::SeqCst);
        loop {
            let seen = self.departures.current();
            if self.is_empty() {
                break;
            }
            self.departures.wait(seen);
        }
        self.nr_closing.fetch_sub(1, Ordering::SeqCst);
        was_open
    }

    /// Opens the gate.
    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }

    fn is_empty(&self) -> bool {
        self.nr_inside() == 0
    }

    /// The number of changes inside, or more if changes enter or leave during the call.
    fn nr_inside(&self) -> i64 {
        let sum = |counts: &PerThread<AtomicU64>| -> u64 {
            counts.all().fold(0, |sum, count| sum.wrapping_add(count.load(Ordering::SeqCst)))
        };
        // Read `left` first: a change that is inside during both reads is in the sum of `entered` only.
        let left = sum(&self.left);
        sum(&self.entered).wrapping_sub(left).cast_signed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_change_is_inside_a_closed_gate() {
        let (gate, inside, stop) = (ChangeGate::default(), AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    while !stop.load(Ordering::SeqCst) {
                        if gate.enter() {
                            inside.fetch_add(1, Ordering::SeqCst);
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            gate.leave();
                        } else {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..100 {
                assert!(gate.close());
                for _ in 0..20 {
                    assert_eq!(inside.load(Ordering::SeqCst), 0, "I1");
                    std::thread::yield_now();
                }
                gate.open();
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
