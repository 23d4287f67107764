//! Plans new chunks: size, and place on the devices.
//!
//! Sizes follow the kernel: data 1 GiB, metadata 256 MiB (1 GiB on filesystems above 50 GiB), system 32 MiB. If a tenth
//! of the filesystem is less, that is the size, but at least 1 MiB.
//!
//! Invariants:
//! - I1. No stripe covers the first MiB of a device, which holds boot loaders and the primary superblock.
//! - I2. A planned stripe overlaps no stripe of a chunk in the map, and ends inside the device.

use std::num::NonZeroU64;
use std::ops::Range;

use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_format::{DevId, Logical, Physical, RootId};
use uuid::Uuid;

use crate::profile::STRIPE_LEN;

/// Bytes at the start of a device that no chunk uses (I1).
pub const DEVICE_RESERVED: u64 = 1 << 20;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Smallest stripe of a new chunk, unless the caller limits the chunk to a shorter length.
const STRIPE_LEN_MIN: u64 = MIB;

/// The facts about a device from which chunks are planned: its size and its used ranges.
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
            let end = whole_elements(end);
            if let Some(start) = start.checked_next_multiple_of(STRIPE_LEN).filter(|&start| start < end) {
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

    /// [`DeviceSpace::holes`], without the 64 KiB of each superblock mirror.
    pub(crate) fn holes_without_mirrors(&self) -> Vec<Range<u64>> {
        let mut holes = self.holes();
        for mirror in SUPERBLOCK_OFFSETS {
            let mirror = mirror..mirror.saturating_add(STRIPE_LEN);
            let parts = |hole: Range<u64>| {
                let before = hole.start..hole.end.min(mirror.start);
                let behind = hole.start.max(mirror.end)..hole.end;
                if hole.start < mirror.end && mirror.start < hole.end { [before, behind] } else { [hole, 0..0] }
            };
            holes = holes.into_iter().flat_map(parts).filter(|hole| hole.start < hole.end).collect();
        }
        holes
    }

    /// Bytes in holes that are large enough for a stripe.
    pub(crate) fn unallocated_bytes(&self) -> u64 {
        self.holes().iter().map(len_bytes).filter(|&len| len >= STRIPE_LEN_MIN).sum()
    }

    /// Logical bytes that new chunks with `nr_stripes` stripes can hold on this device, if all stripes of a chunk lie
    /// in one hole.
    fn allocatable_bytes(&self, nr_stripes: NonZeroU64) -> u64 {
        self.holes().iter().map(|hole| stripe_len_in(hole, nr_stripes)).filter(|&len| len >= STRIPE_LEN_MIN).sum()
    }
}

/// Logical bytes that new chunks of this profile can hold on these devices.
pub(crate) fn allocatable_bytes(devices: &[DeviceSpace], flags: BlockGroupFlags) -> u64 {
    nr_stripes(flags).map_or(0, |nr| devices.iter().map(|device| device.allocatable_bytes(nr)).sum())
}

/// Number of stripes of a chunk, or `None` for profiles that this program does not write.
pub(crate) fn nr_stripes(flags: BlockGroupFlags) -> Option<NonZeroU64> {
    match flags.intersection(BlockGroupFlags::PROFILES) {
        BlockGroupFlags::DUP => NonZeroU64::new(2),
        profile if profile.is_empty() => NonZeroU64::new(1),
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
    let tenth = (total_bytes / 10).checked_next_multiple_of(STRIPE_LEN).unwrap_or(GIB);
    by_type.min(tenth.max(STRIPE_LEN_MIN))
}

/// Plans a chunk of the single or DUP profile. Returns `None` for other profiles, and if no device has a large enough
/// hole.
pub(crate) fn plan(
    devices: &[DeviceSpace],
    flags: BlockGroupFlags,
    max_len: u64,
    sectorsize: u32,
    next_logical: Logical,
) -> Option<(Logical, ChunkItem)> {
    let nr_stripes = nr_stripes(flags)?;
    let total_bytes = devices.iter().map(|device| device.total_bytes).fold(0, u64::saturating_add);
    let wanted = whole_elements(chunk_len_max(flags, total_bytes).min(max_len));
    let (device, hole) = devices
        .iter()
        .filter_map(|device| Some((device, best_hole(&device.holes(), wanted.checked_mul(nr_stripes.get())?)?)))
        .max_by_key(|(device, hole)| (len_bytes(hole), device.unallocated_bytes()))?;
    let len = wanted.min(stripe_len_in(&hole, nr_stripes));
    if len < STRIPE_LEN_MIN.min(max_len) || len == 0 {
        return None;
    }
    let logical = Logical(next_logical.0.max(DEVICE_RESERVED).checked_next_multiple_of(STRIPE_LEN)?);
    logical.checked_add(len)?;
    // Place the stripes one after the other in the hole.
    let starts = (0..nr_stripes.get()).map(|n| Physical(hole.start).advance(n.saturating_mul(len)));
    let chunk = ChunkItem {
        length: len,
        owner: RootId::EXTENT_TREE.0,
        stripe_len: STRIPE_LEN,
        flags,
        io_align: STRIPE_LEN as u32,
        io_width: STRIPE_LEN as u32,
        sector_size: sectorsize,
        sub_stripes: 1,
        stripes: starts.map(|offset| Stripe { devid: device.devid, offset, dev_uuid: device.uuid }).collect(),
    };
    Some((logical, chunk))
}

/// The first hole of at least `wanted` bytes, cut to `wanted`; if there is none, the largest hole.
fn best_hole(holes: &[Range<u64>], wanted: u64) -> Option<Range<u64>> {
    let fitting = holes.iter().find(|hole| len_bytes(hole) >= wanted);
    let cut = fitting.map(|hole| hole.start..hole.start.saturating_add(wanted));
    cut.or_else(|| holes.iter().rev().max_by_key(|hole| len_bytes(hole)).cloned())
}

/// Length of a range of device bytes.
pub(crate) fn len_bytes(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// The largest length that each of `nr_stripes` stripes can have if they share a hole.
fn stripe_len_in(hole: &Range<u64>, nr_stripes: NonZeroU64) -> u64 {
    whole_elements(len_bytes(hole) / nr_stripes)
}

/// Rounds down to whole stripe elements.
fn whole_elements(bytes: u64) -> u64 {
    bytes.saturating_sub(bytes % STRIPE_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(total_bytes: u64, used: &[Range<u64>]) -> DeviceSpace {
        DeviceSpace { devid: DevId(1), uuid: Uuid::nil(), total_bytes, used: used.to_vec() }
    }

    fn planned(device: DeviceSpace, flags: BlockGroupFlags, max_len: u64) -> Option<(u64, Vec<u64>, u64)> {
        let (logical, chunk) = plan(&[device], flags, max_len, 4096, Logical(5 * MIB + 1))?;
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
    fn an_allocation_takes_the_first_hole_that_fits_else_the_largest() {
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
