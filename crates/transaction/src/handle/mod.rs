//! Transaction handles: what an operation may put, and what it waits for before it may begin.

pub(crate) mod admission;
pub(crate) mod lanes;
pub(crate) mod metadata_reservation;
pub(crate) mod running;
pub(crate) mod throttle;
pub(crate) mod ticket;
pub(crate) mod trans_handle;
