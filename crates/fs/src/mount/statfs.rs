//! `statfs`, with the numbers that Linux reports for the same filesystem.

use ubtrfs_format::item::NAME_LEN_MAX;
use ubtrfs_format::superblock::CompatRo;
use ubtrfs_format::{Profile, RootId};

use crate::Fs;
use crate::error::Result;
use crate::types::StatFs;

impl Fs {
    /// Space as `df` shows it: blocks on the devices, divided by the number of copies of data.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "sums of bytes on the devices; `factor` and `bsize` are at least 1"
    )]
    pub fn statfs(&self) -> Result<StatFs> {
        let usage = self.engine.usage();
        let superblock = self.engine.superblock();
        let bsize = u64::from(self.geometry.sectorsize.max(1));
        let factor = Profile::copies_of(usage.data_flags);
        let blocks = usage.device_bytes / factor / bsize;
        let metadata = if self.geometry.mixed { 0 } else { usage.metadata.used };
        let raw_used =
            usage.data.used * factor + (metadata + usage.system.used) * Profile::copies_of(usage.metadata_flags);
        let reserve = self.linux_reserve()? / bsize;
        let bfree = blocks.saturating_sub(raw_used / factor / bsize).saturating_sub(reserve);
        // On one device, Linux counts all bytes that no chunk uses.
        let new_data = match Profile::of(usage.data_flags).is_some_and(Profile::fits_one_device) {
            true => usage.unallocated_bytes / factor,
            false => usage.allocatable_data_bytes,
        };
        let data_free = usage.data.total.saturating_sub(usage.data.used).saturating_sub(self.engine.free_on_seeds());
        let bavail = (data_free + new_data) / bsize;
        let id = superblock.fsid.as_u128() ^ u128::from(self.root().root.0);
        let fold = |bits: u128| u32::try_from(bits & u128::from(u32::MAX)).unwrap_or_default();
        Ok(StatFs {
            bsize: self.geometry.sectorsize,
            blocks,
            bfree,
            bavail,
            files: 0,
            ffree: 0,
            namelen: u32::try_from(NAME_LEN_MAX).unwrap_or(255),
            fsid: [fold((id >> 96) ^ (id >> 32)), fold((id >> 64) ^ id)],
        })
    }

    /// The reserve in bytes that Linux keeps free for removing files and for commits; `df` shows the reserve as used.
    /// The reserve is the size of the trees that account for space. It is at least the space for one item in each of
    /// these trees and in the root tree, for an unlink, and for the unlink's delayed refs; it is at most `RESERVE_MAX`.
    fn linux_reserve(&self) -> Result<u64> {
        let superblock = self.engine.superblock();
        let free_space_tree = superblock.compat_ro().contains(CompatRo::FREE_SPACE_TREE);
        let block_group_tree = superblock.compat_ro().contains(CompatRo::BLOCK_GROUP_TREE);
        let trees = [
            (RootId::EXTENT_TREE, true),
            (RootId::CSUM_TREE, true),
            (RootId::FREE_SPACE_TREE, free_space_tree),
            (RootId::BLOCK_GROUP_TREE, block_group_tree),
        ];
        // `nr_items` starts with one item for the root tree.
        let (mut nr_items, mut used) = (1, 0);
        for (tree, _) in trees.into_iter().filter(|(_, there)| *there) {
            nr_items = u64::saturating_add(nr_items, 1);
            let bytes_used = self.engine.root_item(tree)?.map_or(0, |item| item.bytes_used);
            // In a crafted image, `bytes_used` can be any number, so the sum saturates.
            used = u64::saturating_add(used, bytes_used);
        }
        nr_items = nr_items.saturating_add(if free_space_tree { 3 * UNLINK_ITEMS } else { 2 * UNLINK_ITEMS });
        let item_bytes = u64::from(self.geometry.nodesize).saturating_mul(2 * TREE_HEIGHT_MAX);
        Ok(used.max(nr_items.saturating_mul(item_bytes)).min(RESERVE_MAX))
    }
}

/// Number of items that an unlink changes: orphan item, entry, index, reference, inode, directory.
const UNLINK_ITEMS: u64 = 6;
const TREE_HEIGHT_MAX: u64 = 8;
const RESERVE_MAX: u64 = 512 << 20;
