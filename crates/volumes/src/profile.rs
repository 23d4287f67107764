//! Maps a chunk's logical bytes to its stripes, by profile. The facts of the profiles are in `format::Profile`.
//!
//! Source: the btrfs on-disk format page ("Chunk item") and the layout that the kernel writes. With `n` stripes,
//! logical offset `o` in the chunk, element `e = o / 64 KiB`:
//!
//! | profile | copies | data stripes | stripe of element `e` | row of element `e` |
//! |---|---|---|---|---|
//! | single, dup, raid1, raid1c3, raid1c4 | n | 1 | every | not striped |
//! | raid0 | 1 | n | e % n | e / n |
//! | raid10 | 2 | n / 2 | e % (n / 2) * 2 + copy | e / (n / 2) |
//! | raid5, raid6 | 1 | n - 1, n - 2 | (e % data + row) % n | e / data |
//!
//! Invariants:
//! - I1. A [`ChunkGeometry`] exists only for a chunk whose fields passed [`ChunkGeometry::of`]; its mapping cannot
//!   overflow.

use std::ops::Range;

use ubtrfs_format::item::{BlockGroupFlags, ChunkItem};
use ubtrfs_format::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_format::{DevId, FormatError, Logical, Physical, Profile};

/// Bytes of a stripe element.
pub(crate) const STRIPE_LEN: u64 = ChunkItem::STRIPE_LEN;

/// Largest length of a chunk. The limit keeps sums of lengths within 64 bits; no device is larger.
const LENGTH_MAX: u64 = 1 << 60;

/// A run of bytes on one stripe of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Index of the stripe.
    pub(crate) stripe: usize,
    /// Offset from the stripe's start.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len_bytes: u64,
}

impl Segment {
    /// Whether `next` begins where this segment ends, on the same stripe.
    pub(crate) fn is_before(&self, next: &Self) -> bool {
        self.stripe == next.stripe && self.offset.checked_add(self.len_bytes) == Some(next.offset)
    }
}

/// The layout of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkGeometry {
    profile: &'static Profile,
    nr_stripes: u64,
    /// Number of data stripes (see the table above). A row has one element of each stripe; this many of them hold
    /// different data.
    nr_data: u64,
    length: u64,
}

/// The places of all copies of the byte at `offset` in a chunk at `start`.
///
/// # Errors
/// The chunk's fields contradict each other.
pub fn copies_of(start: Logical, chunk: &ChunkItem, offset: u64) -> Result<Vec<(DevId, Physical)>, FormatError> {
    let geometry = ChunkGeometry::of(start, chunk, chunk.sector_size)?;
    let place = |segment: Segment| {
        let stripe = &chunk.stripes[segment.stripe];
        (stripe.devid, stripe.offset.advance(segment.offset))
    };
    Ok((0..geometry.nr_copies()).flat_map(|copy| geometry.segments(offset, 1, copy)).map(place).collect())
}

fn value(field: &'static str, value: u64, expected: &'static str) -> FormatError {
    FormatError::Value { what: "chunk", field, value, expected }
}

