//! Refused reservations, for tests: a chosen reservation of a thread fails with `ENOSPC`, as on a full filesystem.
//!
//! An operation that fails for lack of space must leave its file unchanged, or partly changed in an allowed way. Tests
//! refuse each reservation of an operation in turn; a full filesystem refuses only some of them, by chance.

use std::cell::Cell;

use ubtrfs_error::{Error, Result};

thread_local! {
    /// Number of reservations of this thread that are granted before one is refused.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Refuses a reservation of the calling thread, after `nr_granted` granted reservations. Only one reservation is
/// refused.
pub fn refuse_reservation_after(nr_granted: u64) {
    LEFT.set(Some(nr_granted));
}

/// Cancels the refusal if no reservation was refused yet. Returns whether a reservation was refused.
pub fn end_refusal() -> bool {
    LEFT.take().is_none()
}

/// Fails if the calling thread's reservation is to be refused.
pub(crate) fn check() -> Result<()> {
    match LEFT.take() {
        Some(0) => Err(Error::NoSpace),
        left => {
            LEFT.set(left.map(|left| left.saturating_sub(1)));
            Ok(())
        }
    }
}
