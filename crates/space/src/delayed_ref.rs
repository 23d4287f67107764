//! Delayed refs: changes of reference counts, queued until the extent tree is updated.
//!
//! Updating references changes the extent tree, which in turn allocates and frees blocks of the extent tree. So changes
//! are collected here, added up for each reference, and applied to the extent tree as one sorted batch.
//!
//! Invariants:
//! - I1. A head exists for an extent only while one of its deltas is not zero, flags are to be set, or quotas must
//!   count the extent again.
//! - I2. Heads are sorted by bytenr, with one head per bytenr: two live extents never start at one address, and an
//!   address that a transaction frees is not reused before it is unpinned.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ubtrfs_format::item::{ExtentFlags, InlineRef};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical, RootId};

use crate::Extent;
use crate::ref_deltas::RefDeltas;

/// A reference to an extent, without its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RefKey {
    /// A reference to a tree block by a tree: the owner of the node that points to the block.
    TreeBlock(RootId),
    /// A reference to a tree block by the node at this address, which has the full backref flag.
    SharedBlock(Logical),
    /// A reference to a data extent by a file.
    Data {
        /// The subvolume.
        root: RootId,
        /// The inode.
        ino: Ino,
        /// File offset of the file extent item minus its offset into the extent (wrapping).
        offset: u64,
    },
    /// A reference to a data extent by the leaf at this address, which has the full backref flag.
    SharedData(Logical),
}

impl RefKey {
    /// The reference's type on disk.
    pub fn key_type(&self) -> KeyType {
        match self {
            Self::TreeBlock(_) => KeyType::TREE_BLOCK_REF,
            Self::SharedBlock(_) => KeyType::SHARED_BLOCK_REF,
            Self::Data { .. } => KeyType::EXTENT_DATA_REF,
            Self::SharedData(_) => KeyType::SHARED_DATA_REF,
        }
    }

    /// The key of a reference on disk; `None` for an owner ref, which is not counted.
    pub fn of(reference: &InlineRef) -> Option<Self> {
        Some(match *reference {
            InlineRef::TreeBlock(root) => Self::TreeBlock(root),
            InlineRef::SharedBlock(parent) => Self::SharedBlock(parent),
            InlineRef::ExtentData(data) => Self::Data { root: data.root, ino: data.objectid, offset: data.offset },
            InlineRef::SharedData { parent, .. } => Self::SharedData(parent),
            InlineRef::Owner(_) => return None,
        })
    }
}

/// Whether an extent is a tree block or data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtentKind {
    /// A tree block.
    Tree {
        /// Level of the block, stored in the key of a skinny item.
        level: u8,
        /// First key of the block, stored in a non-skinny item when the item is created.
        first_key: Key,
    },
    /// A data extent.
    Data,
}

/// How a change of an extent's references affects quotas. The variants are listed in ascending order: when changes of
/// an extent are merged, the greatest of their variants applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnerMark {
    /// The set of subvolumes that reach the extent stays the same: references are handed over, or the extent moves.
    #[default]
    Same,
    /// A subvolume may start or stop reaching the extent.
    Changed,
    /// Like `Changed`, and only one subvolume reached the extent before the change.
    WasPrivate,
}

/// All queued changes of an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayedRefHead {
    /// The extent.
    pub extent: Extent,
    /// Tree block or data.
    pub kind: ExtentKind,
    /// References to add (positive) or drop (negative); never zero.
    pub deltas: RefDeltas,
    /// Flags to set on the extent item.
    pub set_flags: ExtentFlags,
    /// Generation for a new extent item.
    pub generation: Generation,
    /// Whether quotas count the extent again. A marked head stays queued when its deltas cancel out, because the
    /// references may belong to other subvolumes than before.
    pub owners: OwnerMark,
    /// For simple quotas, the tree that allocated the extent; `None` if no queued change names this tree.
    pub allocated_by: Option<RootId>,
}

impl DelayedRefHead {
    /// The change of the extent's reference count.
    pub fn net(&self) -> i64 {
        self.deltas.iter().map(|(_, delta)| delta).sum()
    }

