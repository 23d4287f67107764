//! [`RefDeltas`]: changes of the references to an extent. A single reference, the usual case, needs no allocation.
//!
//! Invariants:
//! - I1. No delta is zero, and a single delta is stored as [`Deltas::One`], so equal changes compare equal.

use std::collections::BTreeMap;

use crate::RefKey;

/// Changes of the reference counts of an extent. No change is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RefDeltas {
    deltas: Deltas,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Deltas {
    #[default]
    None,
    One(RefKey, i64),
    Many(BTreeMap<RefKey, i64>),
}

impl RefDeltas {
    /// Adds `delta` to the change of `reference`. The sum saturates; only 2^63 references could reach the limit.
    pub fn add(&mut self, reference: RefKey, delta: i64) {
        self.deltas = match std::mem::take(&mut self.deltas) {
            Deltas::None => Deltas::One(reference, delta),
            Deltas::One(known, before) if known == reference => Deltas::One(known, before.saturating_add(delta)),
            Deltas::One(known, before) => Deltas::Many(BTreeMap::from([(known, before), (reference, delta)])),
            Deltas::Many(mut many) => {
                let sum = many.entry(reference).or_default();
                *sum = sum.saturating_add(delta);
                Deltas::Many(many)
            }
        };
        self.drop_zero(&reference);
    }

    /// Restores I1 after a change of `reference`.
    fn drop_zero(&mut self, reference: &RefKey) {
        match &mut self.deltas {
            Deltas::One(_, 0) => self.deltas = Deltas::None,
            Deltas::None | Deltas::One(..) => {}
            Deltas::Many(many) => {
                if many.get(reference) == Some(&0) {
                    many.remove(reference);
                }
                if let (1, Some((&last, &delta))) = (many.len(), many.first_key_value()) {
                    self.deltas = Deltas::One(last, delta);
                }
            }
        }
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        matches!(self.deltas, Deltas::None)
    }

    /// Iterates over references and deltas, ordered by reference.
    pub fn iter(&self) -> impl Iterator<Item = (&RefKey, i64)> {
        let (one, many) = match &self.deltas {
            Deltas::None => (None, None),
            Deltas::One(reference, delta) => (Some((reference, *delta)), None),
            Deltas::Many(many) => (None, Some(many.iter().map(|(reference, delta)| (reference, *delta)))),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl FromIterator<(RefKey, i64)> for RefDeltas {
    fn from_iter<I: IntoIterator<Item = (RefKey, i64)>>(deltas: I) -> Self {
        let mut all = Self::default();
        deltas.into_iter().for_each(|(reference, delta)| all.add(reference, delta));
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ubtrfs_format::Logical;

    use super::*;

    proptest! {
        #[test]
        fn deltas_equal_a_map_without_zeros(changes in prop::collection::vec((0u64..4, -2i64..3), 0..24)) {
            let mut deltas = RefDeltas::default();
            let mut model = BTreeMap::new();
            for (parent, delta) in changes {
                let reference = RefKey::SharedData(Logical(parent));
                deltas.add(reference, delta);
                *model.entry(reference).or_default() += delta;
                model.retain(|_, delta| *delta != 0);
                prop_assert!(deltas.iter().eq(model.iter().map(|(reference, delta)| (reference, *delta))));
                prop_assert_eq!(deltas.is_empty(), model.is_empty());
                prop_assert_eq!(&deltas, &model.iter().map(|(reference, delta)| (*reference, *delta)).collect(), "I1");
            }
        }
    }
}
