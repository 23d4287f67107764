//! The superblock as text.

use std::fmt::{self, Write};

use super::{KeyText, print_chunk};
use crate::codec::{Field, Reader};
use crate::csum::CsumType;
use crate::item::ChunkItem;
use crate::key::Key;
use crate::superblock::{
    CompatRo, Incompat, MAGIC, RootBackup, SUPERBLOCK_SIZE, SYS_CHUNK_ARRAY_SIZE, Superblock, flags,
};

/// Prints a superblock's fields; `full` adds the superblock's system chunks and root backups.
pub fn print_superblock(raw: &[u8], full: bool, out: &mut dyn Write) -> fmt::Result {
    let superblock = match Superblock::decode(raw) {
        Ok(superblock) => superblock,
        Err(cause) => return writeln!(out, "corrupt: {cause}"),
    };
    print_head(&superblock, raw, out)?;
    print_sizes(&superblock, out)?;
    print_features(&superblock, out)?;
    print_device(&superblock, out)?;
    if full {
        print_sys_chunks(&superblock, out)?;
        writeln!(out, "backup_roots[{}]:", superblock.super_roots.len())?;
        for (index, backup) in superblock.super_roots.iter().enumerate() {
            print_backup(index, backup, out)?;
        }
    }
    writeln!(out)
}

fn matches(good: bool) -> &'static str {
    if good { "[match]" } else { "[DON'T MATCH]" }
}

fn print_head(superblock: &Superblock, raw: &[u8], out: &mut dyn Write) -> fmt::Result {
    let Superblock { csum_type, bytenr, flags, magic, fsid, .. } = superblock;
    let known = superblock.csum_type();
    let size = known.map_or(superblock.csum.len(), CsumType::size);
    let csum = superblock.csum.get(..size).unwrap_or_default();
    let verdict = match (known, raw.get(32..SUPERBLOCK_SIZE)) {
        (Some(known), Some(body)) => matches(known.compute(body).get(..size) == Some(csum)),
        _ => "[UNKNOWN CSUM TYPE OR SIZE]",
    };
    writeln!(out, "csum_type\t\t{csum_type} ({})", known.map_or("INVALID", CsumType::name))?;
    writeln!(out, "csum_size\t\t{size}")?;
    writeln!(out, "csum\t\t\t0x{} {verdict}", crate::node::hex(csum))?;
    writeln!(out, "bytenr\t\t\t{bytenr}")?;
    print_flags("flags\t\t\t", *flags, &SUPER_FLAGS, out)?;
    writeln!(out, "magic\t\t\t{} {}", dotted(magic), matches(*magic == MAGIC))?;
    writeln!(out, "fsid\t\t\t{fsid}")?;
    writeln!(out, "metadata_uuid\t\t{}", superblock.node_fsid())?;
    writeln!(out, "label\t\t\t{}", dotted(superblock.label()))
}

fn print_sizes(superblock: &Superblock, out: &mut dyn Write) -> fmt::Result {
    let Superblock { generation, root, sys_chunk_array_size, chunk_root_generation, root_level, .. } = superblock;
    let Superblock { chunk_root, chunk_root_level, log_root, log_root_transid, log_root_level, .. } = superblock;
    let Superblock { total_bytes, bytes_used, sectorsize, nodesize, leafsize, stripesize, .. } = superblock;
    writeln!(out, "generation\t\t{generation}")?;
    writeln!(out, "root\t\t\t{root}")?;
    writeln!(out, "sys_array_size\t\t{sys_chunk_array_size}")?;
    writeln!(out, "chunk_root_generation\t{chunk_root_generation}")?;
    writeln!(out, "root_level\t\t{root_level}")?;
    writeln!(out, "chunk_root\t\t{chunk_root}")?;
    writeln!(out, "chunk_root_level\t{chunk_root_level}")?;
    writeln!(out, "log_root\t\t{log_root}")?;
    writeln!(out, "log_root_transid (deprecated)\t{log_root_transid}")?;
    writeln!(out, "log_root_level\t\t{log_root_level}")?;
    writeln!(out, "total_bytes\t\t{total_bytes}")?;
    writeln!(out, "bytes_used\t\t{bytes_used}")?;
    writeln!(out, "sectorsize\t\t{sectorsize}")?;
    writeln!(out, "nodesize\t\t{nodesize}")?;
    writeln!(out, "leafsize (deprecated)\t{leafsize}")?;
    writeln!(out, "stripesize\t\t{stripesize}")?;
    writeln!(out, "root_dir\t\t{}", superblock.root_dir_objectid)?;
    writeln!(out, "num_devices\t\t{}", superblock.num_devices)
}

