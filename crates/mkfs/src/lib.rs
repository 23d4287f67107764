//! Makes an empty filesystem on a device.
//!
//! The result has the chunks, trees and keys that mkfs.btrfs 6.2 makes, except keys that contain the address of a tree
//! block or of free space. Everything is made in one transaction, of generation 1. Each tree is built directly from
//! leaves in key order, without crate `tree`.
//!
//! ```text
//! options --layout--> chunks --trees--> items of each tree --blocks--> tree blocks --make--> device
//! ```
//!
//! Invariants:
//! - I1. Nothing is written before every check has passed, so a refusal leaves the target unchanged.
//! - I2. The primary superblock is written last, after a flush, so an interrupted run leaves no filesystem.

#![forbid(unsafe_code)]

mod blocks;
mod layout;
mod options;
mod signature;
mod trees;
mod unfinished;

use std::io::IoSlice;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, DevItem};
use ubtrfs_format::superblock::{
    LABEL_SIZE, MAGIC, RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SYS_CHUNK_ARRAY_SIZE, Superblock,
};
use ubtrfs_format::{DevId, Generation, Logical, RootId};
use uuid::Uuid;

use blocks::Filesystem;
pub use layout::min_size;
pub use options::MkfsOptions;
pub use signature::detect;
pub use unfinished::Unfinished;

/// The transaction that makes the filesystem.
const GENERATION: Generation = Generation(1);
/// The id of the only device.
const DEVID: DevId = DevId(1);

/// A block group of the new filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGroupReport {
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Logical start.
    pub start: u64,
    /// Logical length in bytes.
    pub len_bytes: u64,
}

/// The properties of a new filesystem.
#[derive(Clone, Debug)]
pub struct MkfsReport {
    /// Bytes of the device that the filesystem uses.
    pub total_bytes: u64,
    /// Bytes used by tree blocks.
    pub bytes_used: u64,
    /// The block groups.
    pub block_groups: Vec<BlockGroupReport>,
}

/// Makes an empty filesystem.
///
/// # Errors
///
/// Fails without a change if the options contradict each other, the device is too small or read-only, or the device has
/// content and `force` is not set. Fails with an I/O error of the device.
pub fn make(device: &dyn Device, options: &MkfsOptions) -> Result<MkfsReport> {
    options.check()?;
    let total_bytes = usable_bytes(device, options)?;
    let chunks = layout::plan(options, total_bytes)?;
    if !options.force
        && let Some(found) = signature::detect(device)?
    {
        return Err(Error::Refused {
            what: format!("{} contains {found}", device.describe()),
            hint: "choose another target, or overwrite it with `mkfs -f`",
        });
    }
    let fs = Filesystem::build(options, &chunks, total_bytes)?;

    if options.discard {
        // Errors are ignored, because the device may not support discards.
        let _unsupported = device.discard(0, total_bytes);
    }
    signature::wipe(device, total_bytes)?;
    for block in &fs.blocks {
        for stripe in fs.stripes_of(block.bytenr) {
            write(device, stripe, &block.raw)?;
        }
    }
    flush(device)?;
    let superblock = superblock(options, &fs, total_bytes);
    for offset in SUPERBLOCK_OFFSETS[1..].iter().filter(|&offset| offset + (SUPERBLOCK_SIZE as u64) < total_bytes) {
        write(device, *offset, &Superblock { bytenr: *offset, ..superblock.clone() }.encode_with_csum())?;
    }
    flush(device)?;
    write(device, SUPERBLOCK_OFFSETS[0], &superblock.encode_with_csum())?;
    flush(device)?;

    let report = |chunk: &layout::Chunk| BlockGroupReport {
        flags: chunk.item.flags,
        start: chunk.start,
        len_bytes: chunk.item.length,
    };
    Ok(MkfsReport { total_bytes, bytes_used: fs.bytes_used(), block_groups: chunks.iter().map(report).collect() })
}

/// Computes the bytes of the device that the filesystem will use, in whole sectors.
fn usable_bytes(device: &dyn Device, options: &MkfsOptions) -> Result<u64> {
    let have = device.len_bytes();
    if device.is_read_only() {
        return Err(Error::Refused {
            what: format!("{} cannot be written", device.describe()),
            hint: "make it writable first",
        });
    }
    let wanted = options.size_bytes.unwrap_or(have);
    if wanted > have {
        return Err(Error::Refused {
            what: format!("{} has {have} bytes, less than the requested {wanted}", device.describe()),
            hint: "give a smaller size, or enlarge the device",
        });
    }
    Ok(wanted / u64::from(options.sectorsize) * u64::from(options.sectorsize))
}

