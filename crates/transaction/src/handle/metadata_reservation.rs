//! Room for metadata: whether what the running transaction takes on can be committed.
//!
//! Trees change at commits, by copying: a transaction needs room for a copy of all nodes that it touches (the old ones
//! become free when it is committed) and for what it adds. Each change is admitted only while the free space and what
//! new chunks can add hold the need of all changes admitted before it, estimated from above ([`Load::need`]):
//!
//! ```text
//!   free + unallocated  >=  frozen transaction + active transaction + writeback to come + what the purpose must leave
//! ```
//!
//! I1. A change that was admitted finds room at the commit: the estimate is an upper bound, and data chunks leave the
//!     room alone ([`Engine::leaves_room_for_metadata`]).
//! I2. Dirty data that was accepted finds room for its items: ordinary changes leave it, by the reservations of data.
//! I3. Removing and committing work on a full filesystem: they may use what ordinary changes must leave.
//!
//! While there is much room, changes are admitted many at a time and taken from there by the operations of a thread, whose
//! load is counted many operations at a time ([`Share`]).
//!
//! I4. What a share has, or has not told yet, is counted as reserved: what is known of a transaction is never less than it needs.
//!
//! A commit turns estimates into facts, so a full filesystem commits often before it says that it is full.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_error::Result;
use ubtrfs_format::item::ChunkItem;
use ubtrfs_format::{KeyType, RootId};
use ubtrfs_space::{SpaceInfo, SpaceKind};

use crate::delayed::delayed_item::is_name;
use crate::delayed::item_map::Growth;
use crate::engine::{BackgroundWork, Engine, copies};
use crate::handle::lanes::Lanes;
use crate::handle::trans_handle::MetadataReservation;

/// Who asks for metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An ordinary change; can fail for lack of space.
    Change,
    /// Items of dirty data that was accepted before.
    Writeback,
    /// Frees space in the end.
    Removal,
}

/// What the active transaction has taken on so far, and what the frozen one needs.
#[derive(Debug, Default)]
pub(crate) struct TransactionLoad {
    rows: Puts,
    names: Puts,
    /// Changes that reservations still may put, and what shares have of them.
    nr_reserved: AtomicU64,
    shares: Lanes<Mutex<Share>>,
    /// Bytes of checksums to come.
    csum_bytes: AtomicU64,
    /// What the commit that runs now needs.
    frozen_need: AtomicU64,
    /// Bytes that the frozen items take in memory.
    frozen_memory: AtomicU64,
    /// Whether this transaction's commit was asked for.
    pub(crate) asked_for_commit: AtomicBool,
    /// Whether the delayed items that are active now are asked to be flushed.
    pub(crate) asked_for_flush: AtomicBool,
}

/// Changes of one kind of delayed items.
#[derive(Debug, Default)]
struct Puts {
    /// Changes put; those of file extents count for the other trees that they touch.
    nr_puts: AtomicU64,
    /// Bytes that the changes may add to the trees.
    item_bytes: AtomicU64,
    /// Bytes that the delayed items take in memory.
    memory_bytes: AtomicI64,
}

/// What threads have of the transaction's room, and what they did not tell it yet.
#[derive(Debug, Default)]
struct Share {
    /// Changes that were admitted and are not reserved yet.
    nr_admitted: u64,
    /// Changes whose reservations have ended.
    nr_ended: u64,
    /// What operations put.
    load: OperationLoad,
}

/// What the changes of one operation add to the load of their transaction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OperationLoad {
    rows: OperationPuts,
    names: OperationPuts,
}

/// Changes of one operation and one kind; see [`Puts`].
#[derive(Clone, Copy, Debug, Default)]
struct OperationPuts {
    nr_puts: u64,
    item_bytes: u64,
    memory_bytes: i64,
}

/// What the need of a load is estimated by.
#[derive(Clone, Copy, Debug)]
struct MetadataUse {
    /// Bytes of metadata in use.
    used: u64,
    nodesize: u64,
    /// Bytes of the extent tree, where subvolumes may share blocks.
    shared_extent_tree: Option<u64>,
}

