//! Chunks, devices and block groups.

use bitflags::bitflags;
use uuid::Uuid;

use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::{DevId, Generation, Physical};
use crate::node::{ITEM_HEAD_SIZE, LeafBuilder};

bitflags! {
    /// Type and profile of a chunk or block group. No profile bit means single.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct BlockGroupFlags: u64 {
        /// File data.
        const DATA = 1 << 0;
        /// Blocks of the chunk tree.
        const SYSTEM = 1 << 1;
        /// Blocks of all other trees.
        const METADATA = 1 << 2;
        /// Striped.
        const RAID0 = 1 << 3;
        /// Two copies on two devices.
        const RAID1 = 1 << 4;
        /// Two copies, which may be on one device.
        const DUP = 1 << 5;
        /// Striped mirrors.
        const RAID10 = 1 << 6;
        /// One parity.
        const RAID5 = 1 << 7;
        /// Two parities.
        const RAID6 = 1 << 8;
        /// Three copies on three devices.
        const RAID1C3 = 1 << 9;
        /// Four copies on four devices.
        const RAID1C4 = 1 << 10;
    }
}

impl BlockGroupFlags {
    /// All type bits.
    pub const TYPES: Self = Self::DATA.union(Self::SYSTEM).union(Self::METADATA);
    /// All profile bits.
    pub const PROFILES: Self = Self::RAID0
        .union(Self::RAID1)
        .union(Self::DUP)
        .union(Self::RAID10)
        .union(Self::RAID5)
        .union(Self::RAID6)
        .union(Self::RAID1C3)
        .union(Self::RAID1C4);
}

disk_struct! {
    /// One stripe of a chunk, 32 bytes.
    #[derive(Copy)]
    Stripe {
        /// The device.
        devid: DevId,
        /// Offset of the stripe on the device.
        offset: Physical,
        /// The device's UUID.
        dev_uuid: Uuid,
    }
}

/// `CHUNK_ITEM`, key `(256 CHUNK_ITEM logical)`: 48 bytes, then the stripes.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | length |
/// | 8 | 8 | owner (2) |
/// | 16 | 8 | stripe_len |
/// | 24 | 8 | type |
/// | 32 | 4 | io_align |
/// | 36 | 4 | io_width |
/// | 40 | 4 | sector_size |
/// | 44 | 2 | num_stripes |
/// | 46 | 2 | sub_stripes |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkItem {
    /// Logical length in bytes.
    pub length: u64,
    /// Always the extent tree.
    pub owner: u64,
    /// Size of a stripe element in bytes: 64 KiB.
    pub stripe_len: u64,
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Optimal alignment.
    pub io_align: u32,
    /// Optimal width.
    pub io_width: u32,
    /// Minimal I/O size.
    pub sector_size: u32,
    /// Sub-stripes (raid10: 2).
    pub sub_stripes: u16,
    /// The stripes; their number is `num_stripes`.
    pub stripes: Vec<Stripe>,
}

impl ChunkItem {
    /// Size of the part before the stripes, in bytes.
    pub const HEADER_SIZE: usize = 48;
    /// The only stripe element length in use.
    pub const STRIPE_LEN: u64 = 64 * 1024;

    /// Number of stripes for which an item has room in a leaf of `nodesize` bytes.
    pub fn stripes_in_leaf(nodesize: usize) -> u16 {
        let taken = ITEM_HEAD_SIZE.saturating_add(Self::HEADER_SIZE);
        let room = LeafBuilder::capacity(nodesize).saturating_sub(taken);
        u16::try_from(room / Stripe::SIZE).unwrap_or(u16::MAX)
    }

    /// Reads a chunk item and leaves the reader at the end of the item, because the system chunk array holds
    /// several items.
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        let length = u64::read(reader)?;
        let owner = u64::read(reader)?;
        let stripe_len = u64::read(reader)?;
        let flags = BlockGroupFlags::from_bits_retain(u64::read(reader)?);
        let io_align = u32::read(reader)?;
        let io_width = u32::read(reader)?;
        let sector_size = u32::read(reader)?;
        let num_stripes = u16::read(reader)?;
        let sub_stripes = u16::read(reader)?;
        let stripes = (0..num_stripes).map(|_| Stripe::read(reader)).collect::<Result<_, _>>()?;
        Ok(Self { length, owner, stripe_len, flags, io_align, io_width, sector_size, sub_stripes, stripes })
    }

    /// Reads an item.
    pub fn decode(data: &[u8]) -> Result<Self, FormatError> {
        Self::read(&mut Reader::new("ChunkItem", data))
    }

    /// Encodes the item as its bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.length.write(&mut out);
        self.owner.write(&mut out);
        self.stripe_len.write(&mut out);
        self.flags.bits().write(&mut out);
        self.io_align.write(&mut out);
        self.io_width.write(&mut out);
        self.sector_size.write(&mut out);
        u16::try_from(self.stripes.len()).unwrap_or(u16::MAX).write(&mut out);
        self.sub_stripes.write(&mut out);
        self.stripes.iter().for_each(|stripe| stripe.write(&mut out));
        out
    }
}

