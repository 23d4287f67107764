//! Writeback of dirty data: its scheduling, its conversion to extents, and fsync.

pub(crate) mod data_path;
pub(crate) mod delalloc;
pub(crate) mod errors;
pub(crate) mod flusher;
pub(crate) mod fsync;
pub(crate) mod inline_data;
pub(crate) mod ordered_data;
mod policy;
pub(crate) mod thread;
