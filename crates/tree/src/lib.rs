//! Trees of immutable nodes: the node and its cache, lookups, cursors, and the one function that changes a tree.
//!
//! Stands on `format` alone and is generic over storage: nodes are read through [`NodeSource`] and written through
//! [`NodeSink`]. It knows no item semantics.
//!
//! Invariants:
//! - I1. A [`Node`] never changes. A change makes new nodes; who holds the old ones goes on reading them.
//! - I2. Whoever reads a child goes through a [`NodePtr`] with the level, generation and first key that the parent
//!   promises. Levels descend strictly, so that no content of a disk can make a walk loop.
//! - I3. Trees change through [`apply`] only.

#![forbid(unsafe_code)]

mod apply;
mod cache;
mod cursor;
mod lookup;
mod node;
mod storage;

pub use apply::{ApplyStats, Batch, Changes, PartSink, Value, apply, apply_in_parts};
pub use cache::{CacheStats, NodeCache};
pub use cursor::Cursor;
pub use lookup::{Item, LeafPlace, find_leaf, get};
pub use node::{Node, NodePtr, RootPtr};
pub use storage::{NodeSink, NodeSource};
