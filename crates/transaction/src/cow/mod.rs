//! Copy on write: how nodes and references change when a batch changes a tree.
//!
//! `sink` decides whether a node keeps its address, and which references change. `child_refs` has the references that a
//! block holds.

pub(crate) mod child_refs;
pub(crate) mod sink;
