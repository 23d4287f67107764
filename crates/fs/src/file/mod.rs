//! File content between the caller and the trees: reading, writing, dirty data, extents, holes, sharing.

pub(crate) mod buf_pool;
pub(crate) mod dirty;
pub(crate) mod extent_map;
pub(crate) mod extent_ops;
pub(crate) mod fallocate;
pub(crate) mod read;
pub(crate) mod readahead;
pub(crate) mod reflink;
pub(crate) mod truncate;
pub(crate) mod write;
