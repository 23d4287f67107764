//! Subvolume roots: root items, creation and snapshots, dropping deleted subvolumes.

pub(crate) mod dead_roots;
pub(crate) mod root_item;
#[cfg(test)]
pub(crate) mod snapshot_epoch_tests;
pub(crate) mod subvolume_roots;