fn superblock(options: &MkfsOptions, fs: &Filesystem, total_bytes: u64) -> Superblock {
    let root = |tree| fs.root(tree);
    let array = fs.sys_chunk_array();
    let mut sys_chunk_array = [0; SYS_CHUNK_ARRAY_SIZE];
    sys_chunk_array[..array.len()].copy_from_slice(&array);
    let mut label = [0; LABEL_SIZE];
    label[..options.label.len()].copy_from_slice(&options.label);
    let has_free_space_tree = fs.has_tree(RootId::FREE_SPACE_TREE);
    Superblock {
        csum: [0; 32],
        fsid: options.fsid,
        bytenr: SUPERBLOCK_OFFSETS[0],
        flags: 1,
        magic: MAGIC,
        generation: GENERATION,
        root: root(RootId::ROOT_TREE).bytenr,
        chunk_root: root(RootId::CHUNK_TREE).bytenr,
        log_root: Logical(0),
        log_root_transid: 0,
        total_bytes,
        bytes_used: fs.bytes_used(),
        root_dir_objectid: RootId::ROOT_TREE_DIR.0,
        num_devices: 1,
        sectorsize: options.sectorsize,
        nodesize: options.nodesize,
        leafsize: options.nodesize,
        stripesize: options.sectorsize,
        sys_chunk_array_size: array.len() as u32,
        chunk_root_generation: GENERATION,
        compat_flags: 0,
        compat_ro_flags: options.compat_ro.bits(),
        incompat_flags: options.incompat_bits().bits(),
        csum_type: options.csum_type as u16,
        root_level: root(RootId::ROOT_TREE).level,
        chunk_root_level: root(RootId::CHUNK_TREE).level,
        log_root_level: 0,
        dev_item: dev_item(options, fs.device_bytes_used(), total_bytes),
        label,
        cache_generation: if has_free_space_tree { 0 } else { u64::MAX },
        uuid_tree_generation: GENERATION.0,
        metadata_uuid: Uuid::nil(),
        nr_global_roots: 0,
        reserved: [0; 27],
        sys_chunk_array,
        super_roots: [backup(fs, total_bytes), empty_backup(), empty_backup(), empty_backup()],
        padding: [0; 565],
    }
}

fn dev_item(options: &MkfsOptions, bytes_used: u64, total_bytes: u64) -> DevItem {
    DevItem {
        devid: DEVID,
        total_bytes,
        bytes_used,
        io_align: options.sectorsize,
        io_width: options.sectorsize,
        sector_size: options.sectorsize,
        dev_type: 0,
        generation: 0,
        start_offset: 0,
        dev_group: 0,
        seek_speed: 0,
        bandwidth: 0,
        uuid: options.device_uuid,
        fsid: options.fsid,
    }
}

fn empty_backup() -> RootBackup {
    RootBackup {
        tree_root: Logical(0),
        tree_root_gen: Generation(0),
        chunk_root: Logical(0),
        chunk_root_gen: Generation(0),
        extent_root: Logical(0),
        extent_root_gen: Generation(0),
        fs_root: Logical(0),
        fs_root_gen: Generation(0),
        dev_root: Logical(0),
        dev_root_gen: Generation(0),
        csum_root: Logical(0),
        csum_root_gen: Generation(0),
        total_bytes: 0,
        bytes_used: 0,
        num_devices: 0,
        unused_64: [0; 4],
        tree_root_level: 0,
        chunk_root_level: 0,
        extent_root_level: 0,
        fs_root_level: 0,
        dev_root_level: 0,
        csum_root_level: 0,
        unused_8: [0; 10],
    }
}

fn backup(fs: &Filesystem, total_bytes: u64) -> RootBackup {
    let root = |tree| fs.root(tree);
    RootBackup {
        tree_root: root(RootId::ROOT_TREE).bytenr,
        tree_root_gen: GENERATION,
        chunk_root: root(RootId::CHUNK_TREE).bytenr,
        chunk_root_gen: GENERATION,
        extent_root: root(RootId::EXTENT_TREE).bytenr,
        extent_root_gen: GENERATION,
        fs_root: root(RootId::FS_TREE).bytenr,
        fs_root_gen: GENERATION,
        dev_root: root(RootId::DEV_TREE).bytenr,
        dev_root_gen: GENERATION,
        csum_root: root(RootId::CSUM_TREE).bytenr,
        csum_root_gen: GENERATION,
        total_bytes,
        bytes_used: fs.bytes_used(),
        num_devices: 1,
        tree_root_level: root(RootId::ROOT_TREE).level,
        chunk_root_level: root(RootId::CHUNK_TREE).level,
        extent_root_level: root(RootId::EXTENT_TREE).level,
        fs_root_level: root(RootId::FS_TREE).level,
        dev_root_level: root(RootId::DEV_TREE).level,
        csum_root_level: root(RootId::CSUM_TREE).level,
        ..empty_backup()
    }
}

fn write(device: &dyn Device, offset: u64, data: &[u8]) -> Result<()> {
    let failed = |source| Error::io("write", device.describe(), offset, data.len() as u64, source);
    device.write_vectored_at(offset, &[IoSlice::new(data)]).map_err(failed)
}

fn flush(device: &dyn Device) -> Result<()> {
    device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))
}
