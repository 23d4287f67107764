//! Commit: the sequence that makes a transaction durable, and applying delayed items to their trees.

pub(crate) mod apply_rows;
pub(crate) mod apply_trees;
pub(crate) mod dev_stats;
pub(crate) mod quota;
pub(crate) mod sequence;
pub(crate) mod state;
