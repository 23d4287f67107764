//! A filesystem with one DUP chunk on memory devices, and a device that records its requests.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "only tests call this")]

use std::io;
use std::sync::{Arc, Mutex};

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::codec::Field;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem, Stripe};
use ubtrfs_format::superblock::{LABEL_SIZE, MAGIC, RootBackup, SYS_CHUNK_ARRAY_SIZE, Superblock};
use ubtrfs_format::{DevId, Generation, Key, KeyType, Logical, Physical};
use uuid::Uuid;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const FSID: Uuid = Uuid::from_bytes([7; 16]);
/// Start of the chunk; its stripes lie at 1 MiB and 5 MiB.
pub(crate) const CHUNK: Logical = Logical(16 * MIB);
pub(crate) const CHUNK_LEN: u64 = 4 * MIB;

pub(crate) fn dev_item(devid: u64, total_bytes: u64) -> DevItem {
    DevItem {
        devid: DevId(devid),
        total_bytes,
        bytes_used: 0,
        io_align: 4096,
        io_width: 4096,
        sector_size: 4096,
        dev_type: 0,
        generation: 0,
        start_offset: 0,
        dev_group: 0,
        seek_speed: 0,
        bandwidth: 0,
        uuid: Uuid::from_u128(devid.into()),
        fsid: FSID,
    }
}

pub(crate) fn chunk() -> ChunkItem {
    let stripe =
        |n: u64| Stripe { devid: DevId(1), offset: Physical(MIB + n * CHUNK_LEN), dev_uuid: Uuid::from_u128(1) };
    ChunkItem {
        length: CHUNK_LEN,
        owner: 2,
        stripe_len: 65536,
        flags: BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP,
        io_align: 65536,
        io_width: 65536,
        sector_size: 4096,
        sub_stripes: 1,
        stripes: vec![stripe(0), stripe(1)],
    }
}

pub(crate) fn superblock(total_bytes: u64) -> Superblock {
    let mut array = Vec::new();
    Key::new(256, KeyType::CHUNK_ITEM, CHUNK.0).write(&mut array);
    array.extend_from_slice(&chunk().encode());
    let mut sys_chunk_array = [0; SYS_CHUNK_ARRAY_SIZE];
    sys_chunk_array[..array.len()].copy_from_slice(&array);
    let backup = RootBackup::decode(&[0; RootBackup::SIZE]).unwrap();
    Superblock {
        csum: [0; 32],
        fsid: FSID,
        bytenr: 65536,
        flags: 1,
        magic: MAGIC,
        generation: Generation(10),
        root: Logical(CHUNK.0 + 16384),
        chunk_root: CHUNK,
        log_root: Logical(0),
        log_root_transid: 0,
        total_bytes,
        bytes_used: 6 * 16384,
        root_dir_objectid: 6,
        num_devices: 1,
        sectorsize: 4096,
        nodesize: 16384,
        leafsize: 16384,
        stripesize: 4096,
        sys_chunk_array_size: array.len() as u32,
        chunk_root_generation: Generation(10),
        compat_flags: 0,
        compat_ro_flags: 3,
        incompat_flags: 0x341,
        csum_type: 0,
        root_level: 0,
        chunk_root_level: 0,
        log_root_level: 0,
        dev_item: dev_item(1, total_bytes),
        label: [0; LABEL_SIZE],
        cache_generation: 0,
        uuid_tree_generation: 0,
        metadata_uuid: Uuid::nil(),
        nr_global_roots: 0,
        reserved: [0; 27],
        sys_chunk_array,
        super_roots: [backup.clone(), backup.clone(), backup.clone(), backup],
        padding: [0; 565],
    }
}

/// Writes a superblock at this offset.
pub(crate) fn put(device: &dyn Device, sb: &Superblock, offset: u64) {
    let own = Superblock { bytenr: offset, ..sb.clone() };
    device.write_at(offset, &own.encode_with_csum()).unwrap();
}

/// A request that a [`Recorder`] recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Write(u64),
    Flush,
}

/// A device in memory that records writes and flushes, and fails reads of chosen ranges.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) memory: MemoryDevice,
    pub(crate) asked: Mutex<Vec<Asked>>,
    pub(crate) bad_reads: Mutex<Vec<std::ops::Range<u64>>>,
}

impl Recorder {
    pub(crate) fn new(len_bytes: u64) -> Arc<Self> {
        let memory = MemoryDevice::new(len_bytes);
        Arc::new(Self { memory, asked: Mutex::default(), bad_reads: Mutex::default() })
    }

    /// Makes a device with a filesystem.
    pub(crate) fn formatted(len_bytes: u64) -> Arc<Self> {
        let device = Self::new(len_bytes);
        put(&device.memory, &superblock(len_bytes), 65536);
        device
    }
}

impl Device for Recorder {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        if self.bad_reads.lock().unwrap().iter().any(|bad| bad.start < end && offset < bad.end) {
            return Err(io::Error::other("bad sector"));
        }
        self.memory.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.asked.lock().unwrap().push(Asked::Write(offset));
        self.memory.write_at(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.asked.lock().unwrap().push(Asked::Flush);
        self.memory.flush()
    }
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.memory.discard(offset, len_bytes)
    }
    fn describe(&self) -> String {
        self.memory.describe()
    }
    fn is_read_only(&self) -> bool {
        false
    }
}
