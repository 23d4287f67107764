//! Sorted batches: the one way in which a tree changes.

use std::sync::Arc;

use ubtrfs_format::{Error, Key, Result};

use crate::node::RootPtr;
use crate::storage::{NodeSink, NodeSource};

/// Data of an item in a batch.
pub type Value = Arc<[u8]>;

/// Changes in strictly ascending key order: `Some` inserts or replaces, `None` deletes (an absent key is fine).
pub type Batch = Vec<(Key, Option<Value>)>;

/// What one or more calls of [`apply`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyStats {
    /// Batches applied.
    pub batches: u64,
    /// Leaves written.
    pub leaves_written: u64,
    /// Nodes written, leaves included.
    pub nodes_written: u64,
    /// Items inserted or replaced.
    pub items_put: u64,
    /// Items deleted that were there.
    pub items_deleted: u64,
    /// Bytes that items take in the leaves written, heads included.
    pub leaf_bytes_used: u64,
}

impl std::ops::AddAssign for ApplyStats {
    fn add_assign(&mut self, other: Self) {
        self.batches += other.batches;
        self.leaves_written += other.leaves_written;
        self.nodes_written += other.nodes_written;
        self.items_put += other.items_put;
        self.items_deleted += other.items_deleted;
        self.leaf_bytes_used += other.leaf_bytes_used;
    }
}

/// Applies a batch and answers the new root.
pub fn apply(
    _source: &dyn NodeSource,
    _sink: &mut dyn NodeSink,
    _root: &RootPtr,
    _batch: &[(Key, Option<Value>)],
) -> Result<(RootPtr, ApplyStats)> {
    Err(Error::Unsupported { what: "a change of a tree".into(), hint: "wait for the next build" })
}
