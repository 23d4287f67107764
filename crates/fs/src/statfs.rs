//! `statfs`, with the numbers that Linux shows for the same filesystem.

use ubtrfs_format::item::{BlockGroupFlags, NAME_LEN_MAX};

use crate::Fs;
use crate::error::Result;
use crate::types::StatFs;

impl Fs {
    /// Space as `df` shows it: devices' bytes over the number of copies of data.
    pub fn statfs(&self) -> Result<StatFs> {
        let usage = self.engine.usage();
        let superblock = self.engine.superblock();
        let bsize = u64::from(self.geometry.sectorsize.max(1));
        let factor = copies(usage.data_flags);
        let blocks = usage.device_bytes / factor / bsize;
        let raw_used = usage.data.used * factor
            + usage.metadata.used * copies(usage.metadata_flags)
            + usage.system.used * copies(usage.metadata_flags);
        let reserve = usage.global_reserve / bsize;
        let bfree = blocks.saturating_sub(raw_used / factor / bsize).saturating_sub(reserve);
        let data_free = usage.data.total.saturating_sub(usage.data.used);
        let bavail = (data_free + usage.unallocated_bytes / factor) / bsize;
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
}

fn copies(flags: BlockGroupFlags) -> u64 {
    let two = BlockGroupFlags::DUP | BlockGroupFlags::RAID1 | BlockGroupFlags::RAID10;
    if flags.contains(BlockGroupFlags::RAID1C4) {
        4
    } else if flags.contains(BlockGroupFlags::RAID1C3) {
        3
    } else if flags.intersects(two) {
        2
    } else {
        1
    }
}
