//! Delayed items: changes in memory that a commit records, and trees as readers see them with these changes.
//!
//! - `delayed_item`: the active and frozen changes of a tree.
//! - `tree_view`, `loaded_trees`: a tree as readers see it, and the trees in memory.
//! - `item_map`, `item_page`, `name_map`, `item_log`: the maps that hold the changes.
//! - `data_ledger`, `sector_csums`: data extents until they are committed, and their checksums.
//! - `moved_extents`: the new addresses of data that a relocation moved.

pub(crate) mod data_ledger;
pub(crate) mod delayed_item;
pub(crate) mod item_log;
pub(crate) mod item_map;
pub(crate) mod item_page;
pub(crate) mod loaded_trees;
pub(crate) mod moved_extents;
pub(crate) mod name_map;
pub(crate) mod sector_csums;
pub(crate) mod tree_view;
