//! [`TransHandle`]: a handle on the running transaction, through which an operation changes items.

use std::cell::Cell;

use ubtrfs_format::codec::{Field, Reader};
use ubtrfs_format::item::{FileExtent, RegularExtent};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical};
use ubtrfs_space::Extent;

use crate::delayed::delayed_item::LockedItems;
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::handle::root_change::RootChange;
use crate::handle::transaction_load::HandleLoad;
use crate::per_thread::EnteredGate;
use crate::race::race_point;

/// The right to put some items, which [`Engine::begin`] turns into a transaction handle.
#[must_use = "a reservation that is dropped at once holds nothing"]
#[derive(Debug)]
pub struct MetadataReservation<'e> {
    engine: &'e Engine,
    nr_items: u64,
    purpose: ReservationPurpose,
}

impl<'e> MetadataReservation<'e> {
    /// A reservation of changes that the engine's load already counts.
    pub(crate) fn counted(engine: &'e Engine, nr_items: u64, purpose: ReservationPurpose) -> Self {
        Self { engine, nr_items, purpose }
    }

    /// Number of changes reserved.
    pub fn nr_items(&self) -> usize {
        usize::try_from(self.nr_items).unwrap_or(usize::MAX)
    }
}

impl Drop for MetadataReservation<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.abort("a change panicked".to_owned());
        }
        self.engine.admission.load.end(self.nr_items, self.purpose);
    }
}

/// A handle on the running transaction; all changes put through it belong to this transaction. A handle is held
/// briefly: the holder does no I/O, and waits for no lock that other threads hold during I/O.
#[derive(Debug)]
pub struct TransHandle<'e> {
    pub(crate) engine: &'e Engine,
    /// Load of the changes. The load is added once, when the handle is dropped, so that threads do not contend for the
    /// counters. Until the drop, the reservation accounts for the load.
    load: Cell<HandleLoad>,
    // The reservation is dropped before the gate: after a panic, this drop aborts the filesystem before the next commit
    // can begin.
    _reservation: MetadataReservation<'e>,
    _gate: EnteredGate<'e>,
}

/// Changes of one tree through a handle. Neighbouring items are put under one lock, which is held until a change needs
/// another lock or until this value is dropped. While this value exists, the caller must not read the tree or change it
/// in another way.
#[derive(Debug)]
pub struct TreeChanges<'o> {
    op: &'o TransHandle<'o>,
    tree: &'o Tree,
    items: Option<LockedItems<'o>>,
}

impl Engine {
    /// Estimated memory of a changed tree until the commit, without its delayed items: the tree, its subvolume, and a
    /// new node.
    pub(crate) fn changed_tree_bytes(&self) -> u64 {
        CHANGED_TREE_BYTES.saturating_add(self.geometry.nodesize.into())
    }

    /// Begins an operation: enters the transaction gate. The caller already holds the inode locks that the operation
    /// needs.
    pub fn begin<'e>(&'e self, reservation: MetadataReservation<'e>) -> TransHandle<'e> {
        race_point();
        TransHandle { engine: self, load: Cell::default(), _reservation: reservation, _gate: self.running.enter() }
    }
}

impl TransHandle<'_> {
    /// The generation of the transaction that the handle belongs to.
    pub fn generation(&self) -> Generation {
        self.engine.generation()
    }

    /// Inserts or replaces an item.
    pub fn put(&self, tree: &Tree, key: Key, value: impl AsRef<[u8]>) {
        self.changes(tree).put(key, value);
    }

    /// Deletes an item if it exists.
    pub fn delete(&self, tree: &Tree, key: Key) {
        self.changes(tree).delete(key);
    }

    /// Begins several changes of one tree.
    pub fn changes<'o>(&'o self, tree: &'o Tree) -> TreeChanges<'o> {
        if self.engine.running.list(tree) {
            let mut load = self.load.get();
            load.add_tree(self.engine.changed_tree_bytes());
            self.load.set(load);
        }
        TreeChanges { op: self, tree, items: None }
    }

    /// Adds the checksums of an extent that is already written, one for each sector from `at` on.
    pub fn add_csums(&self, at: Logical, csums: Vec<u8>) {
        self.engine.admission.load.add_csums(csums.len() as u64);
        self.engine.ledger.add_csums(at, csums);
    }

    pub(crate) fn change_root(&self, change: RootChange) {
        self.engine.running.request(change);
    }

    /// Returns a file extent item with the current address of its extent, if the extent moved since the item was
    /// planned.
    fn with_current_address(&self, value: &[u8]) -> Option<Vec<u8>> {
        let extent = regular_extent(value)?;
        let current = self.engine.moved.current(extent.disk_bytenr);
        if current == extent.disk_bytenr {
            return None;
        }
        let mut moved = value.to_vec();
        let place = moved.get_mut(FileExtent::HEADER_SIZE..)?.first_chunk_mut()?;
        *place = current.0.to_le_bytes();
        Some(moved)
    }

    fn note_extent(&self, tree: &Tree, key: &Key, value: &[u8]) {
        if let Some(extent) = regular_extent(value) {
            let referrer = (tree.id(), Ino(key.objectid), key.offset.wrapping_sub(extent.offset));
            self.engine.ledger.put(Extent::new(extent.disk_bytenr, extent.disk_num_bytes), referrer);
        }
    }
}

impl TreeChanges<'_> {
    /// The generation of the transaction that the changes belong to.
    pub fn generation(&self) -> Generation {
        self.op.generation()
    }

    /// Inserts or replaces an item.
    pub fn put(&mut self, key: Key, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        debug_assert!(
            self.tree.listed.load(std::sync::atomic::Ordering::Acquire),
            "I1 of running: the commit would miss the tree"
        );
        if key.item_type == KeyType::EXTENT_DATA && self.tree.id().is_fs_tree() {
            let moved = self.op.with_current_address(value);
            let value = moved.as_deref().unwrap_or(value);
            self.op.note_extent(self.tree, &key, value);
            return self.set(key, Some(value));
        }
        self.set(key, Some(value));
    }

    /// Deletes an item if it exists.
    pub fn delete(&mut self, key: Key) {
        self.set(key, None);
    }

    fn set(&mut self, key: Key, value: Option<&[u8]>) {
        if self.items.as_ref().is_some_and(|items| !items.has(&key)) {
            // Unlock the current shard before locking the next one: two shards are never locked at the same time.
            self.items = None;
        }
        let items = self.items.get_or_insert_with(|| self.tree.active.lock(&key));
        let growth = items.set(key, value);
        let mut load = self.op.load.get();
        load.add(&growth, key.item_type);
        self.op.load.set(load);
    }
}

impl Drop for TransHandle<'_> {
    fn drop(&mut self) {
        // The gate is still held, so the load counts for this transaction.
        self.engine.admission.load.add(&self.load.get());
    }
}

/// Estimated memory of a changed tree and its subvolume, without nodes.
const CHANGED_TREE_BYTES: u64 = 8192;

/// Returns the extent on disk that a file extent item refers to. `None` for holes and for inline data. Does not copy
/// inline data.
pub(crate) fn regular_extent(item: &[u8]) -> Option<RegularExtent> {
    const TYPE_OFFSET: usize = FileExtent::HEADER_SIZE - 1;
    if *item.get(TYPE_OFFSET)? == 0 {
        return None;
    }
    let mut reader = Reader::new("FileExtent", item.get(FileExtent::HEADER_SIZE..)?);
    RegularExtent::read(&mut reader).ok().filter(|extent| extent.disk_bytenr.0 != 0)
}
