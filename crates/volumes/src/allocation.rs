//! Plans new chunks: the devices, the number of stripes, their size, and their place on the devices.
//!
//! The rules are Linux's, so a filesystem that both write keeps one shape:
//!
//! 1. Each device offers the first hole that fits the largest stripes of the chunk, else its largest hole.
//! 2. Devices are sorted by that hole, then by their free space, largest first.
//! 3. The profile decides how many of them get stripes ([`Profile::stripes_on`]).
//! 4. A stripe is as long as the smallest of the chosen holes allows. Chunks of data have at most 10 GiB, of metadata
//!    256 MiB (1 GiB on filesystems above 50 GiB), of the system 32 MiB, and never more than a tenth of the devices. A
//!    stripe that would exceed this limit is shortened to a multiple of 16 MiB. A stripe has at most 1 GiB.
//!
//! While devices are missing, a chunk that cannot have its profile on the present devices gets stripes on the missing
//! ones, as far as the profile tolerates their loss. So no chunk loses its profile, and the stripes are filled when the
//! devices return or are replaced.
//!
//! Invariants:
//! - I1. No stripe covers the first MiB of a device, which holds boot loaders and the primary superblock.
//! - I2. A planned stripe overlaps no stripe of a chunk in the map, and ends inside the device.
//! - I3. At most as many stripes are planned on missing devices as the profile tolerates lost devices.

use std::cmp::Reverse;
use std::ops::Range;

use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{DevId, Logical, Physical, Profile, RootId};
use uuid::Uuid;

use crate::profile::STRIPE_LEN;

/// Bytes at the start of a device that no chunk uses (I1).
pub const DEVICE_RESERVED: u64 = 1 << 20;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Smallest stripe of a new chunk.
pub(crate) const STRIPE_LEN_MIN: u64 = STRIPE_LEN;
/// Largest stripe of a new chunk.
const STRIPE_LEN_MAX: u64 = GIB;
/// A stripe of a chunk that would be too long is a multiple of this number.
const STRIPE_STEP: u64 = 16 * MIB;

/// The chunk that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    flags: BlockGroupFlags,
    profile: &'static Profile,
    /// Longest stripe.
    stripe_max: u64,
    /// Length of a chunk that is long enough: a longer one is shortened to a multiple of [`STRIPE_STEP`].
    chunk_max: u64,
    /// Greatest length that the caller accepts.
    len_max: u64,
    /// Most devices that the chunk's item has room for.
    devices_max: u16,
}

impl Wish {
    /// A chunk of this type and profile on a filesystem whose writable devices have `total_bytes`. `None` for profiles
    /// that this program does not write.
    pub(crate) fn new(flags: BlockGroupFlags, total_bytes: u64, len_max: u64, nodesize: u32) -> Option<Self> {
        let profile = writable_profile(flags)?;
        let by_type = chunk_len_max(flags, total_bytes);
        let chunk_max = by_type.min(total_bytes / 10);
        let stripe_max = whole_elements(by_type.min(STRIPE_LEN_MAX).min(len_max));
        let devices_max = ChunkItem::stripes_in_leaf(usize::try_from(nodesize).unwrap_or_default());
        Some(Self { flags, profile, stripe_max, chunk_max, len_max, devices_max })
    }

    /// Wanted length of a hole.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.stripe_max.saturating_mul(self.profile.dev_stripes.into())
    }

    /// Shortest hole that a chunk can use.
    fn device_bytes_min(&self) -> u64 {
        STRIPE_LEN_MIN.saturating_mul(self.profile.dev_stripes.into())
    }

    /// The number of stripes and the number of devices of a chunk, if `nr_devices` have room.
    fn stripes_on(&self, nr_devices: usize) -> Option<(u64, usize)> {
        let nr_devices = u16::try_from(nr_devices).unwrap_or(u16::MAX).min(self.devices_max);
        let nr_stripes = self.profile.stripes_on(nr_devices)?;
        Some((nr_stripes.into(), nr_stripes.checked_div(self.profile.dev_stripes)?.into()))
    }

    /// The length of each stripe, if the smallest hole has `hole` bytes. 0 if the hole is too small.
    fn stripe_len(&self, hole: u64, nr_stripes: u64) -> u64 {
        let fitting = hole.min(self.device_bytes()).checked_div(self.profile.dev_stripes.into()).unwrap_or(0);
        let nr_data = self.profile.data_stripes(nr_stripes);
        let mut stripe = whole_elements(fitting);
        if stripe.saturating_mul(nr_data) > self.chunk_max {
            let shortened = self.chunk_max.div_ceil(nr_data.max(1)).checked_next_multiple_of(STRIPE_STEP);
            stripe = stripe.min(shortened.unwrap_or(u64::MAX));
        }
        stripe.min(whole_elements(self.len_max.checked_div(nr_data).unwrap_or(0)))
    }
}

