//! Names: lookup, listing directories, creating, linking, removing, renaming; unlinked inodes.

pub(crate) mod create;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod orphan;
pub(crate) mod rename;
pub(crate) mod state;
