//! Writeback of dirty data: its scheduling, its conversion to extents, and fsync.
//!
//! - `data_path`: the memory for dirty data, and how much of it starts writeback.
//! - `thread`: the background threads.
//! - `delalloc`: which files are written first, whether data is written in place, and when writers wait.
//! - `policy`: whether a file's data is compressed and gets checksums.
//! - `ordered_data`: how dirty ranges become extents, and when an attempt to compress is given up.
//! - `inline_data`: which files are stored inline.
//! - `fsync`: the order of an fsync.
//! - `errors`: which fsync reports a failed write.
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