impl ChunkGeometry {
    /// Makes the layout of a chunk at `logical`; fails if the chunk's fields contradict each other.
    pub(crate) fn of(logical: Logical, chunk: &ChunkItem, sectorsize: u32) -> Result<Self, FormatError> {
        let sectorsize = u64::from(sectorsize.max(1));
        if chunk.length == 0 || !chunk.length.is_multiple_of(sectorsize) {
            return Err(value("length", chunk.length, "expected a multiple of the sector size"));
        }
        if chunk.length > LENGTH_MAX {
            return Err(value("length", chunk.length, "expected at most 2^60"));
        }
        if !logical.0.is_multiple_of(sectorsize) || logical.checked_add(chunk.length).is_none() {
            return Err(value("logical", logical.0, "expected a sector inside the address space"));
        }
        if chunk.stripe_len != STRIPE_LEN {
            return Err(value("stripe_len", chunk.stripe_len, "expected 65536"));
        }
        if !chunk.flags.intersects(BlockGroupFlags::TYPES) {
            return Err(value("type", chunk.flags.bits(), "expected data, metadata or system"));
        }
        let profile =
            Profile::of(chunk.flags).ok_or(value("type", chunk.flags.bits(), "expected at most one profile"))?;
        let nr_stripes = chunk.stripes.len();
        let is_raid10 = profile.flag == BlockGroupFlags::RAID10;
        if is_raid10 && (chunk.sub_stripes != profile.sub_stripes || !nr_stripes.is_multiple_of(2)) {
            return Err(value("sub_stripes", chunk.sub_stripes.into(), "expected 2 and an even number of stripes"));
        }
        if !profile.allows_stripes(nr_stripes) {
            return Err(value("num_stripes", nr_stripes as u64, "expected a number that the profile allows"));
        }
        let nr_stripes = nr_stripes as u64;
        let nr_data = profile.data_stripes(nr_stripes);
        let geometry = Self { profile, nr_stripes, nr_data, length: chunk.length };
        let len = geometry.stripe_len_bytes();
        match chunk.stripes.iter().find(|stripe| stripe.offset.checked_add(len).is_none()) {
            Some(stripe) => Err(value("stripe offset", stripe.offset.0, "expected the stripe to end below 2^64")),
            None => Ok(geometry),
        }
    }

    /// Number of readable copies of each byte.
    pub(crate) fn nr_copies(&self) -> usize {
        self.profile.ncopies.into()
    }

    /// Whether each stripe has all bytes of the chunk, at the same offsets.
    pub(crate) fn is_mirrored(&self) -> bool {
        !self.profile.is_striped()
    }

    /// Whether the profile has parity stripes.
    pub(crate) fn has_parity(&self) -> bool {
        self.profile.has_parity()
    }

    /// Whether all bytes can be read after the loss of a device.
    pub(crate) fn has_redundancy(&self) -> bool {
        self.profile.tolerated_failures > 0
    }

    /// Whether each byte has a copy on a stripe for which `is_alive` holds. Copies only: lost bytes are not rebuilt from
    /// parity.
    pub(crate) fn survives(&self, is_alive: impl Fn(usize) -> bool) -> bool {
        let nr_stripes = usize::try_from(self.nr_stripes).unwrap_or(usize::MAX);
        // Consecutive stripes hold the copies of the same bytes; in a chunk with parity, each stripe holds other bytes.
        let nr_copies = self.nr_copies().max(1);
        (0..nr_stripes)
            .step_by(nr_copies)
            .all(|first| (first..first.saturating_add(nr_copies).min(nr_stripes)).any(&is_alive))
    }

    /// Number of columns of a striped chunk: groups of stripes that hold the same bytes.
    pub(crate) fn nr_columns(&self) -> usize {
        usize::try_from(self.nr_data).unwrap_or(usize::MAX)
    }

    /// The column of an offset in a striped chunk.
    pub(crate) fn column_of(&self, offset: u64) -> usize {
        let element = offset / STRIPE_LEN;
        usize::try_from(element.checked_rem(self.nr_data).unwrap_or(0)).unwrap_or(0)
    }
}

#[allow(
    clippy::arithmetic_side_effects,
    reason = "I1: the length is at most 2^60, offsets lie inside the chunk, and nr_data is at least 1"
)]
impl ChunkGeometry {
    /// Bytes of each stripe to which the chunk's bytes are mapped. This is the length of its device extent, except for
    /// a chunk that does not consist of whole rows, which no known program makes: there, the last row reaches past the
    /// end that [`Profile::stripe_len`] gives. The map of chunks keeps other chunks out of these bytes too.
    pub(crate) fn stripe_len_bytes(&self) -> u64 {
        match self.profile.is_striped() {
            true => self.length.div_ceil(self.nr_data).next_multiple_of(STRIPE_LEN),
            false => self.length,
        }
    }

