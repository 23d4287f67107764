//! Makes an empty filesystem on a device.
#![forbid(unsafe_code)]
#![allow(clippy::todo)]

use ubtrfs_device::Device;
use ubtrfs_format::item::{BlockGroupFlags, Timespec};
use ubtrfs_format::superblock::{CompatRo, Incompat};
use ubtrfs_format::{CsumType, Error};
use uuid::Uuid;

/// What the new filesystem is to be like. `Default` is what btrfs-progs 6.2 makes.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Label, at most 255 bytes.
    pub label: Vec<u8>,
    /// Filesystem id.
    pub fsid: Uuid,
    /// Id of the device.
    pub device_uuid: Uuid,
    /// Id of the chunk tree.
    pub chunk_tree_uuid: Uuid,
    /// Id of the top-level subvolume.
    pub subvol_uuid: Uuid,
    /// Bytes to use; all of the device by default.
    pub size_bytes: Option<u64>,
    /// Bytes of a tree block.
    pub nodesize: u32,
    /// Bytes of a data block.
    pub sectorsize: u32,
    /// Checksum algorithm.
    pub csum_type: CsumType,
    /// Profile of data: empty for single, or DUP.
    pub data_profile: BlockGroupFlags,
    /// Profile of metadata: empty for single, or DUP.
    pub metadata_profile: BlockGroupFlags,
    /// Data and metadata share block groups.
    pub mixed: bool,
    /// Incompat features; those that follow from other options are added.
    pub incompat: Incompat,
    /// compat_ro features.
    pub compat_ro: CompatRo,
    /// Overwrite an existing filesystem.
    pub force: bool,
    /// Time of creation.
    pub now: Timespec,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            label: Vec::new(),
            fsid: Uuid::new_v4(),
            device_uuid: Uuid::new_v4(),
            chunk_tree_uuid: Uuid::new_v4(),
            subvol_uuid: Uuid::new_v4(),
            size_bytes: None,
            nodesize: 16384,
            sectorsize: 4096,
            csum_type: CsumType::Crc32c,
            data_profile: BlockGroupFlags::empty(),
            metadata_profile: BlockGroupFlags::DUP,
            mixed: false,
            incompat: Incompat::MIXED_BACKREF
                | Incompat::EXTENDED_IREF
                | Incompat::SKINNY_METADATA
                | Incompat::NO_HOLES,
            compat_ro: CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID,
            force: false,
            now: now(),
        }
    }
}

fn now() -> Timespec {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timespec { sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX), nsec: since.subsec_nanos() }
}

/// One block group of the new filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGroupReport {
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Logical start.
    pub start: u64,
    /// Logical length in bytes.
    pub len_bytes: u64,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct MkfsReport {
    /// Bytes of the device that are used.
    pub total_bytes: u64,
    /// Bytes used by tree blocks.
    pub bytes_used: u64,
    /// The block groups.
    pub block_groups: Vec<BlockGroupReport>,
}

/// Makes an empty filesystem.
pub fn make(_device: &dyn Device, _options: &MkfsOptions) -> Result<MkfsReport, Error> {
    todo!()
}
