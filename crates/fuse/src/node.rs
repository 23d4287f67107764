//! Node ids: maps btrfs's inodes to the inode numbers of the FUSE protocol.
//!
//! On Linux each subvolume has a separate device number (`st_dev`), and inode numbers are unique only in a subvolume. A
//! FUSE mount has one device number, and programs treat two directories with equal `st_dev` and `st_ino` as one
//! directory. So all inode numbers of a mount differ, including the numbers of nested subvolumes' root directories. The
//! node id, which must be unique anyway, is computed from the subvolume and the inode number in it, and programs see it
//! as `st_ino`:
//!
//! | inode                                                              | node id and `st_ino`                      |
//! |--------------------------------------------------------------------|-------------------------------------------|
//! | root directory of the FUSE filesystem                              | 1; `st_ino` by one of the rows below       |
//! | of the first mounted subvolume, number below 2^40                  | the inode number, as on Linux             |
//! | of another subvolume, id below 2^22, number below 2^40             | `id << 40 \| number`                      |
//! | of another subvolume, id below 2^32, number below 2^30             | `2^62 \| id << 30 \| number`              |
//! | the empty directory that a snapshot has in place of a nested subvolume, both ids below 2^31         | `2^63 \| 2^62 \| snapshot << 31 \| subvolume` |
//! | anything else                                                      | `2^63 \| 62 bits of a hash`, incremented while the id is taken |
//!
//! Except for numbers made from hashes, the numbers are equal after every mount and on every machine. Backups that
//! compare inode numbers with the numbers of their last run, file handles that outlive the server (NFS), and `tar
//! --listed-incremental` depend on equal numbers. Subvolume ids are not reused, so a number never refers to another
//! file later. Numbers made from hashes are also equal unless two hashes collide; file handles with these numbers
//! become stale when the server ends.
//!
//! With `submounts`, each FUSE filesystem shows one subvolume, with Linux's numbers. A nested subvolume has a directory
//! there on which the nested subvolume's own FUSE filesystem is mounted.
//!
//! The root of the FUSE filesystem is the root directory of the first mounted subvolume or, if the mounts show several
//! subvolumes, the top level. Among the root directories of subvolumes, only the root directory of the first mounted
//! subvolume has `st_ino` 256. Crate `btrfsutil` recognises the others by the forms above.
//!
//! Invariants:
//! - N1. The mapping is one to one for the lifetime of the mount. An id that [`NodeIds::node`] cannot have made is
//!   stale.
//! - N2. `fs` counts the references that the kernel holds (lookup counts): one for each `Attr` that goes to the kernel
//!   in an entry, until FORGET gives the reference back. This module keeps no second count that could disagree.

use std::collections::HashMap;

use parking_lot::RwLock;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::InodeId;

/// The node id of the mount's root directory, fixed by the protocol.
pub(crate) const ROOT_NODE: u64 = 1;

/// The mapping of one FUSE filesystem.
#[derive(Debug)]
pub(crate) struct NodeIds {
    /// The directory with node id 1.
    root: InodeId,
    /// The subvolume whose inodes keep their numbers.
    first: RootId,
    /// Whether the FUSE filesystem shows the first subvolume only.
    shows_one: bool,
    /// Inodes whose numbers do not fit the arithmetic forms; ordinary filesystems have no such inodes.
    outliers: RwLock<Outliers>,
}

#[derive(Debug, Default)]
struct Outliers {
    ids: HashMap<u64, InodeId>,
    nodes: HashMap<InodeId, u64>,
}

impl NodeIds {
    /// Makes the mapping for a FUSE filesystem whose root is `root`. The inodes of the subvolume `first` keep their
    /// numbers.
    pub(crate) fn new(root: InodeId, first: RootId) -> Self {
        Self { root, first, shows_one: false, outliers: RwLock::default() }
    }

    /// Makes the mapping for a FUSE filesystem that shows one subvolume with Linux's numbers.
    pub(crate) fn of_one_subvolume(root: RootId) -> Self {
        Self { shows_one: true, ..Self::new(InodeId::root_of(root), root) }
    }

    /// The root directory of the FUSE filesystem.
    pub(crate) fn root(&self) -> InodeId {
        self.root
    }

    /// The node id of an inode.
    pub(crate) fn node(&self, id: InodeId) -> u64 {
        self.by_arithmetic(id).unwrap_or_else(|| self.outlier(id))
    }

    /// The generation of an inode for file handles. Equal numbers can mean inodes of different subvolumes when another
    /// subvolume is mounted first the next time, so the subvolume is a part of it.
    pub(crate) fn generation(id: InodeId, generation: u64) -> u64 {
        generation ^ hash(InodeId { root: id.root, ino: Ino(0) })
    }

