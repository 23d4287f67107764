//! [`TransactionLoad`]: a count of the changes of a transaction, by all threads, and an upper bound of the room that
//! these changes need ([`Load::need`]).
//!
//! While room is ample, many changes are admitted for a thread in one step. The thread's operations reserve from the
//! changes that were admitted in advance (the stock), and the load of these operations is added to the transaction's
//! load only after many operations ([`LoadShare`]).
//!
//! I1. The stock of a share, and load that the share has not added yet, count as reserved: the counted load is never
//!     too low.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::KeyType;

use crate::delayed::delayed_item::is_name;
use crate::delayed::item_map::Growth;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::per_thread::PerThread;

/// The load of the active transaction so far, and the need of the frozen transaction.
#[derive(Debug, Default)]
pub(crate) struct TransactionLoad {
    pub(super) rows: ChangeCounts,
    pub(super) names: ChangeCounts,
    /// Number of changes that are admitted and whose reservations have not ended, including the stocks of the shares.
    /// The changes of an ended reservation are subtracted when the counts of its thread's [`LoadShare`] are added to
    /// these counts.
    pub(super) nr_reserved: AtomicU64,
    /// Number of reservations of snapshots that are granted and not dropped yet, or whose grant is being decided.
    pub(super) nr_snapshots: AtomicU64,
    pub(super) shares: PerThread<Mutex<LoadShare>>,
    /// Number of changes of file extent items since the last commit. The commit needs memory for each: a delayed ref, and
    /// a data extent or freed space.
    pub(super) nr_extent_changes: AtomicU64,
    /// The number of such changes in the running commit.
    pub(super) nr_frozen_extent_changes: AtomicU64,
    /// Bytes of checksums that the commit will insert.
    pub(super) csum_bytes: AtomicU64,
    /// Bytes that the running commit, or the running apply of rows, needs for the frozen items.
    pub(super) frozen_need: AtomicU64,
    /// Memory of the frozen items, in bytes.
    pub(super) frozen_memory: AtomicU64,
    /// Upper bound of the bytes of all trees at the last commit. While no blocks are shared, a commit copies each
    /// existing node at most once, so [`Load::need`] counts copies of little more than the used bytes. In mixed block
    /// groups, data is a part of the used bytes. So for removals, subvolume deletions and writeback, this number is
    /// taken instead if it is smaller. For ordinary changes it is not: their need is larger, which leaves free the room
    /// that Linux requires for its global reserve when it mounts.
    pub(super) tree_bytes: AtomicU64,
    /// Whether a commit of this transaction was requested.
    pub(crate) asked_for_commit: AtomicBool,
    /// Whether a flush of the active delayed items was requested.
    pub(crate) asked_for_flush: AtomicBool,
}

/// Counts of the changes of one kind of delayed item.
#[derive(Debug, Default)]
pub(super) struct ChangeCounts {
    /// Number of changes. A change of a file extent item counts several times, because it also changes the extent tree
    /// and the csum tree.
    pub(super) nr_changes: AtomicU64,
    /// Bytes that the changes may add to the trees.
    pub(super) item_bytes: AtomicU64,
    /// Memory of the delayed items, in bytes.
    pub(super) memory_bytes: AtomicI64,
}

/// A thread's stock of admitted changes, and the thread's counts that are not added to the transaction's counts yet.
#[derive(Debug, Default)]
pub(super) struct LoadShare {
    /// Number of changes that are admitted but not reserved yet.
    pub(super) nr_admitted: u64,
    /// Number of reserved changes whose reservations have ended.
    pub(super) nr_ended: u64,
    /// Load of handles that have ended.
    pub(super) load: HandleLoad,
}

/// The load that the changes of one handle add to the transaction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandleLoad {
    pub(super) rows: HandleCounts,
    pub(super) names: HandleCounts,
    /// Number of changes of file extent items.
    pub(super) nr_extent_changes: u64,
}

/// Counts of one handle's changes of one kind of delayed item; see [`ChangeCounts`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HandleCounts {
    pub(super) nr_changes: u64,
    pub(super) item_bytes: u64,
    pub(super) memory_bytes: i64,
}

/// The state of the trees, from which the need of a load is estimated.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetadataUse {
    /// Bytes of metadata in use.
    pub(super) used: u64,
    pub(super) nodesize: u64,
    /// Bytes of the extent tree, if subvolumes may share blocks.
    pub(super) shared_extent_tree: Option<u64>,
}

/// The load of some changes: their number, and the bytes that they add.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) nr_changes: u64,
    pub(super) new_bytes: u64,
}

