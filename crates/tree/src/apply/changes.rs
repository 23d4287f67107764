//! The input of [`apply`](super::apply): changes in key order.

use std::sync::Arc;

use ubtrfs_format::Key;

/// The data of an item in a batch.
pub type Value = Arc<[u8]>;

/// A list of changes: `Some` inserts or replaces an item, `None` deletes it if it exists.
pub type Batch = Vec<(Key, Option<Value>)>;

/// A sequence of changes in strictly ascending key order.
pub trait Changes: Sync {
    /// The number of changes.
    fn len(&self) -> usize;

    /// The key of a change. Panics past the last change.
    fn key(&self, index: usize) -> Key;

    /// The new data of the item, or `None` to delete it if it exists. Panics past the last change.
    fn value(&self, index: usize) -> Option<&[u8]>;

    /// Whether there are no changes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Changes for Batch {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn key(&self, index: usize) -> Key {
        self[index].0
    }

    fn value(&self, index: usize) -> Option<&[u8]> {
        self[index].1.as_deref()
    }
}