/// A device on which the wanted chunk can have stripes.
#[derive(Clone, Debug)]
pub(crate) struct CandidateDevice {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    /// The device's best hole for the wanted chunk.
    pub(crate) hole: Range<u64>,
    pub(crate) unallocated_bytes: u64,
    /// Whether nothing can be written to the device now.
    pub(crate) is_missing: bool,
}

/// The profile of new chunks with these flags, or `None` for profiles that this program does not write: those with
/// parity.
pub(crate) fn writable_profile(flags: BlockGroupFlags) -> Option<&'static Profile> {
    Profile::of(flags).filter(|profile| !profile.has_parity())
}

/// Largest logical length of a chunk of this type, on a filesystem of `total_bytes` that is large enough.
fn chunk_len_max(flags: BlockGroupFlags, total_bytes: u64) -> u64 {
    if flags.contains(BlockGroupFlags::DATA) {
        10 * GIB
    } else if flags.contains(BlockGroupFlags::METADATA) {
        if total_bytes > 50 * GIB { GIB } else { 256 * MIB }
    } else {
        32 * MIB
    }
}

/// Plans the wanted chunk in the best of these places. Returns `None` if they have no room for the profile.
pub(crate) fn plan(
    places: impl Iterator<Item = CandidateDevice>,
    wish: &Wish,
    sectorsize: u32,
    next_logical: Logical,
) -> Option<(Logical, ChunkItem)> {
    let usable = places.filter(|place| len_bytes(&place.hole) >= wish.device_bytes_min());
    let (missing, mut places): (Vec<CandidateDevice>, Vec<CandidateDevice>) =
        usable.partition(|place| place.is_missing);
    sort(&mut places, wish);
    if wish.stripes_on(places.len()).is_none() {
        add_missing(&mut places, missing, wish);
    }
    let (nr_stripes, nr_devices) = wish.stripes_on(places.len())?;
    places.truncate(nr_devices);
    let smallest = places.iter().map(|place| len_bytes(&place.hole)).min()?;
    let stripe_len = wish.stripe_len(smallest, nr_stripes);
    if stripe_len == 0 {
        return None;
    }
    let length = stripe_len.checked_mul(wish.profile.data_stripes(nr_stripes))?;
    let logical = Logical(next_logical.0.max(DEVICE_RESERVED).checked_next_multiple_of(STRIPE_LEN)?);
    logical.checked_add(length)?;
    // Stripes of one device lie one after the other in its hole.
    let stripes = places.iter().flat_map(|place| {
        (0..wish.profile.dev_stripes.into()).map(move |n: u64| Stripe {
            devid: place.devid,
            offset: Physical(place.hole.start).advance(n.saturating_mul(stripe_len)),
            dev_uuid: place.uuid,
        })
    });
    let chunk = ChunkItem {
        length,
        owner: RootId::EXTENT_TREE.0,
        stripe_len: STRIPE_LEN,
        flags: wish.flags,
        io_align: STRIPE_LEN as u32,
        io_width: STRIPE_LEN as u32,
        sector_size: sectorsize,
        sub_stripes: wish.profile.sub_stripes,
        stripes: stripes.collect(),
    };
    debug_assert!(
        chunk.stripes.iter().all(|stripe| stripe.offset.0 >= DEVICE_RESERVED),
        "I1: the first MiB of a device"
    );
    debug_assert!(
        places.iter().all(|place| place.hole.start.saturating_add(chunk.device_extent_len()) <= place.hole.end),
        "I2: a stripe ends past its hole"
    );
    debug_assert!(
        places.iter().filter(|place| place.is_missing).count() <= wish.profile.tolerated_failures.into(),
        "I3: too many stripes on missing devices"
    );
    Some((logical, chunk))
}

/// Sorts places, the best first.
fn sort(places: &mut [CandidateDevice], wish: &Wish) {
    let of = |place: &CandidateDevice| (len_bytes(&place.hole).min(wish.device_bytes()), place.unallocated_bytes);
    places.sort_by_key(|place| (Reverse(of(place)), place.devid));
}

