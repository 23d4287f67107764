//! Leaf items; each type decodes and encodes itself.
//!
//! Source: the btrfs on-disk format page. Tests compare sizes with images made by mkfs.btrfs and the kernel.

mod balance;
mod chunk;
mod dir;
mod extent;
mod file_extent;
mod free_space;
mod inode;
mod qgroup;
mod root;

pub use balance::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem};
pub use chunk::{
    BlockGroupFlags, BlockGroupItem, ChunkItem, DevExtent, DevItem, DevReplaceItem, DevStatsItem, DeviceRecord, Stripe,
};
pub use dir::{DirItem, DirItemHeader, DirItemView, FileType, NAME_LEN_MAX, is_entry_name};
pub use extent::{ExtentDataRef, ExtentFlags, ExtentItem, InlineRef, TreeBlockInfo};
pub use file_extent::{Compression, FileExtent, FileExtentBody, RegularExtent};
pub use free_space::{FREE_SPACE_BITMAP_BITS, FREE_SPACE_BITMAP_SIZE, FreeSpaceHeader, FreeSpaceInfo};
pub use inode::{InodeExtref, InodeFlags, InodeItem, InodeRef, InodeRefHeader, Timespec};
pub use qgroup::{QgroupInfo, QgroupLimit, QgroupStatus};
pub use root::{RootFlags, RootItem, RootRef};
