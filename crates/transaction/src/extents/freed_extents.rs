//! [`FreedExtents`]: freed space that the devices are not told of yet.

use std::collections::BTreeMap;
use std::ops::Range;

use parking_lot::Mutex;
use ubtrfs_format::Logical;
use ubtrfs_space::Extent;

use crate::engine::Engine;

/// Freed ranges that are not discarded yet: for asynchronous discards, and old places of moved data. Owns the ranges,
/// under a lock; no other lock is taken under that lock.
#[derive(Debug, Default)]
pub(crate) struct FreedExtents {
    /// The end of each range, by its start. Adjacent ranges are joined.
    ranges: Mutex<BTreeMap<u64, u64>>,
}

impl FreedExtents {
    /// Notes freed extents.
    pub(crate) fn note(&self, extents: &[Extent]) {
        let mut ranges = self.ranges.lock();
        for extent in extents {
            if ranges.len() >= FREED_MAX {
                return;
            }
            let (mut start, mut end) = (extent.bytenr.0, extent.end());
            if let Some((&before, &before_end)) = ranges.range(..=start).next_back()
                && before_end >= start
            {
                (start, end) = (before, end.max(before_end));
            }
            while let Some((&next, &next_end)) = ranges.range(start..=end).next() {
                ranges.remove(&next);
                end = end.max(next_end);
            }
            ranges.insert(start, end);
        }
    }

    /// Takes all ranges.
    pub(crate) fn take(&self) -> BTreeMap<u64, u64> {
        std::mem::take(&mut *self.ranges.lock())
    }

    /// Takes the parts of the freed ranges that lie in `part`.
    fn take_in(&self, part: &Range<u64>) -> Vec<Range<u64>> {
        let mut ranges = self.ranges.lock();
        let mut taken = Vec::new();
        while let Some((start, end)) = ranges.range(..part.end).next_back().map(|(start, end)| (*start, *end))
            && end > part.start
        {
            ranges.remove(&start);
            if end > part.end {
                ranges.insert(part.end, end);
            }
            if start < part.start {
                ranges.insert(start, part.start);
            }
            taken.push(start.max(part.start)..end.min(part.end));
        }
        taken
    }
}

impl Engine {
    /// With synchronous discards, discards the old places of data that moved out of a block group. No thread may still
    /// have an old address, and the group must be read-only, so that its free space is not allocated.
    pub(crate) fn discard_moved(&self, group: &Range<u64>) {
        if !self.options.discard {
            return;
        }
        let ranges = self.freed.take_in(group).into_iter();
        self.discard_unused(
            ranges.map(|range| Extent::new(Logical(range.start), range.end.saturating_sub(range.start))),
        );
    }

    /// Discards extents that no thread can read or allocate. A failure ends the discard with a warning, because no data
    /// depends on it.
    pub(crate) fn discard_unused(&self, mut extents: impl Iterator<Item = Extent>) {
        if let Err(error) = extents.try_for_each(|extent| self.volumes.discard(extent.bytenr, extent.len_bytes)) {
            tracing::warn!("discard: {error}");
        }
    }
}

/// Maximum number of freed ranges that wait to be discarded. Further ranges are not discarded.
const FREED_MAX: usize = 1 << 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_freed_ranges_in_a_block_group_are_taken() {
        let freed = FreedExtents::default();
        let extent = |start, end: u64| Extent::new(Logical(start), end - start);
        freed.note(&[extent(0, 10), extent(20, 40), extent(40, 60), extent(70, 80), extent(90, 120)]);
        assert_eq!(freed.take_in(&(30..100)), [90..100, 70..80, 30..60]);
        assert!(freed.take_in(&(30..100)).is_empty());
        assert_eq!(freed.take(), BTreeMap::from([(0, 10), (20, 30), (100, 120)]));
        freed.note(&[extent(20, 32), extent(34, 40)]);
        assert_eq!(freed.take_in(&(30..40)), [34..40, 30..32], "the last one ends with the part");
        assert_eq!(freed.take(), BTreeMap::from([(20, 30)]));
    }
}
