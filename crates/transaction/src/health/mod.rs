//! Failure and measurement: panics, device error counters, statistics, metrics, the timeline.

pub(crate) mod abort;
pub(crate) mod metric;
pub(crate) mod stats;
pub(crate) mod timeline;
pub(crate) mod unwind;
