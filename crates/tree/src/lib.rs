//! Trees of immutable nodes: nodes and their cache, lookups, cursors, and the function that changes a tree.
//!
//! This crate depends only on `format` and `error`, and is generic over storage: it reads nodes through [`NodeSource`]
//! and writes them through [`NodeSink`]. The crate does not interpret items.
//!
//! Invariants:
//! - I1. A [`Node`] never changes. A change makes new nodes; readers that hold old nodes keep using them.
//! - I2. Children are read through a [`NodePtr`] with the level, generation and first key that the parent promises.
//!   Levels descend strictly, so no disk content can make a walk loop.
//! - I3. Only [`apply`] and [`apply_in_parts`] change trees.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod apply;
mod cache;
mod cursor;
mod diff;
mod lookup;
mod node;
mod storage;

pub use apply::{ApplyStats, Batch, Changes, PartSink, Value, apply, apply_in_parts};
pub use cache::{CacheStats, NodeCache};
pub use cursor::Cursor;
pub use diff::{Diff, ItemChange};
pub use lookup::{Item, LeafPlace, find_leaf, get};
pub use node::{Node, NodePtr, RootPtr};
pub use storage::{NodeSink, NodeSource};
