//! Hashes that keys are made of: all are crc32c with particular seeds, without the usual inversions.
//!
//! Source: the btrfs on-disk format page ("Directory item", "Inode extref", "Extent data ref").

use crate::ids::{Ino, RootId};

/// crc32c as btrfs uses it for hashing: `seed` in, raw register out, no inversion at either end.
pub fn crc32c_raw(seed: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, data)
}

/// Offset of the `DIR_ITEM` or `XATTR_ITEM` of a name.
pub fn name_hash(name: &[u8]) -> u64 {
    crc32c_raw(!1, name).into()
}

/// Offset of the `INODE_EXTREF` of a name in a directory.
pub fn extref_hash(parent: u64, name: &[u8]) -> u64 {
    // The kernel seeds with the parent's number truncated to 32 bits.
    #[allow(clippy::cast_possible_truncation, clippy::as_conversions, reason = "the format truncates")]
    let seed = parent as u32;
    crc32c_raw(seed, name).into()
}

/// Offset of a keyed `EXTENT_DATA_REF`.
pub fn extent_data_ref_hash(root: RootId, objectid: Ino, offset: u64) -> u64 {
    let high = crc32c_raw(u32::MAX, &root.0.to_le_bytes());
    let low = crc32c_raw(u32::MAX, &objectid.0.to_le_bytes());
    let low = crc32c_raw(low, &offset.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}
