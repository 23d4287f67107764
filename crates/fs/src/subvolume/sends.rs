//! [`Sends`]: excludes changes that would disturb a send: deleting or changing the sent subvolumes, and moving extents.
//!
//! - N1. A subvolume in [`SendState::kept`] is read-only. It cannot be deleted or become writable: a call that would
//!   delete it or make it writable fails at once. Files that were opened for writing before it became read-only can
//!   still change it; a send notices the change and fails ([`Fs::check_unchanged`]). A deduplication into it counts as a
//!   move of extents (N2).
//! - N2. Sends and moves of extents exclude each other, because a send reads nodes and data by address. Each waits
//!   until the other has ended. A balance or resize moves one block group after the other, and sends have priority: a
//!   send waits only for the block group that is being moved. Moves wait until no send runs or waits, and can be
//!   cancelled while they wait. A chunk that moves on the devices but keeps its logical address does not disturb sends.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::RootId;
use ubtrfs_transaction::{Job, race_point};

use crate::Fs;
use crate::error::{Error, Result};

/// The running sends and moves of extents.
#[derive(Debug, Default)]
pub(crate) struct Sends {
    state: Mutex<SendState>,
    /// Notified when a send or a move ends.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct SendState {
    /// Subvolumes that must not change, each with the number of sends and receives that need it unchanged.
    kept: HashMap<RootId, usize>,
    /// Number of running and waiting sends.
    sending: usize,
    /// Number of running moves of extents.
    moving: usize,
}

/// A guard of a send, which ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Sending<'s>(&'s Sends);

/// A guard that keeps subvolumes as they are (N1), until the guard is dropped.
#[derive(Debug)]
pub(crate) struct KeptSubvolumes<'s> {
    sends: &'s Sends,
    ids: Vec<RootId>,
}

/// A guard of a move of extents, which ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Moving<'s>(&'s Sends);

impl Sends {
    /// Begins a send, after waiting for running moves of extents (N2). The caller holds no lock that a move takes.
    pub(crate) fn begin_send(&self, job: &Job) -> Result<Sending<'_>, EngineError> {
        {
            let mut state = self.state.lock();
            state.sending = state.sending.saturating_add(1);
        }
        // From here on, no move begins. `sending` locks the state when it is dropped, so it is declared before `state`:
        // if the wait fails, `state` is dropped first, and the drop of `sending` does not deadlock.
        let sending = Sending(self);
        let mut state = self.state.lock();
        self.wait_while(&mut state, |state| state.moving > 0, "waiting until extents are moved", job)?;
        drop(state);
        race_point();
        Ok(sending)
    }

    /// Begins to move extents, after waiting for all sends (N2). The caller holds no lock that a send takes.
    pub(crate) fn begin_move(&self, job: &Job) -> Result<Moving<'_>, EngineError> {
        let mut state = self.state.lock();
        self.wait_while(&mut state, |state| state.sending > 0, "waiting until a subvolume is sent", job)?;
        state.moving = state.moving.saturating_add(1);
        Ok(Moving(self))
    }

    /// Begins to move extents, unless a send runs or waits (N2).
    pub(crate) fn try_begin_move(&self) -> Option<Moving<'_>> {
        let mut state = self.state.lock();
        if state.sending > 0 {
            return None;
        }
        state.moving = state.moving.saturating_add(1);
        Some(Moving(self))
    }

    /// Waits while a condition holds. Fails if the job is cancelled. The job shows `step` during the wait.
    fn wait_while(
        &self,
        state: &mut MutexGuard<'_, SendState>,
        is_busy: impl Fn(&SendState) -> bool,
        step: &str,
        job: &Job,
    ) -> Result<(), EngineError> {
        if !is_busy(state) {
            return Ok(());
        }
        let before = job.progress().step;
        job.set_step(step);
        let mut waited = Ok(());
        while waited.is_ok() && is_busy(state) {
            self.ended.wait_for(state, PATIENCE);
            waited = MutexGuard::unlocked(state, || job.check());
        }
        job.set_step(before);
        waited
    }

    /// Keeps subvolumes as they are. The caller makes sure that they are read-only and stay so during the call (N1).
    fn keep(&self, ids: impl Iterator<Item = RootId>) -> KeptSubvolumes<'_> {
        let mut state = self.state.lock();
        let ids: Vec<RootId> = ids.collect();
        for id in &ids {
            let nr_users = state.kept.entry(*id).or_default();
            *nr_users = nr_users.saturating_add(1);
        }
        KeptSubvolumes { sends: self, ids }
    }

    /// Fails if the subvolume has to stay as it is (N1).
    pub(crate) fn check_not_kept(&self, id: RootId) -> Result<()> {
        let is_kept = self.state.lock().kept.contains_key(&id);
        if is_kept {
            Err(Error::InProgress("it is being sent, or is the parent or a clone source of a send or receive"))
        } else {
            Ok(())
        }
    }
}

