//! Copy on write: what happens to nodes and references when a batch changes a tree.

pub(crate) mod child_refs;
pub(crate) mod sink;
