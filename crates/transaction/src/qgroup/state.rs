//! [`Quotas`]: the state of quotas of an open filesystem.
//!
//! Owns one lock, under which only the lock of the reserved bytes is taken. The state changes only under the commit
//! lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_error::Result;
use ubtrfs_format::item::QgroupStatus;
use ubtrfs_format::{Generation, RootId};

use super::groups::{Qgroup, Qgroups};
use super::items::{self, NO_RESCAN, QgroupStatusItem};
use crate::engine::Engine;
use crate::handle::quota_reservation::Reserved;

/// Quotas of a filesystem.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// A [`QuotaMode`].
    mode: AtomicU8,
    /// Whether the next commit removes the quota tree.
    removal: AtomicBool,
    /// Whether any group has a limit.
    limited: AtomicBool,
    /// Bytes that are reserved within the limits.
    pub(crate) reserved: Arc<Reserved>,
    state: Mutex<Option<QuotaState>>,
}

/// The way in which space is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum QuotaMode {
    /// Quotas are disabled.
    Off,
    /// An extent is charged to all subvolumes that use it. Changes of users are marked in the delayed refs.
    Full,
    /// An extent is charged to the subvolume that allocated it ([`super::simple`]).
    Simple,
}

/// The status and the groups while quotas are enabled.
#[derive(Debug)]
pub(crate) struct QuotaState {
    pub(crate) status: QgroupStatusItem,
    pub(crate) groups: Qgroups,
}

impl Quotas {
    /// Sets the state; `None` disables quotas. The caller holds the commit lock, or opens the filesystem.
    pub(crate) fn set(&self, state: Option<QuotaState>) {
        let mut now = self.state.lock();
        let mode = match &state {
            None => QuotaMode::Off,
            Some(state) if state.simple_since().is_some() => QuotaMode::Simple,
            Some(_) => QuotaMode::Full,
        };
        self.mode.store(mode as u8, Ordering::Release);
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

    /// The way in which space is counted.
    pub(crate) fn mode(&self) -> QuotaMode {
        match self.mode.load(Ordering::Acquire) {
            mode if mode == QuotaMode::Full as u8 => QuotaMode::Full,
            mode if mode == QuotaMode::Simple as u8 => QuotaMode::Simple,
            _ => QuotaMode::Off,
        }
    }

    /// Whether quotas are enabled, of either kind.
    pub(crate) fn is_on(&self) -> bool {
        self.mode() != QuotaMode::Off
    }

    /// With simple quotas, the transaction that enabled them. Extents of earlier transactions are not counted.
    pub(crate) fn simple_since(&self) -> Option<Generation> {
        if self.mode() != QuotaMode::Simple {
            return None;
        }
        self.state.lock().as_ref().and_then(QuotaState::simple_since)
    }

    /// The state; `None` while quotas are disabled.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<QuotaState>> {
        self.state.lock()
    }

    /// Asks the next commit to remove the quota tree.
    pub(crate) fn request_removal(&self) {
        self.removal.store(true, Ordering::Release);
    }

    /// Returns whether the removal of the quota tree was requested, and clears the request.
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
    pub(crate) fn has_changes(&self) -> bool {
        self.is_on() && self.state.lock().as_ref().is_some_and(|state| state.groups.has_changes())
    }

    /// Notes that the numbers are not reliable any more.
    pub(crate) fn mark_inconsistent(&self) {
        if let Some(state) = &mut *self.state.lock() {
            state.status.flags |= QgroupStatus::INCONSISTENT;
        }
    }
}

impl Engine {
    /// Loads the state of quotas when the filesystem is opened.
    pub(crate) fn load_quotas(&self) -> Result<()> {
        let Some(tree) = self.tree(RootId::QUOTA_TREE)? else { return Ok(()) };
        let loaded = tree.with_root(|source, root| items::load(source, root));
        let (mut status, groups) = match loaded {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            // As in Linux, an unreadable quota tree does not fail the mount: quotas are then unavailable.
            Err(error) => {
                tracing::error!("quotas are unavailable, because the quota tree cannot be read: {error}");
                return Ok(());
            }
        };
        let is_simple = status.has(QgroupStatus::SIMPLE_MODE);
        if !status.has(QgroupStatus::ON) || is_simple && status.enabled.is_none() {
            return Ok(());
        }
        if !is_simple && status.generation != self.committed_generation() {
            // A program that does not know quotas has written to the filesystem, so the numbers may be wrong.
            status.flags |= QgroupStatus::INCONSISTENT;
        }
        self.quotas.set(Some(QuotaState { status, groups }));
        Ok(())
    }
}

impl QuotaState {
    /// The state right after full quotas were enabled: nothing is counted yet, and a rescan runs.
    pub(crate) fn fresh(groups: Qgroups, transid: Generation) -> Self {
        let flags = QgroupStatus::ON | QgroupStatus::INCONSISTENT;
        let status = QgroupStatusItem { flags, generation: transid, rescan: NO_RESCAN, enabled: None };
        let mut state = Self { status, groups };
        state.start_rescan(transid);
        state
    }

    /// The state right after simple quotas were enabled: extents from this transaction on are counted.
    pub(crate) fn fresh_simple(groups: Qgroups, transid: Generation) -> Self {
        let flags = QgroupStatus::ON | QgroupStatus::SIMPLE_MODE;
        let status = QgroupStatusItem { flags, generation: transid, rescan: NO_RESCAN, enabled: Some(transid) };
        Self { status, groups }
    }

    /// With simple quotas, the transaction that enabled them.
    pub(crate) fn simple_since(&self) -> Option<Generation> {
        let is_simple = self.status.has(QgroupStatus::SIMPLE_MODE);
        is_simple.then_some(self.status.enabled).flatten()
    }

    /// Whether a rescan runs.
    pub(crate) fn is_rescanning(&self) -> bool {
        self.status.has(QgroupStatus::RESCAN)
    }

    /// Starts a rescan: sets all numbers to zero, and the progress to the lowest address.
    pub(crate) fn start_rescan(&mut self, transid: Generation) {
        self.status.flags |= QgroupStatus::RESCAN;
        self.status.rescan = 0;
        self.groups.zero(transid);
    }

    /// Whether the numbers include the extent at this address. While a rescan runs, the numbers include only the
    /// extents before the address that the rescan has reached.
    pub(crate) fn counts(&self, bytenr: u64) -> bool {
        !self.is_rescanning() || bytenr < self.status.rescan
    }

    /// Whether simple quotas charge extents to this group.
    pub(crate) fn is_charged(&self, group: &Qgroup) -> bool {
        self.simple_since().is_some() && group.referenced > 0
    }

    /// Marks the numbers as inconsistent and starts a rescan, because arithmetic cannot determine the numbers.
    pub(crate) fn mark_unknown_and_rescan(&mut self, transid: Generation) {
        self.status.flags |= QgroupStatus::INCONSISTENT;
        self.start_rescan(transid);
    }
}