/// A share of work for the trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    nr_puts: u64,
    new_bytes: u64,
}

/// Nodes that a change copies at most, in order: a leaf with its part of the path, a leaf of the extent tree that loses
/// the old leaf, and a share of those that learn of the new one.
const NODES_A_PUT: u64 = 3;
/// Nodes that every commit copies: paths to the roots, root tree, block groups, free space.
const NODES_A_COMMIT: u64 = 24;
/// A file extent item changes the extent tree and the csum tree as well.
const EXTRA_PUTS_AN_EXTENT: u64 = 2;
/// A new item's head, and what its leaf and the nodes above it may leave empty, estimated from above.
const ITEM_OVERHEAD: u64 = 64;
/// Bytes of a leaf that an item which refers to an extent takes, estimated from below.
const CHILD_BYTES: u64 = 72;
/// Bytes that a reference more adds to an extent's item, and what that may leave empty, estimated from above.
const REFERENCE_BYTES: u64 = 64;
/// Items that writeback puts for a dirty file, and for each further extent of it.
const PUTS_A_DIRTY_FILE: u64 = 4;
/// Compressed extents, the smallest that writeback makes of much data, hold this much.
const EXTENT_BYTES: u64 = 128 << 10;
/// Nodes that the global reserve has at least: a few times what a commit with one removal needs.
const RESERVE_NODES_MIN: u64 = 128;
const RESERVE_MAX: u64 = 512 << 20;
/// Mixed block groups are for small filesystems.
const RESERVE_MIXED_MAX: u64 = 16 << 20;
/// Room is ample where it is so many times what is needed.
const AMPLE: u64 = 3;
/// Changes that are admitted for a thread at a time: some fifty operations.
const SHARE_ITEMS: u64 = 1024;

impl TransactionLoad {
    /// An operation ends.
    pub(crate) fn add(&self, load: &OperationLoad) {
        self.shares.mine().lock().load += *load;
    }

    /// Takes changes from what was admitted for this thread; false where it has not so many.
    fn take_admitted(&self, nr_items: u64) -> bool {
        let mut share = self.shares.mine().lock();
        let rest = share.nr_admitted.checked_sub(nr_items);
        share.nr_admitted = rest.unwrap_or(share.nr_admitted);
        rest.is_some()
    }

    /// All threads tell what they did not yet, and give back what they have. Returns whether there was anything.
    fn settle(&self) -> bool {
        self.shares.all().fold(false, |any, share| {
            let mut share = share.lock();
            share.nr_ended += std::mem::take(&mut share.nr_admitted);
            self.tell(&mut share) || any
        })
    }

    /// Counts what a share did not tell. Returns whether there was anything. The share is locked: a transaction that ends
    /// meanwhile waits for it, so that the load counts for its own.
    fn tell(&self, share: &mut Share) -> bool {
        let Share { nr_ended, load, .. } =
            std::mem::replace(share, Share { nr_admitted: share.nr_admitted, ..Share::default() });
        // The load first: meanwhile it is counted twice, not left out (I4).
        self.rows.add(&load.rows);
        self.names.add(&load.names);
        self.nr_reserved.fetch_sub(nr_ended, Ordering::Relaxed);
        nr_ended > 0
    }

    /// Checksums were added.
    pub(crate) fn add_csums(&self, bytes: u64) {
        self.csum_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that the delayed items of the active transaction take in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.rows.memory_bytes() + self.names.memory_bytes()
    }

    /// The share of names in [`Self::memory_bytes`].
    pub(crate) fn name_memory_bytes(&self) -> u64 {
        self.names.memory_bytes()
    }

    /// The share of rows.
    pub(crate) fn row_memory_bytes(&self) -> u64 {
        self.rows.memory_bytes()
    }

