//! Writeback of dirty data: its scheduling, its conversion to extents, and fsync.
//!
//! - `data_path`: the memory for dirty data, and how much of it starts writeback.
//! - `thread`: the background threads.
//! - `delalloc`: the order in which files are written, and limits for writers.
//! - `writeback_job`: the data of one inode in a batch: which of it is written in place.
//! - `policy`: the choice of compression and checksums for a file's data.
//! - `ordered_data`: turning dirty ranges into extents, and giving up attempts to compress.
//! - `inline_data`: storing small files inline.
//! - `fsync`: the order of an fsync.
//! - `errors`: reporting failed writes to fsync.
//! - `no_flush`: reservations that must not start writeback.

pub(crate) mod data_path;
pub(crate) mod delalloc;
pub(crate) mod errors;
pub(crate) mod fsync;
pub(crate) mod inline_data;
pub(crate) mod no_flush;
pub(crate) mod ordered_data;
mod policy;
pub(crate) mod thread;
mod writeback_job;
