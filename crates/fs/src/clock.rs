//! The clock.

use std::time::{SystemTime, UNIX_EPOCH};

use ubtrfs_format::item::Timespec;

/// The current time in the form that inodes store.
pub(crate) fn now() -> Timespec {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timespec { sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX), nsec: since.subsec_nanos() }
}
