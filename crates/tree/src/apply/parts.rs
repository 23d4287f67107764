//! Applies a long batch in parallel parts. Each part is a range of the root's children, walked like a whole tree. The
//! pointers that the parts return form the run of the root.
//!
//! ```text
//! root        [ a  b  c  d  e  f ]
//! part 0        a' b' b" c            first thread and sink
//! part 1                    d  e' f'  second thread and sink
//! new root    [ a' b' b" c  d  e' f' ]
//! ```
//!
//! Invariants:
//! - I1. Each node below the root is touched by at most one part, because each part ends between two children of the
//!   root, and never merges its nodes with nodes of another part. So each part leaves at most one underfull node
//!   per level at each end.
//! - I2. The calls to each part's sink follow the rules of [`NodeSink`]. The calls for the root and its new nodes go to
//!   the main sink, before and after all parts.
//! - I3. If a batch deletes nearly all items, the root may keep a single child until the next batch. Linux accepts such
//!   roots.

use std::ops::{AddAssign, Range};
use std::sync::Arc;

use ubtrfs_error::{Result, side_by_side};

use super::child_run::ChildRun;
use super::{Applier, ApplyStats, TouchedNode};
use crate::node::Node;
use crate::storage::NodeSink;

/// The sink of a part.
pub type PartSink<'s> = &'s mut (dyn NodeSink + Send);

/// The result of a part: pointers for the root, and statistics.
struct AppliedPart {
    children: ChildRun,
    stats: ApplyStats,
}

impl Applier<'_> {
    /// Walks below an internal root, in at most as many parts as there are sinks.
    pub(super) fn walk_parts(&mut self, touched: TouchedNode, sinks: &mut [PartSink<'_>]) -> Result<()> {
        let TouchedNode { node: root, changes } = touched;
        self.dissolve(&root)?;
        self.run_below(root.level()).add_old_children(root.nritems());
        let children = self.reached_children(&root, changes);
        let shares = shares(&children, sinks.len());
        if shares.len() < 2 {
            return self.walk_children(&root, 0..root.nritems(), &children, true);
        }
        let (source, batch, tree, last_address) = (self.source, self.batch, self.tree, self.last_address);
        let works = shares.iter().zip(sinks).enumerate().map(|(at, (share, sink))| {
            let from = if at == 0 { 0 } else { children[share.start].0 };
            let to = shares.get(at.saturating_add(1)).map_or(root.nritems(), |next| children[next.start].0);
            let (root, children) = (&root, &children[share.clone()]);
            move || {
                let mut applier = Applier::new(source, &mut **sink, batch, tree, last_address);
                // The part leaves its pointers for the root in a run, which is joined with the runs of the other
                // parts.
                applier.top = root.level();
                applier.run_part(root, from..to, children, at == 0)
            }
        });
        for part in side_by_side(works) {
            let AppliedPart { children, stats } = part?;
            self.run_below(root.level()).append(children);
            self.stats.add_assign(stats);
        }
        self.cut_children(root.level())
    }

    fn run_part(
        mut self,
        root: &Arc<Node>,
        slots: Range<usize>,
        children: &[(usize, Range<usize>)],
        first_has_effect: bool,
    ) -> Result<AppliedPart> {
        self.walk_children(root, slots, children, first_has_effect)?;
        for level in 0..root.level() {
            self.end_run(level)?;
        }
        let children = std::mem::take(self.run_below(root.level()));
        Ok(AppliedPart { children, stats: self.stats })
    }
}

/// Splits the children into at most `count` ranges with about equal numbers of changes.
#[allow(
    clippy::arithmetic_side_effects,
    reason = "positions in a batch, in order; the product is below 2^64 because `number` is at most the number of threads"
)]
fn shares(children: &[(usize, Range<usize>)], count: usize) -> Vec<Range<usize>> {
    let (Some((_, first)), Some((_, last))) = (children.first(), children.last()) else { return Vec::new() };
    let (start, total) = (first.start, last.end - first.start);
    let mut shares = Vec::with_capacity(count);
    let mut from = 0;
    for number in 1..=count {
        let until = start + total * number / count;
        let to = children.partition_point(|(_, changes)| changes.end <= until);
        if to > from {
            shares.push(from..to);
            from = to;
        }
    }
    shares
}
