//! Plans the chunks of a new filesystem.
//!
//! Sizes and addresses equal those of mkfs.btrfs 6.2, so that images can be compared item by item. mkfs.btrfs first
//! makes small single chunks at fixed places of the first device, with equal logical and physical addresses. Then
//! mkfs.btrfs adds the requested chunks after the small chunks, and removes small chunks that are not needed:
//!
//! | chunk | at | length of a stripe |
//! |---|---|---|
//! | system, single | 1 MiB | 4 MiB |
//! | metadata, single | 5 MiB | 8 MiB |
//! | data, single | 13 MiB | 8 MiB |
//! | mixed, single | 5 MiB | a tenth of the device: 1 MiB to 8 MiB |
//! | system, other | next | 8 MiB |
//! | metadata, other | next | 256 MiB (1 GiB on filesystems above 50 GiB) |
//! | data or mixed, other | next | 1 GiB |
//!
//! *Next* is logical address 21 MiB (13 MiB with mixed block groups), and the end of the last stripe on each device. A
//! stripe of the last three rows becomes shorter if the chunk's data takes more than 16 MiB (system), than the
//! stripe's usual length (metadata), than 10 GiB (data), or than a tenth of the filesystem. The limit is then divided
//! by the number of stripes, down to at least 1 MiB (system), 32 MiB (metadata) or 64 MiB (data).
//!
//! mkfs.btrfs keeps a list of the devices, at first from the last device to the first. A chunk gets the first devices of
//! the list that have room for its stripes. Its first stripe lies on the last of them. They move to the head of the list.
//! If they are too few, the chunk gets fewer stripes or, if its profile needs more, shorter stripes.
//!
//! On devices that are too small for this layout, smaller chunks are packed from 1 MiB on.
//!
//! Invariants:
//! - I1. Stripes do not overlap, start at 1 MiB or later, and end inside their device. Stripes of a chunk lie on
//!   different devices, except with the profile DUP.
//! - I2. The first SYSTEM chunk holds the chunk tree, and the first METADATA chunk all other trees.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{DevId, Logical, Physical, Profile, RootId};
use ubtrfs_volumes::{DEVICE_RESERVED, copies_of};
use uuid::Uuid;

use crate::MkfsOptions;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes that a single device must have past the end of the last chunk of the full layout. A device with fewer bytes
/// gets the small layout.
const SPARE: u64 = 8 * MIB;
/// The smallest device of a filesystem with several devices.
const MEMBER_MIN: u64 = 16 * MIB;
/// Maximum number of stripes of a system chunk, so that the superblock has room for it.
const SYSTEM_STRIPES_MAX: u16 = 58;

/// A device of the new filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewMember {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    /// Bytes of the device that the filesystem uses, in whole sectors.
    pub(crate) total_bytes: u64,
}

/// A chunk of the new filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewChunk {
    pub(crate) start: u64,
    pub(crate) item: ChunkItem,
}

impl NewChunk {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.item.length
    }

    /// The places of all copies of the tree block at this logical address. A block lies in one element of a striped
    /// chunk, because blocks are aligned and not larger than an element.
    pub(crate) fn copies_of(&self, bytenr: u64) -> Vec<(DevId, Physical)> {
        copies_of(Logical(self.start), &self.item, bytenr - self.start).expect("planned chunks are valid")
    }
}

/// Plans the chunks for these devices, ordered by address.
pub(crate) fn plan(options: &MkfsOptions, members: &[NewMember]) -> Result<Vec<NewChunk>> {
    for member in members.iter().filter(|_| members.len() > 1) {
        if member.total_bytes < MEMBER_MIN {
            return Err(Error::Refused {
                what: format!(
                    "device {} is too small: it has {} bytes, a device of several needs at least {}",
                    member.devid,
                    member.total_bytes,
                    size_text(MEMBER_MIN)
                ),
                hint: "leave it out, or give a larger device",
            });
        }
    }
    let spare = if members.len() == 1 { SPARE } else { 0 };
    if let Some(full) = full_layout(options, members)
        && full.ends.iter().zip(members).all(|(end, member)| end + spare <= member.total_bytes)
    {
        return Ok(full.chunks);
    }
    if let Some(small) = small_layout(options, members) {
        return Ok(small.chunks);
    }
    let each = size_text(min_size(options, members.len()));
    let is_single = options.metadata_profile.is_empty() && options.data_profile.is_empty();
    let (what, hint) = match (members.len(), is_single) {
        (1, true) => {
            (format!("the size is too small: this filesystem needs at least {each}"), "give a larger device or size")
        }
        (1, false) => (
            format!("the size is too small: this filesystem needs at least {each}"),
            "give a larger device or size, or the single profile",
        ),
        (nr, _) => (
            format!(
                "the devices are too small: on {nr} devices of one size, this filesystem needs at least {each} on each"
            ),
            "give larger devices or sizes, or another profile",
        ),
    };
    Err(Error::Refused { what, hint })
}

