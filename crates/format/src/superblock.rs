//! The superblock: 4096 bytes at 64 KiB, with mirrors at 64 MiB and 256 GiB.
//!
//! Source: the btrfs on-disk format page ("Superblock").

use bitflags::bitflags;
use uuid::Uuid;

use crate::codec::{Field, Reader};
use crate::csum::CsumType;
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::{DevId, Generation, Logical};
use crate::item::DevItem;

/// Size of a superblock in bytes.
pub const SUPERBLOCK_SIZE: usize = 4096;
/// Device offsets of the superblock and its mirrors. A mirror past the device's end does not exist.
pub const SUPERBLOCK_OFFSETS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
/// The magic number of a btrfs superblock.
pub const MAGIC: [u8; 8] = *b"_BHRfS_M";
/// Offset of the magic number in a superblock.
pub const MAGIC_OFFSET: usize = 64;
/// Smallest size of a data sector and of a tree block.
pub const BLOCK_SIZE_MIN: u32 = 4096;
/// Largest size of a data sector and of a tree block.
pub const BLOCK_SIZE_MAX: u32 = 65536;
/// Size of the system chunk array in bytes.
pub const SYS_CHUNK_ARRAY_SIZE: usize = 2048;
/// Number of root backups.
pub const NR_ROOT_BACKUPS: usize = 4;
/// Size of the label's field in bytes.
pub const LABEL_SIZE: usize = 256;
/// Longest label in bytes, without its terminating zero.
pub const LABEL_LEN_MAX: usize = LABEL_SIZE - 1;

/// Bits of [`Superblock::flags`]. Source: the on-disk format page, and the output of btrfs-progs' `dump-super`.
pub mod flags {
    /// The superblock was written.
    pub const WRITTEN: u64 = 1;
    /// Relocated.
    pub const RELOC: u64 = 1 << 1;
    /// An error was recorded.
    pub const ERROR: u64 = 1 << 2;
    /// Other filesystems may be made on top of this one, which is never written.
    pub const SEEDING: u64 = 1 << 32;
    /// An image of the metadata, without data.
    pub const METADUMP: u64 = 1 << 33;
    /// An image of the metadata in a later form, without data.
    pub const METADUMP_V2: u64 = 1 << 34;
    /// A change of the id in all blocks was interrupted.
    pub const CHANGING_FSID: u64 = 1 << 35;
    /// A change of the id in the superblocks was interrupted.
    pub const CHANGING_FSID_V2: u64 = 1 << 36;
    /// A conversion of the block group tree was interrupted.
    pub const CHANGING_BG_TREE: u64 = 1 << 38;
    /// A change of the checksums of data was interrupted.
    pub const CHANGING_DATA_CSUM: u64 = 1 << 39;
    /// A change of the checksums of tree blocks was interrupted.
    pub const CHANGING_META_CSUM: u64 = 1 << 40;
    /// All flags of interrupted conversions.
    pub const INTERRUPTED: u64 =
        CHANGING_FSID | CHANGING_FSID_V2 | CHANGING_BG_TREE | CHANGING_DATA_CSUM | CHANGING_META_CSUM;
}

disk_struct! {
    /// The roots of a recent commit, 168 bytes.
    RootBackup {
        /// Root tree.
        tree_root: Logical,
        /// Generation of the root tree.
        tree_root_gen: Generation,
        /// Chunk tree.
        chunk_root: Logical,
        /// Generation of the chunk tree.
        chunk_root_gen: Generation,
        /// Extent tree. A backup has no field for the block group tree.
        extent_root: Logical,
        /// Generation of the extent tree.
        extent_root_gen: Generation,
        /// Top-level subvolume.
        fs_root: Logical,
        /// Generation of the top-level subvolume.
        fs_root_gen: Generation,
        /// Device tree.
        dev_root: Logical,
        /// Generation of the device tree.
        dev_root_gen: Generation,
        /// Checksum tree.
        csum_root: Logical,
        /// Generation of the checksum tree.
        csum_root_gen: Generation,
        /// Total size of all devices in bytes.
        total_bytes: u64,
        /// Bytes used.
        bytes_used: u64,
        /// Number of devices.
        num_devices: u64,
        /// Unused.
        unused_64: [u64; 4],
        /// Level of the root tree.
        tree_root_level: u8,
        /// Level of the chunk tree.
        chunk_root_level: u8,
        /// Level of the extent tree.
        extent_root_level: u8,
        /// Level of the top-level subvolume.
        fs_root_level: u8,
        /// Level of the device tree.
        dev_root_level: u8,
        /// Level of the checksum tree.
        csum_root_level: u8,
        /// Unused.
        unused_8: [u8; 10],
    }
}

