//! Space on disk: extent, csum and free space trees, data extents, chunk allocation.
//!
//! - `extent_tree`, `csum_tree`, `free_space_tree`: the items of these trees.
//! - `data_io`: the I/O of data extents, with checksums.
//! - `block_group_claims`: the block groups that are emptied, moved or removed, and waiting for them.
//! - `chunk_alloc`, `conversion`: making chunks, and the profile of new chunks during a conversion.
//! - `chunk_migration`: recording the moves of chunks on the devices.
//! - `device_items`, `replacing`: changes of devices that a commit records.
//! - `freed_extents`: freed space that is discarded later.

pub(crate) mod block_group_claims;
pub(crate) mod chunk_alloc;
pub(crate) mod chunk_migration;
pub(crate) mod conversion;
pub(crate) mod csum_tree;
pub(crate) mod data_io;
pub(crate) mod device_items;
pub(crate) mod extent_tree;
pub(crate) mod free_space_tree;
pub(crate) mod freed_extents;
#[cfg(test)]
pub(crate) mod ledger_kernel_tests;
pub(crate) mod replacing;
