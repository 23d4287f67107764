//! [`BlockGroupClaims`]: the block groups that operations empty, move or remove.
//!
//! ```text
//! begin_emptying --> Emptying -- condemn --> Condemned <-- begin_removal, end_removal --> Removing
//! begin_move ------> Copying -- note_copied --> Copied -- note_failure --> Failed
//!                       +---------- cancel_move ---+------- cancel_move -----+--> Cancelling
//! begin_removal ---> Removing
//! ```
//!
//! [`BlockGroupClaims::end`] ends the claim of a group that is emptied or moved, and [`BlockGroupClaims::end_removal`]
//! that of a group that is only removed. The group is free then.
//!
//! Owns the claims, under one lock, and the lock under which groups are closed to allocations. No other lock is taken
//! under the lock of the claims.
//!
//! Invariants:
//! - C1. A block group has at most one claim, so it is never moved, emptied and removed at the same time. Only a commit
//!   takes over a claim: it removes the group that a relocation condemned.
//! - C2. Soon after a group is claimed to be emptied, the group is read-only: nothing is allocated in it. The group is
//!   removed only after it is condemned, because until then threads may read the old copies of data that has moved.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;

/// The use of a claimed block group.
#[derive(Clone, Debug)]
enum Claim {
    /// Extents are being moved out of the block group.
    Emptying,
    /// The block group is empty, and no thread reads from it: the next commit removes it.
    Condemned,
    /// The pieces of the chunk are being copied.
    Copying,
    /// All pieces of the chunk are copied. The next commit records the move.
    Copied,
    /// A commit could not record the move.
    Failed(Error),
    /// The move is being undone.
    Cancelling,
    /// The running commit removes the block group.
    Removing { is_condemned: bool },
}

impl Claim {
    /// The work of [`Error::BlockGroupBusy`].
    fn work(&self) -> &'static str {
        match self {
            Self::Emptying | Self::Condemned => "emptied",
            Self::Copying | Self::Copied | Self::Failed(_) | Self::Cancelling => "moved",
            Self::Removing { .. } => "removed",
        }
    }
}

/// The stage of emptying a block group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emptying {
    /// Extents are being moved out of the block group.
    Moving,
    /// The block group is empty, and no thread reads from it.
    Condemned,
}

/// The claims of block groups, by the start of the group.
#[derive(Debug, Default)]
pub(crate) struct BlockGroupClaims {
    claims: Mutex<BTreeMap<Logical, Claim>>,
    /// This lock is held while a relocation makes sure that writers find space in other groups, and forbids allocations
    /// in the group that it empties. Lock order: this lock -> all locks of commits and writeback.
    closing: Mutex<()>,
}

impl BlockGroupClaims {
    /// Claims a group that is to be emptied.
    ///
    /// # Errors
    ///
    /// [`Error::BlockGroupBusy`] if the group is claimed (C1).
    pub(crate) fn begin_emptying(&self, start: Logical) -> Result<()> {
        self.begin(start, Claim::Emptying)
    }

    /// Claims a group whose chunk is to be moved.
    ///
    /// # Errors
    ///
    /// [`Error::BlockGroupBusy`] if the group is claimed (C1).
    pub(crate) fn begin_move(&self, start: Logical) -> Result<()> {
        self.begin(start, Claim::Copying)
    }

    fn begin(&self, start: Logical, claim: Claim) -> Result<()> {
        match self.claims.lock().entry(start) {
            Entry::Occupied(other) => Err(Error::BlockGroupBusy { start, work: other.get().work() }),
            Entry::Vacant(free) => {
                free.insert(claim);
                Ok(())
            }
        }
    }

    /// Claims a group that the running commit removes. Returns false if the group is claimed, unless it is condemned
    /// (C1).
    pub(crate) fn begin_removal(&self, start: Logical) -> bool {
        let mut claims = self.claims.lock();
        let is_condemned = match claims.get(&start) {
            None => false,
            Some(Claim::Condemned) => true,
            Some(_) => return false,
        };
        claims.insert(start, Claim::Removing { is_condemned });
        true
    }

    /// Ends the removal of a group, whether it succeeded or not.
    pub(crate) fn end_removal(&self, start: Logical) {
        let mut claims = self.claims.lock();
        match claims.remove(&start) {
            // The relocation that condemned the group ends its claim itself.
            Some(Claim::Removing { is_condemned: true }) => drop(claims.insert(start, Claim::Condemned)),
            before => {
                let is_removing = matches!(before, Some(Claim::Removing { .. }));
                assert!(is_removing, "C1: the removal of block group {start} ends without a claim");
            }
        }
    }

    /// Notes that a group is empty, so that the next commit removes it (C2).
    pub(crate) fn condemn(&self, start: Logical) {
        let before = self.claims.lock().insert(start, Claim::Condemned);
        let is_emptying = matches!(before, Some(Claim::Emptying));
        assert!(is_emptying, "C2: block group {start} is condemned, but nobody empties it");
    }

