//! Subvolume roots: root items, creation and snapshots, dropping deleted subvolumes.
//!
//! - `subvolume_roots`: making subvolumes and snapshots in a commit, and the blocks that a snapshot shares with its
//!   source.
//! - `dead_roots`: freeing the space of deleted subvolumes.
//! - `committed`: read-only subvolumes as of the last commit.
//! - `root_item`, `state`: new root items, and the state of subvolumes as a whole.

pub(crate) mod committed;
pub(crate) mod dead_roots;
#[cfg(test)]
pub(crate) mod last_snapshot_tests;
pub(crate) mod root_item;
pub(crate) mod state;
pub(crate) mod subvolume_roots;
