//! [`Quotas`]: the state of quotas of an open filesystem.
//!
//! Owns one lock, under which no other lock is taken. The state changes only under the commit lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_format::Generation;
use ubtrfs_format::item::QgroupStatus;

use super::groups::Groups;
use super::items::{NO_RESCAN, Status};
use crate::handle::quota_reservation::Reserved;

/// Quotas of a filesystem.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// Whether changes of users are marked in the delayed refs.
    tracks: AtomicBool,
    /// Whether the next commit removes the quota tree.
    removal: AtomicBool,
    /// Whether any group has a limit.
    limited: AtomicBool,
    /// Bytes that are reserved within the limits.
    pub(crate) reserved: Arc<Reserved>,
    state: Mutex<Option<QuotaState>>,
}

/// The status and the groups while quotas are enabled.
#[derive(Debug)]
pub(crate) struct QuotaState {
    pub(crate) status: Status,
    pub(crate) groups: Groups,
}

impl Quotas {
    /// Sets the state; `None` disables quotas. The caller holds the commit lock, or opens the filesystem.
    pub(crate) fn set(&self, state: Option<QuotaState>) {
        let mut now = self.state.lock();
        self.tracks.store(state.is_some(), Ordering::Release);
        *now = state;
        drop(now);
        self.note_limits();
    }

    /// Updates [`Self::has_limits`]. Must be called after limits changed.
    pub(crate) fn note_limits(&self) {
        let state = self.state.lock();
        let limited = state.as_ref().is_some_and(|state| state.groups.have_limits());
        self.limited.store(limited, Ordering::Release);
    }

    /// Whether any group has a limit.
    pub(crate) fn has_limits(&self) -> bool {
        self.limited.load(Ordering::Acquire)
    }

    /// Whether quotas are enabled.
    pub(crate) fn is_on(&self) -> bool {
        self.tracks.load(Ordering::Acquire)
    }

    /// The state; `None` while quotas are disabled.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<QuotaState>> {
        self.state.lock()
    }

    /// Requests that the next commit removes the quota tree.
    pub(crate) fn request_removal(&self) {
        self.removal.store(true, Ordering::Release);
    }

    /// Takes the request to remove the quota tree.
    pub(crate) fn take_removal(&self) -> bool {
        self.removal.swap(false, Ordering::AcqRel)
    }

    /// Whether a commit has work to do for quotas.
    pub(crate) fn have_work(&self) -> bool {
        self.removal.load(Ordering::Acquire) || self.is_rescanning() || self.has_changes()
    }

    /// Whether a rescan runs.
    pub(crate) fn is_rescanning(&self) -> bool {
        self.is_on() && self.state.lock().as_ref().is_some_and(QuotaState::is_rescanning)
    }

    /// Whether changes of groups, limits or relations are not on disk yet.
    fn has_changes(&self) -> bool {
        self.is_on() && self.state.lock().as_ref().is_some_and(|state| state.groups.has_changes())
    }

    /// Notes that the numbers are not reliable any more.
    pub(crate) fn mark_inconsistent(&self) {
        if let Some(state) = &mut *self.state.lock() {
            state.status.flags |= QgroupStatus::INCONSISTENT;
        }
    }
}

impl QuotaState {
    /// The state right after quotas were enabled: nothing is counted yet.
    pub(crate) fn fresh(groups: Groups, transid: Generation) -> Self {
        let flags = QgroupStatus::ON | QgroupStatus::INCONSISTENT;
        let status = Status { flags, generation: transid, rescan: NO_RESCAN, enabled: None };
        let mut state = Self { status, groups };
        state.start_rescan(transid);
        state
    }

    /// Whether a rescan runs.
    pub(crate) fn is_rescanning(&self) -> bool {
        self.status.has(QgroupStatus::RESCAN)
    }

    /// Starts a rescan.
    pub(crate) fn start_rescan(&mut self, transid: Generation) {
        self.status.flags |= QgroupStatus::RESCAN;
        self.status.rescan = 0;
        self.groups.zero(transid);
    }

    /// Whether the numbers include the extent at this address: a running rescan has not reached later addresses.
    pub(crate) fn counts(&self, bytenr: u64) -> bool {
        !self.is_rescanning() || bytenr < self.status.rescan
    }
}