disk_struct! {
    /// `DEV_ITEM`, key `(1 DEV_ITEM devid)`, 98 bytes; also in the superblock.
    DevItem {
        /// The device.
        devid: DevId,
        /// Size of the device in bytes.
        total_bytes: u64,
        /// Bytes allocated to device extents.
        bytes_used: u64,
        /// Optimal alignment.
        io_align: u32,
        /// Optimal width.
        io_width: u32,
        /// Minimal I/O size.
        sector_size: u32,
        /// Unused.
        dev_type: u64,
        /// Unused.
        generation: u64,
        /// Unused.
        start_offset: u64,
        /// Unused.
        dev_group: u32,
        /// Unused.
        seek_speed: u8,
        /// Unused.
        bandwidth: u8,
        /// The device's UUID.
        uuid: Uuid,
        /// The filesystem's UUID.
        fsid: Uuid,
    }
}

disk_struct! {
    /// `DEV_EXTENT`, key `(devid DEV_EXTENT physical)`, 48 bytes.
    DevExtent {
        /// The chunk tree.
        chunk_tree: u64,
        /// Always 256.
        chunk_objectid: u64,
        /// Logical start of the chunk.
        chunk_offset: u64,
        /// Length in bytes.
        length: u64,
        /// The chunk tree's UUID.
        chunk_tree_uuid: Uuid,
    }
}

disk_struct! {
    /// `BLOCK_GROUP_ITEM`, key `(logical BLOCK_GROUP_ITEM length)`, 24 bytes.
    BlockGroupItem {
        /// Bytes used by extents.
        used: u64,
        /// Always 256.
        chunk_objectid: u64,
        /// Bits of [`BlockGroupFlags`].
        flags: u64,
    }
}

disk_struct! {
    /// `PERSISTENT_ITEM`, key `(0 PERSISTENT_ITEM devid)`: error counters of a device.
    DevStatsItem {
        /// Write, read, flush, corruption and generation errors.
        values: [u64; 5],
    }
}

disk_struct! {
    /// The state of the last replacement of a device, in the device tree under the key (0, DEV_REPLACE, 0).
    DevReplaceItem {
        /// The device that is replaced.
        src_devid: DevId,
        /// Everything below this offset of the device is copied.
        cursor_left: u64,
        /// Everything below this offset is copied or being copied.
        cursor_right: u64,
        /// 1 if the replaced device is read only where no other copy is good, else 0.
        cont_reading_from_srcdev_mode: u64,
        /// One of the constants below.
        replace_state: u64,
        /// Seconds since 1970.
        time_started: u64,
        /// Seconds since 1970; 0 if it has not ended.
        time_stopped: u64,
        /// Writes to the new device that failed.
        num_write_errors: u64,
        /// Sectors without a good copy.
        num_uncorrectable_read_errors: u64,
    }
}

impl DevReplaceItem {
    /// A replacement is running.
    pub const STARTED: u64 = 1;
    /// The replacement is complete.
    pub const FINISHED: u64 = 2;
    /// The replacement was cancelled.
    pub const CANCELED: u64 = 3;
    /// The replacement goes on at the next mount.
    pub const SUSPENDED: u64 = 4;

    /// Whether a part of the new device's content is missing: its filesystem must not be written without it.
    pub fn is_unfinished(&self) -> bool {
        matches!(self.replace_state, Self::STARTED | Self::SUSPENDED)
    }
}

/// A [`DevStatsItem`] and what this program stores behind it. Linux keeps longer items as they are, and reads and writes
/// the counters only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRecord {
    /// The error counters.
    pub stats: DevStatsItem,
    /// The generation up to which the device has everything. `None` if it has everything.
    pub complete_to: Option<Generation>,
    /// The generation of the newest superblock that the device can have. `None` if it gets the filesystem's superblocks.
    pub written_to: Option<Generation>,
    /// The generation of the last commit that knew `written_to` to be true. Linux does not renew it, but may write later
    /// superblocks to the device.
    pub confirmed_at: Option<Generation>,
}

impl DeviceRecord {
    /// Reads the item. An item without the generations is read, too.
    pub fn decode(data: &[u8]) -> Result<Self, FormatError> {
        let stats = DevStatsItem::decode(data)?;
        let number = |at: usize| {
            let raw = data.get(DevStatsItem::SIZE.saturating_add(at)..).and_then(<[u8]>::first_chunk)?;
            Some(Generation(u64::from_le_bytes(*raw))).filter(|generation| generation.0 != 0)
        };
        Ok(Self { stats, complete_to: number(0), written_to: number(8), confirmed_at: number(16) })
    }

    /// The bytes on disk: those of Linux unless the device is behind.
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = self.stats.encode();
        if let Some(complete_to) = self.complete_to {
            raw.extend(complete_to.0.to_le_bytes());
            raw.extend(self.written_to.unwrap_or_default().0.to_le_bytes());
            raw.extend(self.confirmed_at.iter().flat_map(|generation| generation.0.to_le_bytes()));
        }
        raw
    }
}