    /// The inode of a node id; `None` if [`node`](Self::node) cannot have made the id (N1).
    pub(crate) fn id(&self, node: u64) -> Option<InodeId> {
        let low = |bits: u32| node & ((1 << bits) - 1);
        let id = match (node >> 62, node) {
            (_, ROOT_NODE) => self.root,
            (0, _) => match node >> NUMBER_BITS {
                0 => InodeId { root: self.first, ino: Ino(node) },
                root => InodeId { root: RootId(root), ino: Ino(low(NUMBER_BITS)) },
            },
            (HIGH_IDS, _) => InodeId { root: RootId(low(62) >> SHORT_BITS), ino: Ino(low(SHORT_BITS)) },
            (STUBS, _) => InodeId::stub(RootId(low(62) >> STUB_BITS), RootId(low(STUB_BITS))),
            _ => return self.outliers.read().ids.get(&node).copied(),
        };
        (self.by_arithmetic(id) == Some(node)).then_some(id)
    }

    /// The inode number that `stat` shows.
    pub(crate) fn st_ino(&self, id: InodeId) -> u64 {
        match () {
            () if id == self.root => self.root_st_ino(),
            () if self.shows_one && id.stub_of().is_some() => STUB_INO,
            () => self.node(id),
        }
    }

    /// The inode number that a listing shows. Like Linux, a FUSE filesystem that shows one subvolume lists the id of a
    /// nested subvolume, on whose directory another filesystem is mounted.
    pub(crate) fn listed_ino(&self, id: InodeId) -> u64 {
        match id.stub_of() {
            Some(subvolume) if self.shows_one => subvolume.0,
            None if self.shows_one && id.root != self.first => id.root.0,
            _ => self.st_ino(id),
        }
    }

    fn root_st_ino(&self) -> u64 {
        self.numbered(self.root).unwrap_or(ROOT_NODE)
    }

    /// The inode whose number in `stat` is `st_ino`.
    pub(crate) fn id_of_st_ino(&self, st_ino: u64) -> Option<InodeId> {
        if st_ino == self.root_st_ino() { Some(self.root) } else { self.id(st_ino) }
    }

    fn by_arithmetic(&self, id: InodeId) -> Option<u64> {
        if id == self.root { Some(ROOT_NODE) } else { self.numbered(id) }
    }

    fn numbered(&self, id: InodeId) -> Option<u64> {
        let (root, number) = (id.root.0, id.ino.0);
        if let Some(RootId(subvolume)) = id.stub_of() {
            let fits = root < 1 << STUB_BITS && subvolume < 1 << STUB_BITS;
            return fits.then_some(STUBS << 62 | root << STUB_BITS | subvolume);
        }
        match () {
            // No file has a number below 256. So no file gets node id 1, which is the root's.
            () if number < Ino::ROOT_DIR.0 || root == 0 => None,
            () if id.root == self.first => (number < 1 << NUMBER_BITS).then_some(number),
            () if root < 1 << ID_BITS && number < 1 << NUMBER_BITS => Some(root << NUMBER_BITS | number),
            () if root < 1 << LONG_ID_BITS && number < 1 << SHORT_BITS => {
                Some(HIGH_IDS << 62 | root << SHORT_BITS | number)
            }
            () => None,
        }
    }

    fn outlier(&self, id: InodeId) -> u64 {
        if let Some(&node) = self.outliers.read().nodes.get(&id) {
            return node;
        }
        let Outliers { ids, nodes } = &mut *self.outliers.write();
        *nodes.entry(id).or_insert_with(|| {
            let mut node = OUTLIERS << 62 | hash(id) >> 2;
            while ids.contains_key(&node) {
                node = OUTLIERS << 62 | (node + 1) & ((1 << 62) - 1);
            }
            ids.insert(node, id);
            node
        })
    }
}

/// A hash that is equal on every machine and in every version.
fn hash(id: InodeId) -> u64 {
    [id.root.0, id.ino.0].iter().fold(MIX, |state, word| {
        let product = u128::from(state ^ word) * u128::from(MIX);
        (product as u64 ^ (product >> 64) as u64).wrapping_add(*word)
    })
}

