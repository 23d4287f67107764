//! Delayed items leave memory for their trees' nodes without a commit: rows, while the names of their transaction go on
//! gathering, because few names change as many leaves as many ([`crate::delayed::delayed_item`]).
//!
//! ```text
//! commit ----- rows -> nodes ----- rows -> nodes ----- rows -> nodes ----- rows and names -> nodes, commit
//!       names .....................................................
//! ```
//!
//! Crash argument: the nodes lie at addresses that no committed superblock reaches, and what they replace stays where it
//! is until the commit ([`crate::cow::sink`], I3). The superblock is not written, so a cut shows the last commit.
//!
//! Invariants:
//! - I1. The transaction stays the same, and its operations are in whole when it is committed: that some of their items
//!   are in nodes and some delayed is seen by nobody who reads through [`Tree`].
//! - I2. The tree log tells what changed since the last commit from delayed items and nodes of that commit. So it is
//!   spoiled for this transaction, whose fsyncs commit; where fsync was in use lately, there is a commit instead.
//! - I3. Blocks that an apply wrote and a later one left are free only after the commit, so there must be ample room.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::Generation;

use crate::commit::state::CommitWork;
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::health::stats::Span;

impl Engine {
    /// Takes delayed items out of memory: by applying rows where that takes most of them, else by a commit.
    ///
    /// An error turns the filesystem read-only, as that of a commit.
    pub fn flush_delayed_items(&self) -> Result<()> {
        self.check_not_aborted()?;
        let mut work = self.commit_state.lock();
        self.check_not_failed()?;
        if !self.rows_are_worth_an_apply() {
            drop(work);
            return self.commit();
        }
        self.check_writable()?;
        self.or_abort("applying delayed items", || self.apply_rows(&mut work))
    }

    fn apply_rows(&self, work: &mut CommitWork) -> Result<()> {
        let _span = self.stats.span(Span::ApplyRows);
        let _progress = self.admission.begin_flush();
        self.tree_log.spoil();
        let nr_refs = work.refs.len();
        let (transid, frozen) = self.freeze_rows();
        self.apply_frozen(&frozen, &mut work.refs, transid)?;
        self.thaw_rows_load(work.refs.len().saturating_sub(nr_refs) as u64);
        Ok(())
    }

    fn freeze_rows(&self) -> (Generation, Vec<Arc<Tree>>) {
        let gate = self.running.close_gate();
        let frozen: Vec<_> = self
            .running
            .listed(&gate)
            .into_iter()
            .filter_map(|id| self.roots.get(id))
            .filter(|tree| tree.id().is_fs_tree() && !tree.is_sealed())
            .collect();
        self.freeze_rows_load(frozen.iter().map(|tree| tree.freeze_rows()).sum());
        (self.running.transid(), frozen)
    }
}