/// A size as it is written on a command line, such as `28M`.
pub(crate) fn size_text(bytes: u64) -> String {
    const UNITS: [(u32, &str); 3] = [(30, "G"), (20, "M"), (10, "K")];
    let unit = UNITS.iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} bytes"), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// The smallest size in bytes of each of `nr_devices` equal devices, for a filesystem with these options.
pub fn min_size(options: &MkfsOptions, nr_devices: usize) -> u64 {
    let member =
        |index: usize| NewMember { devid: DevId(index as u64 + 1), uuid: Uuid::nil(), total_bytes: DEVICE_RESERVED };
    let members: Vec<NewMember> = (0..nr_devices).map(member).collect();
    let ends = |layout: &ChunkLayout<'_>| layout.ends.iter().copied().max().unwrap_or(DEVICE_RESERVED);
    let packed = small_chunks(options, &members, 0, true).map_or(DEVICE_RESERVED, |layout| ends(&layout));
    if nr_devices > 1 { packed.max(MEMBER_MIN) } else { packed }
}

/// The length of a chunk's stripes.
#[derive(Clone, Copy)]
struct Want {
    /// Length of each stripe.
    stripe: u64,
    /// Largest number of bytes of data that stripes of this length may hold.
    data_max: u64,
    /// Smallest length of a stripe.
    stripe_min: u64,
    /// Smallest length of the chunk, on however many devices.
    data_min: u64,
}

impl Want {
    /// A chunk of `length` bytes, or of a few more so that it has whole rows.
    fn exactly(length: u64) -> Self {
        Self { stripe: 0, data_max: u64::MAX, stripe_min: ChunkItem::STRIPE_LEN, data_min: length }
    }

    /// The smallest length of one of `nr_stripes` stripes.
    fn stripe_min(&self, profile: &Profile, nr_stripes: u64) -> u64 {
        let for_data = self.data_min.div_ceil(profile.data_stripes(nr_stripes));
        for_data.next_multiple_of(ChunkItem::STRIPE_LEN).max(self.stripe_min)
    }
}

struct ChunkLayout<'o> {
    options: &'o MkfsOptions,
    members: &'o [NewMember],
    chunks: Vec<NewChunk>,
    next_logical: u64,
    /// End of the last stripe of each device.
    ends: Vec<u64>,
    /// Indexes of the devices, in the order in which chunks take them.
    order: Vec<usize>,
    /// Whether devices count as endless.
    is_endless: bool,
}

impl<'o> ChunkLayout<'o> {
    fn new(options: &'o MkfsOptions, members: &'o [NewMember]) -> Self {
        Self {
            options,
            members,
            chunks: Vec::new(),
            next_logical: DEVICE_RESERVED,
            ends: vec![DEVICE_RESERVED; members.len()],
            order: (0..members.len()).rev().collect(),
            is_endless: false,
        }
    }

    /// Adds a chunk of the profile single after the last one, on the first device.
    fn push_first(&mut self, flags: BlockGroupFlags, length: u64) {
        self.push(flags, length, &[0]);
    }

    /// Skips the logical and physical addresses of a chunk that [`ChunkLayout::push_first`] adds.
    fn skip_first(&mut self, length: u64) {
        self.next_logical += length;
        self.ends[0] += length;
    }

