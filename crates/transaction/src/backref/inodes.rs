//! [`inodes_of`]: the files that use a data extent, in every subvolume that reaches the extent.

use ubtrfs_error::Result;
use ubtrfs_format::{Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::RefKey;
use ubtrfs_tree::Cursor;

use super::refs::{ExtentRefs, extent_refs, read_refs};
use super::roots::{LeafUse, LeafUses, RootsOf, shared_leaves};
use super::view::TreesView;
use crate::engine::Engine;
use crate::handle::trans_handle::regular_extent;

/// A file extent item that refers to an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExtentUse {
    /// The subvolume.
    pub root: RootId,
    /// The inode.
    pub ino: Ino,
    /// The item's offset in the file.
    pub file_offset: u64,
    /// The item's offset into the extent, before compression.
    pub extent_offset: u64,
    /// Bytes of the file that the item covers.
    pub len_bytes: u64,
    /// Whether the extent is compressed.
    pub compressed: bool,
}

impl ExtentUse {
    /// The offset in the file of the byte at the offset `inside` of the extent; for a compressed extent, the item's
    /// offset, as in Linux.
    pub fn offset_of(&self, inside: u64) -> u64 {
        match inside.checked_sub(self.extent_offset) {
            Some(past) if !self.compressed => self.file_offset.saturating_add(past),
            _ => self.file_offset,
        }
    }

    /// Whether the item covers the byte at the offset `inside` of the extent. An item of a compressed extent covers
    /// every byte, because any read needs the whole extent.
    fn covers(&self, inside: u64) -> bool {
        self.compressed || inside.checked_sub(self.extent_offset).is_some_and(|past| past < self.len_bytes)
    }
}

/// Passes every use of a data extent to `found`, until `found` returns false.
///
/// # Errors
///
/// Fails if a tree is corrupt or cannot be read.
pub(crate) fn inodes_of(
    roots: &mut RootsOf<'_>,
    extent: &ExtentRefs,
    found: &mut dyn FnMut(ExtentUse) -> bool,
) -> Result<()> {
    let shared = shared_leaves(extent);
    for (reference, count) in &extent.refs {
        let uses = match *reference {
            RefKey::SharedData(leaf) => shared_leaf(roots, extent, leaf)?.into_iter().collect(),
            RefKey::Data { root, ino, offset } => {
                let Some(subvolume) = roots.view().subvolume(root)? else { continue };
                let mut scan = LeafUses::new(roots.view(), &subvolume, extent, (ino, offset), *count, &shared)?;
                std::iter::from_fn(|| scan.next_leaf().transpose()).collect::<Result<Vec<_>>>()?
            }
            RefKey::TreeBlock(_) | RefKey::SharedBlock(_) => Vec::new(),
        };
        for LeafUse { leaf, slots } in uses {
            let set = roots.of_block(leaf.bytenr())?;
            for slot in slots {
                let (key, Some(item)) = (leaf.key(slot), regular_extent(leaf.item(slot))) else { continue };
                for &root in set.iter() {
                    let (ino, file_offset) = (Ino(key.objectid), key.offset);
                    let (extent_offset, len_bytes) = (item.offset, item.num_bytes);
                    let compressed = leaf.item(slot).get(COMPRESSION_AT).is_some_and(|kind| *kind != 0);
                    if !found(ExtentUse { root, ino, file_offset, extent_offset, len_bytes, compressed }) {
                        return Ok(());
                    }
                }
            }
        }
    }
    Ok(())
}

/// The items that refer to an extent, in a leaf with full backrefs.
fn shared_leaf(roots: &RootsOf<'_>, extent: &ExtentRefs, leaf: Logical) -> Result<Option<LeafUse>> {
    let view = roots.view();
    let refs = extent_refs(view.source(), view.extent_root(), leaf, view.nodesize(), true)?;
    let Some(refs) = refs.filter(|refs| refs.level == Some(0)) else { return Ok(None) };
    let leaf = view.block(leaf, refs.generation, 0, RootId::FS_TREE)?;
    let is_use = |slot: &usize| {
        leaf.key(*slot).item_type == KeyType::EXTENT_DATA
            && regular_extent(leaf.item(*slot)).is_some_and(|item| item.disk_bytenr == extent.bytenr)
    };
    let slots = (0..leaf.nritems()).filter(is_use).collect();
    Ok(Some(LeafUse { leaf, slots }))
}

/// Offset of the compression byte in a file extent item: after generation and size.
const COMPRESSION_AT: usize = 16;

impl Engine {
    /// Returns up to `limit` uses of the data at an address by files, as of the last commit. If `whole_extent` is set,
    /// returns the uses of all bytes of the data extent that contains the address; otherwise only the items that cover
    /// the address. Also returns the address's offset in the extent. `None` if no data extent covers the address.
    ///
    /// # Errors
    ///
    /// Fails if a tree is corrupt or cannot be read.
    pub fn extent_uses(&self, at: Logical, whole_extent: bool, limit: usize) -> Result<Option<(u64, Vec<ExtentUse>)>> {
        // Blocks of the last commit are reused only after the next commit, and this lock prevents that commit.
        let _work = self.commit_state.lock();
        let view = TreesView::committed(self)?;
        let mut cursor = Cursor::new(view.source(), *view.extent_root());
        let mut key = cursor.seek_le(&Key::new(at.0, KeyType::EXTENT_ITEM, u64::MAX))?;
        // Go back to the extent's item: items of other types, such as keyed references of the extent, may lie behind
        // it.
        while key.is_some_and(|key| key.item_type != KeyType::EXTENT_ITEM) {
            key = cursor.prev()?;
        }
        let inside_of = |key: Key| at.0.checked_sub(key.objectid).filter(|inside| *inside < key.offset);
        let Some((key, inside)) = key.and_then(|key| Some((key, inside_of(key)?))) else { return Ok(None) };
        let extent = read_refs(&mut cursor, &key, key.offset)?;
        if extent.level.is_some() {
            return Ok(None);
        }
        let mut uses = Vec::new();
        inodes_of(&mut RootsOf::new(view), &extent, &mut |found| {
            if whole_extent || found.covers(inside) {
                uses.push(found);
            }
            uses.len() < limit
        })?;
        uses.sort_unstable();
        Ok(Some((inside, uses)))
    }
}