fn print_features(superblock: &Superblock, out: &mut dyn Write) -> fmt::Result {
    writeln!(out, "compat_flags\t\t0x{:x}", superblock.compat_flags)?;
    print_flags("compat_ro_flags\t\t", superblock.compat_ro_flags, &COMPAT_RO, out)?;
    print_flags("incompat_flags\t\t", superblock.incompat_flags, &INCOMPAT, out)?;
    writeln!(out, "cache_generation\t{}", superblock.cache_generation)?;
    writeln!(out, "uuid_tree_generation\t{}", superblock.uuid_tree_generation)
}

fn print_device(superblock: &Superblock, out: &mut dyn Write) -> fmt::Result {
    let item = &superblock.dev_item;
    writeln!(out, "dev_item.uuid\t\t{}", item.uuid)?;
    let fits = item.fsid == superblock.node_fsid();
    writeln!(out, "dev_item.fsid\t\t{} {}", item.fsid, matches(fits))?;
    writeln!(out, "dev_item.type\t\t{}", item.dev_type)?;
    writeln!(out, "dev_item.total_bytes\t{}", item.total_bytes)?;
    writeln!(out, "dev_item.bytes_used\t{}", item.bytes_used)?;
    writeln!(out, "dev_item.io_align\t{}", item.io_align)?;
    writeln!(out, "dev_item.io_width\t{}", item.io_width)?;
    writeln!(out, "dev_item.sector_size\t{}", item.sector_size)?;
    writeln!(out, "dev_item.devid\t\t{}", item.devid)?;
    writeln!(out, "dev_item.dev_group\t{}", item.dev_group)?;
    writeln!(out, "dev_item.seek_speed\t{}", item.seek_speed)?;
    writeln!(out, "dev_item.bandwidth\t{}", item.bandwidth)?;
    writeln!(out, "dev_item.generation\t{}", item.generation)
}

fn print_sys_chunks(superblock: &Superblock, out: &mut dyn Write) -> fmt::Result {
    writeln!(out, "sys_chunk_array[{SYS_CHUNK_ARRAY_SIZE}]:")?;
    for (index, chunk) in sys_chunks(superblock).enumerate() {
        match chunk {
            Ok((key, chunk)) => {
                writeln!(out, "\titem {index} key {}", KeyText(&key))?;
                print_chunk(&chunk, out)?;
            }
            Err(cause) => writeln!(out, "\titem {index} corrupt: {cause}")?,
        }
    }
    Ok(())
}

/// Iterates over the system chunks; ends after the first decoding error.
pub(super) fn sys_chunks(
    superblock: &Superblock,
) -> impl Iterator<Item = Result<(Key, ChunkItem), crate::FormatError>> + '_ {
    let size = usize::try_from(superblock.sys_chunk_array_size).unwrap_or(usize::MAX);
    let array = superblock.sys_chunk_array.get(..size).unwrap_or(&superblock.sys_chunk_array);
    let mut reader = Reader::new("sys_chunk_array", array);
    std::iter::from_fn(move || {
        if reader.is_empty() {
            return None;
        }
        let chunk = Key::read(&mut reader).and_then(|key| Ok((key, ChunkItem::read(&mut reader)?)));
        if chunk.is_err() {
            reader.rest();
        }
        Some(chunk)
    })
}

