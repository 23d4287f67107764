//! Metadata reservations: a change is admitted only if its commit will find room.
//!
//! A commit changes trees by copying nodes. A transaction needs room for a copy of every node that it touches (the old
//! nodes become free when it is committed) and for the items that it adds. A change is admitted only while free space
//! and possible new chunks cover its own need and that of all changes admitted before it.
//! [`Load::need`](crate::handle::transaction_load::Load::need) is an upper bound of the need of all these changes:
//!
//! ```text
//!   free + unallocated  >=  frozen transaction + active transaction + future writeback + space that the purpose must leave
//! ```
//!
//! I1. An admitted change finds room at the commit: the estimate is an upper bound, and new data chunks leave this room
//!     on the devices ([`Engine::leaves_room_for_metadata`]).
//! I2. Accepted dirty data finds room for its items: ordinary changes leave room for the items of all reserved data.
//! I3. Removals and commits work on a full filesystem: they may use space that ordinary changes must leave. In a
//!     subvolume with snapshots, removals can take more space than they free: they copy shared nodes, and the snapshots
//!     keep the old nodes. So removals leave room for the deletion of a subvolume, which ends the sharing.
//!
//! I4. While a commit runs, its new nodes are counted twice, as need and as used space, and the nodes that they replace
//!     are pinned. So a reservation that does not fit during a commit does not fail yet: its last attempt is made
//!     between two commits.
//!
//! A commit replaces estimates by exact numbers, so a nearly full filesystem commits often before it reports
//! `ENOSPC`.

use std::sync::atomic::Ordering;

use ubtrfs_format::item::RootItem;
use ubtrfs_format::{Key, KeyType, RootId};
use ubtrfs_space::{SpaceInfo, SpaceKind};

use crate::engine::{BackgroundWork, DirtyData, Engine};
use crate::handle::trans_handle::MetadataReservation;
use crate::handle::transaction_load::{
    EXTRA_CHANGES_PER_EXTENT, ITEM_OVERHEAD, Load, MetadataUse, NODES_PER_COMMIT, SHARE_ITEMS,
};

/// The purpose of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReservationPurpose {
    /// An ordinary change, which can fail for lack of space.
    Change,
    /// Writing the items of dirty data that was accepted earlier.
    Writeback,
    /// A change that frees space once it is committed, if no snapshot shares that space.
    Removal,
    /// The deletion of a subvolume, and the work of dropping its tree.
    SubvolumeDeletion,
    /// A snapshot. After the grant, all changes may copy blocks that the snapshot shares.
    Snapshot,
}

impl ReservationPurpose {
    /// Whether a reservation for this purpose waits for its turn, and leaves the global reserve untouched.
    pub(crate) fn is_ordinary(self) -> bool {
        matches!(self, Self::Change | Self::Snapshot)
    }
}

