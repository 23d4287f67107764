//! Making, changing and deleting subvolumes. An operation requests a change of subvolumes in a transaction, and the
//! commit makes the change after it has applied the frozen items.
//!
//! ```text
//! snapshot:   root' = copy of the source's root node, owned by the new tree; everything below it has two users from here on
//! subvolume:  root' = a leaf with the root directory
//! both:       -> the name's items into the parent's tree -> ROOT_REF, ROOT_BACKREF, UUID item -> ROOT_ITEM in the rounds
//! ```
//!
//! The source's root item records the transaction that made the snapshot (`last_snapshot`): blocks that are not newer
//! than that transaction may be shared, so [`crate::cow::sink`] looks up the references of such a block before it
//! replaces the block. Blocks that this transaction made before the copy may be shared too, so they are treated as
//! shared when the name is added, and when the same commit takes a second snapshot.
//!
//! Invariants:
//! - I1. The name enters its directory after the copy, so a snapshot inside its source does not contain itself.
//! - I2. A subvolume is in memory ([`Engine::tree`]) only from its commit on, so no thread changes the subvolume before
//!   that commit.
//! - I3. Root items change only under the commit lock, so a change is on disk with the transaction that requested it.
//!
//! Source: the btrfs format page on root items and references; the on-disk state that Linux leaves after operations on
//! subvolumes.

use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{InodeFlags, RootFlags, RootItem};
use ubtrfs_format::node::{LeafBuilder, NodeHeader, item_len_max, write_header};
use ubtrfs_format::superblock::Incompat;
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use ubtrfs_space::{DelayedRefs, RefKey, SpaceKind};
use ubtrfs_tree::{Batch, Node, NodeSource, RootPtr};
use uuid::Uuid;

use crate::cow::child_refs::{ChildRefs, UserChange};
use crate::delayed::tree_view::{RootState, Tree};
use crate::engine::Engine;
use crate::handle::root_change::{NewContent, NewSubvolume, Received, RootChange};
use crate::handle::trans_handle::TransHandle;
use crate::lock_rank::{self, Rank};
use crate::qgroup::state::QuotaMode;
use crate::roots::root_item::blank_root_item;

/// The tree of a new subvolume.
#[derive(Debug)]
pub(crate) struct MadeTree {
    /// The root of the tree.
    pub(crate) root: RootPtr,
    received_uuid: Uuid,
}

impl TransHandle<'_> {
    /// Makes a subvolume read-only or writable, with effect from this transaction's commit on. A subvolume that becomes
    /// writable loses its received UUID: it will no longer equal the subvolume that was sent.
    pub fn set_subvolume_read_only(&self, id: RootId, read_only: bool) {
        self.change_root(RootChange::SetReadOnly(id, read_only));
    }

    /// Marks a subvolume as received, with effect from this transaction's commit on.
    pub fn set_subvolume_received(&self, id: RootId, received: Received) {
        self.change_root(RootChange::SetReceived(id, received));
    }

    /// Marks a subvolume as deleted. The caller also deletes the subvolume's name and references, and puts its
    /// `ORPHAN_ITEM`. [`Engine::drop_subvolume`] frees its space.
    pub fn delete_subvolume(&self, id: RootId) {
        self.change_root(RootChange::Delete(id));
    }
}

impl Engine {
    /// Finds the highest subvolume id, before any subvolume can be deleted. As in Linux, each new id is above the ids
    /// of all subvolumes that existed when the filesystem was opened or later.
    pub(crate) fn note_highest_root_id(&self) -> Result<()> {
        let highest = self.own_tree(RootId::ROOT_TREE).and_then(|tree| tree.highest_objectid());
        let highest = highest.map(|highest| highest.unwrap_or(objectid::FIRST_FREE - 1));
        self.roots.note_highest_id(highest.clone());
        highest.map(drop)
    }

