//! The space of one device: its device extents, and the holes between them, in which new stripes are placed.
//!
//! A change of one device extent, the totals, and the search for a hole take time that grows with the logarithm of the
//! number of device extents. Only a change of the end of the space ([`DeviceSpace::set_end`]) visits all of them.
//!
//! Invariants:
//! - I1. Device extents do not overlap.
//! - I2. `holes` has exactly the holes of the space: the parts of the gaps between device extents, from
//!   [`DEVICE_RESERVED`] to `end`, cut to whole stripe elements.
//! - I3. `by_class` and `by_len` have exactly the holes of `by_start`, and `room` is the sum over these holes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ubtrfs_format::superblock::SUPERBLOCK_OFFSETS;

use crate::allocation::{DEVICE_RESERVED, STRIPE_LEN_MIN, len_bytes, whole_elements};
use crate::profile::STRIPE_LEN;

/// Device extents and holes of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceSpace {
    /// No hole ends past this offset.
    end: u64,
    /// Ends of device extents, by start.
    extents: BTreeMap<u64, u64>,
    used_bytes: u64,
    holes: Holes,
}

impl DeviceSpace {
    /// Sets the offset past which no hole ends: the size of the device, or less while it is being shrunk.
    pub(crate) fn set_end(&mut self, end: u64) {
        if end == self.end {
            return;
        }
        self.end = end;
        self.holes = Holes::default();
        let mut at = 0;
        for (&start, &extent_end) in &self.extents {
            if let Some(hole) = hole_in(at..start, self.end) {
                self.holes.insert(hole);
            }
            at = extent_end;
        }
        if let Some(hole) = hole_in(at..u64::MAX, self.end) {
            self.holes.insert(hole);
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Adds a device extent. Returns `false`, without a change, if it is empty or overlaps another.
    pub(crate) fn insert(&mut self, extent: Range<u64>) -> bool {
        let gap = self.gap_at(extent.start);
        if extent.is_empty() || !(gap.start <= extent.start && extent.end <= gap.end) {
            return false;
        }
        self.replace_gaps(std::slice::from_ref(&gap), &[gap.start..extent.start, extent.end..gap.end]);
        self.used_bytes = self.used_bytes.saturating_add(len_bytes(&extent));
        self.extents.insert(extent.start, extent.end);
        true
    }

    /// Removes the device extent that begins at `start`, if there is one.
    pub(crate) fn remove(&mut self, start: u64) {
        let Some(end) = self.extents.remove(&start) else { return };
        self.used_bytes = self.used_bytes.saturating_sub(len_bytes(&(start..end)));
        let gap = self.gap_at(start);
        self.replace_gaps(&[gap.start..start, end..gap.end], std::slice::from_ref(&gap));
    }

    /// Bytes of all device extents.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// The number of device extents.
    #[cfg(test)]
    pub(crate) fn nr_extents(&self) -> usize {
        self.extents.len()
    }

    /// Bytes in holes that are large enough for a stripe.
    pub(crate) fn unallocated_bytes(&self) -> u64 {
        self.allocatable_bytes(1)
    }

    /// Logical bytes that new chunks with 1 or 2 stripes on this device can hold, if all stripes of a chunk lie in one
    /// hole. 0 for other numbers of stripes.
    pub(crate) fn allocatable_bytes(&self, nr_stripes: u64) -> u64 {
        let index = usize::try_from(nr_stripes).ok().and_then(|nr| nr.checked_sub(1));
        index.and_then(|index| self.holes.room.get(index)).copied().unwrap_or(0)
    }

    /// The first hole of at least `wanted` bytes, cut to `wanted`; if there is none, the largest hole.
    pub(crate) fn best_hole(&self, wanted: u64) -> Option<Range<u64>> {
        let fitting = self.holes.first_fit(0, wanted);
        let cut = fitting.map(|hole| hole.start..hole.start.saturating_add(wanted));
        cut.or_else(|| self.holes.largest())
    }

    /// The start of the first range of `len` bytes in a hole that contains no superblock mirror.
    pub(crate) fn first_without_mirrors(&self, len: u64) -> Option<u64> {
        self.starts_without_mirrors(len, 1).first().copied()
    }

    /// The starts of the first ranges of `len` bytes, at most `number`, that do not overlap, lie in holes and contain no
    /// superblock mirror.
    pub(crate) fn starts_without_mirrors(&self, len: u64, number: usize) -> Vec<u64> {
        let (mut starts, mut from) = (Vec::new(), 0);
        // At most one hole per mirror has room only with the mirror.
        while let Some(hole) = self.holes.first_fit(from, len) {
            from = hole.start.saturating_add(1);
            for mut part in without_mirrors(hole) {
                while len_bytes(&part) >= len {
                    if starts.len() >= number {
                        return starts;
                    }
                    starts.push(part.start);
                    let next = part.start.saturating_add(len).checked_next_multiple_of(STRIPE_LEN);
                    part.start = next.unwrap_or(u64::MAX);
                }
            }
        }
        starts
    }

    /// All holes, without the 64 KiB of each superblock mirror, in order.
    pub(crate) fn holes_without_mirrors(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.holes.by_start.iter().flat_map(|(&start, &end)| without_mirrors(start..end))
    }

    /// The number of holes.
    pub(crate) fn nr_holes(&self) -> usize {
        self.holes.by_start.len()
    }

    /// Whether a range lies in a hole and contains no part of a superblock mirror.
    pub(crate) fn is_unallocated(&self, range: &Range<u64>) -> bool {
        let hole = self.holes.by_start.range(..=range.start).next_back().map(|(&start, &end)| start..end);
        hole.is_some_and(|hole| without_mirrors(hole).any(|part| part.start <= range.start && range.end <= part.end))
    }

    /// The gap between device extents that contains `at`, or an empty range if a device extent contains `at`.
    fn gap_at(&self, at: u64) -> Range<u64> {
        let start = self.extents.range(..=at).next_back().map_or(0, |(_, &end)| end);
        let end = self.extents.range(at..).next().map_or(u64::MAX, |(&start, _)| start);
        start..end.max(start)
    }

    /// Replaces the holes of the `old` gaps by those of the `new` gaps (I2).
    fn replace_gaps(&mut self, old: &[Range<u64>], new: &[Range<u64>]) {
        for hole in old.iter().filter_map(|gap| hole_in(gap.clone(), self.end)) {
            self.holes.remove(hole);
        }
        for hole in new.iter().filter_map(|gap| hole_in(gap.clone(), self.end)) {
            self.holes.insert(hole);
        }
    }
}

/// Holes, by start and by length.
#[derive(Clone, Debug, Default)]
struct Holes {
    /// Ends, by start.
    by_start: BTreeMap<u64, u64>,
    /// `(class, start)`: the class of a hole is the logarithm of its length, rounded down.
    by_class: BTreeSet<(u32, u64)>,
    by_len: BTreeSet<(u64, Reverse<u64>)>,
    /// Logical bytes that chunks of 1 and of 2 stripes can hold, in holes that are large enough for them.
    room: [u64; 2],
}

impl Holes {
    fn insert(&mut self, hole: Range<u64>) {
        let len = len_bytes(&hole);
        self.by_start.insert(hole.start, hole.end);
        self.by_class.insert((class_of(len), hole.start));
        self.by_len.insert((len, Reverse(hole.start)));
        for (nr_stripes, room) in (1..).zip(&mut self.room) {
            *room = room.saturating_add(room_in(len, nr_stripes));
        }
    }

    fn remove(&mut self, hole: Range<u64>) {
        let len = len_bytes(&hole);
        self.by_start.remove(&hole.start);
        self.by_class.remove(&(class_of(len), hole.start));
        self.by_len.remove(&(len, Reverse(hole.start)));
        for (nr_stripes, room) in (1..).zip(&mut self.room) {
            *room = room.saturating_sub(room_in(len, nr_stripes));
        }
    }

    /// The first hole that begins at `from` or later and has at least `wanted` bytes.
    fn first_fit(&self, from: u64, wanted: u64) -> Option<Range<u64>> {
        let own_class = class_of(wanted);
        let starts_in = |class: u32| self.by_class.range((class, from)..=(class, u64::MAX)).map(|&(_, start)| start);
        // All holes of the higher classes fit. In the class of `wanted`, all fit if `wanted` is a power of two, which
        // it is for nearly all chunks; else some are too short.
        let higher = own_class.saturating_add(1)..=u64::BITS;
        let mut first = higher.filter_map(|class| starts_in(class).next()).min();
        let limit = first.unwrap_or(u64::MAX);
        let fits = |start: &u64| self.by_start.get(start).is_some_and(|end| len_bytes(&(*start..*end)) >= wanted);
        if let Some(start) = starts_in(own_class).take_while(|start| *start <= limit).find(fits) {
            first = Some(start);
        }
        first.and_then(|start| Some(start..*self.by_start.get(&start)?))
    }

    /// The largest hole; of equal ones the first.
    fn largest(&self) -> Option<Range<u64>> {
        let (len, Reverse(start)) = *self.by_len.last()?;
        Some(start..start.saturating_add(len))
    }
}

fn class_of(len: u64) -> u32 {
    len.checked_ilog2().unwrap_or(0)
}

/// Logical bytes of a chunk that fills a hole of `len` bytes with this number of stripes; 0 if the stripes would be too
/// short.
fn room_in(len: u64, nr_stripes: u64) -> u64 {
    let stripe = whole_elements(len.checked_div(nr_stripes).unwrap_or(0));
    if stripe >= STRIPE_LEN_MIN { stripe } else { 0 }
}

/// The hole of a gap between device extents (I2), on a device whose space ends at `end`.
fn hole_in(gap: Range<u64>, end: u64) -> Option<Range<u64>> {
    let start = gap.start.max(DEVICE_RESERVED).checked_next_multiple_of(STRIPE_LEN)?;
    let end = whole_elements(gap.end.min(end));
    (start < end).then_some(start..end)
}

/// The parts of a hole outside of superblock mirrors.
fn without_mirrors(hole: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = hole.start;
    let mirrors = SUPERBLOCK_OFFSETS.into_iter().map(|start| start..start.saturating_add(STRIPE_LEN));
    let last = std::iter::once(hole.end..hole.end);
    let parts = mirrors.filter(move |mirror| mirror.start < hole.end).chain(last).map(move |mirror| {
        let part = at..mirror.start.max(at);
        at = at.max(mirror.end);
        part
    });
    parts.filter(|part| part.start < part.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The holes, computed from all extents.
    fn expected(extents: &[Range<u64>], end: u64) -> Vec<Range<u64>> {
        let mut sorted = extents.to_vec();
        sorted.sort_by_key(|extent| extent.start);
        let starts = std::iter::once(0).chain(sorted.iter().map(|extent| extent.end));
        let ends = sorted.iter().map(|extent| extent.start).chain(std::iter::once(u64::MAX));
        starts.zip(ends).filter_map(|(start, gap_end)| hole_in(start..gap_end, end)).collect()
    }

    #[test]
    fn changes_of_extents_keep_the_holes() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut space = DeviceSpace::default();
        let mut extents: Vec<Range<u64>> = Vec::new();
        for step in 0..4000 {
            match random(10) {
                0 => space.set_end(random(600) * MIB / 2),
                1..4 if !extents.is_empty() => {
                    let gone = extents.swap_remove(random(extents.len() as u64) as usize);
                    space.remove(gone.start);
                }
                _ => {
                    let start = random(600) * MIB / 2 + random(2) * 4096;
                    let extent = start..start + (1 + random(8)) * MIB / 4;
                    let is_free = extents.iter().all(|other| other.end <= extent.start || extent.end <= other.start);
                    assert_eq!(space.insert(extent.clone()), is_free, "{extent:?} in step {step}");
                    if is_free {
                        extents.push(extent);
                    }
                }
            }
            let holes = expected(&extents, space.end());
            let found: Vec<Range<u64>> = space.holes.by_start.iter().map(|(&start, &end)| start..end).collect();
            assert_eq!(found, holes, "step {step}");
            assert_eq!(space.used_bytes(), extents.iter().map(len_bytes).sum::<u64>());
            for nr_stripes in [1, 2] {
                let room: u64 = holes.iter().map(|hole| room_in(len_bytes(hole), nr_stripes)).sum();
                assert_eq!(space.allocatable_bytes(nr_stripes), room, "step {step}");
            }
            let wanted = (1 + random(64)) * STRIPE_LEN;
            let fitting = holes.iter().find(|hole| len_bytes(hole) >= wanted);
            assert_eq!(space.holes.first_fit(0, wanted).as_ref(), fitting, "{wanted} in step {step}");
            assert_eq!(space.holes.largest(), holes.iter().rev().max_by_key(|hole| len_bytes(hole)).cloned());
            let parts: Vec<Range<u64>> = space.holes_without_mirrors().collect();
            let roomy = parts.iter().find(|part| len_bytes(part) >= wanted).map(|part| part.start);
            assert_eq!(space.first_without_mirrors(wanted), roomy, "{wanted} in step {step}");
            let probe = random(600) * MIB / 2;
            let probe = probe..probe + MIB;
            let is_inside = parts.iter().any(|part| part.start <= probe.start && probe.end <= part.end);
            assert_eq!(space.is_unallocated(&probe), is_inside, "{probe:?} in step {step}");
        }
    }
}
