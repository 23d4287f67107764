//! Checks a superblock against the format. This check accepts unknown feature bits; `volumes::features` judges them.
//!
//! Invariants:
//! - I1. After `Ok`, sizes and levels are within the format's bounds, and the system chunk array decodes.

use crate::check::{CheckContext, check_chunk, chunk_size};
use crate::csum::CsumType;
use crate::error::FormatError;
use crate::ids::objectid;
use crate::item::{BlockGroupFlags, ChunkItem, Stripe};
use crate::key::{Key, KeyType};
use crate::node::LEVEL_MAX;
use crate::superblock::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, CompatRo, Incompat, MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, flags,
};

const WHAT: &str = "superblock";

/// Flags that a superblock may have: written, relocated, error, seeding, and the two kinds of metadata images.
const KNOWN_FLAGS: u64 =
    flags::WRITTEN | flags::RELOC | flags::ERROR | flags::SEEDING | flags::METADUMP | flags::METADUMP_V2;

/// Flags of an interrupted conversion of the whole filesystem, and how to finish the conversion. A filesystem with one
/// of these flags has metadata in the old and the new state.
const INTERRUPTED: [(u64, &str); 5] = [
    (
        flags::CHANGING_FSID,
        "CHANGING_FSID: a change of the filesystem id was interrupted; complete it with ubtrfs tune -u or btrfstune -u, whichever began it",
    ),
    (
        flags::CHANGING_FSID_V2,
        "CHANGING_FSID_V2: a change of the metadata UUID was interrupted; complete it with ubtrfs tune -m or btrfstune -m, and all devices",
    ),
    (
        flags::CHANGING_BG_TREE,
        "CHANGING_BG_TREE: a conversion of the block group tree was interrupted; run the same btrfstune again",
    ),
    (
        flags::CHANGING_DATA_CSUM,
        "CHANGING_DATA_CSUM: a change of the checksums was interrupted; run the same btrfstune --csum again",
    ),
    (
        flags::CHANGING_META_CSUM,
        "CHANGING_META_CSUM: a change of the checksums was interrupted; run the same btrfstune --csum again",
    ),
];

/// Checks a superblock that was decoded from `raw`, the 4096 bytes on the device.
pub fn check_superblock(superblock: &Superblock, raw: &[u8]) -> Result<(), FormatError> {
    check(superblock, raw, check_flags)
}

/// Checks a superblock, as [`check_superblock`], but accepts unknown flags and flags of interrupted conversions.
pub fn check_superblock_but_flags(superblock: &Superblock, raw: &[u8]) -> Result<(), FormatError> {
    check(superblock, raw, |_| Ok(()))
}

fn check_flags(superblock: &Superblock) -> Result<(), FormatError> {
    if let Some((flag, remedy)) = INTERRUPTED.iter().find(|(flag, _)| superblock.flags & flag != 0) {
        return Err(bad("flags", *flag, remedy));
    }
    if superblock.flags & !KNOWN_FLAGS != 0 {
        return Err(bad("flags", superblock.flags & !KNOWN_FLAGS, "unknown flag"));
    }
    Ok(())
}

fn check(
    superblock: &Superblock,
    raw: &[u8],
    check_flags: impl Fn(&Superblock) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    if superblock.magic != MAGIC {
        return Err(bad("magic", u64::from_le_bytes(superblock.magic), "expected _BHRfS_M"));
    }
    let csum_type = superblock.csum_type();
    let csum_type = csum_type.ok_or_else(|| bad("csum_type", superblock.csum_type, "expected 0 to 3"))?;
    check_csum(raw, csum_type)?;
    if !SUPERBLOCK_OFFSETS.contains(&superblock.bytenr) {
        return Err(bad("bytenr", superblock.bytenr, "expected 64 KiB, 64 MiB or 256 GiB"));
    }
    check_flags(superblock)?;
    check_sizes(superblock)?;
    check_roots(superblock)?;
    check_features(superblock)?;
    if superblock.dev_item.fsid != superblock.node_fsid() {
        return Err(FormatError::Mismatch {
            what: WHAT,
            field: "dev_item.fsid",
            found: superblock.dev_item.fsid.to_string().into(),
            expected: superblock.node_fsid().to_string().into(),
        });
    }
    if superblock.num_devices == 0 {
        return Err(bad("num_devices", 0u64, "expected at least 1"));
    }
    if superblock.label.last() != Some(&0) {
        return Err(bad("label", superblock.label.last().copied().unwrap_or_default(), "expected to end in a zero"));
    }
    check_sys_chunk_array(superblock)
}

fn bad(field: &'static str, value: impl Into<u64>, expected: &'static str) -> FormatError {
    FormatError::Value { what: WHAT, field, value: value.into(), expected }
}

fn check_csum(raw: &[u8], csum_type: CsumType) -> Result<(), FormatError> {
    let size = csum_type.size();
    let short = FormatError::Short { what: WHAT, need: SUPERBLOCK_SIZE, have: raw.len() };
    let (Some(found), Some(body)) = (raw.get(..size), raw.get(32..SUPERBLOCK_SIZE)) else { return Err(short) };
    let computed = csum_type.compute(body);
    let computed = computed.get(..size).unwrap_or_default();
    if found == computed {
        return Ok(());
    }
    let hex = crate::node::hex;
    Err(FormatError::Checksum { what: WHAT, found: hex(found), computed: hex(computed) })
}

