//! [`inodes_of`]: the files that use a data extent, in every subvolume that reaches them.

use ubtrfs_error::Result;
use ubtrfs_format::{Ino, KeyType, RootId};
use ubtrfs_space::RefKey;

use super::refs::{ExtentRefs, extent_refs};
use super::roots::{LeafUse, RootsOf, leaf_uses, shared_leaves};
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
}

/// Passes every use of a data extent to `found`, until it returns false.
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
                leaf_uses(roots.view(), &subvolume, extent, (ino, offset), *count, &shared)?
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
                    if !found(ExtentUse { root, ino, file_offset, extent_offset, len_bytes }) {
                        return Ok(());
                    }
                }
            }
        }
    }
    Ok(())
}

/// The items of a leaf with full backrefs that refer to an extent.
fn shared_leaf(roots: &RootsOf<'_>, extent: &ExtentRefs, leaf: ubtrfs_format::Logical) -> Result<Option<LeafUse>> {
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
