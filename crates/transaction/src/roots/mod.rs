//! Subvolume roots: root items, creation and snapshots, dropping deleted subvolumes.

pub(crate) mod committed;
pub(crate) mod dead_roots;
#[cfg(test)]
pub(crate) mod last_snapshot_tests;
pub(crate) mod root_item;
pub(crate) mod state;
pub(crate) mod subvolume_roots;
