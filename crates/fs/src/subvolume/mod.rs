//! Subvolumes and snapshots: creating, deleting, listing, renaming.

pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod list;
pub(crate) mod rename;
pub(crate) mod state;
