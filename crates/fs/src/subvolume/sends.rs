//! [`Sends`]: excludes changes that would disturb a send: deleting or changing the sent subvolumes, and moving extents.
//!
//! - N1. A subvolume in [`State::sending`] is read-only. A subvolume that is being sent cannot be deleted or become
//!   writable.
//! - N2. Sends and moves of extents exclude each other: a send reads nodes and data by address.
//! - N3. A call that would break one of these rules fails at once. The call does not wait, because a send can take as
//!   long as its reader does.

use std::collections::HashMap;

use parking_lot::Mutex;
use ubtrfs_format::RootId;

use crate::error::{Error, Result};

/// The running sends and moves of extents.
#[derive(Debug, Default)]
pub(crate) struct Sends {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Subvolumes that running sends read, each with the number of these sends.
    sending: HashMap<RootId, usize>,
    /// Number of running moves of extents.
    moving: usize,
}

/// A guard of a send, which ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Sending<'s> {
    sends: &'s Sends,
    ids: Vec<RootId>,
}

/// A guard of a move of extents, which ends when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Moving<'s>(&'s Sends);

impl Sends {
    /// Begins to send these subvolumes. The caller checks afterwards that the subvolumes are read-only (N1).
    pub(crate) fn begin_send(&self, ids: impl Iterator<Item = RootId>) -> Result<Sending<'_>> {
        let mut state = self.state.lock();
        if state.moving > 0 {
            return Err(Error::InProgress("extents are being moved; send when the balance or resize is done"));
        }
        let ids: Vec<RootId> = ids.collect();
        for id in &ids {
            let nr_sends = state.sending.entry(*id).or_default();
            *nr_sends = nr_sends.saturating_add(1);
        }
        Ok(Sending { sends: self, ids })
    }

    /// Begins to move extents (N2).
    pub(crate) fn begin_move(&self) -> Result<Moving<'_>> {
        let mut state = self.state.lock();
        if !state.sending.is_empty() {
            return Err(Error::InProgress("a subvolume is being sent; try it again when that is done"));
        }
        state.moving = state.moving.saturating_add(1);
        Ok(Moving(self))
    }

    /// Fails if a subvolume is being sent.
    pub(crate) fn check_not_sent(&self, id: RootId) -> Result<()> {
        let is_sent = self.state.lock().sending.contains_key(&id);
        if is_sent {
            Err(Error::InProgress("it is being sent, or is the parent or a clone source of a send"))
        } else {
            Ok(())
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        let mut state = self.sends.state.lock();
        for id in &self.ids {
            if let Some(count) = state.sending.get_mut(id) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    state.sending.remove(id);
                }
            }
        }
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.moving = state.moving.saturating_sub(1);
    }
}