disk_struct! {
    /// The superblock.
    Superblock {
        /// Checksum of the bytes from 32 on.
        csum: [u8; 32],
        /// Filesystem id that users see.
        fsid: Uuid,
        /// Offset of this copy on the device.
        bytenr: u64,
        /// The bits of [`flags`].
        flags: u64,
        /// [`MAGIC`].
        magic: [u8; 8],
        /// Last committed transaction.
        generation: Generation,
        /// Root tree.
        root: Logical,
        /// Chunk tree.
        chunk_root: Logical,
        /// Address of the root node of the tree of log trees; 0 if there is none.
        log_root: Logical,
        /// Unused (always 0).
        log_root_transid: u64,
        /// Total size of all devices in bytes.
        total_bytes: u64,
        /// Bytes used by extents.
        bytes_used: u64,
        /// Always 6.
        root_dir_objectid: u64,
        /// Number of devices.
        num_devices: u64,
        /// Size of a data block in bytes.
        sectorsize: u32,
        /// Size of a tree block in bytes.
        nodesize: u32,
        /// Equal to `nodesize`.
        leafsize: u32,
        /// Equal to `sectorsize`.
        stripesize: u32,
        /// Number of bytes in use in the system chunk array.
        sys_chunk_array_size: u32,
        /// Generation of the chunk tree.
        chunk_root_generation: Generation,
        /// Compatible features.
        compat_flags: u64,
        /// [`CompatRo`] bits.
        compat_ro_flags: u64,
        /// [`Incompat`] bits.
        incompat_flags: u64,
        /// [`CsumType`].
        csum_type: u16,
        /// Level of the root tree.
        root_level: u8,
        /// Level of the chunk tree.
        chunk_root_level: u8,
        /// Level of the log root tree.
        log_root_level: u8,
        /// This device.
        dev_item: DevItem,
        /// Label, padded with zeros.
        label: [u8; LABEL_SIZE],
        /// Generation of the free space cache (v1); `u64::MAX` if the cache is not valid.
        cache_generation: u64,
        /// Generation of the last commit that kept the UUID tree up to date.
        uuid_tree_generation: u64,
        /// Filesystem id in tree blocks, with the metadata-uuid feature.
        metadata_uuid: Uuid,
        /// Number of global roots (extent tree v2).
        nr_global_roots: u64,
        /// Reserved.
        reserved: [u64; 27],
        /// System chunks: a key and a chunk item for each.
        sys_chunk_array: [u8; SYS_CHUNK_ARRAY_SIZE],
        /// Ring of root backups.
        super_roots: [RootBackup; NR_ROOT_BACKUPS],
        /// Padding.
        padding: [u8; 565],
    }
}

impl Field for [RootBackup; NR_ROOT_BACKUPS] {
    const SIZE: usize = RootBackup::SIZE * NR_ROOT_BACKUPS;
    fn read(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        Ok([RootBackup::read(reader)?, RootBackup::read(reader)?, RootBackup::read(reader)?, RootBackup::read(reader)?])
    }
    fn store(&self, out: &mut [u8]) {
        out.chunks_exact_mut(RootBackup::SIZE).zip(self).for_each(|(out, backup)| backup.store(out));
    }
}

const _: () = assert!(Superblock::SIZE == SUPERBLOCK_SIZE);

