//! [`CommittedTree`]: a read-only subvolume as of the last commit, for walks that compare whole trees.
//!
//! - I1. The nodes of a committed tree keep their addresses while no block group is emptied and the subvolume is not
//!   changed, because a commit frees only nodes that no tree reaches. The caller keeps the subvolume from being deleted
//!   or made writable, and extents from being moved. Files that were opened earlier can still change a read-only
//!   subvolume; every change changes its root, so the caller compares the roots in the end.
//! - I2. Commits free nodes of the root tree and the extent tree, so the commit lock is held while these are read.

use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{FileExtent, RootItem};
use ubtrfs_format::{Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::RefKey;
use ubtrfs_tree::{Cursor, NodeSource, RootPtr};

use crate::backref::refs::{extent_refs, first_refs};
use crate::backref::view::TreesView;
use crate::engine::Engine;
use crate::nodes::leaf_reader::LeafReader;
use crate::nodes::store::NodeStore;

/// A subvolume's tree on disk.
#[derive(Clone, Debug)]
pub struct CommittedTree {
    store: Arc<NodeStore>,
    root: RootPtr,
    item: RootItem,
}

/// A possible use of an extent: an inode number (of an unknown subvolume), and the file offset at which the
/// extent's first byte would lie. The offset wraps if the first byte would lie before the start of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseHint {
    /// The inode.
    pub ino: Ino,
    /// The file offset of the file extent item minus the item's offset into the extent.
    pub base: u64,
}

impl CommittedTree {
    /// The root of the tree.
    pub fn root(&self) -> RootPtr {
        self.root
    }

    /// The root item.
    pub fn item(&self) -> &RootItem {
        &self.item
    }

    /// A source of nodes.
    pub fn source(&self) -> &dyn NodeSource {
        &*self.store
    }
}

impl Engine {
    /// A subvolume as of the last commit; `None` if the subvolume did not exist at that commit, or if it is being
    /// deleted.
    ///
    /// # Errors
    ///
    /// Fails if the root tree is corrupt or cannot be read.
    pub fn committed_tree(&self, id: RootId) -> Result<Option<CommittedTree>> {
        let _work = self.commit_state.lock();
        self.find_committed(id)
    }

    /// Runs `read` on a subvolume as of the last commit. Other threads may change the subvolume during the call, but no
    /// commit can run, so `read` must be short. Returns `None` if [`Engine::committed_tree`] would return `None`.
    ///
    /// # Errors
    ///
    /// As for [`Engine::committed_tree`].
    pub fn with_committed_tree<T>(&self, id: RootId, read: impl FnOnce(CommittedTree) -> T) -> Result<Option<T>> {
        let _work = self.commit_state.lock();
        Ok(self.find_committed(id)?.map(read))
    }

    /// Finds a subvolume as of the last commit. The caller holds the commit lock (I2).
    fn find_committed(&self, id: RootId) -> Result<Option<CommittedTree>> {
        let superblock = self.commit_state.superblock().clone();
        let root_tree = RootPtr {
            tree: RootId::ROOT_TREE,
            bytenr: superblock.root,
            generation: superblock.generation,
            level: superblock.root_level,
        };
        let mut cursor = Cursor::new(&*self.store, root_tree);
        let found = cursor.seek_le(&Key::new(id.0, KeyType::ROOT_ITEM, u64::MAX))?;
        if found.is_none_or(|key| key.objectid != id.0 || key.item_type != KeyType::ROOT_ITEM) {
            return Ok(None);
        }
        let item = RootItem::decode_any(cursor.data().unwrap_or_default())
            .map_err(|cause| Error::from(cause).in_tree(RootId::ROOT_TREE))?;
        let root = RootPtr { tree: id, bytenr: item.bytenr, generation: item.generation, level: item.level };
        Ok((item.refs > 0).then(|| CommittedTree { store: Arc::clone(&self.store), root, item }))
    }

    /// Runs `work` with a source of nodes that reads announced leaves ahead. The leaves do not enter the node cache.
    pub fn with_walk_source<T>(&self, work: impl FnOnce(&dyn NodeSource) -> T) -> T {
        LeafReader::with_limit(&self.store, WALK_LEAVES_MAX, |reader| work(reader))
    }

    /// Places where data extents may be used, in the order of `extents` (address and length of each). Looks at no more
    /// than `most` references of each extent. A leaf that several subvolumes share yields each place once.
    ///
    /// # Errors
    ///
    /// Fails if the extent tree is corrupt or cannot be read.
    pub fn use_hints(&self, extents: &[(Logical, u64)], most: usize) -> Result<Vec<Vec<UseHint>>> {
        // I2
        let _work = self.commit_state.lock();
        let view = TreesView::committed(self)?;
        extents.iter().map(|(bytenr, len_bytes)| hints_of(&view, *bytenr, *len_bytes, most)).collect()
    }
}

fn hints_of(view: &TreesView<'_>, bytenr: Logical, len_bytes: u64, most: usize) -> Result<Vec<UseHint>> {
    let found = first_refs(view.source(), view.extent_root(), (bytenr, len_bytes), false, most)?;
    let mut hints = Vec::new();
    for (reference, _) in found.iter().flat_map(|(extent, _)| &extent.refs).take(most) {
        match *reference {
            RefKey::Data { ino, offset, .. } => hints.push(UseHint { ino, base: offset }),
            RefKey::SharedData(leaf) => hints_in_leaf(view, bytenr, leaf, &mut hints)?,
            RefKey::TreeBlock(_) | RefKey::SharedBlock(_) => {}
        }
    }
    hints.sort_unstable();
    hints.dedup();
    Ok(hints)
}

/// Adds the uses of an extent in a leaf with full backrefs.
fn hints_in_leaf(view: &TreesView<'_>, bytenr: Logical, leaf: Logical, hints: &mut Vec<UseHint>) -> Result<()> {
    let refs = extent_refs(view.source(), view.extent_root(), leaf, view.nodesize(), true)?;
    let Some(refs) = refs.filter(|refs| refs.level == Some(0)) else { return Ok(()) };
    let leaf = view.block(leaf, refs.generation, 0, RootId::FS_TREE)?;
    for slot in 0..leaf.nritems() {
        let key = leaf.key(slot);
        if key.item_type != KeyType::EXTENT_DATA {
            continue;
        }
        let item = FileExtent::decode(leaf.item(slot)).map_err(|cause| Error::from(cause).in_tree(leaf.owner()))?;
        if let Some(extent) = item.disk_extent().filter(|extent| extent.disk_bytenr == bytenr) {
            hints.push(UseHint { ino: Ino(key.objectid), base: key.offset.wrapping_sub(extent.offset) });
        }
    }
    Ok(())
}

/// Maximum number of leaves that are read ahead of a walk.
const WALK_LEAVES_MAX: usize = 512;