/// When a change copies a leaf, at most this many nodes of the extent tree are copied too: the node with the item of
/// the old leaf, and a share of the nodes into which the items of new leaves are inserted. The copied leaf itself and
/// its share of the path are not counted.
pub(super) const EXTENT_NODES_PER_CHANGE: u64 = 2;
/// Number of nodes that every commit copies: paths to the roots, root tree, block groups, free space.
pub(super) const NODES_PER_COMMIT: u64 = 24;
/// Number of changes in the extent tree and the csum tree that each change of a file extent item causes.
pub(super) const EXTRA_CHANGES_PER_EXTENT: u64 = 2;
/// Upper bound of the overhead of a new item in bytes: its head, and the space that its leaf and the nodes above may
/// leave empty.
pub(super) const ITEM_OVERHEAD: u64 = 64;
/// Lower bound of the bytes that an item with an extent reference takes in a leaf.
pub(super) const CHILD_BYTES: u64 = 72;
/// Upper bound of the bytes that one more reference to an extent needs in the extent tree, including the space that
/// leaves may leave empty.
pub(super) const REFERENCE_BYTES: u64 = 64;
/// Number of changes that are admitted for a thread in advance: enough for about fifty operations.
pub(super) const SHARE_ITEMS: u64 = 1024;
/// Bytes of memory that a thread's load may have before it is added to the transaction's counts.
pub(super) const SHARE_BYTES: i64 = 256 << 10;

impl TransactionLoad {
    /// Adds the load of a handle that ends.
    pub(crate) fn add(&self, load: &HandleLoad) {
        let mut share = self.shares.current().lock();
        share.load.add_load(load);
        if share.load.memory_bytes() >= SHARE_BYTES {
            self.add_share(&mut share);
        }
    }

    /// Takes changes from this thread's stock ([`LoadShare`]). Returns false, and takes nothing, if the stock is too
    /// small.
    pub(crate) fn take_admitted(&self, nr_items: u64) -> bool {
        let mut share = self.shares.current().lock();
        let rest = share.nr_admitted.checked_sub(nr_items);
        share.nr_admitted = rest.unwrap_or(share.nr_admitted);
        rest.is_some()
    }

    /// Adds the counts of all shares to the transaction's counts, and gives the stocks up: their changes are no longer
    /// reserved. Returns whether the number of reserved changes fell.
    pub(super) fn add_shares(&self) -> bool {
        self.shares.all().fold(false, |any, share| {
            let mut share = share.lock();
            share.nr_ended = share.nr_ended.saturating_add(std::mem::take(&mut share.nr_admitted));
            self.add_share(&mut share) || any
        })
    }

    /// Adds the counts of a share to the transaction's counts. Returns whether the number of reserved changes fell. The
    /// caller holds the share's lock: the end of the transaction waits for that lock, so the counts are added to the
    /// right transaction.
    pub(super) fn add_share(&self, share: &mut LoadShare) -> bool {
        let LoadShare { nr_ended, load, .. } =
            std::mem::replace(share, LoadShare { nr_admitted: share.nr_admitted, ..LoadShare::default() });
        // Add the load before `nr_reserved` falls: for a moment the load is counted twice, but it is never missing
        // (I1).
        self.rows.add(&load.rows);
        self.names.add(&load.names);
        self.nr_extent_changes.fetch_add(load.nr_extent_changes, Ordering::Relaxed);
        let before = self.nr_reserved.fetch_sub(nr_ended, Ordering::Relaxed);
        assert!(before >= nr_ended, "I1: {nr_ended} changes end of {before} that are reserved");
        nr_ended > 0
    }

    /// Number of changes whose reservations have not ended, without the stocks, which it gives up.
    pub(crate) fn nr_reserved(&self) -> u64 {
        self.add_shares();
        self.nr_reserved.load(Ordering::Relaxed)
    }

    /// Whether the load may get less without a reservation for `purpose`: when other threads put their admitted changes.
    pub(crate) fn may_get_less(&self, purpose: ReservationPurpose) -> bool {
        self.add_shares();
        // Writeback also waits for changes that were put since the commit: the next commit replaces their estimate.
        match purpose {
            ReservationPurpose::Writeback => self.active() != Load::default(),
            _ => self.nr_reserved.load(Ordering::Relaxed) > 0,
        }
    }

    /// Adds the bytes of new checksums to the load.
    pub(crate) fn add_csums(&self, bytes: u64) {
        self.csum_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Memory of the active transaction's delayed items, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.rows.memory_bytes().saturating_add(self.names.memory_bytes())
    }

