//! Hashes used as key offsets: crc32c with particular seeds, without the usual inversions.
//!
//! Source: the btrfs on-disk format page ("Directory item", "Inode extref", "Extent data ref").

use crate::ids::{Ino, RootId};

/// Updates a raw crc32c register with `data`, starting from `seed`, without inverting it before or after.
pub fn crc32c_raw(seed: u32, data: &[u8]) -> u32 {
    // For short names and keys, selecting and starting the fast algorithm takes longer than this loop.
    if data.len() > SHORT_MAX {
        return !crc32c::crc32c_append(!seed, data);
    }
    data.iter().fold(seed, |register, &byte| {
        let [low, ..] = register.to_le_bytes();
        let entry = TABLE.get(usize::from(low ^ byte)).copied().unwrap_or_default();
        entry ^ (register >> 8)
    })
}

const SHORT_MAX: usize = 32;

/// For each byte value: the crc32c register that starts with this value, after eight shifts.
static TABLE: [u32; 256] = table();

#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "evaluated by the compiler")]
const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte: u32 = 0;
    let mut index = 0;
    while index < table.len() {
        let mut register = byte;
        let mut bit = 0;
        while bit < 8 {
            // The Castagnoli polynomial, bits reversed.
            register = if register & 1 == 0 { register >> 1 } else { (register >> 1) ^ 0x82f6_3b78 };
            bit += 1;
        }
        table[index] = register;
        index += 1;
        byte += 1;
    }
    table
}

/// The key offset of the `DIR_ITEM` or `XATTR_ITEM` that holds a name.
pub fn name_hash(name: &[u8]) -> u64 {
    crc32c_raw(!1, name).into()
}

/// The key offset of the `INODE_EXTREF` that holds the name `name` in the directory `parent`.
pub fn extref_hash(parent: u64, name: &[u8]) -> u64 {
    // The kernel seeds the hash with the parent's inode number truncated to 32 bits.
    #[allow(clippy::cast_possible_truncation, clippy::as_conversions, reason = "the format truncates")]
    let seed = parent as u32;
    crc32c_raw(seed, name).into()
}

/// The key offset of a keyed `EXTENT_DATA_REF`.
pub fn extent_data_ref_hash(root: RootId, objectid: Ino, offset: u64) -> u64 {
    let high = crc32c_raw(u32::MAX, &root.0.to_le_bytes());
    let low = crc32c_raw(u32::MAX, &objectid.0.to_le_bytes());
    let low = crc32c_raw(low, &offset.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_data_use_equal_hashes() {
        let data: Vec<u8> = (0..=255).collect();
        for len in 0..64 {
            for seed in [0, 1, !1, u32::MAX, 0x1234_5678] {
                let data = &data[256 - len..];
                assert_eq!(crc32c_raw(seed, data), !crc32c::crc32c_append(!seed, data), "{len} {seed}");
            }
        }
    }

    /// Compares computed hashes with those in keys that the kernel and mkfs.btrfs wrote.
    #[test]
    fn hashes_equal_the_kernels() {
        assert_eq!(name_hash(b"default"), 0x8dbf_c2d2);
        assert_eq!(name_hash(b"user.one"), 135_686_088);
        let name = [&[b'x'; 200][..], b"129"].concat();
        assert_eq!(extref_hash(268, &name), 161_109_021);
        assert_eq!(extent_data_ref_hash(RootId(5), Ino(741), 0), 1_007_496_931_384_985_720);
    }
}
