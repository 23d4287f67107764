//! [`ReceivedRanges`]: which bytes of a read have arrived (I3 of the crate).

/// Ranges that do not touch, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct ReceivedRanges {
    ranges: Vec<(u32, u32)>,
}

/// Most ranges that do not touch. Servers send a read in order, or as a few pieces.
const RANGES_MAX: usize = 1024;

impl ReceivedRanges {
    /// Adds a range, from its start to its end. False if the range is empty, has bytes that have arrived already, or
    /// makes too many ranges.
    #[must_use]
    pub(crate) fn add(&mut self, start: u32, end: u32) -> bool {
        if start >= end {
            return false;
        }
        let index = self.ranges.partition_point(|(other, _)| *other < start);
        let before = index.checked_sub(1).and_then(|index| self.ranges.get(index)).copied();
        let after = self.ranges.get(index).copied();
        if before.is_some_and(|(_, other)| other > start) || after.is_some_and(|(other, _)| other < end) {
            return false;
        }
        let joins_before = before.is_some_and(|(_, other)| other == start);
        let joins_after = after.is_some_and(|(other, _)| other == end);
        let index_before = index.saturating_sub(1);
        match (joins_before, joins_after) {
            (true, true) => {
                let (_, last) = self.ranges.remove(index);
                self.set_end(index_before, last);
            }
            (true, false) => self.set_end(index_before, end),
            (false, true) => {
                if let Some(range) = self.ranges.get_mut(index) {
                    range.0 = start;
                }
            }
            (false, false) => self.ranges.insert(index, (start, end)),
        }
        self.ranges.len() <= RANGES_MAX
    }

    fn set_end(&mut self, index: usize, end: u32) {
        if let Some(range) = self.ranges.get_mut(index) {
            range.1 = end;
        }
    }

    /// Whether all of the first `len` bytes have arrived, and no others.
    pub(crate) fn is_all_of(&self, len: u32) -> bool {
        self.ranges == [(0, len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_counts_once() {
        let mut received = ReceivedRanges::default();
        assert!(received.add(4, 8) && received.add(0, 2) && received.add(10, 12));
        for (start, end) in [(0, 1), (1, 3), (3, 5), (7, 9), (0, 12), (9, 11), (2, 2), (5, 3)] {
            assert!(!received.add(start, end), "{start} {end}");
        }
        assert!(!received.is_all_of(12));
        assert!(received.add(2, 4) && received.add(8, 10));
        assert!(received.is_all_of(12) && !received.is_all_of(11));
    }

    #[test]
    fn too_many_pieces_are_refused() {
        let mut received = ReceivedRanges::default();
        assert!((0..1024).all(|n| received.add(2 * n, 2 * n + 1)));
        assert!(!received.add(5000, 5001));
    }
}
