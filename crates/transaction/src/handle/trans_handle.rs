//! [`TransHandle`]: a group of item changes that is in one transaction as a whole.

use std::cell::Cell;

use parking_lot::RwLockReadGuard;
use ubtrfs_error::Result;
use ubtrfs_format::codec::{Field, Reader};
use ubtrfs_format::item::{FileExtent, RegularExtent};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical};
use ubtrfs_space::Extent;

use crate::delayed::delayed_item::LockedItems;
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::handle::metadata_reservation::{OperationLoad, Purpose};
use crate::roots::subvolume_roots::RootChange;

/// The right to put some items; [`Engine::begin`] turns it into an operation.
#[must_use = "a reservation that is dropped at once holds nothing"]
#[derive(Debug)]
pub struct MetadataReservation<'e> {
    engine: &'e Engine,
    nr_items: u64,
}

impl<'e> MetadataReservation<'e> {
    /// Stands for items that the engine's load counts already.
    pub(crate) fn counted(engine: &'e Engine, nr_items: u64) -> Self {
        Self { engine, nr_items }
    }

    /// Changes that it is for.
    pub fn nr_items(&self) -> usize {
        usize::try_from(self.nr_items).unwrap_or(usize::MAX)
    }
}

impl Drop for MetadataReservation<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.abort("a change panicked".to_owned());
        }
        self.engine.admission.load.unreserve(self.nr_items);
    }
}

/// A group of item changes. Short: no I/O, no waiting for locks that others hold across I/O.
#[derive(Debug)]
pub struct TransHandle<'e> {
    engine: &'e Engine,
    /// What its changes are for the transaction, which learns of it once, when the operation ends: threads would wait for each
    /// other's counting. Until then the reservation stands for it.
    load: Cell<OperationLoad>,
    // Before the gate: what a panic left is cut off from the next commit first.
    _reservation: MetadataReservation<'e>,
    _gate: RwLockReadGuard<'e, ()>,
}

/// Changes of one tree in an operation. Neighbours are put under one lock, which is held until a change that lies elsewhere, or
/// until this is dropped: meanwhile the tree must not be read, nor changed in another way.
#[derive(Debug)]
pub struct TreeChanges<'o> {
    op: &'o TransHandle<'o>,
    tree: &'o Tree,
    items: Option<LockedItems<'o>>,
}

impl Engine {
    /// Reserves metadata for about `nr_items` item changes.
    ///
    /// May flush and commit; no inode lock may be held. Fails with [`ubtrfs_error::Error::NoSpace`] where nothing helps.
    pub fn reserve(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(nr_items, nr_items, Purpose::Change)
    }

    /// Like [`Engine::reserve`] for what frees space: may use the global reserve.
    pub fn reserve_for_removal(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(nr_items, nr_items, Purpose::Removal)
    }

    /// The same for a removal that can be done in steps: for `most` changes or, where space is short, for fewer, but
    /// `least`; see [`MetadataReservation::nr_items`].
    pub fn reserve_for_removal_steps(&self, most: usize, least: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(most, least, Purpose::Removal)
    }

    /// Like [`Engine::reserve`] for the items of dirty data, whose room was kept since space was reserved for the data.
    pub fn reserve_for_writeback(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(nr_items, nr_items, Purpose::Writeback)
    }

    /// Enters the transaction gate. The inode locks that the operation needs are held already.
    pub fn begin<'e>(&'e self, reservation: MetadataReservation<'e>) -> TransHandle<'e> {
        TransHandle { engine: self, load: Cell::default(), _reservation: reservation, _gate: self.running.enter() }
    }
}

impl TransHandle<'_> {
    /// The transaction that this operation belongs to.
    pub fn generation(&self) -> Generation {
        self.engine.generation()
    }

    /// Inserts or replaces an item.
    pub fn put(&self, tree: &Tree, key: Key, value: impl AsRef<[u8]>) {
        self.changes(tree).put(key, value);
    }

    /// Deletes an item; an absent one is fine.
    pub fn delete(&self, tree: &Tree, key: Key) {
        self.changes(tree).delete(key);
    }

    /// For several changes of a tree one after the other.
    pub fn changes<'o>(&'o self, tree: &'o Tree) -> TreeChanges<'o> {
        self.engine.running.list(tree);
        TreeChanges { op: self, tree, items: None }
    }

    /// A directory gets another name in this operation: fsyncs of this transaction commit, so that what is below it is
    /// found by its new path.
    pub fn note_directory_moved(&self) {
        self.engine.tree_log.note_dir_moved(self.generation());
    }

    /// Adds the checksums of an extent that was written before: one for each sector from `at` on.
    pub fn add_csums(&self, at: Logical, csums: Vec<u8>) {
        self.engine.admission.load.add_csums(csums.len() as u64);
        self.engine.ledger.add_csums(at, csums);
    }

    pub(crate) fn change_root(&self, change: RootChange) {
        self.engine.running.ask_for(change);
    }

    fn note_extent(&self, tree: &Tree, key: &Key, value: &[u8]) {
        if let Some(extent) = regular_extent(value) {
            let referrer = (tree.id(), Ino(key.objectid), key.offset.wrapping_sub(extent.offset));
            self.engine.ledger.put(Extent::new(extent.disk_bytenr, extent.disk_num_bytes), referrer);
        }
    }
}

impl TreeChanges<'_> {
    /// The transaction that they belong to.
    pub fn generation(&self) -> Generation {
        self.op.generation()
    }

    /// Inserts or replaces an item.
    pub fn put(&mut self, key: Key, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        if key.item_type == KeyType::EXTENT_DATA && self.tree.id().is_fs_tree() {
            self.op.note_extent(self.tree, &key, value);
        }
        self.set(key, Some(value));
    }

    /// Deletes an item; an absent one is fine.
    pub fn delete(&mut self, key: Key) {
        self.set(key, None);
    }

    fn set(&mut self, key: Key, value: Option<&[u8]>) {
        if self.items.as_ref().is_some_and(|items| !items.has(&key)) {
            // Before the next ones are locked: never two at once.
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
        // With the gate still held, so that it counts for this transaction.
        self.engine.admission.load.add(&self.load.get());
    }
}

/// The extent on disk that a file extent item refers to, read without copying inline data.
pub(crate) fn regular_extent(item: &[u8]) -> Option<RegularExtent> {
    const TYPE_OFFSET: usize = FileExtent::HEADER_SIZE - 1;
    if *item.get(TYPE_OFFSET)? == 0 {
        return None;
    }
    let mut reader = Reader::new("FileExtent", item.get(FileExtent::HEADER_SIZE..)?);
    RegularExtent::read(&mut reader).ok().filter(|extent| extent.disk_bytenr.0 != 0)
}