    /// Bytes that the frozen items take in memory.
    pub(crate) fn frozen_memory_bytes(&self) -> u64 {
        self.frozen_memory.load(Ordering::Relaxed)
    }

    /// The frozen items are not in memory any more.
    pub(crate) fn frozen_items_dropped(&self) {
        self.frozen_memory.store(0, Ordering::Relaxed);
    }

    /// A reservation ends.
    pub(crate) fn unreserve(&self, nr_items: u64) {
        let mut share = self.shares.mine().lock();
        share.nr_ended += nr_items;
        if share.nr_admitted < nr_items || share.nr_ended >= SHARE_ITEMS {
            self.tell(&mut share);
        }
    }

    fn active(&self) -> Load {
        let reserved = Load {
            nr_puts: self.nr_reserved.load(Ordering::Relaxed),
            new_bytes: self.csum_bytes.load(Ordering::Relaxed),
        };
        self.rows.load() + self.names.load() + reserved
    }
}

impl Puts {
    fn add(&self, of_operation: &OperationPuts) {
        let OperationPuts { nr_puts, item_bytes, memory_bytes } = *of_operation;
        if nr_puts > 0 {
            self.nr_puts.fetch_add(nr_puts, Ordering::Relaxed);
            self.item_bytes.fetch_add(item_bytes, Ordering::Relaxed);
        }
        if memory_bytes != 0 {
            self.memory_bytes.fetch_add(memory_bytes, Ordering::Relaxed);
        }
    }

    fn load(&self) -> Load {
        Load { nr_puts: self.nr_puts.load(Ordering::Relaxed), new_bytes: self.item_bytes.load(Ordering::Relaxed) }
    }

    fn memory_bytes(&self) -> u64 {
        u64::try_from(self.memory_bytes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn reset(&self) {
        self.nr_puts.store(0, Ordering::Relaxed);
        self.item_bytes.store(0, Ordering::Relaxed);
        self.memory_bytes.store(0, Ordering::Relaxed);
    }
}

impl OperationLoad {
    /// An item was put, or its absence.
    pub(crate) fn add(&mut self, growth: &Growth, item_type: KeyType) {
        let puts = if is_name(item_type) { &mut self.names } else { &mut self.rows };
        let item_bytes = growth.data_bytes as u64 + if growth.is_new { ITEM_OVERHEAD } else { 0 };
        puts.item_bytes += item_bytes;
        puts.memory_bytes += growth.memory_bytes as i64;
        let is_extent = item_type == KeyType::EXTENT_DATA;
        puts.nr_puts += u64::from(item_bytes > 0) + if is_extent { EXTRA_PUTS_AN_EXTENT } else { 0 };
    }
}

impl Load {
    /// Bytes that the trees may allocate for it.
    ///
    /// All changes together copy at most every node there is. New items leave no two neighbouring leaves that fit into
    /// one, so leaves are half full at least; an eighth is for the nodes above and for the extent items of all these.
    ///
    /// Where trees share blocks, each of them may copy its own of a node, and what a copied node points to gets one more
    /// reference: of all its children, which lie anywhere in the extent tree.
    fn need(self, room: &MetadataUse) -> u64 {
        let MetadataUse { used, nodesize, shared_extent_tree } = *room;
        let touched = self.nr_puts.saturating_mul(NODES_A_PUT).saturating_add(NODES_A_COMMIT).saturating_mul(nodesize);
        let new = 2 * self.new_bytes + self.new_bytes / 8;
        let Some(extent_tree) = shared_extent_tree else {
            return touched.min(used + used / 16 + 16 * nodesize) + new;
        };
        let nr_children = self.nr_puts.saturating_mul(nodesize / CHILD_BYTES);
        let their_items = nr_children.saturating_mul(nodesize).min(extent_tree + extent_tree / 16);
        touched + new + their_items + nr_children.saturating_mul(REFERENCE_BYTES)
    }
}

impl std::ops::AddAssign for OperationLoad {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.names += other.names;
    }
}

impl std::ops::AddAssign for OperationPuts {
    fn add_assign(&mut self, other: Self) {
        self.nr_puts += other.nr_puts;
        self.item_bytes += other.item_bytes;
        self.memory_bytes += other.memory_bytes;
    }
}

impl std::ops::Add for Load {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { nr_puts: self.nr_puts + other.nr_puts, new_bytes: self.new_bytes + other.new_bytes }
    }
}

