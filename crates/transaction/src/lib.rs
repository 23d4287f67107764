//! ubtrfs-transaction.

mod csum_tree;
mod extent_tree;
mod free_space_tree;
