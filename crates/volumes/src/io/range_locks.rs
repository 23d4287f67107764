//! [`RangeLocks`]: keeps a repair from overwriting newer content, without stopping writes elsewhere.
//!
//! The logical address space is divided into ranges. A lock serves every [`NR_LOCKS`]th range.
//!
//! Invariant:
//! - I1. Locks are taken in ascending order of their numbers.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use ubtrfs_format::Logical;

/// A lock for each range of logical addresses.
#[derive(Debug)]
pub(crate) struct RangeLocks {
    locks: Vec<RwLock<()>>,
}

impl Default for RangeLocks {
    fn default() -> Self {
        Self { locks: (0..NR_LOCKS).map(|_| RwLock::new(())).collect() }
    }
}

/// Shared locks of a write: those of its first two ranges, and those of further ranges.
pub(crate) type WriteLocks<'l> = ([Option<RwLockReadGuard<'l, ()>>; 2], Vec<RwLockReadGuard<'l, ()>>);

impl RangeLocks {
    /// Prevents repairs of these bytes while the guards are held.
    pub(crate) fn write(&self, at: Logical, len_bytes: u64) -> WriteLocks<'_> {
        let mut locks = self.locks_of(at, len_bytes).map(|lock| lock.read());
        ([locks.next(), locks.next()], locks.collect())
    }

    /// Waits for the writes of these bytes that run, and prevents further ones while the guards are held.
    pub(crate) fn repair(&self, at: Logical, len_bytes: u64) -> Vec<RwLockWriteGuard<'_, ()>> {
        self.locks_of(at, len_bytes).map(|lock| lock.write()).collect()
    }

    /// The locks of the ranges that these bytes touch (I1).
    fn locks_of(&self, at: Logical, len_bytes: u64) -> impl Iterator<Item = &RwLock<()>> {
        let first = at.0 / RANGE_BYTES;
        let last = at.0.saturating_add(len_bytes.saturating_sub(1)) / RANGE_BYTES;
        let is_among = move |number: u64| number.wrapping_sub(first) % NR_LOCKS <= last.saturating_sub(first);
        (0..).zip(&self.locks).filter(move |(number, _)| is_among(*number)).map(|(_, lock)| lock)
    }
}

/// Bytes of a range: a usual write touches at most two.
const RANGE_BYTES: u64 = 8 << 20;
const NR_LOCKS: u64 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_excludes_exactly_the_writes_to_its_ranges() {
        let locks = RangeLocks::default();
        for (at, len) in [(0, 1), (RANGE_BYTES - 1, 2), (31 * RANGE_BYTES, RANGE_BYTES + 1), (5, 40 * RANGE_BYTES)] {
            let writing = locks.write(Logical(at), len);
            for number in 0..NR_LOCKS {
                let touches = (0..3).any(|turn| {
                    let start = (number + turn * NR_LOCKS) * RANGE_BYTES;
                    start < at + len && at < start + RANGE_BYTES
                });
                assert_eq!(locks.locks[number as usize].try_write().is_none(), touches, "{number}: {at} {len}");
            }
            drop(writing);
            let repairing = locks.repair(Logical(at), len);
            assert!(locks.locks[(at / RANGE_BYTES) as usize].try_read().is_none());
            drop(repairing);
        }
    }
}
