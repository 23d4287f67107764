//! Names: lookup, listing directories, creating, linking, removing, renaming; unlinked inodes.
//!
//! - `lookup`: from names to inodes, and the entries of a directory.
//! - `create`: what a new inode inherits, and its number.
//! - `link`: adding and removing names.
//! - `rename`: what a rename replaces and refuses.
//! - `orphan`: when an inode without names is deleted.
//! - `state`: the rename lock.

pub(crate) mod create;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod orphan;
pub(crate) mod rename;
pub(crate) mod state;
