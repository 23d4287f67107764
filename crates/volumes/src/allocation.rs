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
use ubtrfs_format::{DevId, Logical, Physical, Profile, RootId};
use uuid::Uuid;

use crate::profile::STRIPE_LEN;

/// Bytes at the start of a device that no chunk uses (I1).
pub const DEVICE_RESERVED: u64 = 1 << 20;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Smallest stripe of a new chunk, unless the caller limits the chunk to a shorter length.
pub(crate) const STRIPE_LEN_MIN: u64 = MIB;

/// The chunk that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    flags: BlockGroupFlags,
    /// Greatest length that the caller accepts.
    max_len: u64,
    /// Wanted length.
    len: u64,
    nr_stripes: NonZeroU64,
}

impl Wish {
    /// A chunk of this type and profile on a filesystem whose devices have `total_bytes`. `None` for profiles that this
    /// program does not write.
    pub(crate) fn new(flags: BlockGroupFlags, total_bytes: u64, max_len: u64) -> Option<Self> {
        let nr_stripes = nr_stripes(flags)?;
        let len = whole_elements(chunk_len_max(flags, total_bytes).min(max_len));
        Some(Self { flags, max_len, len, nr_stripes })
    }

    /// Wanted length of a hole.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.len.saturating_mul(self.nr_stripes.get())
    }
}

/// A device on which the wanted chunk can be placed.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    /// The device's best hole for the wanted chunk.
    pub(crate) hole: Range<u64>,
    pub(crate) unallocated_bytes: u64,
}

/// Number of stripes of a chunk, or `None` for profiles that this program does not write: it writes those of one device.
pub(crate) fn nr_stripes(flags: BlockGroupFlags) -> Option<NonZeroU64> {
    let profile = Profile::of(flags).filter(|profile| profile.fits_one_device())?;
    NonZeroU64::new(profile.dev_stripes.into())
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

/// Plans the wanted chunk in the best of these places. Returns `None` if no place is large enough.
pub(crate) fn plan(
    places: impl Iterator<Item = Place>,
    wish: &Wish,
    sectorsize: u32,
    next_logical: Logical,
) -> Option<(Logical, ChunkItem)> {
    let Wish { flags, max_len, nr_stripes, .. } = *wish;
    let Place { devid, uuid, hole, .. } =
        places.max_by_key(|place| (len_bytes(&place.hole), place.unallocated_bytes))?;
    let len = wish.len.min(stripe_len_in(&hole, nr_stripes));
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
        stripes: starts.map(|offset| Stripe { devid, offset, dev_uuid: uuid }).collect(),
    };
    Some((logical, chunk))
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
pub(crate) fn whole_elements(bytes: u64) -> u64 {
    bytes.saturating_sub(bytes % STRIPE_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_space::DeviceSpace;

    fn device(end: u64, used: &[Range<u64>]) -> DeviceSpace {
        let mut space = DeviceSpace::default();
        space.set_end(end);
        used.iter().for_each(|extent| assert!(space.insert(extent.clone())));
        space
    }

    fn planned(space: DeviceSpace, flags: BlockGroupFlags, max_len: u64) -> Option<(u64, Vec<u64>, u64)> {
        let wish = Wish::new(flags, space.end(), max_len)?;
        let hole = space.best_hole(wish.device_bytes())?;
        let unallocated_bytes = space.unallocated_bytes();
        let place = Place { devid: DevId(1), uuid: Uuid::nil(), hole, unallocated_bytes };
        let (logical, chunk) = plan(std::iter::once(place), &wish, 4096, Logical(5 * MIB + 1))?;
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
