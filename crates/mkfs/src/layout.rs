//! Plans the chunks of a new filesystem.
//!
//! Sizes and addresses equal those of mkfs.btrfs 6.2, so that images can be compared item by item. mkfs.btrfs first
//! makes small single chunks at fixed places, with equal logical and physical addresses. Then mkfs.btrfs adds the
//! requested chunks after the small chunks, and removes small chunks that are not needed:
//!
//! | chunk | at | length |
//! |---|---|---|
//! | system, single | 1 MiB | 4 MiB |
//! | metadata, single | 5 MiB | 8 MiB |
//! | data, single | 13 MiB | 8 MiB |
//! | system, dup | 21 MiB and 29 MiB (13 MiB and 21 MiB with mixed block groups) | 8 MiB |
//! | metadata, dup | next | a twentieth of the device: 32 MiB to 256 MiB (1 GiB on devices above 50 GiB) |
//! | data, dup | next | a twentieth of the device: 64 MiB to 1 GiB |
//! | mixed, single | 5 MiB | a tenth of the device: 1 MiB to 8 MiB |
//! | mixed, dup | after the system dup chunk | as data, dup |
//!
//! On a device that is too small for this layout, smaller chunks are packed from 1 MiB on.
//!
//! Invariants:
//! - I1. Stripes do not overlap, start at 1 MiB or later, and end inside the device.
//! - I2. The first SYSTEM chunk holds the chunk tree, and the first METADATA chunk all other trees.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{Physical, Profile, RootId};
use ubtrfs_volumes::DEVICE_RESERVED;

use crate::{DEVID, MkfsOptions};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes that the device must have past the end of the last chunk of the full layout. A device with fewer bytes gets
/// the small layout.
const SPARE: u64 = 8 * MIB;

/// A chunk of the new filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) start: u64,
    pub(crate) item: ChunkItem,
}

impl Chunk {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.item.length
    }
}

/// Plans the chunks for a device of `total_bytes`, ordered by address.
pub(crate) fn plan(options: &MkfsOptions, total_bytes: u64) -> Result<Vec<Chunk>> {
    let full = full_layout(options, total_bytes);
    if full.end + SPARE <= total_bytes {
        return Ok(full.chunks);
    }
    let small = small_layout(options, total_bytes);
    if small.end <= total_bytes {
        return Ok(small.chunks);
    }
    Err(Error::Refused {
        what: format!("the size is too small: this filesystem needs at least {}", size_text(min_size(options))),
        hint: match options.metadata_profile.is_empty() && options.data_profile.is_empty() {
            true => "give a larger device or size",
            false => "give a larger device or size, or the single profile",
        },
    })
}

/// A size as it is written on a command line, such as `28M`.
pub(crate) fn size_text(bytes: u64) -> String {
    const UNITS: [(u32, &str); 3] = [(30, "G"), (20, "M"), (10, "K")];
    let unit = UNITS.iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} bytes"), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// The smallest size in bytes of a device for a filesystem with these options.
pub fn min_size(options: &MkfsOptions) -> u64 {
    small_layout(options, 0).end
}

struct Layout<'o> {
    options: &'o MkfsOptions,
    chunks: Vec<Chunk>,
    next_logical: u64,
    /// End of the last stripe.
    end: u64,
}

impl<'o> Layout<'o> {
    fn new(options: &'o MkfsOptions, start: u64) -> Self {
        Self { options, chunks: Vec::new(), next_logical: start, end: start }
    }

    /// Adds a chunk after the last one.
    fn push(&mut self, flags: BlockGroupFlags, length: u64) {
        // All stripes lie on one device.
        let nr_stripes = Profile::of(flags).map_or(1, |profile| profile.dev_stripes.into());
        let stripe =
            |n| Stripe { devid: DEVID, offset: Physical(self.end + n * length), dev_uuid: self.options.device_uuid };
        let item = ChunkItem {
            length,
            owner: RootId::EXTENT_TREE.0,
            stripe_len: ChunkItem::STRIPE_LEN,
            flags,
            io_align: ChunkItem::STRIPE_LEN as u32,
            io_width: ChunkItem::STRIPE_LEN as u32,
            sector_size: self.options.sectorsize,
            sub_stripes: 1,
            stripes: (0..nr_stripes).map(stripe).collect(),
        };
        self.chunks.push(Chunk { start: self.next_logical, item });
        self.next_logical += length;
        self.end += nr_stripes * length;
    }

