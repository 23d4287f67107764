//! Delayed items: item changes in memory, and trees as readers see them with these changes.
//!
//! - `delayed_item`: the active and frozen changes of a tree.
//! - `tree_view`: a tree as readers see it.
//! - `item_map`, `item_page`, `name_map`, `item_log`: the maps that hold the changes.

pub(crate) mod delayed_item;
pub(crate) mod item_log;
pub(crate) mod item_map;
pub(crate) mod item_page;
pub(crate) mod name_map;
pub(crate) mod tree_view;