fn print_backup(index: usize, backup: &RootBackup, out: &mut dyn Write) -> fmt::Result {
    let roots = [
        ("backup_tree_root:", backup.tree_root, backup.tree_root_gen, backup.tree_root_level),
        ("backup_chunk_root:", backup.chunk_root, backup.chunk_root_gen, backup.chunk_root_level),
        ("backup_extent_root:", backup.extent_root, backup.extent_root_gen, backup.extent_root_level),
        ("backup_fs_root:\t", backup.fs_root, backup.fs_root_gen, backup.fs_root_level),
        ("backup_dev_root:", backup.dev_root, backup.dev_root_gen, backup.dev_root_level),
        ("csum_root:", backup.csum_root, backup.csum_root_gen, backup.csum_root_level),
    ];
    writeln!(out, "\tbackup {index}:")?;
    for (name, bytenr, generation, level) in roots {
        writeln!(out, "\t\t{name}\t{bytenr}\tgen: {generation}\tlevel: {level}")?;
    }
    writeln!(out, "\t\tbackup_total_bytes:\t{}", backup.total_bytes)?;
    writeln!(out, "\t\tbackup_bytes_used:\t{}", backup.bytes_used)?;
    writeln!(out, "\t\tbackup_num_devices:\t{}\n", backup.num_devices)
}

/// Prints the names of the set flags, one per line, then the unknown bits.
fn print_flags(head: &str, bits: u64, names: &[(u64, &str)], out: &mut dyn Write) -> fmt::Result {
    writeln!(out, "{head}0x{bits:x}")?;
    let mut lines: Vec<String> =
        names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).to_owned()).collect();
    let unknown = names.iter().fold(bits, |rest, (bit, _)| rest & !bit);
    if unknown != 0 {
        lines.push(format!("unknown flag: 0x{unknown:x}"));
    }
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\t\t\t( {} )", lines.join(" |\n\t\t\t  "))
}

/// Prints bytes as ASCII, with a dot for each unprintable byte.
fn dotted(bytes: &[u8]) -> String {
    let text = |&byte: &u8| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '.' };
    bytes.iter().map(text).collect()
}

pub(super) const SUPER_FLAGS: [(u64, &str); 7] = [
    (flags::WRITTEN, "WRITTEN"),
    (flags::RELOC, "RELOC"),
    (flags::CHANGING_FSID, "CHANGING_FSID"),
    (flags::CHANGING_FSID_V2, "CHANGING_FSID_V2"),
    (flags::SEEDING, "SEEDING"),
    (flags::METADUMP, "METADUMP"),
    (flags::METADUMP_V2, "METADUMP_V2"),
];

pub(super) const COMPAT_RO: [(u64, &str); 4] = [
    (CompatRo::FREE_SPACE_TREE.bits(), "FREE_SPACE_TREE"),
    (CompatRo::FREE_SPACE_TREE_VALID.bits(), "FREE_SPACE_TREE_VALID"),
    (CompatRo::VERITY.bits(), "VERITY"),
    (CompatRo::BLOCK_GROUP_TREE.bits(), "BLOCK_GROUP_TREE"),
];

pub(super) const INCOMPAT: [(u64, &str); 16] = [
    (Incompat::MIXED_BACKREF.bits(), "MIXED_BACKREF"),
    (Incompat::DEFAULT_SUBVOL.bits(), "DEFAULT_SUBVOL"),
    (Incompat::MIXED_GROUPS.bits(), "MIXED_GROUPS"),
    (Incompat::COMPRESS_LZO.bits(), "COMPRESS_LZO"),
    (Incompat::COMPRESS_ZSTD.bits(), "COMPRESS_ZSTD"),
    (Incompat::BIG_METADATA.bits(), "BIG_METADATA"),
    (Incompat::EXTENDED_IREF.bits(), "EXTENDED_IREF"),
    (Incompat::RAID56.bits(), "RAID56"),
    (Incompat::SKINNY_METADATA.bits(), "SKINNY_METADATA"),
    (Incompat::NO_HOLES.bits(), "NO_HOLES"),
    (Incompat::METADATA_UUID.bits(), "METADATA_UUID"),
    (Incompat::RAID1C34.bits(), "RAID1C34"),
    (Incompat::ZONED.bits(), "ZONED"),
    (Incompat::EXTENT_TREE_V2.bits(), "EXTENT_TREE_V2"),
    (Incompat::RAID_STRIPE_TREE.bits(), "RAID_STRIPE_TREE"),
    (Incompat::SIMPLE_QUOTA.bits(), "SIMPLE_QUOTA"),
];