    /// Determines at open whether any subvolume may share blocks, before space is reserved: the need of admitted
    /// changes must not grow when a subvolume is loaded later.
    pub(crate) fn note_snapshots(&self) -> Result<()> {
        let found = self.own_tree(RootId::ROOT_TREE).and_then(|tree| has_snapshots(&tree));
        if found.as_ref().map_or(true, |found| *found) {
            self.trees.note_shared_blocks();
        }
        found.map(drop)
    }

    /// Returns an id that no subvolume has had since the filesystem was opened.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if all ids are used, or the error that prevented reading the highest id at open.
    pub fn new_root_id(&self) -> Result<RootId> {
        self.roots.new_id()
    }

    /// Makes, changes or deletes a subvolume as an operation requested. The caller holds the commit lock and has
    /// applied the frozen items. The two steps of [`RootChange::Make`] are also separate functions: [`Self::make_tree`]
    /// and [`Self::name_tree`].
    pub(crate) fn change_root(&self, change: RootChange, refs: &mut DelayedRefs, transid: Generation) -> Result<()> {
        lock_rank::check_held(Rank::Commit, "I3: root items change under the commit lock");
        match change {
            RootChange::Make(new) => {
                let made = self.make_tree(&new, refs, transid)?;
                self.name_tree(*new, &made, refs, transid)
            }
            RootChange::SetReadOnly(id, read_only) => {
                let received = self.root_item(id)?.map_or(Uuid::nil(), |item| item.received_uuid);
                self.change_root_item(id, |item| {
                    let mut flags = RootFlags::from_bits_retain(item.flags);
                    flags.set(RootFlags::RDONLY, read_only);
                    item.flags = flags.bits();
                    if !read_only {
                        item.received_uuid = Uuid::nil();
                        (item.stransid, item.rtransid) = Default::default();
                        (item.stime, item.rtime) = Default::default();
                    }
                })?;
                if read_only {
                    return Ok(());
                }
                self.set_uuid((KeyType::UUID_KEY_RECEIVED_SUBVOL, received), id, false, refs, transid)
            }
            RootChange::SetReceived(id, Received { uuid, stransid, stime, rtime, read_only }) => {
                let before = self.root_item(id)?.map_or(Uuid::nil(), |item| item.received_uuid);
                self.change_root_item(id, |item| {
                    (item.received_uuid, item.stransid, item.rtransid) = (uuid, stransid, transid);
                    (item.stime, item.rtime) = (stime, rtime);
                    if read_only {
                        item.flags |= RootFlags::RDONLY.bits();
                    }
                })?;
                let kind = KeyType::UUID_KEY_RECEIVED_SUBVOL;
                self.set_uuid((kind, before), id, false, refs, transid)?;
                self.set_uuid((kind, uuid), id, true, refs, transid)
            }
            RootChange::Delete(id) => {
                self.change_root_item(id, |item| {
                    item.refs = 0;
                    item.flags |= RootFlags::DEAD.bits();
                    (item.drop_progress, item.drop_level) = (Key::MIN, 0);
                })?;
                let Some(item) = self.root_item(id)? else { return Ok(()) };
                let uuids =
                    [(KeyType::UUID_KEY_SUBVOL, item.uuid), (KeyType::UUID_KEY_RECEIVED_SUBVOL, item.received_uuid)];
                for uuid in uuids {
                    self.set_uuid(uuid, id, false, refs, transid)?;
                }
                Ok(())
            }
        }
    }

    fn change_root_item(&self, id: RootId, change: impl FnOnce(&mut RootItem)) -> Result<()> {
        let Some(tree) = self.tree(id)? else { return Ok(()) };
        let mut state = tree.root.lock();
        if let Some(item) = &mut state.item {
            change(item);
            self.trees.note_changed(id);
        }
        Ok(())
    }