/// Upper bound of the bytes of a chunk in the chunk tree: its item with two stripes, and the item's head.
const CHUNK_BYTES: u64 = 256;
/// A removal that makes at most this many changes in one step fits even on a full filesystem: if subvolumes share
/// blocks, the global reserve has room for these changes.
const CHANGES_PER_REMOVAL: u64 = 16;
/// Upper bound of the changes that the deletion of a subvolume makes, the dropping of its tree excluded. At most nine
/// items change: `DIR_ITEM`, `DIR_INDEX`, inode of the directory, `ROOT_REF`, `ROOT_BACKREF`, orphan item, root item,
/// two UUID items. The rest is to spare.
pub(crate) const CHANGES_PER_SUBVOLUME_DELETION: u64 = 12;
/// Number of changes that writeback makes for each reservation of dirty data, besides the changes for the extents.
const CHANGES_PER_DIRTY_RESERVATION: u64 = 4;
/// Upper bound of the bytes that a change of writeback adds to a tree, inline data and checksums excluded.
const BYTES_PER_CHANGE: u64 = 128;
/// Minimum length in bytes of the extents that writeback makes when much dirty data is contiguous. An extent of
/// compressed data covers at most this number of bytes.
const EXTENT_BYTES: u64 = 128 << 10;
/// Minimum number of nodes in the global reserve: a few times the need of a commit with one removal.
const RESERVE_NODES_MIN: u64 = 128;
const RESERVE_MAX: u64 = 512 << 20;
/// Maximum bytes of the global reserve in mixed block groups, which are for small filesystems.
const RESERVE_MIXED_MAX: u64 = 16 << 20;
/// Room is ample if it is at least the need multiplied by this number.
const AMPLE: u64 = 3;
impl Engine {
    /// Admits as many changes as fit, from `most` down to `least`.
    pub(crate) fn admit_most(
        &self,
        most: usize,
        least: usize,
        purpose: ReservationPurpose,
    ) -> Option<MetadataReservation<'_>> {
        let mut nr_items = most;
        loop {
            if self.admit(nr_items as u64, purpose) {
                return Some(MetadataReservation::counted(self, nr_items as u64, purpose));
            }
            if nr_items <= least {
                return None;
            }
            nr_items = (nr_items / 2).max(least);
        }
    }

    /// Admits changes for the next operations of this thread if room is ample. If the need takes most of the room,
    /// requests a commit from the commit thread before any thread must wait.
    pub(crate) fn admit_ahead(&self) {
        let (room, need) = self.metadata_room_and_need(ReservationPurpose::Change);
        if room / AMPLE >= need {
            if self.admit(SHARE_ITEMS, ReservationPurpose::Change) {
                let mut share = self.admission.load.shares.current().lock();
                share.nr_admitted = share.nr_admitted.saturating_add(SHARE_ITEMS);
            }
        } else if need > room.saturating_sub(room / 8) && self.admission.load.active().nr_changes > NODES_PER_COMMIT {
            self.request(BackgroundWork::Commit);
        }
    }

    fn admit(&self, nr_items: u64, purpose: ReservationPurpose) -> bool {
        // Count the changes before the check: of two threads that check at the same time, each must see the other's
        // changes.
        self.admission.load.begin(nr_items, purpose);
        let has_room = self.has_room_for_metadata(purpose);
        if !has_room {
            self.admission.load.end(nr_items, purpose);
        }
        has_room
    }

    /// Whether the room of the trees is at least the need of all admitted changes plus the space that a reservation for
    /// this purpose must leave.
    pub(crate) fn has_room_for_metadata(&self, purpose: ReservationPurpose) -> bool {
        self.has_room_for_metadata_and(0, purpose)
    }

    /// Like [`Engine::has_room_for_metadata`], but requires that `bytes` more are free.
    pub(crate) fn has_room_for_metadata_and(&self, bytes: u64, purpose: ReservationPurpose) -> bool {
        let fits = || {
            let (room, need) = self.metadata_room_and_need(purpose);
            room >= need.saturating_add(bytes)
        };
        fits() || (self.admission.load.add_shares() && fits())
    }

    /// Whether the trees still have the room that they need, now that data space has been reserved. Only in mixed block
    /// groups does data take room of the trees; otherwise the result is true.
    pub(crate) fn data_leaves_room_for_metadata(&self) -> bool {
        !self.geometry.mixed || self.has_room_for_metadata(ReservationPurpose::Change)
    }

    /// Metadata space kept back so that removals and commits work on a full filesystem.
    pub(crate) fn global_reserve(&self, metadata: &SpaceInfo) -> u64 {
        self.reserve_with(metadata, self.shared_removal_need(metadata))
    }

    fn reserve_with(&self, metadata: &SpaceInfo, shared_removal_need: u64) -> u64 {
        let floor = u64::from(self.geometry.nodesize) * RESERVE_NODES_MIN;
        // Mixed block groups hold mostly data, so the reserve is a smaller share of their used space.
        let (share, most) = match self.geometry.mixed {
            true => (metadata.used.saturating_add(metadata.reserved) / 64, RESERVE_MIXED_MAX),
            false => (metadata.used / 8, RESERVE_MAX),
        };
        share.clamp(floor, most.max(floor)).saturating_add(shared_removal_need).min(metadata.total / 2)
    }

    /// The need of one removal, and of the deletion of a subvolume after it, if subvolumes share blocks: each node that
    /// the removal and the deletion copy may add references to blocks all over the extent tree. The result includes an
    /// eighth to spare. 0 if no blocks are shared, because the minimum size of the reserve covers that case.
    fn shared_removal_need(&self, metadata: &SpaceInfo) -> u64 {
        let room = self.metadata_use(metadata, ReservationPurpose::Removal);
        let removal = Load { nr_changes: CHANGES_PER_REMOVAL + CHANGES_PER_SUBVOLUME_DELETION, new_bytes: 0 };
        let need = room.shared_extent_tree.map_or(0, |_| removal.need(&room));
        // The reserve must be larger than the need, because a removal must leave 1/16 of the reserve free
        // ([`Self::metadata_need`]).
        need.saturating_add(need / 8)
    }

    /// Moves the load of the active transaction to the frozen load.
    pub(crate) fn freeze_load(&self) {
        let info = self.space.info(SpaceKind::Metadata);
        let load = &self.admission.load;
        load.add_shares();
        load.frozen_need
            .store(load.active().need(&self.metadata_use(&info, ReservationPurpose::Change)), Ordering::Relaxed);
        load.frozen_memory.store(load.memory_bytes(), Ordering::Relaxed);
        load.nr_frozen_extent_changes.store(load.nr_extent_changes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        load.rows.reset();
        load.names.reset();
        load.asked_for_commit.store(false, Ordering::Relaxed);
        load.asked_for_flush.store(false, Ordering::Relaxed);
        load.csum_bytes.store(0, Ordering::Relaxed);
        self.admission.throttle.stages.note();
    }

    /// Moves the load of the active rows, and `names_bytes` of the names' memory, to the frozen load. The need of the
    /// frozen names stays counted as active until the commit, because the need is not known per name.
    pub(crate) fn freeze_rows_load(&self, names_bytes: isize) {
        let info = self.space.info(SpaceKind::Metadata);
        let load = &self.admission.load;
        load.add_shares();
        load.frozen_need
            .store(load.rows.load().need(&self.metadata_use(&info, ReservationPurpose::Change)), Ordering::Relaxed);
        let memory = load.row_memory_bytes().saturating_add(names_bytes.max(0) as u64);
        load.frozen_memory.store(memory, Ordering::Relaxed);
        load.rows.reset();
        load.names.memory_bytes.fetch_sub(names_bytes as i64, Ordering::Relaxed);
        load.asked_for_flush.store(false, Ordering::Relaxed);
        self.admission.throttle.stages.note();
    }

    /// Notes that the frozen items are in the trees' nodes, and that the accounting trees record these nodes.
    pub(crate) fn end_frozen_load(&self) {
        self.admission.load.frozen_need.store(0, Ordering::Relaxed);
        self.admission.load.nr_frozen_extent_changes.store(0, Ordering::Relaxed);
    }

    /// Notes that the frozen rows are in nodes, and that the apply added delayed refs of `nr_nodes` extents, most of
    /// them nodes. The commit of the active transaction records these extents in the accounting trees, so they count as
    /// changes of that transaction.
    pub(crate) fn end_frozen_rows_load(&self, nr_nodes: u64) {
        self.admission.load.rows.nr_changes.fetch_add(nr_nodes, Ordering::Relaxed);
        self.admission.load.rows.item_bytes.fetch_add(nr_nodes.saturating_mul(ITEM_OVERHEAD), Ordering::Relaxed);
        self.end_frozen_load();
    }

    /// Whether room is ample ([`AMPLE`]), so that rows may be applied without a commit. The blocks that an apply
    /// replaces become reusable only after a commit.
    pub(crate) fn has_ample_room_for_metadata(&self) -> bool {
        let (room, need) = self.metadata_room_and_need(ReservationPurpose::Change);
        room / AMPLE >= need
    }

    /// Returns two numbers: the bytes that the trees may still take; and the need of all admitted changes plus the
    /// space that a reservation for this purpose must leave.
    fn metadata_room_and_need(&self, purpose: ReservationPurpose) -> (u64, u64) {
        let info = self.space.info(SpaceKind::Metadata);
        (self.metadata_room(&info), self.metadata_need(&info, purpose))
    }

    /// Records the size of the extent tree, for [`Load::need`].
    pub(crate) fn note_extent_tree_bytes(&self) {
        let extents = self.trees.get(RootId::EXTENT_TREE);
        let recorded = extents.and_then(|tree| tree.root.lock().item.as_ref().map(|item| item.bytes_used));
        // A recorded size of 0, or of more than all used metadata space, is wrong: assume all used metadata space.
        let used = self.space.info(SpaceKind::Metadata).used;
        let bytes = recorded.filter(|bytes| (1..=used).contains(bytes)).unwrap_or(used);
        self.admission.extent_tree_bytes.store(bytes, Ordering::Relaxed);
        if self.geometry.mixed {
            // If the size is unknown, no bound applies.
            let bytes = self.tree_bytes().unwrap_or(u64::MAX);
            self.admission.load.tree_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// Upper bound of the bytes of all trees, computed from their root items; `None` if the root items cannot be read.
    fn tree_bytes(&self) -> Option<u64> {
        let roots = self.trees.get(RootId::ROOT_TREE)?;
        let nodesize = u64::from(self.geometry.nodesize);
        let (mut bytes, mut item_bytes) = (Some(0_u64), 0_u64);
        let visit = |key: &Key, item: &[u8]| {
            item_bytes = item_bytes.saturating_add(ITEM_OVERHEAD).saturating_add(item.len() as u64);
            if key.item_type == KeyType::ROOT_ITEM {
                let of_tree = RootItem::decode_any(item).ok().map(|item| item.bytes_used);
                bytes = bytes.zip(of_tree).map(|(bytes, more)| bytes.saturating_add(more));
            }
        };
        roots.visit(&Key::MIN, &Key::MAX, usize::MAX, visit).ok()?;
        // The root tree and the chunk tree have no root items, so their bytes are estimated from their items. Leaves of
        // the root tree are at least half full.
        let chunks = (self.volumes.chunks().len() as u64).saturating_mul(CHUNK_BYTES);
        let unlisted = item_bytes.saturating_add(chunks).saturating_mul(3).saturating_add(nodesize.saturating_mul(4));
        Some(bytes?.saturating_add(unlisted))
    }

    fn metadata_use(&self, metadata: &SpaceInfo, purpose: ReservationPurpose) -> MetadataUse {
        // Do not read the root item here, because some callers hold its lock.
        let used = match self.geometry.mixed && !purpose.is_ordinary() {
            true => metadata.used.min(self.admission.load.tree_bytes.load(Ordering::Relaxed)),
            false => metadata.used,
        };
        let extent_tree = self.admission.extent_tree_bytes.load(Ordering::Relaxed);
        let shares_blocks = self.trees.shares_blocks() || self.admission.load.nr_snapshots.load(Ordering::Relaxed) > 0;
        let shared_extent_tree = shares_blocks.then_some(extent_tree);
        MetadataUse { used, nodesize: self.geometry.nodesize.into(), shared_extent_tree }
    }

    fn metadata_room(&self, metadata: &SpaceInfo) -> u64 {
        // In mixed block groups, data reservations reduce the free space and the space of future chunks.
        metadata.free.saturating_add(metadata.unallocated).saturating_sub(metadata.may_use)
    }

    fn metadata_need(&self, metadata: &SpaceInfo, purpose: ReservationPurpose) -> u64 {
        let for_removal = self.shared_removal_need(metadata);
        let reserve = self.reserve_with(metadata, for_removal);
        let in_use = self.metadata_use(metadata, purpose);
        let (load, left) = match purpose {
            ReservationPurpose::Change | ReservationPurpose::Snapshot => {
                (self.admission.load.active().plus(self.writeback_load()), reserve)
            }
            // Ordinary changes left room for the items of dirty data (I2), but if free space is fragmented, there are
            // more items than estimated. Then writeback uses the reserve. Removals may use more of the reserve than
            // writeback, so that a removal can still make room when writeback finds none (I3).
            ReservationPurpose::Writeback => {
                (self.admission.load.active(), (reserve / 8).max(for_removal.min(reserve)))
            }
            // A removal leaves room for the deletion of a subvolume (I3).
            ReservationPurpose::Removal => {
                let nr_changes = in_use.shared_extent_tree.map_or(0, |_| CHANGES_PER_SUBVOLUME_DELETION);
                (self.admission.load.active().plus(Load { nr_changes, new_bytes: 0 }), reserve / 16)
            }
            ReservationPurpose::SubvolumeDeletion => (self.admission.load.active(), reserve / 32),
        };
        let frozen = self.admission.load.frozen_need.load(Ordering::Relaxed);
        frozen.saturating_add(load.need(&in_use)).saturating_add(left)
    }

    /// The load of future writeback, estimated from the reserved data space.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "numbers and sizes of dirty data in memory; the sector size is at least 4096"
    )]
    fn writeback_load(&self) -> Load {
        let SpaceInfo { may_use: bytes, nr_free_ranges, .. } = self.space.info(SpaceKind::Data);
        let dirty = self.flusher().map_or_else(DirtyData::default, |flusher| flusher.dirty_data());
        let nr_sectors = bytes / u64::from(self.geometry.sectorsize);
        let csums = nr_sectors * self.geometry.csum_type.size() as u64;
        let nr_reservations = self.space.nr_reservations();
        let nr_changes = |nr_extents: u64| {
            nr_reservations * CHANGES_PER_DIRTY_RESERVATION + nr_extents * (1 + EXTRA_CHANGES_PER_EXTENT)
        };
        // Besides the extents of `EXTENT_BYTES`, count one more extent for each dirty range and each free range,
        // because extents also end where such a range ends.
        let nr_extents = (bytes / EXTENT_BYTES + dirty.nr_ranges + nr_free_ranges).min(nr_sectors);
        let inline_bytes = nr_reservations.min(nr_sectors) * dirty.max_inline_bytes;
        Load {
            // Small extents are mostly neighbours in the trees, so the nodes that they touch are estimated from the
            // bytes.
            nr_changes: nr_changes(bytes / EXTENT_BYTES),
            new_bytes: csums + nr_changes(nr_extents) * BYTES_PER_CHANGE + inline_bytes,
        }
    }
}
