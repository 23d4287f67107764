//! [`MovedExtents`]: old and new addresses of data extents that relocation moved.
//!
//! A thread that looked up an extent before a move may read the extent afterwards, or refer to it in a new item. The
//! map translates an old address to the new address. The old data also stays in place until no thread can have the old
//! address any more.
//!
//! Owns the map, under a lock. Lock order: no other lock is taken under the map's lock.
//!
//! Invariants:
//! - I1. A move is noted before the checksums of the old address are deleted: a reader that finds no checksum looks the
//!   address up again and finds the new address.
//! - I2. An address is in the map only while its block group is read-only, so the address is not allocated again while
//!   it is in the map. The address is not discarded either: with synchronous discards, the discard waits for the end of
//!   the move ([`Engine::discard_moved`](crate::Engine::discard_moved)).
//! - I3. The copy of an extent may move again while the first move is in the map, because several block groups are
//!   emptied at the same time. An address is therefore translated until it is not in the map. This ends: a copy is made
//!   only in a writable group, so by I2 no chain of moves returns to an address in the map. A relocation forgets a move
//!   only after every thread with an earlier address of the chain has finished, because these threads looked their
//!   addresses up before the move.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use ubtrfs_format::Logical;
use ubtrfs_space::Extent;

/// The moves whose old addresses may still be in use.
#[derive(Debug, Default)]
pub(crate) struct MovedExtents {
    /// Whether the map has entries. Most of the time the map is empty.
    any: AtomicBool,
    /// Length and new address, by the old address.
    moves: RwLock<BTreeMap<u64, (u64, Logical)>>,
}

impl MovedExtents {
    /// The current address of data that was at this address (I3).
    pub(crate) fn current(&self, at: Logical) -> Logical {
        if !self.any.load(Ordering::Acquire) {
            return at;
        }
        let moves = self.moves.read();
        let next = |at: Logical| {
            let (start, (len_bytes, to)) = moves.range(..=at.0).next_back()?;
            let offset = at.0.saturating_sub(*start);
            (offset < *len_bytes).then(|| to.advance(offset))
        };
        let mut current = at;
        while let Some(to) = next(current) {
            current = to;
        }
        current
    }

    /// Whether a part of this range is an old address.
    pub(crate) fn covers(&self, extent: Extent) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let moves = self.moves.read();
        let last = moves.range(..extent.end()).next_back();
        last.is_some_and(|(start, (len_bytes, _))| start.saturating_add(*len_bytes) > extent.bytenr.0)
    }

    /// Notes moves.
    pub(crate) fn note(&self, moves: impl IntoIterator<Item = (Extent, Logical)>) {
        let mut map = self.moves.write();
        for (from, to) in moves {
            let last = map.range(..=to.0).next_back();
            let is_old = last.is_some_and(|(start, (len_bytes, _))| to.0.saturating_sub(*start) < *len_bytes);
            assert!(!is_old, "I3: an extent moves to {to}, an address that is in the map");
            let before = map.insert(from.bytenr.0, (from.len_bytes, to));
            assert!(before.is_none(), "I2: the extent at {} moves twice", from.bytenr);
        }
        self.any.store(!map.is_empty(), Ordering::Release);
    }

    /// Drops the moves of extents that were in this range. No thread may still have an old address in the range.
    pub(crate) fn forget(&self, range: Range<u64>) {
        let mut map = self.moves.write();
        map.retain(|start, _| !range.contains(start));
        self.any.store(!map.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_touches_an_old_address_is_covered() {
        let moved = MovedExtents::default();
        let extent = |start, len_bytes| Extent::new(Logical(start), len_bytes);
        assert!(!moved.covers(extent(0, 1 << 30)));
        moved.note([(extent(8192, 8192), Logical(1 << 20))]);
        let covered = [(0, 8192), (4096, 8192), (8192, 4096), (12288, 8192), (16384, 4096), (0, 1 << 20)];
        assert_eq!(
            covered.map(|(start, len)| moved.covers(extent(start, len))),
            [false, true, true, true, false, true]
        );
    }

    #[test]
    fn addresses_inside_moved_extents_are_translated() {
        let moved = MovedExtents::default();
        assert_eq!(moved.current(Logical(5)), Logical(5));
        moved.note([(Extent::new(Logical(4096), 8192), Logical(1 << 20))]);
        let found = [0, 4095, 4096, 8192, 12287, 12288].map(|at| moved.current(Logical(at)).0);
        assert_eq!(found, [0, 4095, 1 << 20, (1 << 20) + 4096, (1 << 20) + 8191, 12288]);
        moved.forget(0..4096);
        assert_eq!(moved.current(Logical(4096)), Logical(1 << 20));
        moved.forget(0..8192);
        assert_eq!(moved.current(Logical(4096)), Logical(4096));
    }

    #[test]
    fn the_address_from_before_two_moves_is_translated_twice() {
        let moved = MovedExtents::default();
        moved.note([(Extent::new(Logical(4096), 8192), Logical(1 << 20))]);
        moved.note([(Extent::new(Logical(1 << 20), 8192), Logical(2 << 20))]);
        assert_eq!(moved.current(Logical(8192)), Logical((2 << 20) + 4096));
    }
}
