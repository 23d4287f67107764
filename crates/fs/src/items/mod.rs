//! Items of names and of file data: their keys, reading them, planning changes of them.
//!
//! - `dir_item`: the items that make up a name.
//! - `file_extent`: finding extent items, and planning the replacement of ranges.

pub(crate) mod dir_item;
pub(crate) mod file_extent;
