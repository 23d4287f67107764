//! Loading the log that is on the devices at open. The blocks and the data of the log are protected from being
//! overwritten until the replay is committed. Crate `ubtrfs-fs` decides which logs are replayed
//! (`mount/log_replay.rs`).
//!
//! The log root tree has a root item for each subvolume with a log. A log tree holds items under the keys that they
//! have in the subvolume, and checksums under their keys in the csum tree.
//!
//! Invariants:
//! - I1. The extent tree records neither the blocks of a log nor the data that only the log refers to. The space of log
//!   blocks and of logged data is removed from the free space before anything is allocated.
//! - I2. The walk fails if it meets a block twice, so the walk ends even if the blocks of a crafted log refer to each
//!   other in a circle.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::RootItem;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{Corrupt, FormatError, Generation, Ino, Key, KeyType, Logical, RootId, objectid};
use ubtrfs_space::Extent;
use ubtrfs_tree::{Cursor, NodePtr, NodeSource, RootPtr};

use crate::delayed::tree_view::{RootState, Tree};
use crate::engine::Engine;
use crate::extents::csum_tree;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::handle::trans_handle::{MetadataReservation, TransHandle, regular_extent};
use crate::nodes::store::NodeStore;

/// A log that was on the devices when the filesystem was opened.
#[derive(Debug)]
pub struct FoundLog {
    /// The subvolumes with a log (some may not exist any more), and their log trees.
    pub trees: Vec<(RootId, Arc<Tree>)>,
    blocks: Vec<Logical>,
}

/// Reads the log root tree and all blocks of the logs, so that an unreadable log is found before anything changes.
pub(crate) fn load(store: &Arc<NodeStore>, superblock: &Superblock) -> Result<FoundLog> {
    let root = RootPtr {
        tree: RootId::TREE_LOG,
        bytenr: superblock.log_root,
        generation: Generation(superblock.generation.0.saturating_add(1)),
        level: superblock.log_root_level,
    };
    let mut seen = HashSet::new();
    walk(store, &root.node_ptr(), &mut seen)?;
    let mut trees = Vec::new();
    let mut cursor = Cursor::new(&**store, root);
    let mut next = cursor.seek_ge(&Key::MIN)?;
    while let Some(key) = next {
        if (key.objectid, key.item_type) == (RootId::TREE_LOG.0, KeyType::ROOT_ITEM) {
            let data = cursor.data().unwrap_or_default();
            let item = RootItem::decode_any(data).map_err(|cause| Error::from(cause).in_tree(RootId::TREE_LOG))?;
            let root =
                RootPtr { tree: RootId::TREE_LOG, bytenr: item.bytenr, generation: item.generation, level: item.level };
            walk(store, &root.node_ptr(), &mut seen)?;
            let state = RootState::new(key.offset, item);
            trees.push((RootId(key.offset), Arc::new(Tree::new(root, Arc::clone(store), state))));
        }
        next = cursor.next()?;
    }
    Ok(FoundLog { trees, blocks: seen.into_iter().collect() })
}

/// Collects the block that a pointer leads to, and all blocks below that block (I2).
fn walk(store: &NodeStore, ptr: &NodePtr, seen: &mut HashSet<Logical>) -> Result<()> {
    if !seen.insert(ptr.bytenr) {
        let expected = "expected a block that the log refers to once";
        return Err(corrupt("bytenr", ptr.bytenr.0, expected).at(ptr.bytenr));
    }
    let node = store.read_node(ptr)?;
    if !node.is_leaf() {
        for slot in 0..node.nritems() {
            walk(store, &node.child_ptr(slot, RootId::TREE_LOG), seen)?;
        }
    }
    Ok(())
}

fn corrupt(field: &'static str, value: u64, expected: &'static str) -> Error {
    Corrupt::new(FormatError::Value { what: "tree log", field, value, expected }).in_tree(RootId::TREE_LOG).into()
}

impl Engine {
    /// Takes the log to replay; `None` if the filesystem has no log, or if the log was taken already. The caller puts
    /// the log's items through [`Engine::begin_replay`]. On a writable filesystem a commit must follow; until that
    /// commit the log stays on the devices.
    pub fn take_log(&self) -> Option<FoundLog> {
        self.tree_log.take_found()
    }

