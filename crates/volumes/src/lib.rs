//! The devices of one filesystem as one logical address space: superblock mirrors, chunk map, copies.
#![forbid(unsafe_code)]
#![allow(clippy::todo, missing_docs, unused_variables)]

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem, DevStatsItem};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, FormatError, Logical, Result};
use uuid::Uuid;

/// How to open a filesystem's devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Nothing is written, not even repairs.
    pub read_only: bool,
}

/// A device as users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// Its id.
    pub devid: DevId,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its size as the filesystem uses it.
    pub total_bytes: u64,
    /// Bytes in device extents.
    pub bytes_used: u64,
    /// The path, or `None` where it is missing.
    pub path: Option<String>,
}

/// The devices of one filesystem.
#[derive(Debug)]
pub struct Volumes {
    superblock: Superblock,
}

impl Volumes {
    /// Opens a filesystem from all its devices.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: OpenOptions) -> Result<Self> {
        todo!()
    }
    /// Why the filesystem cannot be written, if it cannot.
    pub fn write_refusal(&self) -> Option<String> {
        todo!()
    }
    /// The superblock, as read at open.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }
    /// Which mirror it came from: 0 for the primary at 64 KiB.
    pub fn superblock_mirror(&self) -> usize {
        todo!()
    }
    /// Adds a chunk of the chunk tree. Idempotent.
    pub fn add_chunk(&self, logical: Logical, chunk: ChunkItem) -> Result<()> {
        todo!()
    }
    /// Forgets a chunk; its device space can be planned again.
    pub fn remove_chunk(&self, logical: Logical) {
        todo!()
    }
    /// The chunk that covers an address, and its start.
    pub fn chunk_at(&self, logical: Logical) -> Option<(Logical, Arc<ChunkItem>)> {
        todo!()
    }
    /// All chunks in order.
    pub fn chunks(&self) -> Vec<(Logical, Arc<ChunkItem>)> {
        todo!()
    }
    /// Plans a new chunk of this type and profile (not added yet), or `None` where no device has room.
    pub fn plan_chunk(&self, flags: BlockGroupFlags, max_len: u64) -> Option<(Logical, ChunkItem)> {
        todo!()
    }
    /// Bytes of all devices in no device extent.
    pub fn unallocated_bytes(&self) -> u64 {
        todo!()
    }
    /// Logical ranges of that chunk that cover superblock mirrors, merged and sorted.
    pub fn reserved_ranges(&self, logical: Logical) -> Vec<Range<u64>> {
        todo!()
    }
    /// Copies that can be read at this address; 0 where no chunk is.
    pub fn num_copies(&self, logical: Logical) -> usize {
        todo!()
    }
    /// Reads and verifies each `unit_bytes` piece (`verify(index of the piece, its bytes)`); heals from other copies.
    pub fn read(
        &self,
        logical: Logical,
        buf: &mut [u8],
        unit_bytes: usize,
        verify: &dyn Fn(usize, &[u8]) -> Result<(), FormatError>,
    ) -> Result<()> {
        todo!()
    }
    /// Reads one copy, unverified.
    pub fn read_copy(&self, logical: Logical, buf: &mut [u8], copy: usize) -> Result<()> {
        todo!()
    }
    /// Writes all copies.
    pub fn write(&self, logical: Logical, data: &[u8]) -> Result<()> {
        todo!()
    }
    /// Writes all copies of several buffers, one behind the other.
    pub fn write_vectored(&self, logical: Logical, bufs: &[IoSlice<'_>]) -> Result<()> {
        todo!()
    }
    /// Makes everything written so far durable on every device.
    pub fn flush(&self) -> Result<()> {
        todo!()
    }
    /// Tells the devices that a range is not needed: best effort.
    pub fn discard(&self, logical: Logical, len_bytes: u64) -> Result<()> {
        todo!()
    }
    /// Writes the superblock to all mirrors of all devices (dev_item, bytenr and csum are filled in here). Does not
    /// flush: flush before, so that what it points to is durable, and after.
    pub fn write_superblock(&self, sb: &Superblock) -> Result<()> {
        todo!()
    }
    /// All devices, missing ones too.
    pub fn devices(&self) -> Vec<DeviceSummary> {
        todo!()
    }
    /// The device item as it should be in the chunk tree now: `bytes_used` is the sum of the chunks' stripes.
    pub fn dev_item(&self, devid: DevId) -> Option<DevItem> {
        todo!()
    }
    /// Takes over a device item read from the chunk tree (adds a missing device).
    pub fn set_dev_item(&self, item: &DevItem) -> Result<()> {
        todo!()
    }
    /// Error counters of each device.
    pub fn stats(&self) -> Vec<(DevId, DevStatsItem)> {
        todo!()
    }
    /// Takes over the counters that the device tree holds; later errors are added to them.
    pub fn set_stats(&self, devid: DevId, stats: &DevStatsItem) {
        todo!()
    }
}