    /// Adds the changes of this extent from another queue. Returns the other queue's extent if its length differs (I2).
    fn absorb(&mut self, other: Self) -> Option<Extent> {
        other.deltas.iter().for_each(|(reference, delta)| self.deltas.add(*reference, delta));
        self.set_flags |= other.set_flags;
        self.owners = self.owners.max(other.owners);
        self.allocated_by = self.allocated_by.or(other.allocated_by);
        (self.extent != other.extent).then_some(other.extent)
    }

    fn is_void(&self) -> bool {
        !self.changes_item() && self.owners == OwnerMark::Same
    }

    /// Whether the head changes anything in the extent tree.
    pub fn changes_item(&self) -> bool {
        !self.deltas.is_empty() || !self.set_flags.is_empty()
    }
}

/// The queue of delayed refs.
#[derive(Debug, Default)]
pub struct DelayedRefs {
    heads: BTreeMap<Logical, DelayedRefHead>,
    /// An extent that conflicts with another extent at the same address, because items on disk are wrong.
    conflict: Option<Extent>,
}

impl DelayedRefs {
    /// Makes an empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds (`delta > 0`) or drops (`delta < 0`) references, without a mark for quotas.
    pub fn add(&mut self, extent: Extent, kind: ExtentKind, reference: RefKey, delta: i64, generation: Generation) {
        self.change(extent, kind, generation, |head| head.deltas.add(reference, delta));
    }

    /// Adds or drops references like [`Self::add`], with a mark for quotas.
    pub fn add_marked(
        &mut self,
        extent: Extent,
        kind: ExtentKind,
        (reference, delta): (RefKey, i64),
        generation: Generation,
        mark: OwnerMark,
    ) {
        self.change(extent, kind, generation, |head| {
            head.deltas.add(reference, delta);
            head.owners = head.owners.max(mark);
        });
    }

    /// Notes the tree that allocated an extent, if changes of the extent are queued.
    pub fn note_allocated_by(&mut self, bytenr: Logical, tree: RootId) {
        if let Some(head) = self.heads.get_mut(&bytenr) {
            head.allocated_by = Some(tree);
        }
    }

    /// Sets flags on the extent item.
    pub fn set_flags(&mut self, extent: Extent, kind: ExtentKind, flags: ExtentFlags, generation: Generation) {
        self.change(extent, kind, generation, |head| head.set_flags |= flags);
    }

    /// The queued change of the reference count, and the queued flags, of the extent at `bytenr`.
    pub fn net(&self, bytenr: Logical) -> Option<(i64, ExtentFlags)> {
        self.heads.get(&bytenr).map(|head| (head.net(), head.set_flags))
    }

    /// The queued changes of the extent at `bytenr`.
    pub fn get(&self, bytenr: Logical) -> Option<&DelayedRefHead> {
        self.heads.get(&bytenr)
    }

    /// Removes the changes of an extent that was freed before it was ever recorded in the extent tree.
    pub fn forget(&mut self, bytenr: Logical) -> Option<DelayedRefHead> {
        self.heads.remove(&bytenr)
    }

    /// Empties the queue and returns the heads, sorted by bytenr. Iteration gradually frees the memory of the heads.
    pub fn take(&mut self) -> impl ExactSizeIterator<Item = DelayedRefHead> + use<> {
        std::mem::take(&mut self.heads).into_values()
    }

