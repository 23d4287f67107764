//! [`BlockGroupClaims`]: the block groups that operations empty, move or remove, and the threads that wait for one of
//! these operations to end.
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
//! - C3. A claim ends after its work is done or undone, so a thread that is woken finds no rest of it.
//! - C4. A waiter looks at the claims under the lock under which they end, and each end wakes all waiters. So no end is
//!   missed.
//! - C5. A waiter has no claim, and holds no lock that a commit takes. So the owner of the claim can go on.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;

use crate::engine::Engine;
use crate::job::Job;
use crate::lock_rank::{self, Rank};
use crate::race::race_point;

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
    /// Notified at each end of a claim (C4).
    ended: Condvar,
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
                self.ended.notify_all();
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
    /// [`BlockGroupClaims::end`] (C3). Returns false if the move has ended.
    pub(crate) fn cancel_move(&self, start: Logical) -> bool {
        match self.claims.lock().get_mut(&start) {
            Some(claim @ (Claim::Copying | Claim::Copied | Claim::Failed(_))) => {
                *claim = Claim::Cancelling;
                true
            }
            _ => false,
        }
    }

    /// Ends the claim of a group that was emptied or moved (C3).
    pub(crate) fn end(&self, start: Logical) {
        self.claims.lock().remove(&start);
        self.ended.notify_all();
    }

    /// The error of a call that needs this group; `None` if the group is free.
    pub(crate) fn busy(&self, start: Logical) -> Option<Error> {
        self.claims.lock().get(&start).map(|claim| Error::BlockGroupBusy { start, work: claim.work() })
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

    /// Waits until one of these groups is free, but at most for `patience`. Returns whether one is free.
    fn wait_for_any(&self, groups: &[Logical], patience: Duration) -> bool {
        let mut claims = self.claims.lock();
        let are_claimed = |claims: &BTreeMap<Logical, Claim>| groups.iter().all(|start| claims.contains_key(start));
        self.ended.wait_while_for(&mut claims, |claims| are_claimed(claims), patience);
        !are_claimed(&claims)
    }
}

impl Engine {
    /// Waits until one of these block groups is not being emptied, moved or removed. The groups are those that
    /// [`Error::BlockGroupBusy`] named; the caller tries again after the wait. Returns false if all of them are still in
    /// use after `patience`.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`]; an error if the filesystem turned read-only.
    pub fn wait_for_block_groups(&self, groups: &[Logical], patience: Duration, job: &Job) -> Result<bool> {
        lock_rank::check_none_from(Rank::Unreserved, "C5: a commit may need this lock");
        // A write may hold a range that a copy needs; it has no claim, and ends soon.
        if groups.iter().any(|start| self.claims.busy(*start).is_none()) {
            std::thread::sleep(UNCLAIMED_PAUSE);
        }
        let end = Instant::now().checked_add(patience);
        loop {
            job.check()?;
            self.abort_state.check_not_aborted()?;
            race_point();
            if self.claims.wait_for_any(groups, TICK) {
                return Ok(true);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(false);
            }
        }
    }
}

/// How long a waiter leaves alone what is busy without a claim.
const UNCLAIMED_PAUSE: Duration = Duration::from_millis(2);
/// Interval at which a waiter checks whether it is cancelled, and whether the filesystem turned read-only.
const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::EngineOptions;

    const GROUP: Logical = Logical(1 << 30);

    fn engine() -> Arc<Engine> {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        Engine::open(vec![device], EngineOptions::default()).expect("opened")
    }

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
        assert!(claims.busy(GROUP).is_none());
    }

    /// A wait that misses an end lasts until its patience ends.
    fn check_that_no_end_is_missed(begin: fn(&BlockGroupClaims) -> bool, end: fn(&BlockGroupClaims)) {
        let (claims, nr_inside) = (BlockGroupClaims::default(), AtomicU64::new(0));
        let (patience, other) = (Duration::from_secs(60), Logical(2 << 30));
        claims.begin_move(other).expect("it is free");
        let work = || {
            for _ in 0..2000 {
                while !begin(&claims) {
                    let begun = Instant::now();
                    assert!(claims.wait_for_any(&[other, GROUP], patience));
                    assert!(begun.elapsed() < patience, "C4: an end was missed");
                }
                assert_eq!(nr_inside.fetch_add(1, Ordering::SeqCst), 0, "C1");
                std::thread::yield_now();
                nr_inside.fetch_sub(1, Ordering::SeqCst);
                end(&claims);
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    }

    #[test]
    fn no_end_of_a_claim_is_missed() {
        check_that_no_end_is_missed(|claims| claims.begin_emptying(GROUP).is_ok(), |claims| claims.end(GROUP));
        check_that_no_end_is_missed(|claims| claims.begin_move(GROUP).is_ok(), |claims| claims.end(GROUP));
        check_that_no_end_is_missed(|claims| claims.begin_removal(GROUP), |claims| claims.end_removal(GROUP));
    }

    #[test]
    fn a_wait_ends_with_its_job_and_with_the_filesystem() {
        let engine = engine();
        engine.claims.begin_move(GROUP).expect("it is free");
        let (patience, job) = (Duration::from_secs(3600), Job::new());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| engine.wait_for_block_groups(&[GROUP], patience, &job));
            job.cancel();
            assert!(matches!(waiter.join().expect("no panic"), Err(Error::Cancelled)));
            let waiter = scope.spawn(|| engine.wait_for_block_groups(&[GROUP], patience, &Job::new()));
            engine.abort("a test".to_owned());
            assert!(matches!(waiter.join().expect("no panic"), Err(Error::ReadOnly { .. })));
        });
    }
}
