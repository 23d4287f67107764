//! Items of names and of file data: their keys, reading them, planning changes of them.
//!
//! - `dir_item`: the items that make up a name.
//! - `file_extent`: finding extent items, and planning the replacement of ranges.
//! - `quota_blocks`: the room that each change of metadata needs within the limits of quota groups.

pub(crate) mod dir_item;
pub(crate) mod file_extent;
pub(crate) mod quota_blocks;
