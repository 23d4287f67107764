//! File content between the caller and the trees: reading, writing, truncating, holes, sharing.

pub(crate) mod extent_map;
pub(crate) mod fallocate;
pub(crate) mod read;
pub(crate) mod reflink;
pub(crate) mod truncate;
pub(crate) mod write;
