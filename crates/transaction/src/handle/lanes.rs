//! [`Lanes`]: what every operation touches, kept several times. Two processors that count in one place wait for each other's
//! caches at each count; threads in lanes of their own do not.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One of a kind for each thread, or for a few of them.
#[derive(Debug)]
pub(crate) struct Lanes<T> {
    lanes: Box<[Lane<T>]>,
}

/// In lines of memory of its own; processors fetch two at a time.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Lane<T>(T);

impl<T: Default> Default for Lanes<T> {
    fn default() -> Self {
        Self { lanes: (0..NR_LANES).map(|_| Lane::default()).collect() }
    }
}

impl<T> Lanes<T> {
    /// That of the calling thread.
    pub(crate) fn mine(&self) -> &T {
        &self.lanes[lane_of_thread()].0
    }

    /// Those of all threads.
    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        self.lanes.iter().map(|lane| &lane.0)
    }
}

/// A lock that operations hold shared, each in its thread's lane, and that is seldom taken exclusively.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    lanes: Lanes<RwLock<()>>,
}

/// Nobody is inside until this is dropped.
#[must_use = "the gate opens when this is dropped"]
pub(crate) struct Closed<'g> {
    _lanes: Vec<RwLockWriteGuard<'g, ()>>,
}

impl Gate {
    /// Waits until it is open, and keeps it so.
    pub(crate) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.lanes.mine().read()
    }

    /// Waits until all who are inside have left, and lets nobody in.
    pub(crate) fn close(&self) -> Closed<'_> {
        // Always in this order, so that of two who close it one is first everywhere.
        Closed { _lanes: self.lanes.all().map(RwLock::write).collect() }
    }
}

/// Threads take lanes in turn.
fn lane_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LANE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    LANE.with(|lane| {
        if lane.get() == usize::MAX {
            lane.set(NEXT.fetch_add(1, Ordering::Relaxed) % NR_LANES);
        }
        lane.get()
    })
}

const NR_LANES: usize = 8;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn nobody_is_inside_a_closed_gate() {
        let (gate, inside, closed) = (Gate::default(), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 * NR_LANES {
                scope.spawn(|| {
                    while closed.load(Ordering::SeqCst) < 200 {
                        let _inside = gate.enter();
                        inside.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _closed = gate.close();
                        assert_eq!(inside.load(Ordering::SeqCst), 0);
                        closed.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }

    #[test]
    fn threads_have_lanes_of_their_own() {
        let lanes = Lanes::<AtomicU64>::default();
        lanes.mine().fetch_add(1, Ordering::Relaxed);
        lanes.mine().fetch_add(1, Ordering::Relaxed);
        assert!(lanes.all().any(|count| count.load(Ordering::Relaxed) == 2));
        std::thread::scope(|scope| {
            (0..NR_LANES).for_each(|_| {
                scope.spawn(|| lanes.mine().fetch_add(1, Ordering::Relaxed));
            });
        });
        assert_eq!(lanes.all().map(|count| count.load(Ordering::Relaxed)).sum::<u64>(), 2 + NR_LANES as u64);
    }
}
