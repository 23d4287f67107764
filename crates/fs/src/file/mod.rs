//! File content: reading, writing, truncating, preallocation, holes, shared extents.

pub(crate) mod defragment;
pub(crate) mod encoded;
pub(crate) mod extent_map;
pub(crate) mod fallocate;
pub(crate) mod read;
pub(crate) mod reflink;
pub(crate) mod truncate;
pub(crate) mod write;