/// Adds the missing devices without which the chunk cannot have its profile (I3).
fn add_missing(places: &mut Vec<CandidateDevice>, mut missing: Vec<CandidateDevice>, wish: &Wish) {
    let lacking = usize::from(wish.profile.devs_min).saturating_sub(places.len());
    if lacking <= usize::from(wish.profile.tolerated_failures) {
        sort(&mut missing, wish);
        places.extend(missing.into_iter().take(lacking));
    }
}

/// Logical bytes that new chunks can hold on devices with this much free space, with one stripe on a device: the sum of
/// the lengths of chunks that are planned one after the other. Free space that is scattered in small holes may hold a little less.
pub(crate) fn allocatable_bytes(mut free: Vec<u64>, wish: &Wish) -> u64 {
    let mut total = 0u64;
    loop {
        free.retain(|&bytes| bytes >= wish.device_bytes_min());
        free.sort_unstable_by_key(|&bytes| Reverse(bytes));
        let Some((nr_stripes, nr_devices)) = wish.stripes_on(free.len()) else { return total };
        let nr_data = wish.profile.data_stripes(nr_stripes);
        let smallest = free.get(nr_devices.saturating_sub(1)).copied().unwrap_or(0);
        let stripe = wish.stripe_len(smallest, nr_stripes);
        if stripe == 0 {
            return total;
        }
        // Chunks far from the end are counted together.
        let together = rounds_of(&free, nr_devices).saturating_sub(stripe.saturating_mul(ROUNDS_ONE_BY_ONE));
        if together > 0 {
            total = total.saturating_add(together.saturating_mul(nr_data));
            lower(&mut free, nr_devices, together);
        } else {
            total = total.saturating_add(stripe.saturating_mul(nr_data));
            free.iter_mut().take(nr_devices).for_each(|bytes| *bytes = bytes.saturating_sub(stripe));
        }
    }
}

/// The greatest sum of stripe lengths of chunks that each use `nr_devices` of these devices.
fn rounds_of(free: &[u64], nr_devices: usize) -> u64 {
    let needed = |rounds: u64| u128::from(rounds).saturating_mul(nr_devices as u128);
    let there = |rounds: u64| free.iter().map(|&bytes| u128::from(bytes.min(rounds))).sum::<u128>();
    last_true(free.iter().copied().max().unwrap_or(0), |rounds| there(rounds) >= needed(rounds))
}

/// Takes `rounds` bytes from each of `nr_devices` devices again and again, always from those with the most free space.
fn lower(free: &mut [u64], nr_devices: usize, rounds: u64) {
    let after = |bytes: u64, level: u64| bytes.min(level).max(bytes.saturating_sub(rounds));
    let needed = u128::from(rounds).saturating_mul(nr_devices as u128);
    let taken =
        |level: u64| free.iter().map(|&bytes| u128::from(bytes.saturating_sub(after(bytes, level)))).sum::<u128>();
    let level = last_true(free.iter().copied().max().unwrap_or(0), |level| taken(level) >= needed);
    free.iter_mut().for_each(|bytes| *bytes = after(*bytes, level));
}

/// The last number from 0 to `most` for which `is_true` holds, if it holds for 0 and for no number after the first for
/// which it does not.
fn last_true(most: u64, is_true: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high.saturating_sub(high.saturating_sub(low) / 2);
        if is_true(middle) {
            low = middle;
        } else {
            high = middle.saturating_sub(1);
        }
    }
    low
}

/// Number of chunks at the end that [`allocatable_bytes`] counts one by one.
const ROUNDS_ONE_BY_ONE: u64 = 16;