    /// The part of [`Self::memory_bytes`] that names take.
    pub(crate) fn name_memory_bytes(&self) -> u64 {
        self.names.memory_bytes()
    }

    /// The part of [`Self::memory_bytes`] that rows take.
    pub(crate) fn row_memory_bytes(&self) -> u64 {
        self.rows.memory_bytes()
    }

    /// Memory of the frozen items, in bytes.
    pub(crate) fn frozen_memory_bytes(&self) -> u64 {
        self.frozen_memory.load(Ordering::Relaxed)
    }

    /// Number of changes of file extent items since the last commit.
    pub(crate) fn nr_extent_changes(&self) -> u64 {
        self.nr_extent_changes.load(Ordering::Relaxed)
    }

    /// Number of changes of file extent items in the running commit.
    pub(crate) fn nr_frozen_extent_changes(&self) -> u64 {
        self.nr_frozen_extent_changes.load(Ordering::Relaxed)
    }

    /// Notes that the frozen items have left memory.
    pub(crate) fn frozen_items_dropped(&self) {
        self.frozen_memory.store(0, Ordering::Relaxed);
    }

    /// Begins a reservation.
    pub(super) fn begin(&self, nr_items: u64, purpose: ReservationPurpose) {
        self.nr_reserved.fetch_add(nr_items, Ordering::Relaxed);
        if purpose == ReservationPurpose::Snapshot {
            self.nr_snapshots.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends a reservation.
    pub(crate) fn end(&self, nr_items: u64, purpose: ReservationPurpose) {
        self.unreserve(nr_items);
        if purpose == ReservationPurpose::Snapshot {
            let before = self.nr_snapshots.fetch_sub(1, Ordering::Relaxed);
            assert!(before > 0, "I1: a snapshot's reservation ends twice");
        }
    }

    pub(super) fn unreserve(&self, nr_items: u64) {
        let mut share = self.shares.current().lock();
        share.nr_ended = share.nr_ended.saturating_add(nr_items);
        if share.nr_admitted < nr_items || share.nr_ended >= SHARE_ITEMS {
            self.add_share(&mut share);
        }
    }

    pub(super) fn active(&self) -> Load {
        let reserved = Load {
            nr_changes: self.nr_reserved.load(Ordering::Relaxed),
            new_bytes: self.csum_bytes.load(Ordering::Relaxed),
        };
        self.rows.load().plus(self.names.load()).plus(reserved)
    }
}

impl ChangeCounts {
    pub(super) fn add(&self, of_handle: &HandleCounts) {
        let HandleCounts { nr_changes, item_bytes, memory_bytes } = *of_handle;
        if nr_changes > 0 {
            self.nr_changes.fetch_add(nr_changes, Ordering::Relaxed);
            self.item_bytes.fetch_add(item_bytes, Ordering::Relaxed);
        }
        if memory_bytes != 0 {
            self.memory_bytes.fetch_add(memory_bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn load(&self) -> Load {
        Load { nr_changes: self.nr_changes.load(Ordering::Relaxed), new_bytes: self.item_bytes.load(Ordering::Relaxed) }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        u64::try_from(self.memory_bytes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    pub(super) fn reset(&self) {
        self.nr_changes.store(0, Ordering::Relaxed);
        self.item_bytes.store(0, Ordering::Relaxed);
        self.memory_bytes.store(0, Ordering::Relaxed);
    }
}

impl HandleLoad {
    /// Adds one change to the load: an item that was put or deleted.
    #[allow(clippy::arithmetic_side_effects, reason = "sizes of memory, and a number of changes of one handle")]
    pub(crate) fn add(&mut self, growth: &Growth, item_type: KeyType) {
        let counts = if is_name(item_type) { &mut self.names } else { &mut self.rows };
        let item_bytes = growth.data_bytes as u64 + if growth.is_new { ITEM_OVERHEAD } else { 0 };
        counts.item_bytes += item_bytes;
        counts.memory_bytes += growth.memory_bytes as i64;
        let is_extent = item_type == KeyType::EXTENT_DATA;
        self.nr_extent_changes += u64::from(is_extent);
        counts.nr_changes += u64::from(item_bytes > 0) + if is_extent { EXTRA_CHANGES_PER_EXTENT } else { 0 };
    }

    /// Adds the first change of a tree, which keeps `bytes` of memory from then on.
    pub(crate) fn add_tree(&mut self, bytes: u64) {
        self.rows.memory_bytes = self.rows.memory_bytes.saturating_add_unsigned(bytes);
    }

    pub(super) fn memory_bytes(&self) -> i64 {
        self.rows.memory_bytes.saturating_add(self.names.memory_bytes)
    }

    pub(super) fn add_load(&mut self, other: &Self) {
        self.rows.add(&other.rows);
        self.names.add(&other.names);
        self.nr_extent_changes = self.nr_extent_changes.saturating_add(other.nr_extent_changes);
    }
}

impl Load {
    /// The load of the changes of both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            nr_changes: self.nr_changes.saturating_add(other.nr_changes),
            new_bytes: self.new_bytes.saturating_add(other.new_bytes),
        }
    }

    /// Bytes that the trees may allocate for this load.
    ///
    /// All changes together copy each existing node at most once. After inserts, no two neighbouring leaves fit into
    /// one, so leaves are at least half full. An eighth is added for the nodes above the leaves and for the extent
    /// items of all new nodes.
    ///
    /// If subvolumes share blocks, each subvolume may make its own copy of a shared node, and every copy adds a
    /// reference to all children of the node. The extent items of the children may be anywhere in the extent tree, so
    /// up to the whole extent tree is copied; a quarter is added for its leaves that split.
    pub(super) fn need(self, room: &MetadataUse) -> u64 {
        let MetadataUse { used, nodesize, shared_extent_tree } = *room;
        let nr_extent_nodes = self.nr_changes.saturating_mul(EXTENT_NODES_PER_CHANGE);
        let nr_nodes = self.nr_changes.saturating_add(NODES_PER_COMMIT);
        let bytes = |nr_nodes: u64| nr_nodes.saturating_mul(nodesize);
        let new = self.new_bytes.saturating_mul(2).saturating_add(self.new_bytes / 8);
        let Some(extent_tree) = shared_extent_tree else {
            let most = used.saturating_add(used / 16).saturating_add(nodesize.saturating_mul(16));
            return bytes(nr_nodes.saturating_add(nr_extent_nodes)).min(most).saturating_add(new);
        };
        let nr_children = self.nr_changes.saturating_mul(nodesize / CHILD_BYTES);
        let extent_nodes =
            bytes(nr_extent_nodes.saturating_add(nr_children)).min(extent_tree.saturating_add(extent_tree / 4));
        let references = nr_children.saturating_mul(REFERENCE_BYTES);
        bytes(nr_nodes).saturating_add(new).saturating_add(extent_nodes).saturating_add(references)
    }
}

impl HandleCounts {
    pub(super) fn add(&mut self, other: &Self) {
        self.nr_changes = self.nr_changes.saturating_add(other.nr_changes);
        self.item_bytes = self.item_bytes.saturating_add(other.item_bytes);
        self.memory_bytes = self.memory_bytes.saturating_add(other.memory_bytes);
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_testkit::Rng;

    use super::*;

    #[test]
    fn shares_count_as_reserved_until_they_are_added() {
        let total = TransactionLoad::default();
        let mut rng = Rng::new(11);
        let (mut reserved, mut put) = (Vec::new(), Load::default());
        for _ in 0..20_000 {
            match rng.below(8) {
                // Arm 0 admits changes for one operation; arm 1 admits changes in advance, as `admit_ahead` does.
                0 => {
                    total.nr_reserved.fetch_add(12, Ordering::Relaxed);
                    reserved.push(12);
                }
                1 => {
                    total.nr_reserved.fetch_add(SHARE_ITEMS, Ordering::Relaxed);
                    total.shares.current().lock().nr_admitted += SHARE_ITEMS;
                }
                2..5 => {
                    let nr_items = 1 + rng.below(30);
                    reserved.extend(total.take_admitted(nr_items).then_some(nr_items));
                }
                5..7 => {
                    let Some(nr_items) = reserved.pop() else { continue };
                    let mut load = HandleLoad::default();
                    load.rows.nr_changes = rng.below(nr_items + 1);
                    load.rows.item_bytes = 100 * load.rows.nr_changes;
                    put = put.plus(Load { nr_changes: load.rows.nr_changes, new_bytes: load.rows.item_bytes });
                    total.add(&load);
                    total.unreserve(nr_items);
                }
                _ => {
                    total.add_shares();
                }
            }
            let alive: u64 = reserved.iter().sum();
            assert!(total.active().nr_changes >= put.nr_changes + alive, "I1");
        }
        total.add_shares();
        let expected = put.plus(Load { nr_changes: reserved.iter().sum(), new_bytes: 0 });
        assert_eq!(total.active(), expected);
        assert!(!total.add_shares(), "nothing is left to add");
    }
}
