//! [`PerThread`]: one copy of a value for each thread. A counter or lock that all threads share bounces between
//! processor caches; a copy for each thread stays in one cache.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::lock_rank::{self, Held, Rank};

/// Copies of a value, one for each thread or for a few threads.
#[derive(Debug)]
pub struct PerThread<T> {
    slots: Box<[PaddedCopy<T>]>,
}

/// A copy in cache lines of its own. The copy is aligned to two cache lines, because processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct PaddedCopy<T>(T);

impl<T: Default> Default for PerThread<T> {
    fn default() -> Self {
        Self { slots: (0..NR_SLOTS).map(|_| PaddedCopy::default()).collect() }
    }
}

impl<T> PerThread<T> {
    /// The copy of the calling thread.
    pub fn current(&self) -> &T {
        &self.slots[slot_of_thread()].0
    }

    /// The copies of all threads.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &slot.0)
    }
}

/// A lock that operations hold shared, each through its thread's copy, and that is seldom taken exclusively.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    copies: PerThread<RwLock<()>>,
}

/// Keeps the gate from being closed until dropped.
#[derive(Debug)]
#[must_use = "the gate can be closed when this is dropped"]
pub(crate) struct EnteredGate<'g> {
    _copy: RwLockReadGuard<'g, ()>,
    _held: Held,
}

/// Keeps the gate closed until dropped.
#[must_use = "the gate opens when this is dropped"]
pub(crate) struct ClosedGate<'g> {
    _copies: Vec<RwLockWriteGuard<'g, ()>>,
    _held: Held,
}

impl Gate {
    /// Waits until the gate is open, and keeps it open until the guard is dropped.
    pub(crate) fn enter(&self) -> EnteredGate<'_> {
        lock_rank::check_none_of(Rank::ClosedGate, "the thread that closed the gate waits for it");
        let _held = Held::wait(Rank::Operation, (0, 0));
        EnteredGate { _copy: self.copies.current().read(), _held }
    }

    /// Closes the gate: waits until every operation has left, and blocks new operations until the returned value is
    /// dropped.
    pub(crate) fn close(&self) -> ClosedGate<'_> {
        // All threads lock the copies in this order, so two threads that close the gate at the same time cannot
        // deadlock.
        let _held = Held::wait(Rank::ClosedGate, (0, 0));
        ClosedGate { _copies: self.copies.all().map(RwLock::write).collect(), _held }
    }
}

/// Returns the index of the calling thread's copy. Threads are given indexes in turn.
fn slot_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SLOT: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    SLOT.with(|slot| {
        if slot.get() == usize::MAX {
            slot.set(NEXT.fetch_add(1, Ordering::Relaxed) % NR_SLOTS);
        }
        slot.get()
    })
}

const NR_SLOTS: usize = 8;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn no_thread_is_inside_a_closed_gate() {
        let (gate, inside, closed) = (Gate::default(), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 * NR_SLOTS {
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
    fn threads_have_separate_copies() {
        let slots = PerThread::<AtomicU64>::default();
        slots.current().fetch_add(1, Ordering::Relaxed);
        slots.current().fetch_add(1, Ordering::Relaxed);
        assert!(slots.all().any(|count| count.load(Ordering::Relaxed) == 2));
        std::thread::scope(|scope| {
            (0..NR_SLOTS).for_each(|_| {
                scope.spawn(|| slots.current().fetch_add(1, Ordering::Relaxed));
            });
        });
        assert_eq!(slots.all().map(|count| count.load(Ordering::Relaxed)).sum::<u64>(), 2 + NR_SLOTS as u64);
    }
}
