//! Subvolumes and snapshots: creating, deleting, listing, renaming, quotas, and searching their items.

pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod list;
pub(crate) mod quota;
pub(crate) mod rename;
pub(crate) mod resolve;
mod search;
pub(crate) mod sends;
pub(crate) mod state;
