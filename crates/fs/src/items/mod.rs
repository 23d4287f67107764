//! Items of names and of file data: their keys, reading them, planning changes of them.

pub(crate) mod dir_item;
pub(crate) mod file_extent;