bitflags! {
    /// Features that a program must know to open the filesystem at all.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Incompat: u64 {
        /// Mixed backrefs.
        const MIXED_BACKREF = 1 << 0;
        /// A default subvolume was set.
        const DEFAULT_SUBVOL = 1 << 1;
        /// Data and metadata share block groups.
        const MIXED_GROUPS = 1 << 2;
        /// LZO compression.
        const COMPRESS_LZO = 1 << 3;
        /// zstd compression.
        const COMPRESS_ZSTD = 1 << 4;
        /// Nodes larger than a page.
        const BIG_METADATA = 1 << 5;
        /// Extended inode references.
        const EXTENDED_IREF = 1 << 6;
        /// RAID5 and RAID6.
        const RAID56 = 1 << 7;
        /// Skinny metadata extent items.
        const SKINNY_METADATA = 1 << 8;
        /// No hole extents.
        const NO_HOLES = 1 << 9;
        /// `metadata_uuid` differs from `fsid`.
        const METADATA_UUID = 1 << 10;
        /// Profiles with three and four copies.
        const RAID1C34 = 1 << 11;
        /// Zoned.
        const ZONED = 1 << 12;
        /// Extent tree v2.
        const EXTENT_TREE_V2 = 1 << 13;
        /// RAID stripe tree.
        const RAID_STRIPE_TREE = 1 << 14;
        /// Simple quotas.
        const SIMPLE_QUOTA = 1 << 16;
    }

    /// Features that a program must know to write to the filesystem.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CompatRo: u64 {
        /// Free space tree.
        const FREE_SPACE_TREE = 1 << 0;
        /// The free space tree is valid.
        const FREE_SPACE_TREE_VALID = 1 << 1;
        /// fs-verity.
        const VERITY = 1 << 2;
        /// Block group items in their own tree.
        const BLOCK_GROUP_TREE = 1 << 3;
    }
}

impl Incompat {
    /// The names of these bits for messages, with the numbers of unknown bits: "RAID56, bit 15".
    pub fn names_of(bits: u64) -> String {
        names(Self::all().iter_names().map(|(name, flag)| (name, flag.bits())), bits)
    }
}

impl CompatRo {
    /// The names of these bits, as [`Incompat::names_of`].
    pub fn names_of(bits: u64) -> String {
        names(Self::all().iter_names().map(|(name, flag)| (name, flag.bits())), bits)
    }
}

fn names(known: impl Iterator<Item = (&'static str, u64)>, bits: u64) -> String {
    let mut rest = bits;
    let mut names = Vec::new();
    for (name, bit) in known.filter(|&(_, bit)| bits & bit != 0) {
        names.push(name.to_owned());
        rest &= !bit;
    }
    let is_set = |shift: &u32| rest.checked_shr(*shift).is_some_and(|bits| bits & 1 == 1);
    names.extend((0..u64::BITS).filter(is_set).map(|shift| format!("bit {shift}")));
    names.join(", ")
}

impl Superblock {
    /// The incompat features.
    pub fn incompat(&self) -> Incompat {
        Incompat::from_bits_retain(self.incompat_flags)
    }

    /// The compat_ro features.
    pub fn compat_ro(&self) -> CompatRo {
        CompatRo::from_bits_retain(self.compat_ro_flags)
    }

    /// The checksum type, if it is known.
    pub fn csum_type(&self) -> Option<CsumType> {
        CsumType::from_disk(self.csum_type)
    }

    /// Whether the device is the new one of a replacement that is not complete. The chunk tree has no item of it.
    pub fn is_replacement_target(&self) -> bool {
        self.dev_item.devid == DevId::REPLACEMENT_TARGET
    }

    /// The UUID that tree blocks carry.
    pub fn node_fsid(&self) -> Uuid {
        if self.incompat().contains(Incompat::METADATA_UUID) { self.metadata_uuid } else { self.fsid }
    }

    /// The label without its padding.
    pub fn label(&self) -> &[u8] {
        let end = self.label.iter().position(|&byte| byte == 0).unwrap_or(self.label.len());
        self.label.get(..end).unwrap_or_default()
    }

    /// Encodes the superblock as 4096 bytes with a new checksum.
    pub fn encode_with_csum(&self) -> Vec<u8> {
        let mut raw = self.encode();
        if let Some((csum, body)) = raw.split_first_chunk_mut::<32>() {
            *csum = self.csum_type().unwrap_or_default().compute(body);
        }
        raw
    }
}
