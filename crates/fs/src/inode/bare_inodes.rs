//! [`BareInodes`]: inodes that are known to have no extended attributes, also those that have left memory.
//!
//! Programs that list files ask for the ACL and a security label of each of them, and few files have any. A bit per inode
//! answers without loading the inode.
//!
//! - B1. An inode is marked under its state lock, after a look into its tree. The mark is removed under the same lock, held
//!   for writing, before an attribute is added. A new inode has no mark. So a marked inode has no attributes.
//! - B2. The number of rows is bounded. If there are too many, all marks are forgotten.

use std::collections::HashMap;

use parking_lot::RwLock;

use crate::types::InodeId;

/// The marks, in rows of inodes with neighbouring numbers.
#[derive(Debug)]
pub(crate) struct BareInodes {
    rows: RwLock<HashMap<InodeId, [u64; ROW_WORDS]>>,
    rows_max: usize,
}

impl BareInodes {
    /// Takes about `bytes` of memory at most.
    pub(crate) fn new(bytes: u64) -> Self {
        let rows_max = usize::try_from(bytes / ROW_BYTES).unwrap_or(usize::MAX).max(1);
        Self { rows: RwLock::default(), rows_max }
    }

    /// Whether an inode is known to have no attributes.
    pub(crate) fn contains(&self, id: InodeId) -> bool {
        let (row, word, bit) = place_of(id);
        self.rows.read().get(&row).and_then(|words| words.get(word)).is_some_and(|bits| bits & bit != 0)
    }

    /// Notes that an inode has no attributes (B1).
    pub(crate) fn add(&self, id: InodeId) {
        let (row, word, bit) = place_of(id);
        let mut rows = self.rows.write();
        if rows.len() >= self.rows_max && !rows.contains_key(&row) {
            rows.clear();
        }
        if let Some(bits) = rows.entry(row).or_default().get_mut(word) {
            *bits |= bit;
        }
    }

    /// Forgets what is known of an inode, which gets an attribute (B1).
    pub(crate) fn remove(&self, id: InodeId) {
        let (row, word, bit) = place_of(id);
        if self.contains(id)
            && let Some(bits) = self.rows.write().get_mut(&row).and_then(|words| words.get_mut(word))
        {
            *bits &= !bit;
        }
    }
}

/// The row of an inode, named by the first inode in it, and the word and the bit in the row.
fn place_of(id: InodeId) -> (InodeId, usize, u64) {
    let (number, within) = (id.ino.0 / ROW_INODES, id.ino.0 % ROW_INODES);
    let row = InodeId { root: id.root, ino: ubtrfs_format::Ino(number.saturating_mul(ROW_INODES)) };
    (row, usize::try_from(within / 64).unwrap_or_default(), 1 << (within % 64))
}

const ROW_WORDS: usize = 8;
const ROW_INODES: u64 = 64 * ROW_WORDS as u64;
/// Estimated memory of a row.
const ROW_BYTES: u64 = 160;

#[cfg(test)]
mod tests {
    use ubtrfs_format::{Ino, RootId};

    use super::*;

    fn id(root: u64, ino: u64) -> InodeId {
        InodeId { root: RootId(root), ino: Ino(ino) }
    }

    #[test]
    fn each_inode_has_its_own_mark() {
        let bare = BareInodes::new(1 << 20);
        let ids: Vec<InodeId> =
            [5, 256].iter().flat_map(|&root| (250..1200).step_by(3).map(move |ino| id(root, ino))).collect();
        ids.iter().for_each(|&id| bare.add(id));
        assert!(ids.iter().all(|&id| bare.contains(id)));
        assert!(!bare.contains(id(5, 251)) && !bare.contains(id(7, 250)) && !bare.contains(id(5, u64::MAX)));
        bare.remove(id(5, 250));
        assert!(!bare.contains(id(5, 250)) && bare.contains(id(256, 250)) && bare.contains(id(5, 253)));
    }

    #[test]
    fn marks_take_bounded_memory() {
        let bare = BareInodes::new(10 * ROW_BYTES);
        for ino in (0..1 << 20).step_by(256) {
            bare.add(id(5, ino));
            assert!(bare.contains(id(5, ino)), "B2");
            assert!(bare.rows.read().len() <= 10, "B2");
        }
    }
}