    /// Begins an operation that replays a log. On a read-only filesystem, the changes of the replay stay in memory.
    pub fn begin_replay(&self) -> TransHandle<'_> {
        self.begin(MetadataReservation::counted(self, 0, ReservationPurpose::Change))
    }

    /// Returns the checksums that a log holds for a range of a data extent, as runs of sectors.
    ///
    /// # Errors
    ///
    /// Fails if the log tree is corrupt or cannot be read.
    pub fn logged_csums(&self, log: &Tree, at: Logical, len_bytes: u64) -> Result<Vec<(Logical, Vec<u8>)>> {
        let (csum_size, sectorsize) = (self.geometry.csum_type.size(), self.geometry.sectorsize);
        let csums =
            log.with_root(|source, root| csum_tree::lookup_csums(source, root, at, len_bytes, csum_size, sectorsize))?;
        let mut runs: Vec<(Logical, Vec<u8>)> = Vec::new();
        let mut continues = false;
        for index in 0..csums.len() {
            match csums.get(index) {
                Some(csum) if continues => runs.last_mut().expect("a run began").1.extend_from_slice(csum),
                Some(csum) => {
                    let start = at.0.saturating_add(u64::from(sectorsize).saturating_mul(index as u64));
                    runs.push((Logical(start), csum.to_vec()));
                    continues = true;
                }
                None => continues = false,
            }
        }
        Ok(runs)
    }

    /// Removes the blocks and data of the found log from the free space (I1).
    pub(crate) fn protect_found_log(&self) -> Result<()> {
        // A read-only filesystem does not allocate, and has not loaded the free space.
        if self.read_only().is_some() {
            return Ok(());
        }
        let nodesize = u64::from(self.geometry.nodesize);
        let mut extents: BTreeMap<Logical, u64> = BTreeMap::new();
        let logs = self.tree_log.found_trees();
        for block in self.tree_log.found_blocks() {
            if !self.space.allocate_exact(Extent::new(block, nodesize)) {
                let expected = "expected blocks of the log in free space";
                return Err(corrupt("bytenr", block.0, expected).at(block));
            }
            self.tree_log.keep_until_commit(block, nodesize);
        }
        for (root, log) in &logs {
            self.for_each_logged_extent(log, |key, extent, len_bytes| {
                match extents.insert(extent, len_bytes) {
                    Some(known) if known == len_bytes => return Ok(()),
                    Some(_) => return Err(corrupt("disk_num_bytes", len_bytes, "expected one length of an extent")),
                    None => {}
                }
                if self.has_extent_item(extent, len_bytes)? {
                    return Ok(());
                }
                let extent = Extent::new(extent, len_bytes);
                let aligned = extent.bytenr.0.is_multiple_of(self.geometry.sectorsize.into())
                    && len_bytes.is_multiple_of(self.geometry.sectorsize.into());
                if !aligned || !self.space.allocate_exact(extent) {
                    let expected = "expected data of the log in free space or in an extent";
                    return Err(corrupt("disk_bytenr", extent.bytenr.0, expected));
                }
                self.ledger.allocated(extent);
                // If no item refers to the extent after the replay, the commit frees it.
                self.ledger.put(extent, (*root, Ino(key.objectid), u64::MAX));
                Ok(())
            })?;
        }
        Ok(())
    }

    fn for_each_logged_extent(
        &self,
        log: &Tree,
        mut visit: impl FnMut(&Key, Logical, u64) -> Result<()>,
    ) -> Result<()> {
        let (first, last) = (objectid::FIRST_FREE, objectid::LAST_FREE);
        let end = Key::new(last, KeyType(u8::MAX), u64::MAX);
        // The view is not locked, because `visit` reads other trees. The nodes of a found log never change.
        let mut cursor = Cursor::new(log.source(), log.root_ptr());
        let mut next = cursor.seek_ge(&Key::new(first, KeyType(0), 0))?;
        while let Some(key) = next.filter(|key| *key <= end) {
            if key.item_type == KeyType::EXTENT_DATA
                && let Some(extent) = regular_extent(cursor.data().unwrap_or_default())
            {
                visit(&key, extent.disk_bytenr, extent.disk_num_bytes)?;
            }
            next = cursor.next()?;
        }
        Ok(())
    }

    fn has_extent_item(&self, bytenr: Logical, len_bytes: u64) -> Result<bool> {
        let key = Key::new(bytenr.0, KeyType::EXTENT_ITEM, len_bytes);
        Ok(self.own_tree(RootId::EXTENT_TREE)?.get(&key)?.is_some())
    }
}

impl FoundLog {
    pub(crate) fn blocks(&self) -> &[Logical] {
        &self.blocks
    }
}
