//! Tree nodes between memory and the devices: the store of dirty nodes, streaming writes, readahead.

pub(crate) mod leaf_ahead;
pub(crate) mod leaf_hint;
pub(crate) mod leaf_reader;
pub(crate) mod store;
pub(crate) mod stream;
pub(crate) mod threads;
