//! Reservations: space for changes, data and quota groups, with the flushes and commits that make room.
//!
//! - `metadata`, `data`, `quota`: the kinds of space that are reserved.
//! - `ticket`: the queue of reservations that wait for space, and the decision to return `ENOSPC`.
//! - `throttle`: slowing writers, so that delayed items stay within their share of memory.

mod data;
mod metadata;
mod quota;
pub(crate) mod throttle;
pub(crate) mod ticket;