impl Fs {
    /// Keeps subvolumes as they are (N1).
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`] if a subvolume is writable, [`Error::NotFound`] if it is deleted.
    pub(crate) fn keep_subvolumes(&self, ids: impl Iterator<Item = RootId> + Clone) -> Result<KeptSubvolumes<'_>> {
        // Load the subvolumes before the locks below are taken.
        let found = ids.clone().map(|id| self.subvolume(id)).collect::<Result<Vec<_>>>()?;
        // Another thread may be deleting files without names from a new snapshot, which changes even a read-only one.
        found.iter().for_each(|subvolume| drop(subvolume.orphans_deleted.lock()));
        // Code that deletes a subvolume or makes it writable checks under these locks that it is not kept.
        let _flags = self.subvolumes.lock_flags();
        let _subvolumes = self.subvolumes.lock();
        for subvolume in found {
            if subvolume.is_deleted() {
                return Err(Error::NotFound);
            }
            if !subvolume.is_read_only() {
                return Err(Error::NotPermitted("the subvolume is not read-only"));
            }
        }
        Ok(self.subvolumes.sends.keep(ids))
    }
}

impl Drop for KeptSubvolumes<'_> {
    fn drop(&mut self) {
        let mut state = self.sends.state.lock();
        for id in &self.ids {
            if let Some(count) = state.kept.get_mut(id) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    state.kept.remove(id);
                }
            }
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.sending = state.sending.saturating_sub(1);
        self.0.ended.notify_all();
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.moving = state.moving.saturating_sub(1);
        self.0.ended.notify_all();
    }
}

/// Interval of the checks for cancellation.
const PATIENCE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    /// Calls a function in a thread, so that a deadlock fails the test instead of blocking it forever.
    fn in_time<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, done) = channel();
        std::thread::spawn(move || send.send(call()));
        done.recv_timeout(Duration::from_secs(20)).expect("the call does not return")
    }

    #[test]
    fn a_send_that_is_cancelled_while_it_waits_blocks_nothing() {
        let sends = Arc::new(Sends::default());
        let moving = sends.begin_move(&Job::new()).unwrap();
        let waiting = Arc::clone(&sends);
        in_time(move || {
            let job = Job::new();
            job.cancel();
            assert!(matches!(waiting.begin_send(&job), Err(EngineError::Cancelled)));
            waiting.check_not_kept(RootId(256)).unwrap();
        });
        drop(moving);
        in_time(move || {
            drop(sends.begin_move(&Job::new()).unwrap());
            drop(sends.begin_send(&Job::new()).unwrap());
        });
    }

    #[test]
    fn a_job_shows_that_it_waits_only_while_it_waits() {
        let sends = Sends::default();
        let (send, balance) = (Job::new(), Job::new());
        balance.set_step("block group 1");
        let (sends, send, balance) = (&sends, &send, &balance);
        std::thread::scope(|scope| {
            let step_from = |job: &Job, old: &str| {
                while job.progress().step == old {
                    std::thread::yield_now();
                }
                job.progress().step
            };
            let moving = sends.begin_move(send).unwrap();
            let sending = scope.spawn(|| sends.begin_send(send).unwrap());
            assert_eq!(step_from(send, ""), "waiting until extents are moved");
            drop(moving);
            let sending = sending.join().unwrap();
            assert_eq!(send.progress().step, "");
            let moving = scope.spawn(|| drop(sends.begin_move(balance).unwrap()));
            assert_eq!(step_from(balance, "block group 1"), "waiting until a subvolume is sent");
            drop(sending);
            moving.join().unwrap();
            assert_eq!(balance.progress().step, "block group 1");
        });
    }
}
