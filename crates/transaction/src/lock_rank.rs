//! Ranks of locks: debug builds check the order in which each thread takes them. (ARCHITECTURE.md, "Locks", has the
//! order.)
//!
//! A thread-local list has the ranks of the locks that the thread holds. Release builds keep no list and check nothing.
//!
//! - I1. A thread waits for a lock only if all locks that it holds have a lower rank, or the same rank and a lower key.
//!   So no circle of threads can wait for each other. A lock that is only tried needs no order.
//! - I2. An operation, from begin to end, waits for no device and reserves nothing. The replay of a log is excepted: no
//!   other thread uses the filesystem yet ([`Alone`]).

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// The locks whose order is checked, from the outermost to the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Writes without a reservation, and changes that share the extents of these writes.
    Unreserved,
    /// Changes of read-only flags of subvolumes.
    SubvolumeFlags,
    /// Creating, changing and deleting subvolumes.
    Subvolumes,
    /// Renames.
    Rename,
    /// The right to change a file's extents.
    Writeback,
    /// Writes into extents that files have, and snapshots.
    InPlace,
    /// The state of an inode; the key is its id.
    Inode,
    /// The commit lock.
    Commit,
    /// The state of the tree log.
    TreeLog,
    /// The gate of the running transaction, closed for a freeze.
    ClosedGate,
    /// An operation, which has entered the gate.
    Operation,
    /// The list of changed trees.
    ChangedTrees,
    /// The view of a tree.
    View,
    /// A shard of delayed items.
    Shard,
}

/// Orders locks of one rank (I1).
pub type LockOrder = (u64, u64);

/// Not `Send`, as the guards of locks are.
type OfThisThread = PhantomData<parking_lot::MutexGuard<'static, ()>>;

/// A lock that is held. Belongs to the thread that took it.
#[derive(Debug)]
#[must_use = "the lock counts as held until this is dropped"]
pub struct Held {
    #[cfg(debug_assertions)]
    at: (Rank, LockOrder),
    _of_this_thread: OfThisThread,
}

impl Held {
    /// Checks that the thread may wait for the lock, and notes the lock as held (I1). Called before the wait.
    #[cfg_attr(not(debug_assertions), inline)]
    pub fn wait(rank: Rank, key: LockOrder) -> Self {
        #[cfg(debug_assertions)]
        held::check(rank, key);
        Self::tried(rank, key)
    }

    /// Notes a lock that was free when it was tried.
    #[cfg_attr(not(debug_assertions), inline)]
    pub fn tried(rank: Rank, key: LockOrder) -> Self {
        #[cfg(debug_assertions)]
        held::add((rank, key));
        #[cfg(not(debug_assertions))]
        let _ = (rank, key);
        Self {
            #[cfg(debug_assertions)]
            at: (rank, key),
            _of_this_thread: PhantomData,
        }
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        held::remove(self.at);
    }
}

/// While this exists, the thread is the only one that uses the filesystem. Its operations may wait for devices (I2), and
/// need no locks of inodes ([`check_held_at`]).
#[derive(Debug)]
#[must_use = "the exception ends when this is dropped"]
pub struct Alone {
    _of_this_thread: OfThisThread,
}

impl Alone {
    /// Begins the exception.
    #[allow(clippy::new_without_default, reason = "it changes the state of the thread")]
    pub fn new() -> Self {
        #[cfg(debug_assertions)]
        held::set_alone(true);
        Self { _of_this_thread: PhantomData }
    }
}

#[cfg(debug_assertions)]
impl Drop for Alone {
    fn drop(&mut self) {
        held::set_alone(false);
    }
}

/// Fails if this thread has an open operation, which must not wait for a device or reserve (I2). `rule` says what an
/// operation must not do.
#[cfg_attr(not(debug_assertions), inline)]
pub fn check_no_operation(rule: &str) {
    #[cfg(debug_assertions)]
    if !held::is_alone() {
        held::check_none_of(Rank::Operation, rule);
    }
    #[cfg(not(debug_assertions))]
    let _ = rule;
}

/// Fails if the thread holds a lock of this rank or a higher one. `rule` says what the caller must not do then.
#[cfg_attr(not(debug_assertions), inline)]
pub fn check_none_from(rank: Rank, rule: &str) {
    #[cfg(debug_assertions)]
    held::check_none_from(rank, rule);
    #[cfg(not(debug_assertions))]
    let _ = (rank, rule);
}

/// Fails if the thread holds a lock of this rank.
#[cfg_attr(not(debug_assertions), inline)]
pub fn check_none_of(rank: Rank, rule: &str) {
    #[cfg(debug_assertions)]
    held::check_none_of(rank, rule);
    #[cfg(not(debug_assertions))]
    let _ = (rank, rule);
}

