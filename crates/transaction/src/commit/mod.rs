//! Commit: the sequence that makes a transaction durable, and applying delayed items to their trees.
//!
//! - `sequence`: the order of all writes, and the crash argument.
//! - `apply_trees`, `apply_rows`: applying delayed items in a commit, and between commits to free memory.
//! - `held`: holding commits back, so that several changes become durable together.
//! - `quota`: the parts of the sequence that concern quotas.
//! - `dev_stats`: the error counters of devices.

pub(crate) mod apply_rows;
pub(crate) mod apply_trees;
pub(crate) mod dev_stats;
pub(crate) mod held;
pub(crate) mod quota;
pub(crate) mod sequence;
