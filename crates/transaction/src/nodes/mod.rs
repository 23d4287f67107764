//! Tree nodes between memory and the devices: the store of dirty nodes, streaming writes, readahead.
//!
//! - `store`: where a node is: dirty in memory, in the cache, or on the devices.
//! - `stream`: writing nodes while their tree is changed.
//! - `leaf_hint`: the leaves that a thread used last.
//! - `leaf_ahead`, `leaf_reader`: leaves read ahead for walks, and for batches.
//! - `threads`: how many threads work on nodes.

pub(crate) mod leaf_ahead;
pub(crate) mod leaf_hint;
pub(crate) mod leaf_reader;
pub(crate) mod store;
pub(crate) mod stream;
pub(crate) mod threads;