    /// Adds a chunk after the last one, with stripes of this length on these devices.
    fn push(&mut self, flags: BlockGroupFlags, stripe_len: u64, devices: &[usize]) {
        let profile = profile_of(flags);
        let mut stripes = Vec::new();
        for &device in devices {
            for _ in 0..profile.dev_stripes {
                let NewMember { devid, uuid, .. } = self.members[device];
                stripes.push(Stripe { devid, offset: Physical(self.ends[device]), dev_uuid: uuid });
                self.ends[device] += stripe_len;
            }
        }
        let length = stripe_len * profile.data_stripes(stripes.len() as u64);
        let item = ChunkItem {
            length,
            owner: RootId::EXTENT_TREE.0,
            stripe_len: ChunkItem::STRIPE_LEN,
            flags,
            io_align: ChunkItem::STRIPE_LEN as u32,
            io_width: ChunkItem::STRIPE_LEN as u32,
            sector_size: self.options.sectorsize,
            sub_stripes: profile.sub_stripes,
            stripes,
        };
        self.chunks.push(NewChunk { start: self.next_logical, item });
        self.next_logical += length;
    }

    fn room(&self, device: usize) -> u64 {
        if self.is_endless { u64::MAX } else { self.members[device].total_bytes.saturating_sub(self.ends[device]) }
    }

    /// The number of devices that a chunk takes if all devices have room.
    fn nr_devices(&self, flags: BlockGroupFlags) -> Option<u16> {
        let profile = profile_of(flags);
        let available = u16::try_from(self.members.len()).unwrap_or(u16::MAX);
        let in_leaf = ChunkItem::stripes_in_leaf(self.options.nodesize as usize);
        let is_system = flags.contains(BlockGroupFlags::SYSTEM);
        let stripes_max = in_leaf.min(if is_system { SYSTEM_STRIPES_MAX } else { u16::MAX });
        Some(profile.stripes_on(available.min(stripes_max))? / profile.dev_stripes)
    }

    /// Adds a chunk after the last one, on the devices that the head of this file describes. Returns `None` if they
    /// have no room.
    fn add(&mut self, flags: BlockGroupFlags, want: Want) -> Option<()> {
        let profile = profile_of(flags);
        let dev_stripes = u64::from(profile.dev_stripes);
        let mut nr_devices = self.nr_devices(flags)?;
        let nr_stripes = u64::from(nr_devices) * dev_stripes;
        let mut stripe = want.stripe;
        if stripe.saturating_mul(profile.data_stripes(nr_stripes)) > want.data_max {
            stripe = whole(want.data_max / nr_stripes);
        }
        loop {
            let stripe_min = want.stripe_min(profile, u64::from(nr_devices) * dev_stripes);
            stripe = stripe.max(stripe_min);
            let (mut chosen, mut others) = (Vec::new(), Vec::new());
            for &device in &self.order {
                let fits = self.room(device) / dev_stripes >= stripe;
                let is_taken = fits && chosen.len() < usize::from(nr_devices);
                if is_taken { chosen.push(device) } else { others.push(device) }
            }
            let in_stripes: Vec<usize> = chosen.iter().copied().rev().collect();
            if chosen.len() == usize::from(nr_devices) {
                self.order = [chosen, others].concat();
                self.push(flags, stripe, &in_stripes);
                return Some(());
            }
            let largest = others.iter().map(|&device| whole(self.room(device) / dev_stripes)).max().unwrap_or(0);
            self.order = [in_stripes, others].concat();
            match profile.stripes_on(chosen.len() as u16) {
                Some(fewer) => nr_devices = fewer / profile.dev_stripes,
                None if largest >= stripe_min && largest < stripe => stripe = largest,
                None => return None,
            }
        }
    }
}

fn profile_of(flags: BlockGroupFlags) -> &'static Profile {
    Profile::of(flags).expect("options have at most one profile of each kind")
}

/// Rounds down to a multiple of the stripe length.
fn whole(bytes: u64) -> u64 {
    bytes / ChunkItem::STRIPE_LEN * ChunkItem::STRIPE_LEN
}

/// Divides a size by `divisor`, rounds down to a multiple of the stripe length, and limits the result to `min..=max`.
fn share(bytes: u64, divisor: u64, min: u64, max: u64) -> u64 {
    whole(bytes / divisor).clamp(min, max)
}

const MIXED: BlockGroupFlags = BlockGroupFlags::DATA.union(BlockGroupFlags::METADATA);