/// Fails if the thread does not hold a lock of this rank. `rule` says what the lock is needed for.
#[cfg_attr(not(debug_assertions), inline)]
pub fn check_held(rank: Rank, rule: &str) {
    #[cfg(debug_assertions)]
    held::check_held(|held, _| held == rank, rule);
    #[cfg(not(debug_assertions))]
    let _ = (rank, rule);
}

/// Fails if the thread does not hold the lock of this rank and key. `rule` says what the lock is needed for.
#[cfg_attr(not(debug_assertions), inline)]
pub fn check_held_at(rank: Rank, key: LockOrder, rule: &str) {
    #[cfg(debug_assertions)]
    if !held::is_alone() {
        held::check_held(|held, at| (held, at) == (rank, key), rule);
    }
    #[cfg(not(debug_assertions))]
    let _ = (rank, key, rule);
}

/// A guard of a lock that has a rank.
#[derive(Debug)]
pub struct Guard<G> {
    // Unlocks before the lock counts as free.
    guard: G,
    _held: Held,
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

/// The guard of a mutex.
pub type MutexGuard<'l, T> = Guard<parking_lot::MutexGuard<'l, T>>;
/// The guard of a lock that is held shared.
pub type ReadGuard<'l, T> = Guard<parking_lot::RwLockReadGuard<'l, T>>;
/// The guard of a lock that is held exclusively.
pub type WriteGuard<'l, T> = Guard<parking_lot::RwLockWriteGuard<'l, T>>;

/// The rank and key of a lock; nothing in release builds.
#[derive(Clone, Copy, Debug)]
struct LockPlace {
    #[cfg(debug_assertions)]
    at: (Rank, LockOrder),
}

impl LockPlace {
    fn new(rank: Rank, key: LockOrder) -> Self {
        #[cfg(not(debug_assertions))]
        let _ = (rank, key);
        Self {
            #[cfg(debug_assertions)]
            at: (rank, key),
        }
    }

    #[cfg(debug_assertions)]
    fn wait(self) -> Held {
        Held::wait(self.at.0, self.at.1)
    }

    #[cfg(debug_assertions)]
    fn tried(self) -> Held {
        Held::tried(self.at.0, self.at.1)
    }

    #[cfg(not(debug_assertions))]
    fn wait(self) -> Held {
        Held { _of_this_thread: PhantomData }
    }

    #[cfg(not(debug_assertions))]
    fn tried(self) -> Held {
        Held { _of_this_thread: PhantomData }
    }
}

/// A mutex with a rank.
#[derive(Debug)]
pub struct RankedMutex<T> {
    place: LockPlace,
    lock: parking_lot::Mutex<T>,
}

impl<T> RankedMutex<T> {
    /// A mutex of this rank, which no thread holds twice.
    pub fn new(rank: Rank, value: T) -> Self {
        Self { place: LockPlace::new(rank, (0, 0)), lock: parking_lot::Mutex::new(value) }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let _held = self.place.wait();
        Guard { guard: self.lock.lock(), _held }
    }

    /// Takes the lock if no thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.lock.try_lock().map(|guard| Guard { guard, _held: self.place.tried() })
    }
}

/// A lock with a rank that is held shared or exclusively.
#[derive(Debug)]
pub struct RankedRwLock<T: ?Sized> {
    place: LockPlace,
    lock: parking_lot::RwLock<T>,
}

impl<T> RankedRwLock<T> {
    /// A lock of this rank and key.
    pub fn new(rank: Rank, key: LockOrder, value: T) -> Self {
        Self { place: LockPlace::new(rank, key), lock: parking_lot::RwLock::new(value) }
    }
}

