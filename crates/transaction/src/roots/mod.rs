//! Subvolume roots: root items, creation and snapshots, dropping deleted subvolumes.
//!
//! - `subvolume_roots`: how a commit makes subvolumes and snapshots, and what a snapshot shares with its source.
//! - `dead_roots`: how the space of deleted subvolumes is freed.
//! - `committed`: read-only subvolumes as of the last commit.
//! - `root_item`, `state`: new root items, and the trees in memory.

pub(crate) mod committed;
pub(crate) mod dead_roots;
#[cfg(test)]
pub(crate) mod last_snapshot_tests;
pub(crate) mod root_item;
pub(crate) mod state;
pub(crate) mod subvolume_roots;
