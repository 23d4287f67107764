//! Writeback of dirty data: its scheduling, its conversion to extents, and fsync.
//!
//! - `data_path`: the memory for dirty data, and how much of it starts writeback.
//! - `thread`: the background threads.
//! - `delalloc`: the order in which files are written, writes in place, and limits for writers.
//! - `policy`: the choice of compression and checksums for a file's data.
//! - `ordered_data`: turning dirty ranges into extents, and giving up attempts to compress.
//! - `inline_data`: storing small files inline.
//! - `fsync`: the order of an fsync.
//! - `errors`: reporting failed writes to fsync.
//! - `flusher`: writeback that the engine asks for.

pub(crate) mod data_path;
pub(crate) mod delalloc;
pub(crate) mod errors;
pub(crate) mod flusher;
pub(crate) mod fsync;
pub(crate) mod inline_data;
pub(crate) mod ordered_data;
mod policy;
pub(crate) mod thread;
