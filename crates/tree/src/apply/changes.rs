//! What [`apply`](super::apply) is given: changes in key order, wherever they are kept.

use std::sync::Arc;

use ubtrfs_format::Key;

/// Data of an item in a batch.
pub type Value = Arc<[u8]>;

/// Changes as a list: `Some` inserts or replaces, `None` deletes (an absent key is fine).
pub type Batch = Vec<(Key, Option<Value>)>;

/// Changes in strictly ascending key order.
pub trait Changes: Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// The key of one of them. Panics past the last one.
    fn key(&self, index: usize) -> Key;

    /// What is inserted or replaces, or `None` for what is deleted (an absent key is fine). Panics past the last one.
    fn value(&self, index: usize) -> Option<&[u8]>;

    /// Whether there is none.
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