impl Engine {
    /// Admits `most` changes, or fewer but `least`; or reclaims, or fails with [`Error::NoSpace`] where that does not
    /// help.
    pub(crate) fn reserve_metadata(
        &self,
        most: usize,
        least: usize,
        purpose: Purpose,
    ) -> Result<MetadataReservation<'_>> {
        self.check_writable()?;
        self.limit_delayed_items()?;
        let granted = || self.admit_most(most, least, purpose);
        if purpose != Purpose::Change || self.admission.metadata_tickets.is_empty() {
            if self.admission.load.take_admitted(most as u64) {
                return Ok(MetadataReservation::counted(self, most as u64));
            }
            if let Some(reservation) = granted() {
                self.admit_ahead();
                return Ok(reservation);
            }
        }
        let queue = (purpose == Purpose::Change).then_some(&self.admission.metadata_tickets);
        // From cheap to dear: a commit turns estimates into facts and frees what is pinned; dirty data written first
        // turns more of them into facts.
        self.reserve_with_reclaim(
            queue,
            || Ok(granted()),
            |round| {
                if round > 0 && purpose == Purpose::Change {
                    self.flush_data()?;
                }
                self.commit()
            },
        )
    }

    /// Admits as many changes as there is room for, from `most` down to `least`.
    fn admit_most(&self, most: usize, least: usize, purpose: Purpose) -> Option<MetadataReservation<'_>> {
        let mut nr_items = most;
        loop {
            if self.admit(nr_items as u64, purpose) {
                return Some(MetadataReservation::counted(self, nr_items as u64));
            }
            if nr_items <= least {
                return None;
            }
            nr_items = (nr_items / 2).max(least);
        }
    }

    /// Admits changes for the next operations of this thread where there is ample room. Where what is admitted takes most of
    /// the room, the commit thread is asked to work before anybody must wait.
    fn admit_ahead(&self) {
        let (room, need) = self.metadata_room_and_need(Purpose::Change);
        if room / AMPLE >= need {
            if self.admit(SHARE_ITEMS, Purpose::Change) {
                self.admission.load.shares.mine().lock().nr_admitted += SHARE_ITEMS;
            }
        } else if need > room - room / 8 && self.admission.load.active().nr_puts > NODES_A_COMMIT {
            self.ask_for(BackgroundWork::Commit);
        }
    }

    fn admit(&self, nr_items: u64, purpose: Purpose) -> bool {
        // Counted before it is looked at: of two who ask at once both see both.
        self.admission.load.nr_reserved.fetch_add(nr_items, Ordering::Relaxed);
        let has_room = self.has_room_for_metadata(purpose);
        if !has_room {
            self.admission.load.unreserve(nr_items);
        }
        has_room
    }

    /// Has the floor above write dirty data, which turns promises into facts.
    pub(crate) fn flush_data(&self) -> Result<()> {
        self.flusher().map_or(Ok(()), |flusher| flusher.flush_delalloc(None))
    }

    /// Whether the trees have room for all that was admitted, and leave what this purpose must leave.
    pub(crate) fn has_room_for_metadata(&self, purpose: Purpose) -> bool {
        self.has_room_for_metadata_and(0, purpose)
    }

    /// The same after `bytes` more were taken.
    pub(crate) fn has_room_for_metadata_and(&self, bytes: u64, purpose: Purpose) -> bool {
        let fits = || {
            let (room, need) = self.metadata_room_and_need(purpose);
            room >= need.saturating_add(bytes)
        };
        fits() || (self.admission.load.settle() && fits())
    }

    /// Whether the trees still have their room when a data chunk takes its share of the devices.
    pub(crate) fn leaves_room_for_metadata(&self, chunk: &ChunkItem) -> bool {
        let lost = chunk.length * copies(chunk.flags) / copies(self.chunk_flags(SpaceKind::Metadata));
        self.has_room_for_metadata_and(lost, Purpose::Change)
    }

    /// Metadata kept back so that removing and committing work on a full filesystem.
    pub(crate) fn global_reserve(&self, metadata: &SpaceInfo) -> u64 {
        let floor = u64::from(self.geometry.nodesize) * RESERVE_NODES_MIN;
        // Of mixed block groups most is data.
        let (share, most) = match self.geometry.mixed {
            true => ((metadata.used + metadata.reserved) / 64, RESERVE_MIXED_MAX),
            false => (metadata.used / 8, RESERVE_MAX),
        };
        share.clamp(floor, most.max(floor)).min(metadata.total / 2)
    }

    /// The active transaction becomes the frozen one.
    pub(crate) fn freeze_load(&self) {
        let info = self.space.info(SpaceKind::Metadata);
        let load = &self.admission.load;
        load.settle();
        load.frozen_need.store(load.active().need(&self.metadata_use(&info)), Ordering::Relaxed);
        load.frozen_memory.store(load.memory_bytes(), Ordering::Relaxed);
        load.rows.reset();
        load.names.reset();
        load.asked_for_commit.store(false, Ordering::Relaxed);
        load.asked_for_flush.store(false, Ordering::Relaxed);
        load.csum_bytes.store(0, Ordering::Relaxed);
    }

    /// The active rows become the frozen ones, and names that take this much memory with them. (What these names need
    /// of the trees stays counted until the commit: it is not known apart from that of the other names.)
    pub(crate) fn freeze_rows_load(&self, names_bytes: isize) {
        let info = self.space.info(SpaceKind::Metadata);
        let load = &self.admission.load;
        load.settle();
        load.frozen_need.store(load.rows.load().need(&self.metadata_use(&info)), Ordering::Relaxed);
        load.frozen_memory.store(load.row_memory_bytes() + names_bytes.max(0) as u64, Ordering::Relaxed);
        load.rows.reset();
        load.names.memory_bytes.fetch_sub(names_bytes as i64, Ordering::Relaxed);
        load.asked_for_flush.store(false, Ordering::Relaxed);
    }

    /// The frozen items are in the trees' nodes, and the accounting trees know of it.
    pub(crate) fn thaw_load(&self) {
        self.admission.load.frozen_need.store(0, Ordering::Relaxed);
    }

    /// The frozen rows are in nodes, so many of them made or left: the accounting trees still have to learn of these, at
    /// the commit of the active transaction.
    pub(crate) fn thaw_rows_load(&self, nr_nodes: u64) {
        self.admission.load.rows.nr_puts.fetch_add(nr_nodes, Ordering::Relaxed);
        self.admission.load.rows.item_bytes.fetch_add(nr_nodes * ITEM_OVERHEAD, Ordering::Relaxed);
        self.thaw_load();
    }

    /// Whether there is so much room for metadata that blocks may be taken which only a commit gives back.
    pub(crate) fn has_ample_room_for_metadata(&self) -> bool {
        let (room, need) = self.metadata_room_and_need(Purpose::Change);
        room / AMPLE >= need
    }

    /// What the trees may still take, and what was admitted with what this purpose must leave.
    fn metadata_room_and_need(&self, purpose: Purpose) -> (u64, u64) {
        let info = self.space.info(SpaceKind::Metadata);
        (self.metadata_room(&info), self.metadata_need(&info, purpose))
    }

    /// Looks how large the extent tree is, for [`Load::need`].
    pub(crate) fn note_extent_tree_bytes(&self) {
        let extents = self.roots.get(RootId::EXTENT_TREE);
        let recorded = extents.and_then(|tree| tree.root.lock().item.as_ref().map(|item| item.bytes_used));
        // At most all there is.
        let used = self.space.info(SpaceKind::Metadata).used;
        let bytes = recorded.filter(|bytes| (1..=used).contains(bytes)).unwrap_or(used);
        self.admission.extent_tree_bytes.store(bytes, Ordering::Relaxed);
    }

    fn metadata_use(&self, metadata: &SpaceInfo) -> MetadataUse {
        // Root items are not asked: this is also called by who has one locked.
        let extent_tree = self.admission.extent_tree_bytes.load(Ordering::Relaxed);
        let shared_extent_tree = self.roots.shares_blocks().then_some(extent_tree);
        MetadataUse { used: metadata.used, nodesize: self.geometry.nodesize.into(), shared_extent_tree }
    }

    fn metadata_room(&self, metadata: &SpaceInfo) -> u64 {
        // In mixed block groups the promises of data come off.
        metadata.free.saturating_sub(metadata.may_use) + metadata.unallocated
    }

    fn metadata_need(&self, metadata: &SpaceInfo, purpose: Purpose) -> u64 {
        let reserve = self.global_reserve(metadata);
        let (load, left) = match purpose {
            Purpose::Change => (self.admission.load.active() + self.writeback_load(), reserve),
            Purpose::Writeback => (self.admission.load.active(), reserve / 2),
            Purpose::Removal => (self.admission.load.active(), reserve / 4),
        };
        let frozen = self.admission.load.frozen_need.load(Ordering::Relaxed);
        frozen + load.need(&self.metadata_use(metadata)) + left
    }

    /// What dirty data will put, going by the space that was promised to it.
    fn writeback_load(&self) -> Load {
        let bytes = self.space.info(SpaceKind::Data).may_use;
        let csums = bytes / u64::from(self.geometry.sectorsize) * self.geometry.csum_type.size() as u64;
        let nr_puts =
            self.space.nr_reservations() * PUTS_A_DIRTY_FILE + bytes / EXTENT_BYTES * (1 + EXTRA_PUTS_AN_EXTENT);
        Load { nr_puts, new_bytes: csums + nr_puts * 128 }
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_testkit::Rng;

    use super::*;

    #[test]
    fn what_shares_hold_counts_as_reserved_until_it_is_told() {
        let total = TransactionLoad::default();
        let mut rng = Rng::new(11);
        let (mut reserved, mut put) = (Vec::new(), Load::default());
        for _ in 0..20_000 {
            match rng.below(8) {
                // Admitted for one operation, or ahead.
                0 => {
                    total.nr_reserved.fetch_add(12, Ordering::Relaxed);
                    reserved.push(12);
                }
                1 => {
                    total.nr_reserved.fetch_add(SHARE_ITEMS, Ordering::Relaxed);
                    total.shares.mine().lock().nr_admitted += SHARE_ITEMS;
                }
                2..5 => {
                    let nr_items = 1 + rng.below(30);
                    reserved.extend(total.take_admitted(nr_items).then_some(nr_items));
                }
                5..7 => {
                    let Some(nr_items) = reserved.pop() else { continue };
                    let mut load = OperationLoad::default();
                    load.rows.nr_puts = rng.below(nr_items + 1);
                    load.rows.item_bytes = 100 * load.rows.nr_puts;
                    put = put + Load { nr_puts: load.rows.nr_puts, new_bytes: load.rows.item_bytes };
                    total.add(&load);
                    total.unreserve(nr_items);
                }
                _ => {
                    total.settle();
                }
            }
            let alive: u64 = reserved.iter().sum();
            assert!(total.active().nr_puts >= put.nr_puts + alive, "I4");
        }
        total.settle();
        let expected = put + Load { nr_puts: reserved.iter().sum(), new_bytes: 0 };
        assert_eq!(total.active(), expected);
        assert!(!total.settle(), "nothing is left to tell");
    }
}
