//! Applies delayed rows to their trees' nodes without a commit, to free memory. The names of the transaction stay
//! delayed: a few thousand names change every leaf of a large directory, so applying more names at once writes fewer
//! leaves ([`crate::delayed::delayed_item`]).
//!
//! ```text
//! commit ----- rows -> nodes ----- rows -> nodes ----- rows -> nodes ----- rows and names -> nodes, commit
//!       names .....................................................
//! ```
//!
//! Crash argument: the new nodes lie at addresses that no committed superblock reaches, and the nodes that they replace
//! stay in place until the commit ([`crate::cow::sink`], I3). The superblock is not written, so a power cut leaves the
//! last commit.
//!
//! Invariants:
//! - I1. The transaction stays the same and is committed as a whole. Readers go through [`Tree`], so they do not notice
//!   that some of the transaction's items are in nodes and others are delayed.
//! - I2. The tree log derives the changes since the last commit from delayed items and nodes of that commit. So
//!   after an apply, no log can be written, and each fsync in this transaction commits. If fsync was used recently, a
//!   commit replaces the apply.
//! - I3. Blocks that one apply wrote and a later apply replaced are reusable only after the commit, so rows are applied
//!   only while room is ample.
//! - I4. An apply leaves delayed refs, data extents and checksums for the commit, and the changed trees with their new
//!   nodes. When many of these wait, the flush is a commit.

use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::Generation;

use crate::commit_state::CommitWork;
use crate::delayed::tree_view::Tree;
use crate::engine::{Engine, MemoryPart};
use crate::health::stats::Span;

impl Engine {
    /// Frees the memory of delayed items: applies rows if rows take much of the memory, room is ample, no fsync was
    /// made lately, and little other work waits for the commit. Commits otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`]. An error of an apply also makes the filesystem read-only.
    pub fn flush_delayed_items(&self) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        let mut work = self.commit_state.lock();
        self.abort_state.check_not_failed()?;
        if self.holds_commits() {
            if self.admission.load.row_memory_bytes() == 0 {
                return Err(Error::Refused {
                    what: "the transaction has too many new names for the memory".to_owned(),
                    hint: "give more memory, or make several transactions",
                });
            }
        } else if !self.rows_are_worth_an_apply(work.refs.len()) {
            drop(work);
            return self.commit();
        }
        self.check_writable()?;
        self.abort_state.or_abort("applying delayed items", || self.apply_rows(&mut work))
    }

    /// Memory that the next commit needs for the changes of file extent items so far.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.admission.load.nr_extent_changes().saturating_mul(WAITING_BYTES)
    }

    /// Whether a flush should apply rows and leave the names delayed, instead of committing. `nr_refs` is the number of
    /// delayed refs of earlier applies.
    fn rows_are_worth_an_apply(&self, nr_refs: usize) -> bool {
        let nr_known = nr_refs.saturating_add(self.ledger.nr_put()) as u64;
        let waiting = nr_known.saturating_mul(WAITING_BYTES).max(self.waiting_bytes());
        let trees = (self.running.nr_listed() as u64).saturating_mul(self.changed_tree_bytes());
        waiting.saturating_add(trees) < self.options.memory_part(WAITING_START)
            && self.admission.load.name_memory_bytes() < self.options.memory_part(NAMES_PART)
            && self.admission.load.row_memory_bytes() >= self.options.memory_part(ROWS_PART) / 2
            && !self.tree_log.was_used_lately(self.generation())
            && self.has_ample_room_for_metadata()
    }

    fn apply_rows(&self, work: &mut CommitWork) -> Result<()> {
        let _span = self.stats.span(Span::ApplyRows);
        let _progress = self.admission.begin_flush();
        self.tree_log.require_commit();
        let nr_refs = work.refs.len();
        let (transid, frozen) = self.freeze_rows();
        self.apply_frozen(&frozen, &mut work.refs, transid)?;
        self.end_frozen_rows_load(work.refs.len().saturating_sub(nr_refs) as u64);
        Ok(())
    }

    fn freeze_rows(&self) -> (Generation, Vec<Arc<Tree>>) {
        let gate = self.running.close_gate();
        let frozen: Vec<_> = self
            .running
            .listed(&gate)
            .into_iter()
            .filter_map(|id| self.trees.get(id))
            .filter(|tree| tree.id().is_fs_tree() && !tree.is_sealed())
            .collect();
        self.freeze_rows_load(frozen.iter().map(|tree| tree.freeze_rows()).sum());
        (self.running.transid(), frozen)
    }
}

/// Memory of delayed refs, data extents and checksums at which a flush becomes a commit, because only a commit frees
/// this memory (I4).
pub(crate) const WAITING_START: MemoryPart = (6, 16);
/// Estimated memory of a delayed ref, or of a data extent with its checksums in the ledger, until its commit ends.
pub(crate) const WAITING_BYTES: u64 = 256;
/// Memory of names at which a flush becomes a commit.
pub(crate) const NAMES_PART: MemoryPart = (7, 16);
/// Memory of rows at which a flush begins, if fsync is not in use.
pub(crate) const ROWS_PART: MemoryPart = (2, 16);
