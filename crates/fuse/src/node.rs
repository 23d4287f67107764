//! Node ids: what the FUSE protocol calls an inode, against what btrfs calls one.
//!
//! A node id is also the `st_ino` that programs see, so it is made from the inode's address by arithmetic and is the
//! same after every mount:
//!
//! | inode                                    | node id                | `st_ino`           |
//! |------------------------------------------|------------------------|--------------------|
//! | root directory of the mount              | 1                      | 256                |
//! | of the mounted subvolume, below 2^40     | its number             | its number         |
//! | of another subvolume (id below 2^23)     | `id << 40 \| number`   | the node id; 256 for the subvolume's root directory |
//! | the empty directory in place of a nested subvolume that a snapshot did not take along | `2^63 \| index` | 2 |
//! | anything that does not fit the above     | `2^63 \| index`        | the node id        |
//!
//! Invariants:
//! N1. The mapping is one to one for the lifetime of the mount.
//! N2. References that the kernel holds (lookup counts) are counted by `fs`, one per `Attr` it returns; forget gives
//!     them back. There is no second count here that could disagree.

use std::collections::HashMap;

use parking_lot::RwLock;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::InodeId;

/// The mount's root directory, by protocol.
pub(crate) const ROOT_NODE: u64 = 1;

/// `BTRFS_EMPTY_SUBVOL_DIR_OBJECTID`.
const EMPTY_SUBVOLUME: Ino = Ino(2);
const INO_BITS: u32 = 40;
const INO_END: u64 = 1 << INO_BITS;
const ROOT_END: u64 = 1 << 23;
const OUTLIER: u64 = 1 << 63;

/// The mapping of one mount.
#[derive(Debug)]
pub(crate) struct Nodes {
    root: InodeId,
    /// Inodes whose numbers do not fit the arithmetic; none on any ordinary filesystem.
    outliers: RwLock<Outliers>,
}

#[derive(Debug, Default)]
struct Outliers {
    ids: Vec<InodeId>,
    nodes: HashMap<InodeId, u64>,
}

impl Nodes {
    /// A mapping for a mount that shows `root` as its root directory.
    pub(crate) fn new(root: InodeId) -> Self {
        Self { root, outliers: RwLock::default() }
    }

    /// The node id of an inode.
    pub(crate) fn node(&self, id: InodeId) -> u64 {
        if id == self.root {
            return ROOT_NODE;
        }
        let (root, ino) = (id.root.0, id.ino.0);
        // Numbers up to 255 are no inodes of files; keep them away from node id 1.
        if (Ino::ROOT_DIR.0..INO_END).contains(&ino) {
            if id.root == self.root.root {
                return ino;
            }
            if root > 0 && root < ROOT_END {
                return root << INO_BITS | ino;
            }
        }
        self.outlier(id)
    }

    /// The inode of a node id, if it is one that [`node`](Self::node) makes.
    pub(crate) fn id(&self, node: u64) -> Option<InodeId> {
        if node == ROOT_NODE {
            return Some(self.root);
        }
        if node & OUTLIER != 0 {
            let index = usize::try_from(node & !OUTLIER).ok()?;
            return self.outliers.read().ids.get(index).copied();
        }
        let ino = Ino(node & (INO_END - 1));
        match node >> INO_BITS {
            0 => Some(InodeId { root: self.root.root, ino }),
            root => Some(InodeId { root: RootId(root), ino }),
        }
    }

    /// What `stat` shows as the inode number.
    pub(crate) fn st_ino(&self, id: InodeId) -> u64 {
        if id.ino == Ino::ROOT_DIR || id.ino == EMPTY_SUBVOLUME { id.ino.0 } else { self.node(id) }
    }

    fn outlier(&self, id: InodeId) -> u64 {
        if let Some(&node) = self.outliers.read().nodes.get(&id) {
            return node;
        }
        let mut outliers = self.outliers.write();
        let next = OUTLIER | outliers.ids.len() as u64;
        let node = *outliers.nodes.entry(id).or_insert(next);
        if node == next {
            outliers.ids.push(id);
        }
        node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(root: u64, ino: u64) -> InodeId {
        InodeId { root: RootId(root), ino: Ino(ino) }
    }

    #[test]
    fn the_mapping_is_one_to_one() {
        let nodes = Nodes::new(id(5, 256));
        let ids = [
            id(5, 256),
            id(5, 257),
            id(5, INO_END - 1),
            id(5, INO_END),
            id(256, 256),
            id(256, 257),
            id(ROOT_END - 1, INO_END - 1),
            id(ROOT_END, 257),
            id(u64::MAX - 300, u64::MAX - 256),
        ];
        let mut seen = HashMap::new();
        for id in ids {
            let node = nodes.node(id);
            assert_eq!(nodes.node(id), node, "stable");
            assert_eq!(nodes.id(node), Some(id));
            assert_eq!(seen.insert(node, id), None, "N1");
        }
        assert_eq!(nodes.node(id(5, 256)), ROOT_NODE);
        assert_eq!(nodes.node(id(5, 257)), 257);
        assert_eq!(nodes.st_ino(id(256, 256)), 256);
        assert_ne!(nodes.st_ino(id(256, 257)), nodes.st_ino(id(5, 257)));
    }

    #[test]
    fn a_mounted_snapshot_shows_its_own_numbers() {
        let nodes = Nodes::new(id(300, 256));
        assert_eq!(nodes.node(id(300, 257)), 257);
        assert_eq!(nodes.id(nodes.node(id(5, 257))), Some(id(5, 257)));
        assert_ne!(nodes.node(id(5, 256)), ROOT_NODE);
    }
}
