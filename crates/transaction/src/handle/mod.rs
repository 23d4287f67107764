//! Transaction handles: the changes that an operation may put, and its waits before it begins.

pub(crate) mod admission;
pub(crate) mod metadata_reservation;
pub(crate) mod quota_reservation;
#[cfg(debug_assertions)]
pub(crate) mod refusal;
pub(crate) mod root_change;
pub(crate) mod running;
pub(crate) mod throttle;
pub(crate) mod ticket;
pub(crate) mod trans_handle;
