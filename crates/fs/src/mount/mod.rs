//! An open filesystem: opening and closing, options, memory budget, background commits, log replay, statistics.

pub(crate) mod commit_thread;
pub(crate) mod fs;
pub(crate) mod guard;
pub(crate) mod log_replay;
pub(crate) mod memory_budget;
pub(crate) mod statfs;
pub(crate) mod stats;
