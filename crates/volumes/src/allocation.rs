//! Plans new chunks: size, and place on the devices.
//!
//! Sizes follow the kernel: data 1 GiB, metadata 256 MiB (1 GiB on filesystems above 50 GiB), system 32 MiB, and at
//! most a tenth of the filesystem.
//!
//! Invariants:
//! - I1. No stripe covers the first MiB of a device, which holds boot loaders and the primary superblock.
//! - I2. A planned stripe overlaps no stripe of a chunk in the map, and ends inside the device.

use std::ops::Range;

use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{DevId, Logical, Physical, RootId};
use uuid::Uuid;

use crate::profile::STRIPE_LEN;

/// Bytes at the start of a device that no chunk uses (I1).
pub const DEVICE_RESERVED: u64 = 1 << 20;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Smallest stripe of a new chunk. The bookkeeping of a smaller chunk would cost more than its space.
const STRIPE_LEN_MIN: u64 = MIB;

/// A device and its used ranges, as the planner sees it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSpace {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    pub(crate) total_bytes: u64,
    /// Device extents, sorted.
    pub(crate) used: Vec<Range<u64>>,
}

impl DeviceSpace {
    /// Free ranges from [`DEVICE_RESERVED`] on, aligned to stripe elements.
    pub(crate) fn holes(&self) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        let mut at = DEVICE_RESERVED;
        let mut push = |start: u64, end: u64| {
            let start = start.next_multiple_of(STRIPE_LEN);
            let end = end / STRIPE_LEN * STRIPE_LEN;
            if start < end {
                holes.push(start..end);
            }
        };
        for used in &self.used {
            if used.start >= self.total_bytes {
                break;
            }
            push(at, used.start);
            at = at.max(used.end);
        }
        if at < self.total_bytes {
            push(at, self.total_bytes);
        }
        holes
    }

    /// Bytes in holes that are large enough for a chunk.
    pub(crate) fn unallocated_bytes(&self) -> u64 {
        self.holes().iter().map(|hole| hole.end - hole.start).filter(|&len| len >= STRIPE_LEN_MIN).sum()
    }

    /// Logical bytes of new chunks with `nr_stripes` stripes, all in one hole.
    fn allocatable_bytes(&self, nr_stripes: u64) -> u64 {
        let of_hole = |hole: Range<u64>| (hole.end - hole.start) / nr_stripes / STRIPE_LEN * STRIPE_LEN;
        self.holes().into_iter().map(of_hole).filter(|&len| len >= STRIPE_LEN_MIN).sum()
    }
}

/// Logical bytes of new chunks of this profile that these devices have room for.
pub(crate) fn allocatable_bytes(devices: &[DeviceSpace], flags: BlockGroupFlags) -> u64 {
    nr_stripes(flags).map_or(0, |nr| devices.iter().map(|device| device.allocatable_bytes(nr)).sum())
}

/// Stripes of a chunk; `None` for profiles that this program does not write.
fn nr_stripes(flags: BlockGroupFlags) -> Option<u64> {
    match flags.intersection(BlockGroupFlags::PROFILES) {
        BlockGroupFlags::DUP => Some(2),
        profile if profile.is_empty() => Some(1),
        _ => None,
    }
}

/// Largest logical length of a chunk of this type on a filesystem of `total_bytes`.
pub(crate) fn chunk_len_max(flags: BlockGroupFlags, total_bytes: u64) -> u64 {
    let by_type = if flags.contains(BlockGroupFlags::DATA) {
        GIB
    } else if flags.contains(BlockGroupFlags::METADATA) {
        if total_bytes > 50 * GIB { GIB } else { 256 * MIB }
    } else {
        32 * MIB
    };
    let tenth = (total_bytes / 10).next_multiple_of(STRIPE_LEN);
    by_type.min(tenth.max(STRIPE_LEN_MIN))
}