fn check_sizes(superblock: &Superblock) -> Result<(), FormatError> {
    let Superblock { sectorsize, nodesize, leafsize, stripesize, .. } = *superblock;
    if !sectorsize.is_power_of_two() || !(BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&sectorsize) {
        return Err(bad("sectorsize", sectorsize, "expected a power of two from 4096 to 65536"));
    }
    if !nodesize.is_power_of_two() || !(sectorsize..=BLOCK_SIZE_MAX).contains(&nodesize) {
        return Err(bad("nodesize", nodesize, "expected a power of two from the sector size to 65536"));
    }
    if leafsize != nodesize {
        return Err(bad("leafsize", leafsize, "expected the node size"));
    }
    if !stripesize.is_power_of_two() {
        return Err(bad("stripesize", stripesize, "expected a power of two"));
    }
    // The smallest filesystem has six trees, each of at least one node.
    if superblock.bytes_used < u64::from(nodesize).saturating_mul(6) {
        return Err(bad("bytes_used", superblock.bytes_used, "expected at least six tree blocks"));
    }
    Ok(())
}

fn check_roots(superblock: &Superblock) -> Result<(), FormatError> {
    let roots = [
        ("root", superblock.root, "root_level", superblock.root_level),
        ("chunk_root", superblock.chunk_root, "chunk_root_level", superblock.chunk_root_level),
        ("log_root", superblock.log_root, "log_root_level", superblock.log_root_level),
    ];
    for (field, bytenr, level_field, level) in roots {
        if !bytenr.0.is_multiple_of(superblock.sectorsize.into()) {
            return Err(bad(field, bytenr.0, "expected a multiple of the sector size"));
        }
        if bytenr.0 == 0 && field != "log_root" {
            return Err(bad(field, 0u64, "expected an address"));
        }
        if level > LEVEL_MAX {
            return Err(bad(level_field, level, "expected at most 7"));
        }
    }
    if superblock.chunk_root_generation > superblock.generation {
        let generation = superblock.chunk_root_generation.0;
        return Err(bad("chunk_root_generation", generation, "expected at most the superblock's generation"));
    }
    Ok(())
}

/// Refuses features that exclude each other.
fn check_features(superblock: &Superblock) -> Result<(), FormatError> {
    let (incompat, compat_ro) = (superblock.incompat(), superblock.compat_ro());
    if incompat.contains(Incompat::MIXED_GROUPS) && superblock.nodesize != superblock.sectorsize {
        return Err(bad("nodesize", superblock.nodesize, "expected the sector size with mixed block groups"));
    }
    let needed = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
    if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE)
        && (!compat_ro.contains(needed) || !incompat.contains(Incompat::NO_HOLES))
    {
        let expected = "expected a free space tree and no-holes with a block group tree";
        return Err(bad("compat_ro_flags", superblock.compat_ro_flags, expected));
    }
    Ok(())
}

/// Checks the array of keys and chunk items; all must be system chunks.
fn check_sys_chunk_array(superblock: &Superblock) -> Result<(), FormatError> {
    let size = superblock.sys_chunk_array_size;
    let smallest = Key::SIZE.saturating_add(ChunkItem::HEADER_SIZE).saturating_add(Stripe::SIZE);
    let array = usize::try_from(size).ok().and_then(|size| superblock.sys_chunk_array.get(..size));
    let mut rest = array
        .filter(|array| array.len() >= smallest)
        .ok_or_else(|| bad("sys_chunk_array_size", size, "expected 97 to 2048"))?;
    let ctx = CheckContext::new(superblock);
    let cut_off = || bad("sys_chunk_array_size", size, "expected whole chunks");
    while !rest.is_empty() {
        let (key, chunk) = rest.split_first_chunk().ok_or_else(cut_off)?;
        let key = Key::decode(key);
        if key.item_type != KeyType::CHUNK_ITEM || key.objectid != objectid::FIRST_CHUNK_TREE {
            return Err(bad("sys_chunk_array key type", key.item_type.0, "expected chunk items"));
        }
        let field = |at: usize, len: usize| chunk.get(at..at.saturating_add(len)).ok_or_else(cut_off);
        let num_stripes = field(44, 2)?.try_into().map(u16::from_le_bytes).unwrap_or_default();
        let flags = field(24, 8)?.try_into().map(u64::from_le_bytes).unwrap_or_default();
        if !BlockGroupFlags::from_bits_retain(flags).contains(BlockGroupFlags::SYSTEM) {
            return Err(bad("sys_chunk_array type", flags, "expected system chunks"));
        }
        let (chunk, behind) = chunk.split_at_checked(chunk_size(num_stripes)).ok_or_else(cut_off)?;
        check_chunk(key.offset, chunk, &ctx)?;
        rest = behind;
    }
    Ok(())
}