/// Plans chunks as mkfs.btrfs does. Returns `None` if a chunk does not fit.
fn full_layout<'o>(options: &'o MkfsOptions, members: &'o [NewMember]) -> Option<ChunkLayout<'o>> {
    let total_bytes = members.iter().map(|member| member.total_bytes).fold(0, u64::saturating_add);
    let (data, metadata) = (options.data_profile, options.metadata_profile);
    let metadata_stripe = if total_bytes > 50 * GIB { GIB } else { 256 * MIB };
    let want = |stripe: u64, max: u64, stripe_min: u64| Want {
        stripe,
        data_max: max.min(total_bytes / 10),
        stripe_min,
        data_min: 0,
    };
    let system_want = Want { stripe: 8 * MIB, data_max: 16 * MIB, stripe_min: MIB, data_min: 0 };
    let metadata_want = want(metadata_stripe, metadata_stripe, 32 * MIB);
    let data_want = want(GIB, 10 * GIB, 64 * MIB);
    let mut layout = ChunkLayout::new(options, members);
    match metadata.is_empty() {
        true => layout.push_first(BlockGroupFlags::SYSTEM, 4 * MIB),
        false => layout.skip_first(4 * MIB),
    }
    if options.mixed {
        match metadata.is_empty() {
            true => layout.push_first(MIXED, share(total_bytes, 10, MIB, 8 * MIB)),
            false => {
                layout.skip_first(8 * MIB);
                layout.add(BlockGroupFlags::SYSTEM | metadata, system_want)?;
                layout.add(MIXED | metadata, data_want)?;
            }
        }
        return Some(layout);
    }
    match metadata.is_empty() {
        true => layout.push_first(BlockGroupFlags::METADATA, 8 * MIB),
        false => layout.skip_first(8 * MIB),
    }
    match data.is_empty() {
        true => layout.push_first(BlockGroupFlags::DATA, 8 * MIB),
        false => layout.skip_first(8 * MIB),
    }
    if !metadata.is_empty() {
        layout.add(BlockGroupFlags::SYSTEM | metadata, system_want)?;
        layout.add(BlockGroupFlags::METADATA | metadata, metadata_want)?;
    }
    if !data.is_empty() {
        layout.add(BlockGroupFlags::DATA | data, data_want)?;
    }
    Some(layout)
}

/// Plans chunks of minimal sizes. If space remains on every device, the metadata chunk and the data chunk each get a
/// quarter of it in addition, up to a chunk length of 8 MiB. Returns `None` if a chunk does not fit.
fn small_layout<'o>(options: &'o MkfsOptions, members: &'o [NewMember]) -> Option<ChunkLayout<'o>> {
    let least = small_chunks(options, members, 0, false)?;
    let more = (0..members.len()).map(|device| least.room(device)).min()?;
    small_chunks(options, members, more, false).or(Some(least))
}

