//! Items of names and of file data: their keys, reading them, planning changes of them.
//!
//! - `dir_item`: the items that make up a name.
//! - `file_extent`: how extent items change when a range is replaced.

pub(crate) mod dir_item;
pub(crate) mod file_extent;
