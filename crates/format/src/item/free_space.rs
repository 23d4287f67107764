//! Items of the free space tree, and the header of the free space cache (v1).

use crate::disk_struct;
use crate::key::Key;

/// Size of a full free space bitmap in bytes.
pub const FREE_SPACE_BITMAP_SIZE: usize = 256;
/// Number of bits in a full free space bitmap; each bit stands for a sector.
pub const FREE_SPACE_BITMAP_BITS: u64 = 8 * 256;

disk_struct! {
    /// `FREE_SPACE_INFO`, key `(block group start FREE_SPACE_INFO block group length)`.
    #[derive(Copy)]
    FreeSpaceInfo {
        /// Number of separate free ranges.
        extent_count: u32,
        /// 0, or [`FreeSpaceInfo::USING_BITMAPS`].
        flags: u32,
    }
}

impl FreeSpaceInfo {
    /// Flag: bitmaps hold the block group's free space.
    pub const USING_BITMAPS: u32 = 1;
}

disk_struct! {
    /// Header of a block group's free space cache (v1), key `(FREE_SPACE 0 block group start)` in the root tree.
    FreeSpaceHeader {
        /// The cache's inode.
        location: Key,
        /// Generation for which the cache is valid.
        generation: u64,
        /// Number of entries.
        num_entries: u64,
        /// Number of bitmaps.
        num_bitmaps: u64,
    }
}
