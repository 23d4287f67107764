//! File content: reading, writing, truncating, preallocation, holes, shared extents.
//!
//! - `read`, `write`: reads and writes, and the offsets of data and holes.
//! - `truncate`, `fallocate`: changing the size, preallocating, zeroing, punching holes.
//! - `reflink`: sharing extents between files, for copies and deduplication.
//! - `encoded`: storing data that arrives compressed.
//! - `defragment`: rewriting small extents as larger ones.
//! - `setattr`: changes of attributes, which may change the size.
//! - `extent_map`: the extents as FIEMAP reports them.

pub(crate) mod defragment;
pub(crate) mod encoded;
pub(crate) mod extent_map;
pub(crate) mod fallocate;
pub(crate) mod read;
pub(crate) mod reflink;
mod setattr;
pub(crate) mod truncate;
pub(crate) mod write;