    /// Skips the logical and physical addresses of a chunk of this length with the profile single.
    fn skip(&mut self, length: u64) {
        self.next_logical += length;
        self.end += length;
    }
}

/// Divides the size of the device by `divisor`, rounds down to a multiple of the stripe length, and limits the result
/// to `min..=max`.
fn share(total_bytes: u64, divisor: u64, min: u64, max: u64) -> u64 {
    (total_bytes / divisor / ChunkItem::STRIPE_LEN * ChunkItem::STRIPE_LEN).clamp(min, max)
}

const MIXED: BlockGroupFlags = BlockGroupFlags::DATA.union(BlockGroupFlags::METADATA);

fn full_layout(options: &MkfsOptions, total_bytes: u64) -> Layout<'_> {
    let (data, metadata) = (options.data_profile, options.metadata_profile);
    let mut layout = Layout::new(options, DEVICE_RESERVED);
    let data_len = share(total_bytes, 20, 64 * MIB, GIB);
    match metadata.is_empty() {
        true => layout.push(BlockGroupFlags::SYSTEM, 4 * MIB),
        false => layout.skip(4 * MIB),
    }
    if options.mixed {
        match metadata.is_empty() {
            true => layout.push(MIXED, share(total_bytes, 10, MIB, 8 * MIB)),
            false => {
                layout.skip(8 * MIB);
                layout.push(BlockGroupFlags::SYSTEM | metadata, 8 * MIB);
                layout.push(MIXED | metadata, data_len);
            }
        }
        return layout;
    }
    match metadata.is_empty() {
        true => layout.push(BlockGroupFlags::METADATA, 8 * MIB),
        false => layout.skip(8 * MIB),
    }
    match data.is_empty() {
        true => layout.push(BlockGroupFlags::DATA, 8 * MIB),
        false => layout.skip(8 * MIB),
    }
    if !metadata.is_empty() {
        let max = if total_bytes > 50 * GIB { GIB } else { 256 * MIB };
        layout.push(BlockGroupFlags::SYSTEM | metadata, 8 * MIB);
        layout.push(BlockGroupFlags::METADATA | metadata, share(total_bytes, 20, 32 * MIB, max));
    }
    if !data.is_empty() {
        layout.push(BlockGroupFlags::DATA | data, data_len);
    }
    layout
}

/// Plans chunks of minimal sizes. If space remains on the device, the metadata chunk and the data chunk each get a
/// quarter of it in addition, up to a chunk length of 8 MiB.
fn small_layout(options: &MkfsOptions, total_bytes: u64) -> Layout<'_> {
    let (data, metadata) = (options.data_profile, options.metadata_profile);
    // The kernel reserves several hundred nodes before it allows writes, so metadata gets room for at least 768 nodes.
    let metadata_min = (768 * u64::from(options.nodesize)).max(4 * MIB);
    let layout_of = |more: u64| {
        let len = |min: u64, profile: BlockGroupFlags| {
            let nr_stripes = if profile.is_empty() { 1 } else { 2 };
            min + share(more, 4 * nr_stripes, 0, 8 * MIB - min.min(8 * MIB))
        };
        let mut layout = Layout::new(options, DEVICE_RESERVED);
        layout.push(BlockGroupFlags::SYSTEM | metadata, MIB);
        if options.mixed {
            layout.push(MIXED | metadata, len(metadata_min, metadata));
            return layout;
        }
        layout.push(BlockGroupFlags::METADATA | metadata, len(metadata_min, metadata));
        layout.push(BlockGroupFlags::DATA | data, len(MIB, data));
        layout
    };
    let least = layout_of(0);
    layout_of(total_bytes.saturating_sub(least.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(options: &MkfsOptions, total_bytes: u64) -> Vec<(u64, u64, Vec<u64>)> {
        let chunks = plan(options, total_bytes).unwrap();
        let stripes = |chunk: &Chunk| chunk.item.stripes.iter().map(|stripe| stripe.offset.0).collect();
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
            assert!(plan(&options, min_size(&options) - 1).is_err());
            for total_bytes in (0..400).map(|n| min_size(&options) + n * MIB).chain([GIB, 60 * GIB]) {
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
}
