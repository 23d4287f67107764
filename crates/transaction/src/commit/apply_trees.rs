//! Applies frozen items to their trees. Large batches of trees that share no blocks are applied in parallel, all other
//! batches one after another.
//!
//! One large batch is applied in parts ([`ubtrfs_tree::apply_in_parts`]). Several large batches are applied in
//! parallel, and each of them is cut into fewer parts than a batch that is applied alone.
//!
//! Invariants:
//! - I1. Trees that are applied in parallel have no block in common, so replacing a block of one tree changes no
//!   references of another tree's blocks. A subvolume shares no block with any tree if it is not a snapshot and no
//!   snapshot of it was ever taken.
//! - I2. All parallel applies read the delayed refs as they were before the first apply; new refs are appended after
//!   the last apply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ubtrfs_error::{Result, side_by_side};
use ubtrfs_format::Generation;
use ubtrfs_space::DelayedRefs;
use ubtrfs_tree::Changes;

use crate::cow::sink::{ApplyProgress, NewRefs, PART_MIN};
use crate::delayed::delayed_item::{FrozenBatch, FrozenItems};
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::nodes::threads::nr_threads;

/// A tree and the batch to apply.
type TreeBatch<'j> = (&'j Tree, &'j FrozenBatch<'j>);

impl Engine {
    /// Applies the frozen items of the trees `trees` and publishes the results. The caller holds the commit lock.
    pub(crate) fn apply_frozen(&self, trees: &[Arc<Tree>], refs: &mut DelayedRefs, transid: Generation) -> Result<()> {
        // Keep the frozen items in memory until no view is locked any more, because dropping many items takes time.
        let items: Vec<_> = trees.iter().map(|tree| tree.frozen()).collect();
        let applied = self.apply_items(trees, &items, refs, transid);
        drop(items);
        self.admission.frozen_items_dropped();
        applied
    }

    fn apply_items(
        &self,
        trees: &[Arc<Tree>],
        items: &[Arc<FrozenItems>],
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<()> {
        let batches: Vec<_> = items.iter().map(|items| items.batch()).collect();
        let progress = ApplyProgress::new(batches.iter().map(Changes::len).sum());
        let jobs = trees.iter().map(|tree| &**tree).zip(&batches);
        let (mut apart, mut in_turn): (Vec<TreeBatch<'_>>, Vec<TreeBatch<'_>>) =
            jobs.partition(|(tree, batch)| batch.len() >= PART_MIN && tree.shares_no_blocks());
        if apart.len() < 2 {
            in_turn.append(&mut apart);
        }
        for new_refs in self.apply_side_by_side(&apart, refs, transid, &progress)? {
            new_refs.append_to(refs);
        }
        for (tree, batch) in in_turn {
            let (new_refs, _) = self.apply_tree(tree, batch, refs, transid, &progress, nr_threads())?;
            new_refs.append_to(refs);
        }
        Ok(())
    }

    fn apply_side_by_side(
        &self,
        jobs: &[TreeBatch<'_>],
        refs: &DelayedRefs,
        transid: Generation,
        progress: &ApplyProgress,
    ) -> Result<Vec<NewRefs>> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let max_parts = nr_threads().checked_div(jobs.len()).unwrap_or_default().max(1);
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<NewRefs>> {
            let mut done = Vec::new();
            while let Some((tree, batch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push(self.apply_tree(tree, *batch, refs, transid, progress, max_parts)?.0);
            }
            Ok(done)
        };
        let results = side_by_side((0..nr_threads().min(jobs.len())).map(|_| work));
        Ok(results.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }
}

impl Tree {
    /// Whether the root item shows that the tree shares no blocks. Taking a snapshot notes the transaction in the root
    /// items of the source and of the snapshot, in Linux too.
    fn shares_no_blocks(&self) -> bool {
        self.id().is_fs_tree() && self.root.lock().last_snapshot == Generation(0)
    }
}
