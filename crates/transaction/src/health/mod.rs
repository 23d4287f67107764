//! Failure and measurement: panics, statistics, metrics, the timeline.
//!
//! - `abort`, `unwind`: making the filesystem read-only after errors and panics.
//! - `stats`, `metric`, `timeline`: counters and spans.

pub(crate) mod abort;
pub(crate) mod metric;
pub(crate) mod stats;
pub(crate) mod timeline;
pub(crate) mod unwind;
