//! Refused reservations, for tests: a chosen reservation of a thread fails with `ENOSPC`, as on a full filesystem.
//!
//! An operation that fails for lack of space must leave its file as it was, or done in part. Tests refuse each of its
//! reservations in turn, which a filesystem that is really full does only by chance.

use std::cell::Cell;

use ubtrfs_error::{Error, Result};

thread_local! {
    /// Reservations of this thread that are still granted before one is refused.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Refuses a reservation of the calling thread, after `nr_granted` others. Only one is refused.
pub fn refuse_reservation_after(nr_granted: u64) {
    LEFT.set(Some(nr_granted));
}

/// Ends the wait for the reservation to refuse. Returns whether one was refused.
pub fn end_refusal() -> bool {
    LEFT.take().is_none()
}

/// Fails if the calling thread's reservation is to be refused.
pub(crate) fn check() -> Result<()> {
    match LEFT.take() {
        Some(0) => Err(Error::NoSpace),
        left => {
            LEFT.set(left.map(|left| left - 1));
            Ok(())
        }
    }
}
