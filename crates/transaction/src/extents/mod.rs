//! Space on disk: extent, csum and free space trees, data extents, chunk allocation.

pub(crate) mod chunk_alloc;
pub(crate) mod chunk_migration;
pub(crate) mod conversion;
pub(crate) mod csum_tree;
pub(crate) mod data_io;
pub(crate) mod data_ledger;
pub(crate) mod device_size;
pub(crate) mod emptying;
pub(crate) mod extent_tree;
pub(crate) mod free_space_tree;
#[cfg(test)]
pub(crate) mod ledger_kernel_tests;
pub(crate) mod moved_extents;
pub(crate) mod trim;