    /// Makes the tree of a new subvolume. No item refers to the new tree until [`Self::name_tree`].
    pub(crate) fn make_tree(
        &self,
        new: &NewSubvolume,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<MadeTree> {
        let id = new.id;
        let (root, mut item, key_offset) = match &new.content {
            NewContent::Items(items) => {
                let root = self.make_root_leaf(id, items, refs, transid)?;
                let mut item = blank_root_item(&root, self.geometry.nodesize);
                item.inode.flags = InodeFlags::ROOT_ITEM_INIT.bits();
                item.bytes_used = self.geometry.nodesize.into();
                (item.root_dirid, item.refs) = (objectid::FIRST_FREE, 1);
                (item.ctransid, item.ctime) = (transid, new.otime);
                (root, item, 0)
            }
            NewContent::SnapshotOf { source, read_only } => {
                let source = self.own_tree(*source)?;
                let root = self.copy_root_node(&source, id, refs, transid)?;
                let item = snapshot_item(&source, &root, *read_only)?;
                (root, item, transid.0)
            }
        };
        (item.uuid, item.otransid, item.otime) = (new.uuid, transid, new.otime);
        if new.stransid.0 != 0 {
            item.stransid = new.stransid;
        }
        let received_uuid = item.received_uuid;
        let state = RootState::new(key_offset, item);
        self.trees.keep(Arc::new(Tree::new(root, Arc::clone(&self.store), state)));
        self.trees.note_changed(id);
        Ok(MadeTree { root, received_uuid })
    }

    /// Puts the name and the references of a new subvolume.
    pub(crate) fn name_tree(
        &self,
        new: NewSubvolume,
        made: &MadeTree,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<()> {
        let NewSubvolume { id, uuid, parent, root_ref, entry, .. } = new;
        self.apply_batch(&*self.own_tree(parent)?, &entry, refs, transid)?;
        let value = root_ref.encode();
        let mut links: Batch = vec![
            (Key::new(parent.0, KeyType::ROOT_REF, id.0), Some(value.clone().into())),
            (Key::new(id.0, KeyType::ROOT_BACKREF, parent.0), Some(value.into())),
        ];
        links.sort_by_key(|(key, _)| *key);
        self.apply_batch(&*self.own_tree(RootId::ROOT_TREE)?, &links, refs, transid)?;
        let received = (KeyType::UUID_KEY_RECEIVED_SUBVOL, made.received_uuid);
        for uuid in [(KeyType::UUID_KEY_SUBVOL, uuid), received] {
            self.set_uuid(uuid, id, true, refs, transid)?;
        }
        Ok(())
    }

    /// Makes a leaf with these items. The leaf is the root of a new tree.
    pub(crate) fn make_root_leaf(
        &self,
        id: RootId,
        items: &[(Key, Vec<u8>)],
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<RootPtr> {
        let mut leaf = LeafBuilder::new(self.geometry.nodesize as usize);
        // The caller has checked that inode, reference and inherited attributes fit into the leaf.
        if !items.iter().all(|(key, value)| leaf.push(key, value)) {
            return Err(Error::Bug { what: format!("the root directory of subvolume {id} does not fit into a leaf") });
        }
        let header = self.root_header(id, 0, transid)?;
        self.put_root_node(leaf.finish(&header), id, refs, transid, UserChange::Change)
    }

    /// Copies a tree's root node. The copy is the root of a new tree, which shares all blocks and data below.
    fn copy_root_node(
        &self,
        source: &Tree,
        id: RootId,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<RootPtr> {
        // Note permanently that blocks are shared. The snapshot's reservation has the same effect only until the
        // reservation ends.
        self.trees.note_shared_blocks();
        let node = self.store.read_node(&source.root_ptr().node_ptr())?;
        let header = self.root_header(id, node.level(), transid)?;
        let mut raw = node.raw().to_vec();
        write_header(&mut raw, &header, node.nritems());
        // The children's new users are not tracked: for snapshots, quotas compute the numbers by arithmetic
        // ([`crate::qgroup`]).
        let child_refs = ChildRefs { owner: id, nodesize: self.geometry.nodesize, transid, quotas: QuotaMode::Off };
        child_refs.add_children(refs, &node, None, 1, UserChange::Same);
        let mut state = source.root.lock();
        state.last_snapshot = transid;
        self.trees.note_changed(source.id());
        if let Some(item) = &mut state.item {
            item.last_snapshot = transid;
        }
        self.put_root_node(raw, id, refs, transid, UserChange::Same)
    }

    fn root_header(&self, id: RootId, level: u8, transid: Generation) -> Result<NodeHeader> {
        let nodesize = self.geometry.nodesize.into();
        let extent = self.allocate_or_make_chunk(SpaceKind::Metadata, nodesize, nodesize, None)?;
        Ok(NodeHeader {
            fsid: self.commit_state.superblock().node_fsid(),
            chunk_tree_uuid: self.chunk_tree_uuid,
            bytenr: extent.ok_or(Error::NoSpace)?.bytenr,
            generation: transid,
            owner: id,
            level,
            flags: 0,
        })
    }

    fn put_root_node(
        &self,
        raw: Vec<u8>,
        id: RootId,
        refs: &mut DelayedRefs,
        transid: Generation,
        users: UserChange,
    ) -> Result<RootPtr> {
        let node = Arc::new(Node::new(raw.into_boxed_slice())?);
        let quotas = self.quotas.mode();
        let child_refs = ChildRefs { owner: id, nodesize: self.geometry.nodesize, transid, quotas };
        child_refs.add_node(refs, &node, RefKey::TreeBlock(id), 1, users);
        let root = RootPtr { tree: id, bytenr: node.bytenr(), generation: transid, level: node.level() };
        self.store.put_dirty(node);
        Ok(root)
    }

    /// Whether the item of a UUID in the UUID tree has room for another subvolume id.
    ///
    /// # Errors
    ///
    /// Fails if the UUID tree cannot be read.
    pub fn has_room_for_uuid(&self, kind: KeyType, uuid: Uuid) -> Result<bool> {
        let Some(tree) = self.tree(RootId::UUID_TREE)? else { return Ok(true) };
        let len = tree.get(&uuid_key(kind, uuid))?.map_or(0, |item| item.len());
        Ok(len.saturating_add(size_of::<u64>()) <= item_len_max(self.geometry.nodesize as usize))
    }

    /// The ids of the subvolumes with a UUID; `None` if the filesystem has no UUID tree.
    ///
    /// # Errors
    ///
    /// Fails if the UUID tree cannot be read.
    pub fn subvolumes_of_uuid(&self, kind: KeyType, uuid: Uuid) -> Result<Option<Vec<RootId>>> {
        let Some(tree) = self.tree(RootId::UUID_TREE)? else { return Ok(None) };
        let item = tree.get(&uuid_key(kind, uuid))?;
        let ids = item.iter().flat_map(|ids| ids.chunks_exact(size_of::<u64>()));
        Ok(Some(ids.map(|id| RootId(word(id))).collect()))
    }

    /// Adds a subvolume id to a UUID's item, or removes the id from the item. Does nothing if the filesystem has no
    /// UUID tree. As on Linux, an id that does not fit into a full item is left out.
    fn set_uuid(
        &self,
        (kind, uuid): (KeyType, Uuid),
        id: RootId,
        is_there: bool,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<()> {
        let Some(tree) = self.tree(RootId::UUID_TREE)?.filter(|_| !uuid.is_nil()) else { return Ok(()) };
        let key = uuid_key(kind, uuid);
        let (root, id) = (id, id.0.to_le_bytes());
        let before = tree.get(&key)?.map_or_else(Vec::new, |item| item.to_vec());
        let mut ids: Vec<u8> =
            before.chunks(size_of::<u64>()).filter(|other| **other != id).flatten().copied().collect();
        if is_there {
            ids.extend(id);
        }
        if ids == before {
            return Ok(());
        }
        if ids.len() > item_len_max(self.geometry.nodesize as usize) {
            tracing::warn!("the UUID tree has no room for subvolume {root}: too many subvolumes have the UUID {uuid}");
            return Ok(());
        }
        let value = (!ids.is_empty()).then(|| ids.into());
        self.apply_batch(&tree, &vec![(key, value)], refs, transid)?;
        Ok(())
    }

    /// Finds deleted subvolumes whose space was not freed before the filesystem was closed, and queues them.
    ///
    /// # Errors
    ///
    /// Fails if the root tree is corrupt or cannot be read.
    pub fn find_dead_roots(&self) -> Result<()> {
        let roots = self.own_tree(RootId::ROOT_TREE)?;
        let mut start = Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, 0);
        let end = Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, u64::MAX);
        while let Some((key, _)) = roots.first_ge(&start, &end)? {
            let id = RootId(key.offset);
            if id.is_subvolume() && self.root_item(id)?.is_some_and(|item| item.refs == 0) {
                self.drop_subvolume(id);
            }
            let Some(next) = key.successor() else { break };
            start = next;
        }
        Ok(())
    }

    /// Queues a deleted subvolume. Later commits drop the subvolume in parts. From now on, reads of the subvolume's
    /// tree fail, and changes put into the tree are discarded.
    pub fn drop_subvolume(&self, id: RootId) {
        if let Some(tree) = self.trees.get(id) {
            tree.seal();
        }
        self.roots.push_dead(id);
    }

    /// Number of deleted subvolumes whose space is not freed yet.
    pub fn nr_dead_roots(&self) -> usize {
        self.roots.nr_dead()
    }

    /// Takes an error that prevented dropping a deleted subvolume. The part of the subvolume that was not dropped stays
    /// on disk.
    pub fn take_drop_failure(&self) -> Option<Error> {
        self.roots.take_drop_failure()
    }

    /// Sets the feature flag for a default subvolume in the superblocks of all later commits. Must be called before the
    /// operation that makes a subvolume other than the top level the default.
    pub fn note_default_subvolume(&self) {
        self.commit_state.note_incompat(Incompat::DEFAULT_SUBVOL.bits());
    }
}

/// Whether any subvolume is a snapshot or the source of a snapshot.
fn has_snapshots(root_tree: &Tree) -> Result<bool> {
    let mut start = Key::new(RootId::FS_TREE.0, KeyType::ROOT_ITEM, 0);
    let end = Key::new(objectid::LAST_FREE, KeyType::ROOT_ITEM, u64::MAX);
    loop {
        let (mut found, mut last) = (false, start);
        let nr_items = root_tree.visit(&start, &end, ITEMS_AT_ONCE, |key, item| {
            last = *key;
            let is_subvolume = key.item_type == KeyType::ROOT_ITEM && RootId(key.objectid).is_subvolume();
            found |= is_subvolume && RootItem::decode_any(item).is_ok_and(|item| item.last_snapshot > Generation(0));
        })?;
        match last.successor().filter(|_| nr_items == ITEMS_AT_ONCE && !found) {
            Some(next) => start = next,
            None => return Ok(found),
        }
    }
}

/// Number of items of the root tree that are read at a time.
const ITEMS_AT_ONCE: usize = 256;

/// Makes the root item of a snapshot: the root item of the source, with the snapshot's own fields replaced.
fn snapshot_item(source: &Tree, root: &RootPtr, read_only: bool) -> Result<RootItem> {
    let what = || format!("tree {} has no root item, but is the source of a snapshot", source.id());
    let item = source.root.lock().item.clone();
    let mut item = item.ok_or_else(|| Error::Bug { what: what() })?;
    (item.bytenr, item.level) = (root.bytenr, root.level);
    (item.generation, item.generation_v2) = (root.generation, root.generation);
    item.parent_uuid = item.uuid;
    (item.refs, item.drop_progress, item.drop_level) = (1, Key::MIN, 0);
    item.flags = if read_only { RootFlags::RDONLY.bits() } else { 0 };
    if !read_only {
        item.received_uuid = Uuid::nil();
        (item.stransid, item.rtransid) = (Generation(0), Generation(0));
        (item.stime, item.rtime) = Default::default();
    }
    Ok(item)
}

/// The key of a UUID's item in the UUID tree.
fn uuid_key(kind: KeyType, uuid: Uuid) -> Key {
    let (high, low) = uuid.as_bytes().split_at(size_of::<u64>());
    Key::new(word(high), kind, word(low))
}

/// The little-endian number at the start of some bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
