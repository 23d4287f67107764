//! Copy on write: how nodes and references change when a batch changes a tree.

pub(crate) mod child_refs;
pub(crate) mod sink;
