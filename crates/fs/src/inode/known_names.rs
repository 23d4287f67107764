//! The known names of a directory that was empty when it was loaded or created. Every name in such a directory was
//! added later, so all of its names are known: any other name does not exist, and the tree need not be searched.
//! Creating a file first checks whether its name exists, so the set saves a tree search for each new file. (`server.rs`
//! of crate `fuse` decides how long the kernel may cache a missing name.)
//!
//! Invariants:
//! - I1. The set holds the hash of every name in the directory, and maybe of names that were removed. The set changes
//!   under the inode's state lock, in [`entry_changed`](crate::namei::create::entry_changed), which every change of an
//!   entry calls.
//! - I2. A directory that had entries when it was loaded has no set. A directory whose set would exceed the memory
//!   budget loses the set.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory budget of the sets of all directories.
#[derive(Debug)]
pub(crate) struct NameBudget {
    used_bytes: AtomicU64,
    max_bytes: u64,
}

/// A set of the hashes of all names of a directory. The set has false positives, because it consists of Bloom filters,
/// each for four times as many names as the previous one. A full filter takes 1.6 bytes per name. All bits of a name
/// are in one cache line.
#[derive(Debug)]
pub(crate) struct KnownNames {
    filters: Vec<Box<[CacheLine]>>,
    /// Number of names that the last filter still has room for.
    room: usize,
    budget: Arc<NameBudget>,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct CacheLine([u64; LINE_WORDS]);

impl NameBudget {
    /// Makes a budget of about `max_bytes` for all sets together.
    pub(crate) fn new(max_bytes: u64) -> Arc<Self> {
        Arc::new(Self { used_bytes: AtomicU64::new(0), max_bytes })
    }
}

impl KnownNames {
    /// Makes the set of an empty directory.
    pub(crate) fn of_empty(budget: &Arc<NameBudget>) -> Self {
        Self { filters: Vec::new(), room: 0, budget: Arc::clone(budget) }
    }

    /// Whether the directory certainly has no name with this hash.
    pub(crate) fn lacks(&self, hash: u64) -> bool {
        let spread = spread(hash);
        // Start with the last filters, which hold most names.
        !self.filters.iter().rev().any(|filter| {
            let line = &filter[line_of(filter, spread)];
            bits(spread).all(|(word, bit)| line.0[word] & bit != 0)
        })
    }

    /// Whether the set takes more memory than an inode in the cache.
    pub(crate) fn is_large(&self) -> bool {
        self.filters.len() >= LARGE_FILTERS
    }

    /// Adds the hash of a new name. Returns false if the set exceeds its budget and must be dropped (I2).
    #[must_use]
    #[allow(clippy::arithmetic_side_effects, reason = "`grow` has made room")]
    pub(crate) fn add(&mut self, hash: u64) -> bool {
        if self.room == 0 && !self.grow() {
            return false;
        }
        self.room -= 1;
        if let Some(filter) = self.filters.last_mut() {
            let spread = spread(hash);
            let line = line_of(filter, spread);
            bits(spread).for_each(|(word, bit)| filter[line].0[word] |= bit);
        }
        true
    }

    #[allow(clippy::arithmetic_side_effects, reason = "sizes of filters, which the memory budget bounds")]
    fn grow(&mut self) -> bool {
        let lines = 1 << (GROWTH_BITS * self.filters.len());
        let bytes = filter_bytes(lines);
        if self.budget.used_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.budget.max_bytes {
            self.budget.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        self.filters.push(vec![CacheLine::default(); lines].into_boxed_slice());
        self.room = lines * LINE_NAMES;
        true
    }
}

impl Drop for KnownNames {
    fn drop(&mut self) {
        let bytes = self.filters.iter().map(|filter| filter_bytes(filter.len())).sum();
        self.budget.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Spreads the 32 bits of a hash to 64 bits that look independent.
#[allow(clippy::arithmetic_side_effects, reason = "a hash has 32 bits")]
fn spread(hash: u64) -> u64 {
    let mixed = (hash + 1).wrapping_mul(SPREAD);
    (mixed ^ mixed >> 32).wrapping_mul(SPREAD)
}

/// Returns the line of a filter in which a name's bits lie. The high bits of `spread` choose the line.
#[allow(clippy::arithmetic_side_effects, reason = "a filter has at least one line")]
fn line_of(filter: &[CacheLine], spread: u64) -> usize {
    // The number of lines is a power of two, and at most 2^32.
    (spread >> 32) as usize & (filter.len() - 1)
}

/// Returns a name's bits in its line, as words and masks. The low bits of `spread` choose the first bit and the step
/// width.
#[allow(clippy::arithmetic_side_effects, reason = "few probes of small steps")]
fn bits(spread: u64) -> impl Iterator<Item = (usize, u64)> {
    let (start, step) = (spread, spread >> 9 | 1);
    (0..NR_PROBES).map(move |probe| {
        let bit = start.wrapping_add(probe * step) as usize % (64 * LINE_WORDS);
        (bit / 64, 1 << (bit % 64))
    })
}

#[allow(clippy::arithmetic_side_effects, reason = "sizes of filters, which the memory budget bounds")]
fn filter_bytes(lines: usize) -> u64 {
    (lines * size_of::<CacheLine>()) as u64
}

const LINE_WORDS: usize = 8;
/// Names per line. With `NR_PROBES` probes, a full filter wrongly reports 0.5 to 1 percent of the absent names as
/// present.
const LINE_NAMES: usize = 40;
const NR_PROBES: u64 = 6;
/// Each filter has four times the lines of the previous one.
const GROWTH_BITS: usize = 2;
/// Number of filters from which on a set is large. The third filter is added after 200 names: 40 in the first filter,
/// 160 in the second.
const LARGE_FILTERS: usize = 3;
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use ubtrfs_format::hash::name_hash;

    use super::*;

    #[test]
    fn names_that_were_added_are_not_lacking_and_few_others_are() {
        let mut names = KnownNames::of_empty(&NameBudget::new(1 << 20));
        assert!(names.lacks(name_hash(b"0")));
        let name = |number: usize| name_hash(format!("file-{number:06}").as_bytes());
        for number in 0..20_000 {
            assert!(names.add(name(number)), "{number}");
            assert!(!names.lacks(name(number)), "{number}");
        }
        assert!((0..20_000).all(|number| !names.lacks(name(number))));
        let seem_there = (20_000..40_000).filter(|&number| !names.lacks(name(number))).count();
        assert!(seem_there < 600, "{seem_there} of 20000");
        assert!(names.is_large());
    }

    #[test]
    fn the_budget_is_kept_and_given_back() {
        let budget = NameBudget::new(filter_bytes(1));
        let (mut names, mut others) = (KnownNames::of_empty(&budget), KnownNames::of_empty(&budget));
        assert!(names.add(1) && !others.add(2));
        let rest = (0..100).take_while(|&number| names.add(number)).count();
        assert_eq!(rest, LINE_NAMES - 1);
        drop(names);
        assert!(others.add(2));
    }
}
