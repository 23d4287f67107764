//! [`NoFlush`]: keeps a thread's own reservations from starting writeback.

use std::cell::Cell;

thread_local! {
    /// Whether reservations of this thread must not start writeback ([`NoFlush`]), because the thread writes data back
    /// itself or holds inode locks.
    static FLUSHING: Cell<bool> = const { Cell::new(false) };
}

/// Prevents writeback by reservations of this thread: writeback could deadlock on inode locks that the thread holds.
#[derive(Debug)]
pub(crate) struct NoFlush {
    before: bool,
}

impl NoFlush {
    pub(crate) fn new() -> Self {
        Self { before: FLUSHING.replace(true) }
    }

    /// Whether this thread has such a guard.
    pub(crate) fn is_active() -> bool {
        FLUSHING.get()
    }
}

impl Drop for NoFlush {
    fn drop(&mut self) {
        FLUSHING.set(self.before);
    }
}