/// Bits of the inode number in the usual form of node ids.
const NUMBER_BITS: u32 = 40;
/// Bits of the subvolume id in the usual form of node ids.
const ID_BITS: u32 = 22;
/// Bits of the inode number in the form for high subvolume ids.
const SHORT_BITS: u32 = 30;
/// Bits of the subvolume id in the form for high subvolume ids.
const LONG_ID_BITS: u32 = 32;
/// Bits of each id in the node id of an empty directory in place of a subvolume.
const STUB_BITS: u32 = 31;
// The two highest bits of a node id tell its form. The usual form has 0; the constants below are the other values.
/// Form of node ids in subvolumes with high ids.
const HIGH_IDS: u64 = 1;
/// Form of node ids that are hashes.
const OUTLIERS: u64 = 2;
/// Form of node ids of empty directories in place of subvolumes.
const STUBS: u64 = 3;
/// The inode number that Linux shows for an empty directory in place of a subvolume.
const STUB_INO: u64 = 2;
/// An odd number whose bits look random.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    fn id(root: u64, ino: u64) -> InodeId {
        InodeId { root: RootId(root), ino: Ino(ino) }
    }

    /// Subvolume ids and inode numbers on both sides of every limit.
    fn borders() -> Vec<InodeId> {
        let around = |bits: u32| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1];
        let roots = [5, 6, 256, 257, u64::MAX - 300].into_iter();
        let roots: Vec<u64> =
            roots.chain(around(ID_BITS)).chain(around(STUB_BITS)).chain(around(LONG_ID_BITS)).collect();
        let numbers = [0, 1, 2, 5, 255, 256, 257, 300, (1 << 63) - 1].into_iter();
        let numbers = numbers.chain(around(SHORT_BITS)).chain(around(NUMBER_BITS)).chain(around(62));
        let stubs = roots.iter().flat_map(|&root| roots.iter().map(move |&of| InodeId::stub(RootId(root), RootId(of))));
        let inodes = numbers.flat_map(|number| roots.iter().map(move |&root| id(root, number)));
        inodes.chain(stubs).collect()
    }

    #[test]
    fn every_inode_has_its_own_number_whatever_is_mounted() {
        let mounts = [5, 256, 1 << ID_BITS, 1 << LONG_ID_BITS, u64::MAX - 300];
        for (mounted, top) in mounts.into_iter().flat_map(|mounted| [(mounted, mounted), (mounted, 5)]) {
            let nodes = NodeIds::new(id(top, 256), RootId(mounted));
            let (mut seen, mut shown) = (HashMap::new(), HashMap::new());
            for id in borders() {
                let node = nodes.node(id);
                assert_eq!(nodes.node(id), node, "stable");
                assert_eq!(nodes.id(node), Some(id), "{mounted}: {node:x}");
                if let Some(other) = seen.insert(node, id) {
                    assert_eq!(other, id, "N1: {node:x}");
                }
                let st_ino = nodes.st_ino(id);
                assert_eq!(nodes.id_of_st_ino(st_ino), Some(id), "{mounted}: {st_ino:x}");
                if let Some(other) = shown.insert(st_ino, id) {
                    assert_eq!(other, id, "st_ino of {id:?}");
                }
            }
            assert_eq!((nodes.node(id(top, 256)), nodes.st_ino(id(mounted, 256))), (ROOT_NODE, 256));
            assert_eq!(nodes.st_ino(id(mounted, 257)), 257, "as Linux shows it");
            assert_eq!(shown.keys().filter(|ino| **ino == 256).count(), 1);
        }
    }

    #[test]
    fn numbers_are_the_same_after_the_next_mount() {
        let nodes = || NodeIds::new(id(5, 256), RootId(5));
        let (one, next) = (nodes(), nodes());
        let ids = borders();
        let numbers: Vec<u64> = ids.iter().map(|id| one.st_ino(*id)).collect();
        let mut other_order: Vec<u64> = ids.iter().rev().map(|id| next.st_ino(*id)).collect();
        other_order.reverse();
        assert_eq!(numbers, other_order);
    }

    #[test]
    fn handles_of_another_first_subvolume_do_not_name_its_files() {
        let [one, other] = [300, 301].map(|first| NodeIds::new(id(5, 256), RootId(first)));
        let (file, same_number) = (id(300, 257), id(301, 257));
        assert_eq!(one.node(file), other.node(same_number));
        let low = |id| NodeIds::generation(id, 7) & u64::from(u32::MAX);
        assert_ne!(low(file), low(same_number), "the kernel keeps 32 bits");
        assert_ne!(low(id(300, 256)), NodeIds::generation(id(300, 256), 8) & u64::from(u32::MAX));
        assert_eq!(low(file), low(id(300, 258)), "it depends on the subvolume only");
    }

    #[test]
    fn another_number_for_the_same_inode_is_stale() {
        let nodes = NodeIds::new(id(300, 256), RootId(300));
        for node in
            [0, 2, 255, 256, 300 << NUMBER_BITS | 257, 5 << NUMBER_BITS | 3, HIGH_IDS << 62 | 5 << SHORT_BITS | 257]
        {
            assert_eq!(nodes.id(node), None, "{node:x}");
        }
        assert_eq!(nodes.id(OUTLIERS << 62 | 7), None, "nobody was told of it");
    }

    #[test]
    fn the_numbers_of_one_subvolume_are_those_of_linux() {
        let nodes = NodeIds::of_one_subvolume(RootId(300));
        let stub = InodeId::stub(RootId(300), RootId(257));
        assert_eq!([id(300, 256), id(300, 257), stub].map(|id| nodes.st_ino(id)), [256, 257, 2]);
        assert_eq!([id(300, 257), id(301, 256), stub].map(|id| nodes.listed_ino(id)), [257, 301, 257]);
        assert_eq!(nodes.id(nodes.node(stub)), Some(stub), "N1");
        assert_eq!((nodes.id_of_st_ino(256), nodes.id_of_st_ino(2)), (Some(id(300, 256)), None));
    }

    #[test]
    fn outliers_whose_hashes_are_taken_get_other_numbers() {
        let nodes = NodeIds::new(id(5, 256), RootId(5));
        let first = id(5, 1 << 50);
        let taken = OUTLIERS << 62 | hash(first) >> 2;
        nodes.outliers.write().ids.insert(taken, id(7, 1 << 50));
        let node = nodes.node(first);
        assert_ne!(node, taken);
        assert_eq!((nodes.id(node), nodes.node(first)), (Some(first), node));
    }
}
