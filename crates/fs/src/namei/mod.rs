//! Names: lookup, listing directories, creating, linking, removing, renaming; unlinked inodes.
//!
//! - `lookup`: from names to inodes, and the entries of a directory.
//! - `create`: new inodes: inherited properties and inode numbers.
//! - `link`: adding and removing names.
//! - `rename`: renaming, replacing and exchanging names.
//! - `orphan`: deletion of inodes without names.
//! - `uses`: opens and lookups of inodes, and the end of the last use.
//! - `deleted_subvolume`: the end of a subvolume without a name.
//! - `state`: the rename lock.

pub(crate) mod create;
pub(crate) mod deleted_subvolume;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod orphan;
pub(crate) mod rename;
pub(crate) mod state;
mod uses;
