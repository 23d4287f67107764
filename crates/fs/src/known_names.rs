//! The names of a directory that was empty in this session once: all of them are known, so that one that is not among
//! them does not exist, without a look into the tree. Making a file looks for its name first.
//!
//! Invariants:
//! - I1. The set holds the hash of every name that the directory has, and maybe of some that it had. It is kept under the
//!   inode's state lock, by [`entry_changed`](crate::create::entry_changed), which every change of an entry calls.
//! - I2. A directory that had entries when it was loaded has no set; one whose set would take too much memory loses it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ubtrfs_format::hash::name_hash;

/// Names in the sets of all directories.
#[derive(Debug)]
pub(crate) struct NameBudget {
    nr_names: AtomicUsize,
    max_names: usize,
}

/// The hashes of all names of a directory.
#[derive(Debug)]
pub(crate) struct KnownNames {
    hashes: HashSet<u64>,
    budget: Arc<NameBudget>,
}

impl NameBudget {
    /// Sets that take about `max_bytes` together.
    pub(crate) fn new(max_bytes: u64) -> Arc<Self> {
        let max_names = usize::try_from(max_bytes / NAME_BYTES).unwrap_or(usize::MAX);
        Arc::new(Self { nr_names: AtomicUsize::new(0), max_names })
    }
}

impl KnownNames {
    /// The names of an empty directory.
    pub(crate) fn of_empty(budget: &Arc<NameBudget>) -> Self {
        Self { hashes: HashSet::default(), budget: Arc::clone(budget) }
    }

    /// Whether the directory does not have the name.
    pub(crate) fn lacks(&self, name: &[u8]) -> bool {
        !self.hashes.contains(&name_hash(name))
    }

    /// The directory gets a name. False where the set is given up (I2).
    #[must_use]
    pub(crate) fn add(&mut self, name: &[u8]) -> bool {
        if self.hashes.insert(name_hash(name)) {
            self.budget.nr_names.fetch_add(1, Ordering::Relaxed) < self.budget.max_names
        } else {
            true
        }
    }
}

impl Drop for KnownNames {
    fn drop(&mut self) {
        self.budget.nr_names.fetch_sub(self.hashes.len(), Ordering::Relaxed);
    }
}

/// Memory of a name in a set, about.
const NAME_BYTES: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_were_added_are_not_lacking_and_the_budget_is_given_back() {
        let budget = NameBudget::new(3 * NAME_BYTES);
        let mut names = KnownNames::of_empty(&budget);
        assert!(names.lacks(b"a"));
        assert!(names.add(b"a") && names.add(b"b") && names.add(b"b"));
        assert!(!names.lacks(b"a") && names.lacks(b"c"));
        let mut others = KnownNames::of_empty(&budget);
        assert!(others.add(b"x") && !others.add(b"y"));
        drop(names);
        assert!(others.add(b"z"));
    }
}
