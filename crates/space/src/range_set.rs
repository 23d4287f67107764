//! Sets of disjoint, coalesced address ranges. [`FreeSpace`] adds an index by length, for allocation.
//!
//! Invariants:
//! - I1. Ranges are not empty, and do not overlap or touch: adjacent ranges are coalesced.
//! - I2. `bytes` is the sum of all lengths.
//! - I3. `by_len` of [`FreeSpace`] holds `(length, start)` of exactly the ranges of the set.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Disjoint ranges, by start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    ends: BTreeMap<u64, u64>,
    bytes: u64,
}

/// The effect of inserting a range: the neighbours that it joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinedRanges {
    /// The range of the set that contains the inserted range and the joined neighbours.
    pub whole: Range<u64>,
    /// The joined neighbour before the inserted range.
    pub left: Option<Range<u64>>,
    /// The joined neighbour after the inserted range.
    pub right: Option<Range<u64>>,
}

impl RangeSet {
    /// Adds a range. Returns `None`, without a change, if the range is empty or overlaps the set.
    pub fn insert(&mut self, range: Range<u64>) -> Option<JoinedRanges> {
        let before = self.ends.range(..=range.start).next_back().map(|(&start, &end)| start..end);
        let after = self.ends.range(range.start..).next().map(|(&start, &end)| start..end);
        let overlaps = before.as_ref().is_some_and(|before| before.end > range.start)
            || after.as_ref().is_some_and(|after| after.start < range.end);
        if range.is_empty() || overlaps {
            return None;
        }
        let left = before.filter(|before| before.end == range.start);
        let right = after.filter(|after| after.start == range.end);
        let start = left.as_ref().map_or(range.start, |left| left.start);
        let end = right.as_ref().map_or(range.end, |right| right.end);
        if let Some(right) = &right {
            self.ends.remove(&right.start);
        }
        self.ends.insert(start, end);
        // I1, I2: the lengths of disjoint ranges add up to at most u64::MAX.
        self.bytes = self.bytes.saturating_add(len_of(&range));
        Some(JoinedRanges { whole: start..end, left, right })
    }

    /// Removes a range and returns the range of the set that contained it. Returns `None`, without a change, if the
    /// given range is empty or not entirely in the set.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> Option<Range<u64>> {
        let held = self.containing(range.start).filter(|held| range.end <= held.end && !range.is_empty())?;
        if held.start < range.start {
            self.ends.insert(held.start, range.start);
        } else {
            self.ends.remove(&held.start);
        }
        if range.end < held.end {
            self.ends.insert(range.end, held.end);
        }
        self.bytes = self.bytes.checked_sub(len_of(&range)).expect("I2: the set contains the removed range");
        Some(held)
    }

    /// The range that contains an address.
    pub(crate) fn containing(&self, at: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.ends.range(..=at).next_back()?;
        (at < end).then_some(start..end)
    }

    /// The ranges that start at `at` or later.
    pub(crate) fn from(&self, at: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ends.range(at..).map(|(&start, &end)| start..end)
    }

    /// The ranges that overlap or touch `range`, sorted.
    pub(crate) fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let before = self.ends.range(..range.start).next_back().map(|(&start, &end)| start..end);
        let before = before.filter(|before| before.end >= range.start);
        let after = self.ends.range(range.start..=range.end.max(range.start)).map(|(&start, &end)| start..end);
        before.into_iter().chain(after)
    }

    /// Number of ranges.
    pub(crate) fn nr_ranges(&self) -> u64 {
        self.ends.len() as u64
    }

    /// The sum of all lengths.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The parts of a range that are not in the set.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let first = self.containing(range.start).map_or(range.start, |held| held.start);
        for held in self.from(first).take_while(|held| held.start < range.end) {
            if at < held.start {
                gaps.push(at..held.start);
            }
            at = at.max(held.end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }
}

/// Free ranges, indexed for allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSpace {
    ranges: RangeSet,
    by_len: BTreeSet<(u64, u64)>,
}

impl FreeSpace {
    /// Adds a range as [`RangeSet::insert`] does; returns whether it was added.
    pub(crate) fn insert(&mut self, range: Range<u64>) -> bool {
        let Some(joined) = self.ranges.insert(range) else { return false };
        for part in [joined.left, joined.right].into_iter().flatten() {
            self.by_len.remove(&index_entry(&part));
        }
        self.by_len.insert(index_entry(&joined.whole));
        true
    }

    /// Removes a range as [`RangeSet::remove`] does; returns whether it was removed.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> bool {
        let Some(held) = self.ranges.remove(range.clone()) else { return false };
        self.by_len.remove(&index_entry(&held));
        for rest in [held.start..range.start, range.end..held.end] {
            if !rest.is_empty() {
                self.by_len.insert(index_entry(&rest));
            }
        }
        true
    }

    /// The ranges, by address.
    pub(crate) fn ranges(&self) -> &RangeSet {
        &self.ranges
    }

    /// Length of the longest range, 0 if there is none.
    pub(crate) fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len_bytes, _)| len_bytes)
    }

    /// Ranges of at least this length, ordered by length, then by address.
    pub(crate) fn at_least(&self, len_bytes: u64) -> impl DoubleEndedIterator<Item = Range<u64>> + '_ {
        self.by_len.range((len_bytes, 0)..).map(|&(len_bytes, start)| start..start.saturating_add(len_bytes))
    }
}

fn index_entry(range: &Range<u64>) -> (u64, u64) {
    (len_of(range), range.start)
}

/// Length of a range, 0 if it is empty.
pub(crate) fn len_of(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(bits: &[bool]) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for at in (0..bits.len()).filter(|&at| bits[at]).map(|at| at as u64) {
            match runs.last_mut() {
                Some(last) if last.end == at => last.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn a_range_set_agrees_with_a_bit_array(ops in prop::collection::vec((any::<bool>(), 0usize..64, 1usize..12), 1..200)) {
            let mut bits = [false; 80];
            let mut free = FreeSpace::default();
            for (insert, start, len) in ops {
                let cells = &mut bits[start..start + len];
                let possible = cells.iter().all(|&bit| bit != insert);
                let range = start as u64..(start + len) as u64;
                let done = if insert { free.insert(range) } else { free.remove(range) };
                prop_assert_eq!(done, possible);
                if possible {
                    cells.fill(insert);
                }
                let expected = runs(&bits);
                prop_assert_eq!(free.ranges().bytes(), expected.iter().map(|run| run.end - run.start).sum::<u64>());
                prop_assert_eq!(free.ranges().from(0).collect::<Vec<_>>(), expected.clone());
                let mut by_len: Vec<_> = expected.iter().map(index_entry).collect();
                by_len.sort_unstable();
                prop_assert_eq!(free.by_len.iter().copied().collect::<Vec<_>>(), by_len);
                let touches = |run: &&Range<u64>| run.start <= (start + len) as u64 && start as u64 <= run.end;
                let touching: Vec<_> = expected.iter().filter(touches).cloned().collect();
                let window = start as u64..(start + len) as u64;
                prop_assert_eq!(free.ranges().touching(&window).collect::<Vec<_>>(), touching);
                let inverted: Vec<bool> = bits.iter().map(|bit| !bit).collect();
                prop_assert_eq!(free.ranges().gaps(0..80), runs(&inverted));
            }
        }
    }
}
