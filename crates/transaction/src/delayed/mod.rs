//! Delayed items: item changes in memory, and trees as readers see them with these changes.

pub(crate) mod delayed_item;
pub(crate) mod item_log;
pub(crate) mod item_map;
pub(crate) mod item_page;
pub(crate) mod name_map;
pub(crate) mod tree_view;
