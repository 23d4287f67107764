//! A long batch applied in parts, side by side: each part is a range of the root's children, and is walked as a whole
//! tree would be. The pointers that the parts end with meet in the run of the root.
//!
//! ```text
//! root        [ a  b  c  d  e  f ]
//! part 0        a' b' b"           one thread, one sink
//! part 1                 d  e' f'  another one
//! new root    [ a' b' b" d  e' f' ]
//! ```
//!
//! Invariants:
//! - I1. A node below the root is touched by one part alone: parts are cut between children of the root, and neighbours of
//!   two parts are not merged. So each part leaves at most one underfull node a level at each of its ends.
//! - I2. What a sink hears of its part keeps the rules of [`NodeSink`]. The root is taken apart, and its new nodes are made,
//!   through the first sink, before and after all parts.
//! - I3. Where nearly all of a tree goes, what is left can be one part's only node: the root then has a single child, until
//!   the next batch. Linux takes such a root as it is.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;

use ubtrfs_error::Result;

use super::child_run::ChildRun;
use super::{Applier, ApplyStats, Touched};
use crate::node::Node;
use crate::storage::NodeSink;

/// A sink for one part.
pub type PartSink<'s> = &'s mut (dyn NodeSink + Send);

/// What a part ends with: pointers for the root, and what it did.
struct Part {
    children: ChildRun,
    stats: ApplyStats,
}

impl Applier<'_> {
    /// Walks below a root that is no leaf, in as many parts as there are sinks, or fewer.
    pub(super) fn walk_parts(&mut self, touched: Touched, sinks: &mut [PartSink<'_>]) -> Result<()> {
        let Touched { node: root, changes } = touched;
        self.take_apart(&root)?;
        self.run_above(root.level() - 1).add_old_children(root.nritems());
        let children = self.reached_children(&root, changes);
        let shares = shares(&children, sinks.len());
        if shares.len() < 2 {
            return self.walk_children(&root, 0..root.nritems(), &children, true);
        }
        let (source, batch, tree, last_address) = (self.source, self.batch, self.tree, self.last_address);
        let parts: Vec<Result<Part>> = std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(shares.len());
            for (at, (share, sink)) in shares.iter().zip(sinks).enumerate() {
                let from = if at == 0 { 0 } else { children[share.start].0 };
                let to = shares.get(at + 1).map_or(root.nritems(), |next| children[next.start].0);
                let (root, children) = (&root, &children[share.clone()]);
                threads.push(scope.spawn(move || {
                    let mut applier = Applier::new(source, &mut **sink, batch, tree, last_address);
                    // The root's run goes on in the next part.
                    applier.top = root.level();
                    applier.run_part(root, from..to, children, at == 0)
                }));
            }
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        for part in parts {
            let Part { children, stats } = part?;
            self.run_above(root.level() - 1).append(children);
            self.stats += stats;
        }
        self.cut_children(root.level())
    }

    fn run_part(
        mut self,
        root: &Arc<Node>,
        slots: Range<usize>,
        children: &[(usize, Range<usize>)],
        first_has_effect: bool,
    ) -> Result<Part> {
        self.walk_children(root, slots, children, first_has_effect)?;
        for level in 0..root.level() {
            self.end_run(level)?;
        }
        let children = std::mem::take(self.run_above(root.level() - 1));
        Ok(Part { children, stats: self.stats })
    }
}

/// Splits the children into at most so many ranges with about equal numbers of changes.
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
