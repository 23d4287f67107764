//! Limits of quota groups.
//!
//! Invariants:
//! - I1. When a reservation is granted, the counted and reserved bytes of each group stay within its limits. Reserved
//!   bytes are the bytes before compression, and the tree blocks for the items of the data (I2 of
//!   `handle/quota_reservation.rs`); counted bytes are the bytes after compression. So any number of writers together
//!   exceed no limit. Only removals that split extents may exceed a limit by their items: they reserve nothing.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::RootId;

use crate::engine::Engine;
use crate::handle::quota_reservation::{Need, QuotaReservation};
use crate::handle::ticket::RECLAIMS;
use crate::qgroup::state::QuotaMode;

impl Engine {
    /// Reserves space for new data with `nr_items` file extent items within the limits of a subvolume's quota groups.
    /// May flush and commit, so the caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// [`Error::QuotaExceeded`] if writing dirty data and committing does not help, or an error of the write or the
    /// commit.
    pub fn reserve_quota(&self, root: RootId, bytes: u64, nr_items: u64) -> Result<QuotaReservation> {
        self.reserve_quota_for(root, Need::new_data(bytes, nr_items, self.geometry.nodesize.into()))
    }

    /// Reserves space for `nr_items` file extent items that will share `bytes` of existing data with another subvolume,
    /// as [`Engine::reserve_quota`] does. With simple quotas, the data stays charged to the subvolume that allocated it.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_quota`].
    pub fn reserve_shared_quota(&self, root: RootId, bytes: u64, nr_items: u64) -> Result<QuotaReservation> {
        let bytes = if self.quotas.mode() == QuotaMode::Simple { 0 } else { bytes };
        self.reserve_quota(root, bytes, nr_items)
    }

    /// Reserves the space of `nr_blocks` tree blocks for a change of a subvolume's metadata, as
    /// [`Engine::reserve_quota`] does.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_quota`].
    pub fn reserve_metadata_quota(&self, root: RootId, nr_blocks: u64) -> Result<QuotaReservation> {
        self.reserve_quota_for(root, Need::metadata(nr_blocks, self.geometry.nodesize.into()))
    }

    /// Reserves space for `nr_items` file extent items if the limits allow it now, without writing or committing.
    pub fn try_reserve_items_quota(&self, root: RootId, nr_items: u64) -> Option<QuotaReservation> {
        self.try_reserve_quota(root, Need::new_data(0, nr_items, self.geometry.nodesize.into()))
    }

    /// Whether any quota group has a limit.
    pub fn has_quota_limits(&self) -> bool {
        self.quotas.has_limits()
    }

    fn reserve_quota_for(&self, root: RootId, need: Need) -> Result<QuotaReservation> {
        if let Some(reservation) = self.try_reserve_quota(root, need) {
            return Ok(reservation);
        }
        // Writing dirty data replaces its reservation by the space in use, which is smaller after overwrites and
        // compression. The space of a file that was just removed may come too late for the first commit.
        for round in 0..RECLAIMS {
            self.reclaim_data(round)?;
            if let Some(reservation) = self.try_reserve_quota(root, need) {
                return Ok(reservation);
            }
        }
        Err(Error::QuotaExceeded)
    }

    /// Reserves space if the limits allow it now, without writing or committing.
    pub(crate) fn try_reserve_quota(&self, root: RootId, need: Need) -> Option<QuotaReservation> {
        if !self.quotas.has_limits() {
            return Some(QuotaReservation::default());
        }
        let mut state = self.quotas.lock();
        let Some(state) = &mut *state else { return Some(QuotaReservation::default()) };
        let above = state.groups.above(root);
        // I1
        self.quotas.reserved.try_hold(above, need, |id, reserved| {
            let fits = |used: u64, limit: Option<u64>| limit.is_none_or(|limit| used.saturating_add(reserved) <= limit);
            state.groups.get(id).is_none_or(|group| {
                fits(group.referenced, group.limit.referenced()) && fits(group.exclusive, group.limit.exclusive())
            })
        })
    }
}
