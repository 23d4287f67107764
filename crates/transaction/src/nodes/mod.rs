//! Tree nodes between memory and the devices: the store of dirty nodes, streaming writes, readahead.
//!
//! - `store`: the place of each node: dirty in memory, in the cache, or on the devices.
//! - `stream`: writing nodes while their tree is changed.
//! - `leaf_hint`: the leaves that a thread used last.
//! - `leaf_ahead`, `leaf_reader`: leaves read ahead for walks, and for batches.
//! - `write`: writing complete nodes.
//! - `threads`: the number of threads that work on nodes.

pub(crate) mod leaf_ahead;
pub(crate) mod leaf_hint;
pub(crate) mod leaf_queue;
pub(crate) mod leaf_reader;
pub(crate) mod store;
pub(crate) mod stream;
pub(crate) mod threads;
pub(crate) mod write;