fn small_chunks<'o>(
    options: &'o MkfsOptions,
    members: &'o [NewMember],
    more: u64,
    is_endless: bool,
) -> Option<ChunkLayout<'o>> {
    let (data, metadata) = (options.data_profile, options.metadata_profile);
    // The kernel reserves several hundred nodes before it allows writes, so metadata gets room for at least 768 nodes.
    let metadata_min = (768 * u64::from(options.nodesize)).max(4 * MIB);
    let mut layout = ChunkLayout { is_endless, ..ChunkLayout::new(options, members) };
    let mut add = |flags: BlockGroupFlags, min: u64| {
        // Chunks of one device go to the devices with the most space.
        let mut order = std::mem::take(&mut layout.order);
        order.sort_by_key(|&device| (std::cmp::Reverse(layout.room(device)), layout.ends[device], device));
        layout.order = order;
        let profile = profile_of(flags);
        let grown = match flags.contains(BlockGroupFlags::SYSTEM) {
            true => 0,
            false => share(more, 4 * u64::from(profile.dev_stripes), 0, 8 * MIB - min.min(8 * MIB)),
        };
        layout.add(flags, Want::exactly(min + grown))
    };
    add(BlockGroupFlags::SYSTEM | metadata, MIB)?;
    if options.mixed {
        add(MIXED | metadata, metadata_min)?;
        return Some(layout);
    }
    add(BlockGroupFlags::METADATA | metadata, metadata_min)?;
    add(BlockGroupFlags::DATA | data, MIB)?;
    Some(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(sizes: &[u64]) -> Vec<NewMember> {
        let member = |(index, &total_bytes): (usize, &u64)| NewMember {
            devid: DevId(index as u64 + 1),
            uuid: Uuid::from_u128(index as u128 + 1),
            total_bytes,
        };
        sizes.iter().enumerate().map(member).collect()
    }

    fn places(options: &MkfsOptions, total_bytes: u64) -> Vec<(u64, u64, Vec<u64>)> {
        let chunks = plan(options, &members(&[total_bytes])).unwrap();
        let stripes = |chunk: &NewChunk| chunk.item.stripes.iter().map(|stripe| stripe.offset.0).collect();
        chunks.iter().map(|chunk| (chunk.start, chunk.item.length, stripes(chunk))).collect()
    }

    #[test]
    fn the_default_layout_is_the_one_of_mkfs_btrfs() {
        let options = MkfsOptions::default();
        assert_eq!(
            places(&options, GIB),
            [
                (13_631_488, 8_388_608, vec![13_631_488]),
                (22_020_096, 8_388_608, vec![22_020_096, 30_408_704]),
                (30_408_704, 53_673_984, vec![38_797_312, 92_471_296]),
            ]
        );
        let metadata_len = |total_bytes| places(&options, total_bytes)[2].1;
        assert_eq!(metadata_len(109 * MIB), 32 * MIB);
        assert_eq!(metadata_len(2 * GIB), 107_347_968);
        assert_eq!(metadata_len(20 * GIB), 256 * MIB);
        assert_eq!(metadata_len(60 * GIB), GIB);
    }

    #[test]
    fn stripes_never_overlap_and_end_inside_the_device() {
        let dup = BlockGroupFlags::DUP;
        let single = BlockGroupFlags::empty();
        for (data, metadata, mixed) in [
            (single, single, false),
            (single, dup, false),
            (dup, dup, false),
            (dup, single, false),
            (single, single, true),
            (dup, dup, true),
        ] {
            let options = MkfsOptions { data_profile: data, metadata_profile: metadata, mixed, ..Default::default() };
            assert!(plan(&options, &members(&[min_size(&options, 1) - 1])).is_err());
            for total_bytes in (0..400).map(|n| min_size(&options, 1) + n * MIB).chain([GIB, 60 * GIB]) {
                let mut stripes: Vec<(u64, u64)> = places(&options, total_bytes)
                    .into_iter()
                    .flat_map(|(_, len, starts)| starts.into_iter().map(move |start| (start, start + len)))
                    .collect();
                stripes.sort_unstable();
                assert!(stripes[0].0 >= MIB && stripes.last().unwrap().1 <= total_bytes);
                assert!(stripes.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{stripes:?}");
            }
        }
    }

    #[test]
    fn chunks_of_arrays_keep_the_promises_of_their_profiles() {
        let flags = |profile: &Profile| profile.flag;
        for profile in Profile::ALL.iter().filter(|profile| !profile.has_parity()) {
            let options =
                MkfsOptions { data_profile: flags(profile), metadata_profile: flags(profile), ..Default::default() };
            for nr_devices in usize::from(profile.devs_min).max(2)..7 {
                let min = min_size(&options, nr_devices);
                for step in 0..40 {
                    let size = |index: u64| min + step * (1 + index * 3) * MIB;
                    let sizes: Vec<u64> = (0..nr_devices as u64).map(size).collect();
                    let chunks = plan(&options, &members(&sizes)).unwrap();
                    let mut places = Vec::new();
                    for NewChunk { item, .. } in &chunks {
                        let len = item.device_extent_len();
                        assert!(profile.allows_stripes(item.stripes.len()) && len.is_multiple_of(64 << 10));
                        assert!(profile.has_whole_rows(item.length, item.stripes.len() as u64));
                        for stripe in &item.stripes {
                            let on_device = item.stripes.iter().filter(|other| other.devid == stripe.devid).count();
                            assert_eq!(on_device, usize::from(profile.dev_stripes), "I1: {profile:?} {sizes:?}");
                            let end = stripe.offset.0 + len;
                            assert!(stripe.offset.0 >= MIB && end <= sizes[stripe.devid.0 as usize - 1], "I1");
                            places.push((stripe.devid, stripe.offset.0, end));
                        }
                    }
                    places.sort_unstable();
                    assert!(places.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1), "I1");
                }
            }
        }
    }
}