    /// Maps `len_bytes` at `offset` in the chunk to segments of this copy, in order. The range must be inside the
    /// chunk.
    pub(crate) fn segments(&self, offset: u64, len_bytes: u64, copy: usize) -> impl Iterator<Item = Segment> + use<> {
        let is_inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.length);
        debug_assert!(is_inside, "I1: {len_bytes} bytes at {offset} of {self:?}");
        let this = *self;
        let end = offset + len_bytes;
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let segment = this.segment(at, end - at, copy);
            at += segment.len_bytes;
            Some(segment)
        })
    }

    fn segment(&self, offset: u64, len_bytes: u64, copy: usize) -> Segment {
        if !self.profile.is_striped() {
            return Segment { stripe: copy, offset, len_bytes };
        }
        let in_element = offset % STRIPE_LEN;
        let element = offset / STRIPE_LEN;
        let (row, column) = (element / self.nr_data, element % self.nr_data);
        let stripe = match self.profile.flag {
            BlockGroupFlags::RAID10 => column * 2 + copy as u64,
            _ if self.has_parity() => (column + row % self.nr_stripes) % self.nr_stripes,
            _ => column,
        };
        Segment {
            stripe: stripe as usize,
            offset: row * STRIPE_LEN + in_element,
            len_bytes: len_bytes.min(STRIPE_LEN - in_element),
        }
    }

    /// Maps a range, which must be inside the chunk, to the run that each stripe of this copy has of it. Not for chunks
    /// with parity, whose runs have gaps.
    pub(crate) fn runs(&self, offset: u64, len_bytes: u64, copy: usize) -> Vec<Segment> {
        if len_bytes == 0 || !self.profile.is_striped() {
            return self.segments(offset, len_bytes, copy).collect();
        }
        let last = offset + len_bytes - 1;
        let (first_element, last_element) = (offset / STRIPE_LEN, last / STRIPE_LEN);
        let run = |column: u64| {
            let skipped = (column + self.nr_data - first_element % self.nr_data) % self.nr_data;
            let first = first_element + skipped;
            if first > last_element {
                return None;
            }
            let final_element = last_element - (last_element - first) % self.nr_data;
            let start = self.segment(offset.max(first * STRIPE_LEN), 1, copy);
            let end = self.segment(last.min(final_element * STRIPE_LEN + STRIPE_LEN - 1), 1, copy);
            Some(Segment { len_bytes: end.offset + 1 - start.offset, ..start })
        };
        (0..self.nr_data).filter_map(run).collect()
    }

    /// Maps `offset` of this stripe to a range of the chunk: the 64 KiB from the byte at `offset` on or, with parity, a
    /// whole row. If a superblock mirror is at `offset`, this is the range in which the kernel allocates nothing.
    /// Returns `None` if `offset` is past the end of the stripe.
    pub(crate) fn logical_range_of(&self, stripe: usize, offset: u64) -> Option<Range<u64>> {
        if offset >= self.stripe_len_bytes() {
            return None;
        }
        let (row, in_element) = (offset / STRIPE_LEN, offset % STRIPE_LEN);
        let (start, len_bytes) = match self.profile.flag {
            _ if self.has_parity() => (row * self.nr_data * STRIPE_LEN, self.nr_data * STRIPE_LEN),
            BlockGroupFlags::RAID10 => ((row * self.nr_data + stripe as u64 / 2) * STRIPE_LEN + in_element, STRIPE_LEN),
            BlockGroupFlags::RAID0 => ((row * self.nr_data + stripe as u64) * STRIPE_LEN + in_element, STRIPE_LEN),
            _ => (offset, STRIPE_LEN),
        };
        let end = (start + len_bytes).min(self.length);
        (start < end).then_some(start..end)
    }
}

