//! An open filesystem: opening and closing, options, memory budget, background commits, log replay, statistics.
//!
//! - `fs`: opening, syncing, closing.
//! - `atomic`: transactions of several changes.
//! - `memory_budget`: dividing the memory.
//! - `commit_thread`: starting commits in the background.
//! - `engine_requests`: requests of the engine to this crate.
//! - `log_replay`: making the changes of a tree log part of the subvolumes.
//! - `statfs`: the numbers that df shows.
//! - `guard`: calls that only a FUSE server needs.
//! - `stats`: counters.
//! - `stream_memory`: the memory of sends and receives.

mod atomic;
pub(crate) mod commit_thread;
mod engine_requests;
pub(crate) mod fs;
pub(crate) mod guard;
pub(crate) mod log_replay;
pub(crate) mod memory_budget;
pub(crate) mod resync_thread;
pub(crate) mod statfs;
pub(crate) mod stats;
pub(crate) mod stream_memory;
