//! Sums of hashes that show whether two sides list equal facts, without keeping the facts.
//!
//! A fact with two sides (for example a reference in the extent tree and the pointer itself, or a `DIR_INDEX` item and
//! an `INODE_REF`) is added with weight +n on one side and -n on the other. If all facts agree, every bucket is zero.
//! Otherwise a second walk keeps the facts of the non-zero buckets and finds the facts that disagree.
//!
//! Invariants:
//! - I1. The hash has a random key, so a crafted image cannot make wrong facts cancel out.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A keyed hash of numbers and names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hash {
    keys: [u64; 2],
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a).wrapping_mul(u128::from(b));
    product as u64 ^ (product >> 64) as u64
}

impl Hash {
    pub(crate) fn random() -> Self {
        let key = || RandomState::new().build_hasher().finish() | 1;
        Self { keys: [key(), key()] }
    }

    pub(crate) fn numbers(&self, parts: &[u64]) -> u64 {
        let mut state = self.keys[0] ^ parts.len() as u64;
        for &part in parts {
            state = fold(state ^ part ^ 0x9e37_79b9_7f4a_7c15, self.keys[1] ^ part.rotate_left(32));
            state = state.wrapping_add(part).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (state >> 29);
        }
        fold(state ^ self.keys[1], self.keys[0]) ^ state
    }

    pub(crate) fn name(&self, name: &[u8]) -> u64 {
        let mut state = self.keys[1] ^ name.len() as u64;
        for piece in name.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            let word = u64::from_le_bytes(word);
            state = fold(state ^ word, self.keys[0] ^ word.rotate_left(17)).wrapping_add(word) ^ (state >> 31);
        }
        fold(state ^ self.keys[0], self.keys[1]) ^ state
    }
}

/// A fact that both sides must list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Fact {
    /// An extent's address or an inode number. The subject determines the bucket.
    pub(crate) subject: u64,
    /// The kind of fact.
    pub(crate) kind: u64,
    pub(crate) parts: [u64; 3],
}

/// The two sides of a fact, as the second walk found them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sides {
    /// Sum of positive weights.
    pub(crate) plus: i64,
    /// Tree, block and slot of an occurrence with positive weight.
    pub(crate) plus_at: Option<(u64, u64, usize)>,
    /// Sum of negative weights as a positive number.
    pub(crate) minus: i64,
    /// Tree, block and slot of an occurrence with negative weight.
    pub(crate) minus_at: Option<(u64, u64, usize)>,
}

/// The sums and, in the second walk, the facts of bad buckets. A bucket is bad if its sum is not zero.
#[derive(Debug)]
pub(crate) struct Ledger {
    hash: Hash,
    buckets: Vec<u64>,
    /// Sum of all buckets, plus the sums that were passed to [`Ledger::add_total`].
    total: u64,
    kept: Option<KeptFacts>,
}

#[derive(Debug)]
struct KeptFacts {
    is_bad: Vec<bool>,
    facts: HashMap<Fact, Sides>,
    overflowed: bool,
}

/// Maximum number of facts that the second walk keeps.
const KEPT_MAX: usize = 1 << 20;

impl Ledger {
    /// Makes an empty ledger with `nr_buckets` buckets, a power of two.
    pub(crate) fn new(hash: Hash, nr_buckets: usize) -> Self {
        Self { hash, buckets: vec![0; nr_buckets], total: 0, kept: None }
    }

    /// Adds a fact; `at` is tree, block and slot.
    pub(crate) fn add(&mut self, fact: Fact, weight: i64, at: (u64, u64, usize)) {
        let bucket = self.bucket_of(fact.subject);
        match &mut self.kept {
            None => {
                let [a, b, c] = fact.parts;
                let hash = self.hash.numbers(&[fact.subject, fact.kind, a, b, c]);
                let sum = hash.wrapping_mul(weight.cast_unsigned());
                self.buckets[bucket] = self.buckets[bucket].wrapping_add(sum);
                self.total = self.total.wrapping_add(sum);
            }
            Some(kept) if kept.is_bad[bucket] => {
                if kept.facts.len() >= KEPT_MAX && !kept.facts.contains_key(&fact) {
                    kept.overflowed = true;
                    return;
                }
                let sides = kept.facts.entry(fact).or_default();
                if weight > 0 {
                    sides.plus = sides.plus.saturating_add(weight);
                    sides.plus_at = Some(at);
                } else {
                    sides.minus = sides.minus.saturating_add(weight.saturating_neg());
                    sides.minus_at = Some(at);
                }
            }
            Some(_) => {}
        }
    }

    fn bucket_of(&self, subject: u64) -> usize {
        self.hash.numbers(&[subject]) as usize & self.buckets.len().saturating_sub(1)
    }

    /// The sum of all facts.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds the sum of many facts to the total, but not to the buckets.
    pub(crate) fn add_total(&mut self, sum: u64) {
        self.total = self.total.wrapping_add(sum);
    }

    /// Whether the total is zero, which means that both sides list equal facts so far.
    pub(crate) fn agrees(&self) -> bool {
        self.total == 0
    }

    /// Whether every bucket is zero, which means that both sides list equal facts.
    pub(crate) fn buckets_agree(&self) -> bool {
        self.buckets.iter().all(|&sum| sum == 0)
    }

    /// Empties the ledger.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(0);
        self.total = 0;
        self.kept = None;
    }

    /// Begins the second walk, which keeps the facts of bad buckets.
    pub(crate) fn keep_disagreements(&mut self) {
        let is_bad = self.buckets.iter().map(|&sum| sum != 0).collect();
        self.kept = Some(KeptFacts { is_bad, facts: HashMap::new(), overflowed: false });
    }

    /// The facts that disagree, sorted, and whether there were too many to keep all of them.
    pub(crate) fn disagreements(&mut self) -> (Vec<(Fact, Sides)>, bool) {
        let Some(kept) = self.kept.take() else { return (Vec::new(), false) };
        let mut facts: Vec<(Fact, Sides)> =
            kept.facts.into_iter().filter(|(_, sides)| sides.plus != sides.minus).collect();
        facts.sort_by_key(|(fact, _)| *fact);
        (facts, kept.overflowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_contradictions_are_found() {
        let mut ledger = Ledger::new(Hash::random(), 64);
        let fact = |subject| Fact { subject, kind: 1, parts: [subject * 3, 0, 7] };
        let both = |ledger: &mut Ledger| {
            for subject in 0..1000 {
                ledger.add(fact(subject), 2, (1, 1, 1));
                ledger.add(fact(subject), -1, (2, 2, 2));
                if subject != 77 {
                    ledger.add(fact(subject), -1, (2, 2, 2));
                }
            }
        };
        both(&mut ledger);
        assert!(!ledger.agrees());
        ledger.keep_disagreements();
        both(&mut ledger);
        let (found, overflowed) = ledger.disagreements();
        assert!(!overflowed);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0, found[0].1.plus, found[0].1.minus), (fact(77), 2, 1));
    }
}