/// Length of a range of device bytes.
pub(crate) fn len_bytes(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
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

    fn place_on(space: &DeviceSpace, devid: u64, wish: &Wish) -> Option<CandidateDevice> {
        Some(CandidateDevice {
            devid: DevId(devid),
            uuid: Uuid::from_u128(devid.into()),
            hole: space.best_hole(wish.device_bytes())?,
            unallocated_bytes: space.unallocated_bytes(),
            is_missing: false,
        })
    }

    /// The chunk that is planned on these devices, numbered from 1; the devices from `nr_present` on are missing.
    fn planned_on(spaces: &[DeviceSpace], flags: BlockGroupFlags, nr_present: u64) -> Option<ChunkItem> {
        let total = spaces.iter().map(DeviceSpace::end).sum();
        let wish = Wish::new(flags, total, u64::MAX, 16384)?;
        let places = (1..).zip(spaces).filter_map(|(devid, space)| {
            let place = place_on(space, devid, &wish)?;
            Some(CandidateDevice { is_missing: devid > nr_present, ..place })
        });
        plan(places, &wish, 4096, Logical(0)).map(|(_, chunk)| chunk)
    }

    fn planned(space: DeviceSpace, flags: BlockGroupFlags, len_max: u64) -> Option<(u64, Vec<u64>, u64)> {
        let wish = Wish::new(flags, space.end(), len_max, 16384)?;
        let places = place_on(&space, 1, &wish).into_iter();
        let (logical, chunk) = plan(places, &wish, 4096, Logical(5 * MIB + 1))?;
        Some((logical.0, chunk.stripes.iter().map(|stripe| stripe.offset.0).collect(), chunk.length))
    }

    /// The lengths and the devices of all chunks that fit on devices of these sizes in MiB.
    fn filled(sizes: &[u64], flags: BlockGroupFlags) -> Vec<(u64, Vec<u64>)> {
        let mut spaces: Vec<DeviceSpace> = sizes.iter().map(|&mib| device(mib * MIB, &[])).collect();
        let mut chunks = Vec::new();
        while let Some(chunk) = planned_on(&spaces, flags, sizes.len() as u64) {
            for stripe in &chunk.stripes {
                let end = stripe.offset.0 + chunk.device_extent_len();
                assert!(spaces[stripe.devid.0 as usize - 1].insert(stripe.offset.0..end), "I2");
            }
            chunks.push((chunk.length, chunk.stripes.iter().map(|stripe| stripe.devid.0).collect()));
        }
        chunks
    }

    const DUP_METADATA: BlockGroupFlags = BlockGroupFlags::METADATA.union(BlockGroupFlags::DUP);

    #[test]
    fn sizes_follow_type_and_filesystem() {
        let of = |flags, total| {
            let wish = Wish::new(flags, total, u64::MAX, 16384).unwrap();
            wish.stripe_len(u64::MAX, wish.stripes_on(1).unwrap().0)
        };
        assert_eq!(of(BlockGroupFlags::DATA, 100 * GIB), GIB);
        assert_eq!(of(BlockGroupFlags::DATA, GIB), 112 * MIB, "a tenth, rounded up to 16 MiB");
        assert_eq!(of(DUP_METADATA, 20 * GIB), 256 * MIB);
        assert_eq!(of(DUP_METADATA, 51 * GIB), GIB);
        assert_eq!(of(BlockGroupFlags::SYSTEM, 51 * GIB), 32 * MIB);
    }

    #[test]
    fn an_allocation_takes_the_first_hole_that_fits_else_the_largest() {
        let used = [MIB..2 * MIB, 4 * MIB..20 * MIB, 50 * MIB..55 * MIB];
        let fs = || device(100 * MIB, &used);
        assert_eq!(planned(fs(), BlockGroupFlags::DATA, MIB), Some((5 * MIB + STRIPE_LEN, vec![2 * MIB], MIB)));
        assert_eq!(planned(fs(), BlockGroupFlags::DATA, GIB), Some((5 * MIB + STRIPE_LEN, vec![55 * MIB], 16 * MIB)));
        let dup = planned(fs(), DUP_METADATA, GIB).unwrap();
        assert_eq!((dup.1, dup.2), (vec![55 * MIB, 71 * MIB], 16 * MIB));
        assert_eq!(fs().unallocated_bytes(), (2 + 30 + 45) * MIB);
    }

    #[test]
    fn a_full_device_gives_no_chunk() {
        let full = device(100 * MIB, &[MIB..50 * MIB, 50 * MIB..100 * MIB - 4096]);
        assert_eq!(planned(full, BlockGroupFlags::DATA, GIB), None);
        assert_eq!(planned(device(MIB, &[]), BlockGroupFlags::DATA, GIB), None);
        let shortest = device(100 * MIB, &[MIB..50 * MIB, 50 * MIB + STRIPE_LEN_MIN..100 * MIB]);
        assert_eq!(planned(shortest, BlockGroupFlags::DATA, GIB).map(|(_, _, len)| len), Some(STRIPE_LEN_MIN));
        assert_eq!(planned(device(GIB, &[]), BlockGroupFlags::DATA | BlockGroupFlags::RAID1, GIB), None);
        assert_eq!(planned(device(GIB, &[]), BlockGroupFlags::DATA | BlockGroupFlags::RAID5, GIB), None);
    }

    /// The expected chunks are those that Linux 6.18 makes on devices of these sizes.
    #[test]
    fn chunks_on_several_devices_have_the_shapes_that_linux_gives_them() {
        let data = |profile| BlockGroupFlags::DATA | profile;
        let sum = |chunks: &[(u64, Vec<u64>)]| chunks.iter().map(|(len, _)| len).sum::<u64>();
        let raid1 = filled(&[1024, 700, 600], data(BlockGroupFlags::RAID1));
        assert_eq!(raid1[0], (240 * MIB, vec![1, 2]), "a tenth of 2324 MiB, rounded up to 16 MiB");
        assert_eq!(raid1[1], (240 * MIB, vec![1, 3]));
        assert_eq!(sum(&raid1) / MIB, 1142, "the rest is on one device");
        let raid0 = filled(&[700, 700, 400], data(BlockGroupFlags::RAID0));
        assert_eq!(raid0[0], (192 * MIB, vec![1, 2, 3]), "three stripes of 64 MiB");
        assert_eq!(raid0.last().unwrap().1, [1, 2], "the smallest device is full");
        assert_eq!(sum(&raid0), (699 + 699 + 399) * MIB);
        let raid10 = filled(&[700; 5], data(BlockGroupFlags::RAID10));
        assert_eq!(raid10[0], (352 * MIB, vec![1, 2, 3, 4]));
        assert_eq!(raid10[1], (352 * MIB, vec![5, 1, 2, 3]), "the device that was left out comes first");
        assert_eq!(raid10.last().unwrap().1.len(), 2, "at last, two devices have room");
        let raid1c3 = filled(&[3072, 3072, 2048, 1024], data(BlockGroupFlags::RAID1C3));
        assert_eq!(raid1c3[0], (928 * MIB, vec![1, 2, 3]));
    }

    #[test]
    fn a_chunk_uses_a_missing_device_only_if_its_profile_needs_it() {
        let spaces = [device(GIB, &[]), device(GIB, &[]), device(2 * GIB, &[])];
        let devices = |profile, nr_present| {
            let chunk = planned_on(&spaces, BlockGroupFlags::DATA | profile, nr_present)?;
            Some(chunk.stripes.iter().map(|stripe| stripe.devid.0).collect::<Vec<_>>())
        };
        assert_eq!(devices(BlockGroupFlags::RAID1, 2), Some(vec![1, 2]), "the largest device is missing");
        assert_eq!(devices(BlockGroupFlags::RAID1, 1), Some(vec![1, 3]));
        assert_eq!(devices(BlockGroupFlags::RAID1C3, 1), Some(vec![1, 3, 2]));
        assert_eq!(devices(BlockGroupFlags::RAID1, 0), None, "I3");
        assert_eq!(devices(BlockGroupFlags::RAID0, 2), Some(vec![1, 2]));
        assert_eq!(devices(BlockGroupFlags::RAID0, 0), None);
        assert_eq!(devices(BlockGroupFlags::RAID10, 1), Some(vec![1, 3]));
    }

    #[test]
    fn the_estimate_is_the_sum_of_the_chunks_that_fit() {
        let sizes: [&[u64]; 9] = [
            &[1024],
            &[1024, 1024],
            &[10240, 1024, 1024],
            &[700; 5],
            &[700, 700, 400],
            &[300_000, 20_000, 100],
            &[4_000_000, 4_000_000, 3_000_000, 2_000_000],
            &[90_000; 7],
            &[1, 2, 70],
        ];
        for sizes in sizes {
            for profile in Profile::ALL.iter().filter(|profile| !profile.has_parity() && !profile.fits_one_device()) {
                let flags = BlockGroupFlags::DATA | profile.flag;
                let total = sizes.iter().map(|mib| mib * MIB).sum();
                let wish = Wish::new(flags, total, u64::MAX, 16384).unwrap();
                let free = sizes.iter().map(|mib| (mib - 1) * MIB).collect();
                let planned: u64 = filled(sizes, flags).iter().map(|(len, _)| len).sum();
                let estimate = allocatable_bytes(free, &wish);
                let off = estimate.abs_diff(planned);
                assert!(off <= planned / 1000, "{} {sizes:?}: {estimate} {planned}", profile.name);
            }
        }
    }
}