    /// Appends another queue's changes.
    pub fn append(&mut self, other: Self) {
        self.conflict = self.conflict.or(other.conflict);
        if self.heads.is_empty() {
            self.heads = other.heads;
            return;
        }
        if other.heads.len() < MANY_HEADS.max(self.heads.len() / MANY_TIMES) {
            for (bytenr, head) in other.heads {
                match self.heads.entry(bytenr) {
                    Entry::Vacant(entry) => drop(entry.insert(head)),
                    Entry::Occupied(mut entry) => {
                        let conflict = entry.get_mut().absorb(head);
                        self.conflict = self.conflict.or(conflict);
                        if entry.get().is_void() {
                            entry.remove();
                        }
                    }
                }
            }
            return;
        }
        // Merging two long queues and rebuilding the map is faster than single inserts, but needs memory for all heads
        // twice.
        let mut others = other.heads.into_values().peekable();
        let mut heads = Vec::with_capacity(self.heads.len().saturating_add(others.len()));
        for mut head in std::mem::take(&mut self.heads).into_values() {
            while let Some(other) = others.next_if(|other| other.extent.bytenr <= head.extent.bytenr) {
                if other.extent.bytenr < head.extent.bytenr {
                    heads.push((other.extent.bytenr, other));
                } else {
                    let conflict = head.absorb(other);
                    self.conflict = self.conflict.or(conflict);
                }
            }
            if !head.is_void() {
                heads.push((head.extent.bytenr, head));
            }
        }
        heads.extend(others.map(|other| (other.extent.bytenr, other)));
        self.heads = BTreeMap::from_iter(heads);
    }

    /// Whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// An extent that conflicts with another queued extent: both have the same address, but different lengths. With a
    /// conflict, nothing may be committed.
    pub fn conflict(&self) -> Option<Extent> {
        self.conflict
    }

    /// Number of extents with changes.
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Changes an extent's head. A missing head is created first, and a head without changes is removed (I1).
    fn change(
        &mut self,
        extent: Extent,
        kind: ExtentKind,
        generation: Generation,
        change: impl FnOnce(&mut DelayedRefHead),
    ) {
        match self.heads.entry(extent.bytenr) {
            Entry::Vacant(entry) => {
                let (deltas, set_flags) = (RefDeltas::default(), ExtentFlags::empty());
                let owners = OwnerMark::Same;
                let allocated_by = None;
                let mut head = DelayedRefHead { extent, kind, deltas, set_flags, generation, owners, allocated_by };
                change(&mut head);
                if !head.is_void() {
                    entry.insert(head);
                }
            }
            Entry::Occupied(mut entry) => {
                // I2: an address has one extent.
                if entry.get().extent != extent {
                    self.conflict.get_or_insert(extent);
                }
                change(entry.get_mut());
                if entry.get().is_void() {
                    entry.remove();
                }
            }
        }
    }
}

/// A queue is appended head by head if it is shorter than the other queue's length divided by this number.
const MANY_TIMES: usize = 16;
/// A queue with fewer heads than this is always appended head by head.
const MANY_HEADS: usize = if cfg!(test) { 100 } else { 128 << 10 };

#[cfg(test)]
mod tests {
    use super::*;

    const GENERATION: Generation = Generation(9);

    fn data(bytenr: u64) -> Extent {
        Extent::new(Logical(bytenr), 4096)
    }

    fn file(ino: u64) -> RefKey {
        RefKey::Data { root: RootId::FS_TREE, ino: Ino(ino), offset: 0 }
    }

    #[test]
    fn adding_and_dropping_nets_to_nothing() {
        let mut refs = DelayedRefs::new();
        refs.add(data(4096), ExtentKind::Data, file(257), 2, GENERATION);
        refs.add(data(4096), ExtentKind::Data, file(257), -1, GENERATION);
        assert_eq!(refs.net(Logical(4096)), Some((1, ExtentFlags::empty())));
        refs.add(data(4096), ExtentKind::Data, file(257), -1, GENERATION);
        assert!(refs.is_empty() && refs.take().next().is_none());
    }

    #[test]
    fn a_moved_reference_keeps_its_head() {
        let mut refs = DelayedRefs::new();
        refs.add(data(8192), ExtentKind::Data, file(257), -1, GENERATION);
        refs.add(data(8192), ExtentKind::Data, file(258), 1, GENERATION);
        refs.add(data(4096), ExtentKind::Data, file(257), 1, GENERATION);
        assert_eq!(refs.net(Logical(8192)), Some((0, ExtentFlags::empty())));
        let heads: Vec<_> = refs.take().collect();
        assert_eq!(heads.iter().map(|head| head.extent.bytenr.0).collect::<Vec<_>>(), [4096, 8192]);
        assert_eq!(heads[1].deltas, RefDeltas::from_iter([(file(257), -1), (file(258), 1)]));
        assert!(refs.is_empty());
    }

