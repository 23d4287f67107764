//! Finds the wrong references by a second walk over all trees, if the sum of any bucket of references is not zero.

use ubtrfs_format::{KeyType, RootId};

use crate::checker::Checker;
use crate::fingerprint::{Fact, Sides};
use crate::problem::{Code, Place};
use crate::walk::LENGTH;

impl<'a> Checker<'a> {
    /// Compares references with extent items.
    pub(crate) fn compare_refs(&mut self) {
        if self.refs.buckets_agree() || self.extents_have_gaps() || (self.has_gaps && self.sink.has_errors()) {
            return;
        }
        self.progress.stage("finding wrong references", None);
        self.refs.keep_disagreements();
        self.second_walk();
        let (facts, overflowed) = self.refs.disagreements();
        // Extents for which a wrong reference was reported. A wrong length of these extents is not reported in
        // addition.
        let mut told = std::collections::HashSet::new();
        for (fact, sides) in facts.iter().filter(|(fact, _)| fact.kind != LENGTH) {
            told.insert(fact.subject);
            self.tell_reference(fact, sides);
        }
        for (fact, sides) in facts.iter().filter(|(fact, _)| fact.kind == LENGTH) {
            if told.insert(fact.subject) {
                let text = format!(
                    "data extent {}: {} file extents have a length of {} bytes, the extent item has {} such references",
                    fact.subject, sides.minus, fact.parts[0], sides.plus
                );
                self.sink.report(Code::FileExtent, place(sides), text);
            }
        }
        if overflowed {
            let text = "too many wrong references to list them all";
            self.sink.report(Code::ExtentRef, Place::tree(RootId::EXTENT_TREE), text);
        }
    }

    /// Walks every tree again, only to add the references of bad buckets to the ledger. The second walk reports and
    /// counts nothing.
    fn second_walk(&mut self) {
        self.sink.mute(true);
        self.quota.pause();
        self.blocks.forget_visits();
        let stats = self.stats;
        let walked = std::mem::take(&mut self.walked);
        for root in &walked {
            if root.id == RootId::EXTENT_TREE {
                self.reread_extents(root);
            } else {
                self.walk(root, &mut |_, _| {});
            }
        }
        self.walked = walked;
        self.stats = stats;
        self.sink.mute(false);
    }

    fn tell_reference(&mut self, fact: &Fact, sides: &Sides) {
        let [a, b, c] = fact.parts;
        let bytenr = fact.subject;
        let what = match KeyType(u8::try_from(fact.kind).unwrap_or_default()) {
            KeyType::TREE_BLOCK_REF => format!("tree block {bytenr}: references of tree {a}"),
            KeyType::SHARED_BLOCK_REF => format!("tree block {bytenr}: references of tree block {a}"),
            KeyType::SHARED_DATA_REF => format!("data extent {bytenr}: references of leaf {a}"),
            _ => format!("data extent {bytenr}: references of tree {a} inode {b} at {c}"),
        };
        let code = match (sides.plus, sides.minus) {
            // `compare_blocks` reports tree blocks without an extent item.
            (0, _) if self.blocks.is_unrecorded(bytenr) => return,
            (0, _) if self.lacks_data_extent(fact) => Code::ExtentMissing,
            _ => Code::ExtentRef,
        };
        let text = format!("{what}: {} found, {} in the extent tree", sides.minus, sides.plus);
        self.sink.report(code, place(sides), text);
    }

    fn lacks_data_extent(&self, fact: &Fact) -> bool {
        let is_data = [KeyType::EXTENT_DATA_REF, KeyType::SHARED_DATA_REF].iter().any(|k| u64::from(k.0) == fact.kind);
        is_data && self.data.list.binary_search_by_key(&fact.subject, |extent| extent.bytenr).is_err()
    }
}

fn place(sides: &Sides) -> Place {
    match sides.minus_at.or(sides.plus_at) {
        Some((tree, bytenr, slot)) => Place::item(RootId(tree), bytenr, slot),
        None => Place::default(),
    }
}
