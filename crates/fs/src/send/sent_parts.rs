//! [`SentParts`]: the parts of extents that a send has sent, within a bound of memory.
//!
//! - S1. The parts take at most the memory that their owner allows. If that becomes less, all parts are forgotten. A part
//!   that is not remembered is only sent again, as data and not as a clone.
//! - S2. Most extents have one part, which needs no allocation of its own.

use std::collections::HashMap;

/// A range of a file that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentPart {
    pub(super) ino: u64,
    /// Offset in the file.
    pub(super) at: u64,
    /// Offset in the extent.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Whether the range ends at the end of the file.
    pub(super) is_end: bool,
}

/// The parts that were sent, by the address of their extent.
#[derive(Debug, Default)]
pub(super) struct SentParts {
    /// The first part of each extent.
    first: HashMap<u64, SentPart>,
    /// The further parts of extents that have several (S2).
    more: HashMap<u64, Vec<SentPart>>,
    /// Number of all parts in `more`.
    nr_more: usize,
}

impl SentParts {
    /// The parts of the extent at this address.
    pub(super) fn of(&self, bytenr: u64) -> impl Iterator<Item = &SentPart> {
        self.first.get(&bytenr).into_iter().chain(self.more.get(&bytenr).into_iter().flatten())
    }

    /// Notes a part of the extent at `bytenr`, if all parts take at most `max_bytes` with it (S1).
    pub(super) fn note(&mut self, bytenr: u64, part: SentPart, max_bytes: u64) {
        if self.bytes() > max_bytes {
            *self = Self::default();
        }
        let last = self.more.get_mut(&bytenr).and_then(|more| more.last_mut()).or_else(|| self.first.get_mut(&bytenr));
        if let Some(last) = last {
            let continues = (last.ino, last.at.checked_add(last.len), last.offset.checked_add(last.len))
                == (part.ino, Some(part.at), Some(part.offset));
            match last.len.checked_add(part.len) {
                Some(len) if continues => (last.len, last.is_end) = (len, part.is_end),
                _ => self.note_more(bytenr, part, max_bytes),
            }
            return;
        }
        let is_full = self.first.len() == self.first.capacity();
        // A map that grows takes the old and the new memory for a moment.
        let grown = if is_full { map_bytes(self.first.capacity().saturating_add(1)) } else { 0 };
        if self.bytes().saturating_add(grown) <= max_bytes {
            self.first.insert(bytenr, part);
        }
    }

    fn note_more(&mut self, bytenr: u64, part: SentPart, max_bytes: u64) {
        if self.bytes().saturating_add(MORE_BYTES) > max_bytes {
            return;
        }
        let more = self.more.entry(bytenr).or_default();
        if more.len() < MORE_MAX {
            more.push(part);
            self.nr_more = self.nr_more.saturating_add(1);
        }
    }

    /// The memory that the parts take, in bytes.
    fn bytes(&self) -> u64 {
        map_bytes(self.first.capacity()).saturating_add((self.nr_more as u64).saturating_mul(MORE_BYTES))
    }
}

/// The memory of a map of first parts that has room for this number of extents.
fn map_bytes(capacity: usize) -> u64 {
    if capacity == 0 {
        return 0;
    }
    // The table has a power of two of places, and leaves an eighth of them empty.
    let places = (capacity as u64).saturating_mul(8).div_ceil(7).next_power_of_two();
    places.saturating_mul((size_of::<(u64, SentPart)>() as u64).saturating_add(1))
}

/// Maximum number of remembered parts of an extent besides the first.
const MORE_MAX: usize = 63;
/// Upper bound of the memory of such a part, with its share of the map and of the room that the list keeps.
const MORE_BYTES: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn part(ino: u64, at: u64) -> SentPart {
        SentPart { ino, at, offset: 0, len: 4096, is_end: false }
    }

    #[test]
    fn s1_the_parts_take_no_more_memory_than_allowed() {
        let max = 1 << 20;
        let mut parts = SentParts::default();
        for bytenr in 0..1 << 20 {
            parts.note(bytenr << 12, part(bytenr, 0), max);
            assert!(parts.bytes() <= max, "{}", parts.bytes());
        }
        assert!(parts.first.len() > 5000, "the memory is used: {}", parts.first.len());
        assert_eq!(parts.of(4096).collect::<Vec<_>>(), [&part(1, 0)]);
        for ino in 0..1 << 16 {
            parts.note((ino % 1024) << 12, part(ino + 5000, 0), max);
            assert!(parts.bytes() <= max, "{}", parts.bytes());
        }
        assert!(parts.nr_more > 100, "{}", parts.nr_more);
    }

    #[test]
    fn s1_all_parts_are_forgotten_when_the_memory_becomes_less() {
        let mut parts = SentParts::default();
        (0..5000).for_each(|bytenr| parts.note(bytenr << 12, part(bytenr, 0), 1 << 20));
        assert_eq!(parts.first.len(), 5000);
        parts.note(0, part(7, 1 << 20), 64 << 10);
        assert_eq!(parts.of(0).collect::<Vec<_>>(), [&part(7, 1 << 20)]);
        assert_eq!(parts.first.len(), 1);
    }

    #[test]
    fn a_part_that_continues_the_last_one_is_joined_with_it() {
        let mut parts = SentParts::default();
        let of = |at: u64, offset: u64| SentPart { ino: 1, at, offset, len: 4096, is_end: at == 8192 };
        for (at, offset) in [(0, 0), (4096, 4096), (1 << 20, 0), ((1 << 20) + 4096, 4096), (8192, 8192)] {
            parts.note(0, of(at, offset), 1 << 20);
        }
        let two = SentPart { len: 8192, ..of(0, 0) };
        assert_eq!(parts.of(0).copied().collect::<Vec<_>>(), [two, SentPart { at: 1 << 20, ..two }, of(8192, 8192)]);
    }

    #[test]
    fn an_extent_has_a_bounded_number_of_parts() {
        let mut parts = SentParts::default();
        (0..1000).for_each(|ino| parts.note(0, part(ino, 0), 1 << 20));
        assert_eq!(parts.of(0).count(), 1 + MORE_MAX);
    }
}
