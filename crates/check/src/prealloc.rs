//! Checks preallocated extents that have checksums.
//!
//! Linux writes into a preallocated extent in place, even if an older kernel let two files share the extent. Then one
//! file's item marks the extent as written, while the other file's item still marks it as preallocated. So the
//! checksums are wrong only if no file marks the extent as written.
//!
//! Invariants:
//! - I1. At most [`SUSPECTS_MAX`] extents are remembered; `E-LIMIT` is reported if there were more.

use std::collections::HashMap;

use ubtrfs_format::KeyType;

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::walk::{Leaf, TreeKind, WalkEvent};

/// Maximum number of remembered extents.
const SUSPECTS_MAX: usize = 1 << 16;

/// Preallocated extents that have checksums, by address.
#[derive(Debug, Default)]
pub(crate) struct Prealloc {
    suspects: HashMap<u64, (Place, String)>,
    overflowed: bool,
}

impl Prealloc {
    /// Remembers an extent that has checksums although a file marks it as preallocated.
    pub(crate) fn suspect(&mut self, bytenr: u64, place: Place, text: String) {
        if self.suspects.len() >= SUSPECTS_MAX {
            self.overflowed = true;
            return;
        }
        self.suspects.entry(bytenr).or_insert((place, text));
    }
}

impl<'a> Checker<'a> {
    /// If there are suspects, walks subvolumes, relocation trees and logs again to find files that mark these extents
    /// as written. Reports the remaining suspects.
    pub(crate) fn compare_prealloc(&mut self) {
        let mut suspects = std::mem::take(&mut self.prealloc.suspects);
        if suspects.is_empty() {
            return;
        }
        self.sink.mute(true);
        let stats = self.stats;
        let roots = self.walked.iter().filter(|root| matches!(root.kind, TreeKind::Files | TreeKind::Reloc)).copied();
        for root in roots.chain(self.log.roots.clone()).collect::<Vec<_>>() {
            self.log_blocks.clear();
            self.walk(&root, &mut |_, event| match event {
                WalkEvent::Leaf(leaf) => forget_written(leaf, &mut suspects),
                // Some leaves of the tree were not read. A file extent in these leaves may mark any of the suspects as
                // written, so none of the suspects is reported.
                WalkEvent::Known(_) | WalkEvent::Gap => suspects.clear(),
            });
        }
        self.stats = stats;
        self.sink.mute(false);
        let mut suspects: Vec<_> = suspects.into_iter().collect();
        suspects.sort_by_key(|(bytenr, _)| *bytenr);
        for (_, (place, text)) in suspects {
            self.sink.report(Code::CsumExtra, place, text);
        }
        if self.prealloc.overflowed {
            self.sink.report(
                Code::Limit,
                Place::default(),
                "too many preallocated extents have checksums to check them all",
            );
        }
    }
}

fn forget_written(leaf: &Leaf<'_>, suspects: &mut HashMap<u64, (Place, String)>) {
    for (_, _, data) in leaf.items().filter(|(_, key, _)| key.item_type == KeyType::EXTENT_DATA) {
        if let (Some(1), Some(bytenr)) = (u8_at(data, 20), u64_at(data, 21)) {
            suspects.remove(&bytenr);
        }
    }
}