/// Logical ranges of a chunk that cover superblock mirrors, sorted and merged. For each mirror, the kernel excludes 64
/// KiB or, with parity, a whole row. Nothing is ever allocated in these ranges.
pub(crate) fn reserved_ranges(start: Logical, chunk: &ChunkItem, geometry: &ChunkGeometry) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    let range_of = |offsets: Range<u64>| start.advance(offsets.start).0..start.advance(offsets.end).0;
    // The kernel also excludes the logical addresses below 64 KiB.
    if start.0 < SUPERBLOCK_OFFSETS[0] {
        ranges.push(start.0..SUPERBLOCK_OFFSETS[0].min(start.advance(chunk.length).0));
    }
    for (index, stripe) in chunk.stripes.iter().enumerate() {
        for mirror in SUPERBLOCK_OFFSETS {
            let Some(offset) = mirror.checked_sub(stripe.offset.0) else { continue };
            ranges.extend(geometry.logical_range_of(index, offset).map(range_of));
        }
    }
    merge(ranges)
}

fn merge(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_format::item::Stripe;
    use ubtrfs_format::{DevId, Physical};
    use uuid::Uuid;

    const K64: u64 = STRIPE_LEN;

    fn chunk(profile: BlockGroupFlags, nr_stripes: usize, length: u64) -> ChunkItem {
        let stripe = |n| Stripe { devid: DevId(n as u64 + 1), offset: Physical(1 << 20), dev_uuid: Uuid::nil() };
        ChunkItem {
            length,
            owner: 2,
            stripe_len: STRIPE_LEN,
            flags: BlockGroupFlags::DATA | profile,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: if profile == BlockGroupFlags::RAID10 { 2 } else { 1 },
            stripes: (0..nr_stripes).map(stripe).collect(),
        }
    }

    fn geometry(profile: BlockGroupFlags, nr_stripes: usize, length: u64) -> ChunkGeometry {
        ChunkGeometry::of(Logical(1 << 30), &chunk(profile, nr_stripes, length), 4096).unwrap()
    }

    fn places(geometry: &ChunkGeometry, offset: u64, len: u64, copy: usize) -> Vec<(usize, u64, u64)> {
        geometry.segments(offset, len, copy).map(|s| (s.stripe, s.offset, s.len_bytes)).collect()
    }

    #[test]
    fn mirrored_profiles_are_one_run_in_each_stripe() {
        let raid1c3 = geometry(BlockGroupFlags::RAID1C3, 3, 1 << 20);
        assert_eq!(raid1c3.nr_copies(), 3);
        assert_eq!(places(&raid1c3, 4096, 500_000, 2), [(2, 4096, 500_000)]);
    }

    #[test]
    fn striped_profiles_rotate_as_the_kernel_does() {
        let raid0 = geometry(BlockGroupFlags::RAID0, 3, 12 * K64);
        assert_eq!(raid0.stripe_len_bytes(), 4 * K64);
        assert_eq!(places(&raid0, 2 * K64 + 100, 2 * K64, 0), [(2, 100, K64 - 100), (0, K64, K64), (1, K64, 100)]);
        let raid10 = geometry(BlockGroupFlags::RAID10, 4, 8 * K64);
        assert_eq!(raid10.stripe_len_bytes(), 4 * K64);
        assert_eq!(places(&raid10, 3 * K64, K64, 1), [(3, K64, K64)]);
        let raid5 = geometry(BlockGroupFlags::RAID5, 3, 12 * K64);
        assert_eq!(raid5.stripe_len_bytes(), 6 * K64);
        // Row 0: d0 d1 P; row 1: P d2 d3; row 2: d5 P d4.
        let stripes: Vec<usize> = places(&raid5, 0, 6 * K64, 0).iter().map(|place| place.0).collect();
        assert_eq!(stripes, [0, 1, 1, 2, 2, 0]);
    }

    #[test]
    fn runs_join_the_segments_of_each_stripe() {
        for (profile, nr_stripes) in [(BlockGroupFlags::RAID0, 3), (BlockGroupFlags::RAID10, 6)] {
            let chunk = geometry(profile, nr_stripes, 12 * K64);
            for (offset, len) in [(0, 12 * K64), (5, 7), (K64 - 1, 2), (100, 5 * K64), (4 * K64, 3 * K64), (7, 0)] {
                for copy in 0..chunk.nr_copies() {
                    let mut joined: Vec<Segment> = Vec::new();
                    for segment in chunk.segments(offset, len, copy) {
                        match joined.iter_mut().find(|run| run.is_before(&segment)) {
                            Some(run) => run.len_bytes += segment.len_bytes,
                            None => joined.push(segment),
                        }
                    }
                    joined.sort_by_key(|run| run.stripe);
                    assert_eq!(chunk.runs(offset, len, copy), joined, "{profile:?} {offset} {len} {copy}");
                }
            }
        }
    }

    #[test]
    fn contradictory_chunks_are_refused() {
        let field = |chunk: &ChunkItem, logical| match ChunkGeometry::of(Logical(logical), chunk, 4096) {
            Err(FormatError::Value { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        let good = chunk(BlockGroupFlags::DUP, 2, 1 << 20);
        assert_eq!(field(&ChunkItem { length: 0, ..good.clone() }, 0), "length");
        assert_eq!(field(&ChunkItem { length: 4095, ..good.clone() }, 0), "length");
        assert_eq!(field(&good, u64::MAX - 4095), "logical");
        assert_eq!(field(&ChunkItem { stripe_len: 0, ..good.clone() }, 0), "stripe_len");
        assert_eq!(field(&ChunkItem { stripes: Vec::new(), ..good.clone() }, 0), "num_stripes");
        assert_eq!(field(&chunk(BlockGroupFlags::RAID0 | BlockGroupFlags::DUP, 2, 4096), 0), "type");
        assert_eq!(field(&ChunkItem { flags: BlockGroupFlags::DUP, ..good.clone() }, 0), "type");
        assert_eq!(field(&chunk(BlockGroupFlags::RAID10, 3, 4096), 0), "sub_stripes");
        assert_eq!(field(&chunk(BlockGroupFlags::RAID6, 2, 4096), 0), "num_stripes");
        let mut far = good;
        far.stripes[1].offset = Physical(u64::MAX - 5);
        assert_eq!(field(&far, 0), "stripe offset");
    }

    #[test]
    fn the_inverse_finds_the_logical_range() {
        let dup = geometry(BlockGroupFlags::DUP, 2, 1 << 20);
        assert_eq!(dup.logical_range_of(1, 8 * K64), Some(8 * K64..9 * K64));
        assert_eq!(dup.logical_range_of(1, 1 << 20), None);
        let raid0 = geometry(BlockGroupFlags::RAID0, 3, 12 * K64);
        assert_eq!(raid0.logical_range_of(1, K64), Some(4 * K64..5 * K64));
        let uneven = geometry(BlockGroupFlags::RAID0, 3, 10 * K64);
        assert_eq!(uneven.logical_range_of(0, 3 * K64), Some(9 * K64..10 * K64));
        assert_eq!(uneven.logical_range_of(1, 3 * K64), None, "the last row has one element");
        let raid5 = geometry(BlockGroupFlags::RAID5, 3, 12 * K64);
        assert_eq!(raid5.logical_range_of(1, K64), Some(2 * K64..4 * K64));
    }

    #[test]
    fn superblocks_beside_a_stripe_reserve_nothing_and_the_first_addresses_are_reserved() {
        let reserved = |start, length| {
            // The stripe begins behind the first superblock.
            let chunk = chunk(BlockGroupFlags::empty(), 1, length);
            let geometry = ChunkGeometry::of(Logical(start), &chunk, 4096).unwrap();
            let ranges = reserved_ranges(Logical(start), &chunk, &geometry).into_iter();
            ranges.map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        let second = SUPERBLOCK_OFFSETS[1] - (1 << 20);
        assert_eq!(reserved(1 << 30, second), [], "it ends before the second");
        let at = (1 << 30) + second;
        assert_eq!(reserved(1 << 30, second + K64), [(at, at + K64)]);
        assert_eq!(reserved(0, 1 << 20), [(0, K64)]);
    }
}