impl<T: ?Sized> RankedRwLock<T> {
    /// Waits until no thread holds the lock exclusively.
    pub fn read(&self) -> ReadGuard<'_, T> {
        let _held = self.place.wait();
        Guard { guard: self.lock.read(), _held }
    }

    /// Waits until no other thread holds the lock.
    pub fn write(&self) -> WriteGuard<'_, T> {
        let _held = self.place.wait();
        Guard { guard: self.lock.write(), _held }
    }

    /// Takes the lock shared if no thread holds it exclusively or waits for that.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        self.lock.try_read().map(|guard| Guard { guard, _held: self.place.tried() })
    }

    /// Takes the lock shared if no thread holds it exclusively, even if one waits for that.
    pub fn try_read_recursive(&self) -> Option<ReadGuard<'_, T>> {
        self.lock.try_read_recursive().map(|guard| Guard { guard, _held: self.place.tried() })
    }

    /// Takes the lock exclusively if no thread holds it.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        self.lock.try_write().map(|guard| Guard { guard, _held: self.place.tried() })
    }
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::{Cell, RefCell};

    use super::{LockOrder, Rank};

    thread_local! {
        static ALONE: Cell<bool> = const { Cell::new(false) };
        static LOCKS: RefCell<Vec<(Rank, LockOrder)>> = const { RefCell::new(Vec::new()) };
    }

    /// The first lock of this thread for which `is_wrong` holds. A thread that ends or panics has no locks to check.
    fn find(is_wrong: impl Fn(&(Rank, LockOrder)) -> bool) -> Option<(Rank, LockOrder)> {
        if std::thread::panicking() {
            return None;
        }
        LOCKS.try_with(|locks| locks.borrow().iter().copied().find(|lock| is_wrong(lock))).ok().flatten()
    }

    pub(super) fn set_alone(is_alone: bool) {
        ALONE.set(is_alone);
    }

    pub(super) fn is_alone() -> bool {
        ALONE.get()
    }

    pub(super) fn check(rank: Rank, key: LockOrder) {
        let wrong = find(|lock| *lock >= (rank, key));
        assert!(wrong.is_none(), "I1: a thread waits for {rank:?} {key:?} while it holds {wrong:?}");
    }

    pub(super) fn check_none_from(rank: Rank, rule: &str) {
        let wrong = find(|(held, _)| *held >= rank);
        assert!(wrong.is_none(), "{rule}; the thread holds {wrong:?}");
    }

    pub(super) fn check_none_of(rank: Rank, rule: &str) {
        let wrong = find(|(held, _)| *held == rank);
        assert!(wrong.is_none(), "{rule}; the thread holds {wrong:?}");
    }

    pub(super) fn check_held(is_wanted: impl Fn(Rank, LockOrder) -> bool, rule: &str) {
        let is_held = std::thread::panicking() || find(|(rank, key)| is_wanted(*rank, *key)).is_some();
        assert!(is_held, "{rule}; the thread does not hold the lock");
    }

    pub(super) fn add(lock: (Rank, LockOrder)) {
        let _ = LOCKS.try_with(|locks| locks.borrow_mut().push(lock));
    }

    pub(super) fn remove(lock: (Rank, LockOrder)) {
        let _ = LOCKS.try_with(|locks| {
            let mut locks = locks.borrow_mut();
            if let Some(at) = locks.iter().rposition(|other| *other == lock) {
                locks.swap_remove(at);
            }
        });
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn fails(work: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(work)).is_err()
    }

    #[test]
    fn a_thread_takes_locks_in_the_order_of_their_ranks() {
        let (outer, inner) = (RankedMutex::new(Rank::Commit, 1), RankedRwLock::new(Rank::View, (5, 0), 2));
        {
            let _outer = outer.lock();
            assert_eq!(*inner.read(), 2);
        }
        let _inner = inner.write();
        assert!(fails(|| drop(outer.lock())), "I1");
        assert!(std::thread::scope(|scope| scope.spawn(|| *outer.lock() == 1).join().unwrap()), "another thread may");
    }

    #[test]
    fn locks_of_one_rank_are_taken_by_ascending_keys() {
        let [first, second] = [1, 2].map(|id| RankedRwLock::new(Rank::Inode, (5, id), ()));
        {
            let _first = first.read();
            drop(second.write());
            assert!(fails(|| drop(first.read())), "a writer may wait between two reads");
        }
        let _second = second.write();
        assert!(fails(|| drop(first.read())), "I1");
        assert!(first.try_read().is_some(), "a lock that is only tried needs no order");
    }

    #[test]
    fn a_lock_that_was_dropped_does_not_count() {
        let [first, second] = [1, 2].map(|id| RankedRwLock::new(Rank::Inode, (5, id), ()));
        let (one, two) = (first.read(), second.read());
        drop(one);
        assert!(fails(|| drop(first.read())));
        drop(two);
        drop(first.read());
        check_none_from(Rank::Unreserved, "nothing is held");
        let _gate = Held::wait(Rank::Operation, (0, 0));
        assert!(fails(|| check_none_of(Rank::Operation, "I2")) && fails(|| check_none_from(Rank::Commit, "I2")));
        check_none_from(Rank::View, "I2");
        check_held(Rank::Operation, "I2");
        check_held_at(Rank::Operation, (0, 0), "I2");
        assert!(fails(|| check_held(Rank::Commit, "I2")) && fails(|| check_held_at(Rank::Operation, (1, 0), "I2")));
    }
}