/// Plans a chunk of the single or DUP profile. Returns `None` for other profiles, and if the devices are full.
pub(crate) fn plan(
    devices: &[DeviceSpace],
    flags: BlockGroupFlags,
    max_len: u64,
    sectorsize: u32,
    next_logical: u64,
) -> Option<(Logical, ChunkItem)> {
    let nr_stripes = nr_stripes(flags)?;
    let total_bytes = devices.iter().map(|device| device.total_bytes).fold(0, u64::saturating_add);
    let wanted = chunk_len_max(flags, total_bytes).min(max_len) / STRIPE_LEN * STRIPE_LEN;
    let (device, hole) = devices
        .iter()
        .filter_map(|device| Some((device, best_hole(&device.holes(), wanted.checked_mul(nr_stripes)?)?)))
        .max_by_key(|(device, hole)| (hole.end - hole.start, device.unallocated_bytes()))?;
    let len = wanted.min((hole.end - hole.start) / nr_stripes / STRIPE_LEN * STRIPE_LEN);
    if len < STRIPE_LEN_MIN.min(max_len) || len == 0 {
        return None;
    }
    let logical = next_logical.max(DEVICE_RESERVED).checked_next_multiple_of(STRIPE_LEN)?;
    logical.checked_add(len)?;
    let stripe = |n| Stripe { devid: device.devid, offset: Physical(hole.start + n * len), dev_uuid: device.uuid };
    let chunk = ChunkItem {
        length: len,
        owner: RootId::EXTENT_TREE.0,
        stripe_len: STRIPE_LEN,
        flags,
        io_align: STRIPE_LEN as u32,
        io_width: STRIPE_LEN as u32,
        sector_size: sectorsize,
        sub_stripes: 1,
        stripes: (0..nr_stripes).map(stripe).collect(),
    };
    Some((Logical(logical), chunk))
}

/// The first hole of at least `wanted` bytes, cut to `wanted`, or else the largest hole.
fn best_hole(holes: &[Range<u64>], wanted: u64) -> Option<Range<u64>> {
    let len = |hole: &Range<u64>| hole.end - hole.start;
    let fitting = holes.iter().find(|hole| len(hole) >= wanted).map(|hole| hole.start..hole.start + wanted);
    fitting.or_else(|| holes.iter().rev().max_by_key(|hole| len(hole)).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(total_bytes: u64, used: &[Range<u64>]) -> DeviceSpace {
        DeviceSpace { devid: DevId(1), uuid: Uuid::nil(), total_bytes, used: used.to_vec() }
    }

    fn planned(device: DeviceSpace, flags: BlockGroupFlags, max_len: u64) -> Option<(u64, Vec<u64>, u64)> {
        let (logical, chunk) = plan(&[device], flags, max_len, 4096, 5 * MIB + 1)?;
        Some((logical.0, chunk.stripes.iter().map(|stripe| stripe.offset.0).collect(), chunk.length))
    }

    const DUP_METADATA: BlockGroupFlags = BlockGroupFlags::METADATA.union(BlockGroupFlags::DUP);

    #[test]
    fn sizes_follow_type_and_filesystem() {
        assert_eq!(chunk_len_max(BlockGroupFlags::DATA, 100 * GIB), GIB);
        assert_eq!(chunk_len_max(BlockGroupFlags::DATA, GIB), 102 * MIB + 7 * STRIPE_LEN);
        assert_eq!(chunk_len_max(DUP_METADATA, 20 * GIB), 256 * MIB);
        assert_eq!(chunk_len_max(DUP_METADATA, 51 * GIB), GIB);
        assert_eq!(chunk_len_max(BlockGroupFlags::SYSTEM, 51 * GIB), 32 * MIB);
    }

    #[test]
    fn takes_the_first_hole_that_fits_else_the_largest() {
        let used = [MIB..2 * MIB, 4 * MIB..20 * MIB, 50 * MIB..55 * MIB];
        let fs = || device(100 * MIB, &used);
        assert_eq!(planned(fs(), BlockGroupFlags::DATA, MIB), Some((5 * MIB + STRIPE_LEN, vec![2 * MIB], MIB)));
        assert_eq!(planned(fs(), BlockGroupFlags::DATA, GIB), Some((5 * MIB + STRIPE_LEN, vec![20 * MIB], 10 * MIB)));
        let dup = planned(fs(), DUP_METADATA, GIB).unwrap();
        assert_eq!((dup.1, dup.2), (vec![20 * MIB, 30 * MIB], 10 * MIB));
        assert_eq!(fs().unallocated_bytes(), (2 + 30 + 45) * MIB);
    }

    #[test]
    fn a_full_device_gives_no_chunk() {
        assert_eq!(
            planned(device(100 * MIB, &[MIB..50 * MIB, 50 * MIB..100 * MIB - 4096]), BlockGroupFlags::DATA, GIB),
            None
        );
        assert_eq!(planned(device(MIB, &[]), BlockGroupFlags::DATA, GIB), None);
        assert_eq!(planned(device(GIB, &[]), BlockGroupFlags::DATA | BlockGroupFlags::RAID0, GIB), None);
    }
}
