//! Makes an empty filesystem on one device or several.
//!
//! The result has the chunks, trees and keys that mkfs.btrfs 6.2 makes, except keys that contain the address of a tree
//! block or of free space. Everything is made in one transaction, of generation 1. Each tree is built directly from
//! leaves in key order, without crate `tree`.
//!
//! ```text
//! options --layout--> chunks --trees--> items of each tree --blocks--> tree blocks --make--> devices
//! ```
//!
//! Invariants:
//! - I1. Nothing is written before every check of every device has passed, so a refusal leaves all devices unchanged.
//! - I2. The primary superblocks are written last, after a flush, and that of the first device after all others. So an
//!   interrupted run leaves no filesystem, or one that is complete but lacks the first device.

#![forbid(unsafe_code)]

mod blocks;
mod layout;
mod options;
mod trees;
mod unfinished;

use std::io::IoSlice;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, DevItem};
use ubtrfs_format::superblock::{
    LABEL_SIZE, MAGIC, RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SYS_CHUNK_ARRAY_SIZE, Superblock,
};
use ubtrfs_format::{DevId, Generation, Logical, Physical, RootId};
use uuid::Uuid;

use blocks::NewFilesystem;
use layout::NewMember;
pub use layout::min_size;
pub use options::MkfsOptions;
pub use ubtrfs_volumes::detect;
pub use unfinished::UnfinishedDevice;

/// The transaction that makes the filesystem.
const GENERATION: Generation = Generation(1);

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
    /// Bytes of all devices that the filesystem uses.
    pub total_bytes: u64,
    /// Bytes of each device that the filesystem uses. The first device has the id 1, the next one 2.
    pub device_bytes: Vec<u64>,
    /// Bytes used by tree blocks.
    pub bytes_used: u64,
    /// The block groups.
    pub block_groups: Vec<BlockGroupReport>,
}

/// Makes an empty filesystem on one device.
///
/// # Errors
///
/// As [`make_array`].
pub fn make(device: &dyn Device, options: &MkfsOptions) -> Result<MkfsReport> {
    make_array(&[device], options)
}

/// Makes an empty filesystem on these devices. The caller passes no device twice.
///
/// # Errors
///
/// Fails without a change if the options contradict each other or the number of devices, a device is too small or
/// read-only, or a device has content and `force` is not set. Fails with an I/O error of a device.
pub fn make_array(devices: &[&dyn Device], options: &MkfsOptions) -> Result<MkfsReport> {
    options.check(devices.len())?;
    let members = members(devices, options)?;
    let chunks = layout::plan(options, &members)?;
    for device in devices {
        if !options.force
            && let Some(found) = detect(*device)?
        {
            return Err(Error::Refused {
                what: format!("{} contains {found}", device.describe()),
                hint: "choose another target, or overwrite it with `mkfs -f`",
            });
        }
    }
    let fs = NewFilesystem::build(options, &chunks, &members)?;

    for (device, member) in devices.iter().zip(&members) {
        if options.discard {
            // Errors are ignored, because the device may not support discards.
            let _unsupported = device.discard(0, member.total_bytes);
        }
        ubtrfs_volumes::wipe(*device, member.total_bytes)?;
    }
    for block in &fs.blocks {
        for (devid, Physical(offset)) in fs.copies_of(block.bytenr) {
            let at = members.iter().position(|member| member.devid == devid).expect("chunks lie on the members");
            write(devices[at], offset, &block.raw)?;
        }
    }
    flush_all(devices)?;
    let superblocks: Vec<Superblock> =
        members.iter().map(|member| superblock(options, &fs, &members, member)).collect();
    for ((device, member), superblock) in devices.iter().zip(&members).zip(&superblocks) {
        let is_inside = |offset: &&u64| **offset + (SUPERBLOCK_SIZE as u64) < member.total_bytes;
        for offset in SUPERBLOCK_OFFSETS[1..].iter().filter(is_inside) {
            write(*device, *offset, &Superblock { bytenr: *offset, ..superblock.clone() }.encode_with_csum())?;
        }
    }
    flush_all(devices)?;
    for (device, superblock) in devices.iter().zip(&superblocks).rev() {
        write(*device, SUPERBLOCK_OFFSETS[0], &superblock.encode_with_csum())?;
        flush(*device)?;
    }

    let report = |chunk: &layout::NewChunk| BlockGroupReport {
        flags: chunk.item.flags,
        start: chunk.start,
        len_bytes: chunk.item.length,
    };
    Ok(MkfsReport {
        total_bytes: total_bytes(&members),
        device_bytes: members.iter().map(|member| member.total_bytes).collect(),
        bytes_used: fs.bytes_used(),
        block_groups: chunks.iter().map(report).collect(),
    })
}

/// The devices with their ids and usable sizes.
fn members(devices: &[&dyn Device], options: &MkfsOptions) -> Result<Vec<NewMember>> {
    let member = |(index, device): (usize, &&dyn Device)| {
        let uuid = options.device_uuids.get(index).copied().unwrap_or_else(Uuid::new_v4);
        Ok(NewMember { devid: DevId(index as u64 + 1), uuid, total_bytes: usable_bytes(*device, options)? })
    };
    devices.iter().enumerate().map(member).collect()
}

fn total_bytes(members: &[NewMember]) -> u64 {
    members.iter().map(|member| member.total_bytes).fold(0, u64::saturating_add)
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

/// The primary superblock of a member.
fn superblock(options: &MkfsOptions, fs: &NewFilesystem, members: &[NewMember], own: &NewMember) -> Superblock {
    let total_bytes = total_bytes(members);
    let num_devices = members.len() as u64;
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
        num_devices,
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
        dev_item: dev_item(options, own, fs.device_bytes_used(own.devid)),
        label,
        cache_generation: if has_free_space_tree { 0 } else { u64::MAX },
        uuid_tree_generation: GENERATION.0,
        metadata_uuid: Uuid::nil(),
        nr_global_roots: 0,
        reserved: [0; 27],
        sys_chunk_array,
        super_roots: [backup(fs, total_bytes, num_devices), empty_backup(), empty_backup(), empty_backup()],
        padding: [0; 565],
    }
}

fn dev_item(options: &MkfsOptions, member: &NewMember, bytes_used: u64) -> DevItem {
    DevItem {
        devid: member.devid,
        total_bytes: member.total_bytes,
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
        uuid: member.uuid,
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

fn backup(fs: &NewFilesystem, total_bytes: u64, num_devices: u64) -> RootBackup {
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
        num_devices,
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

fn flush_all(devices: &[&dyn Device]) -> Result<()> {
    devices.iter().try_for_each(|device| flush(*device))
}

fn flush(device: &dyn Device) -> Result<()> {
    device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))
}