    #[test]
    fn flags_keep_a_head_until_it_is_forgotten() {
        let kind = ExtentKind::Tree { level: 1, first_key: Key::MIN };
        let mut refs = DelayedRefs::new();
        refs.set_flags(data(4096), kind, ExtentFlags::FULL_BACKREF, GENERATION);
        assert_eq!((refs.net(Logical(4096)), refs.len()), (Some((0, ExtentFlags::FULL_BACKREF)), 1));
        assert!(refs.forget(Logical(4096)).is_some() && refs.is_empty());
    }

    #[test]
    fn a_marked_head_stays_when_its_deltas_cancel_out() {
        let (mut refs, mut others) = (DelayedRefs::new(), DelayedRefs::new());
        refs.add_marked(data(4096), ExtentKind::Data, (file(257), -1), GENERATION, OwnerMark::Changed);
        refs.add(data(4096), ExtentKind::Data, file(257), 1, GENERATION);
        others.add_marked(data(8192), ExtentKind::Data, (file(257), 1), GENERATION, OwnerMark::WasPrivate);
        refs.add(data(8192), ExtentKind::Data, file(257), -1, GENERATION);
        refs.append(others);
        let heads: Vec<_> = refs.take().map(|head| (head.extent.bytenr.0, head.owners, head.changes_item())).collect();
        assert_eq!(heads, [(4096, OwnerMark::Changed, false), (8192, OwnerMark::WasPrivate, false)]);
    }

    #[test]
    fn queues_append() {
        let (mut first, mut second) = (DelayedRefs::new(), DelayedRefs::new());
        first.add(data(4096), ExtentKind::Data, file(257), 1, GENERATION);
        second.add(data(4096), ExtentKind::Data, file(257), -1, GENERATION);
        second.set_flags(data(8192), ExtentKind::Data, ExtentFlags::FULL_BACKREF, GENERATION);
        first.append(second);
        assert_eq!((first.net(Logical(4096)), first.len()), (None, 1));
    }

    #[test]
    fn appending_equals_single_adds() {
        for (nr_first, nr_second) in [(1000, 1000), (1000, 20), (20, 1000), (0, 10), (10, 0)] {
            let (mut first, mut second, mut all) = (DelayedRefs::new(), DelayedRefs::new(), DelayedRefs::new());
            // Some extents are in both queues, and some of their changes cancel out.
            for number in 0..nr_first {
                let (extent, ino) = (data(4096 * (number * 7 % 1500)), number % 3);
                first.add(extent, ExtentKind::Data, file(ino), 1, GENERATION);
                all.add(extent, ExtentKind::Data, file(ino), 1, GENERATION);
            }
            for number in 0..nr_second {
                let (extent, ino, delta) =
                    (data(4096 * (number * 11 % 1500)), number % 2, [1, -1][number as usize % 2]);
                second.add(extent, ExtentKind::Data, file(ino), delta, GENERATION);
                all.add(extent, ExtentKind::Data, file(ino), delta, GENERATION);
            }
            first.append(second);
            assert!(first.take().eq(all.take()), "{nr_first} {nr_second}");
            assert_eq!(first.conflict(), None);
        }
        for nr_others in [0, 1000] {
            let (mut first, mut second) = (DelayedRefs::new(), DelayedRefs::new());
            (0..=nr_others).for_each(|number| first.add(data(4096 * number), ExtentKind::Data, file(1), 1, GENERATION));
            let other = Extent::new(Logical(0), 8192);
            second.add(other, ExtentKind::Data, file(2), 1, GENERATION);
            first.append(second);
            assert_eq!(first.conflict(), Some(other));
        }
    }
}