    /// Notes that all pieces of a chunk are copied, so that the next commit records the move.
    pub(crate) fn note_copied(&self, start: Logical) {
        let before = self.claims.lock().insert(start, Claim::Copied);
        assert!(matches!(before, Some(Claim::Copying)), "C1: block group {start} is copied without a claim");
    }

    /// Notes that a commit could not record the move of a group.
    pub(crate) fn note_failure(&self, start: Logical, error: Error) {
        self.claims.lock().insert(start, Claim::Failed(error));
    }

    /// The error of the commit that could not record the move of a group, if there was one.
    pub(crate) fn failure_of(&self, start: Logical) -> Option<Error> {
        match self.claims.lock().get(&start) {
            Some(Claim::Failed(error)) => Some(error.clone()),
            _ => None,
        }
    }

    /// Keeps a commit from recording the move of a group, which the caller undoes before it calls
    /// [`BlockGroupClaims::end`]. Returns false if the move has ended.
    pub(crate) fn cancel_move(&self, start: Logical) -> bool {
        match self.claims.lock().get_mut(&start) {
            Some(claim @ (Claim::Copying | Claim::Copied | Claim::Failed(_))) => {
                *claim = Claim::Cancelling;
                true
            }
            _ => false,
        }
    }

    /// Ends the claim of a group that was emptied or moved.
    pub(crate) fn end(&self, start: Logical) {
        self.claims.lock().remove(&start);
    }

    /// The stage of a group that is being emptied.
    pub(crate) fn emptying(&self, start: Logical) -> Option<Emptying> {
        match self.claims.lock().get(&start) {
            Some(Claim::Emptying) => Some(Emptying::Moving),
            Some(Claim::Condemned | Claim::Removing { is_condemned: true }) => Some(Emptying::Condemned),
            _ => None,
        }
    }

    /// Whether a group is being emptied.
    pub(crate) fn is_any_emptied(&self) -> bool {
        let is_emptied = |claim: &Claim| {
            matches!(claim, Claim::Emptying | Claim::Condemned | Claim::Removing { is_condemned: true })
        };
        self.claims.lock().values().any(is_emptied)
    }

    /// Whether the next commit records the move of a group.
    pub(crate) fn is_copied(&self, start: Logical) -> bool {
        matches!(self.claims.lock().get(&start), Some(Claim::Copied))
    }

    /// The groups whose move the next commit records.
    pub(crate) fn copied(&self) -> Vec<Logical> {
        let claims = self.claims.lock();
        claims.iter().filter(|(_, claim)| matches!(claim, Claim::Copied)).map(|(start, _)| *start).collect()
    }

    /// Whether the next commit has a group to remove, or a move to record.
    pub(crate) fn have_work(&self) -> bool {
        self.claims.lock().values().any(|claim| matches!(claim, Claim::Condemned | Claim::Copied))
    }

    /// Takes the lock under which a relocation closes its group to allocations, or gives up after `patience`.
    pub(crate) fn try_lock_closing(&self, patience: Duration) -> Option<MutexGuard<'_, ()>> {
        self.closing.try_lock_for(patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Logical = Logical(1 << 30);

    #[test]
    fn a_group_has_one_claim_and_only_a_condemned_one_is_taken_over() {
        let claims = BlockGroupClaims::default();
        let is_refused = |work: &str| {
            [claims.begin_emptying(GROUP), claims.begin_move(GROUP)]
                .into_iter()
                .all(|begun| matches!(begun, Err(Error::BlockGroupBusy { start: GROUP, work: found }) if found == work))
        };
        claims.begin_emptying(GROUP).expect("it is free");
        assert!(is_refused("emptied") && !claims.begin_removal(GROUP));
        claims.condemn(GROUP);
        assert!(is_refused("emptied") && claims.have_work());
        assert!(claims.begin_removal(GROUP));
        assert!(is_refused("removed") && !claims.begin_removal(GROUP) && !claims.have_work());
        assert_eq!(claims.emptying(GROUP), Some(Emptying::Condemned));
        claims.end_removal(GROUP);
        assert!(is_refused("emptied"), "its relocation goes on");
        claims.end(GROUP);
        claims.begin_move(GROUP).expect("it is free");
        assert!(is_refused("moved") && !claims.begin_removal(GROUP) && !claims.is_any_emptied());
        claims.note_copied(GROUP);
        assert!(is_refused("moved") && claims.copied() == [GROUP]);
        assert!(claims.cancel_move(GROUP));
        assert!(is_refused("moved") && claims.copied().is_empty(), "no commit records it");
        claims.end(GROUP);
        assert!(!claims.cancel_move(GROUP));
        assert!(claims.begin_removal(GROUP));
        assert!(is_refused("removed") && claims.emptying(GROUP).is_none());
        claims.end_removal(GROUP);
        claims.begin_move(GROUP).expect("it is free");
    }
}
