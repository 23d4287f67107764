//! Limits of quota groups.
//!
//! Invariants:
//! - I1. When a reservation is granted, the counted and reserved bytes of each group stay within its limits. Reserved
//!   bytes are the bytes before compression, and the tree blocks for the items of the data (I2 of
//!   `handle/quota_reservation.rs`); counted bytes are the bytes after compression. So any number of writers together
//!   exceed no limit, except by the items of writes into preallocated space, which reserve nothing.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::RootId;

use crate::engine::Engine;
use crate::handle::quota_reservation::QuotaReservation;
use crate::handle::ticket::RECLAIMS;

impl Engine {
    /// Reserves space for data and its items within the limits of a subvolume's quota groups. May flush and commit, so
    /// the caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// [`Error::QuotaExceeded`] if writing dirty data and committing does not help, or an error of the write or the
    /// commit.
    pub fn reserve_quota(&self, root: RootId, bytes: u64) -> Result<QuotaReservation> {
        if !self.quotas.has_limits() {
            return Ok(QuotaReservation::default());
        }
        if let Some(reservation) = self.try_reserve_quota(root, bytes) {
            return Ok(reservation);
        }
        // Writing dirty data replaces its reservation by the space in use, which is smaller after overwrites and
        // compression. The space of a file that was just removed may come too late for the first commit.
        for round in 0..RECLAIMS {
            self.reclaim_data(round)?;
            if let Some(reservation) = self.try_reserve_quota(root, bytes) {
                return Ok(reservation);
            }
        }
        Err(Error::QuotaExceeded)
    }

    /// Reserves space for data and its items if the limits allow it now, without writing or committing.
    pub(crate) fn try_reserve_quota(&self, root: RootId, bytes: u64) -> Option<QuotaReservation> {
        let mut state = self.quotas.lock();
        let Some(state) = &mut *state else { return Some(QuotaReservation::default()) };
        let above = state.groups.above(root);
        // I1
        self.quotas.reserved.try_hold(above, bytes, self.geometry.nodesize.into(), |id, reserved| {
            let fits = |used: u64, limit: Option<u64>| limit.is_none_or(|limit| used.saturating_add(reserved) <= limit);
            state.groups.get(id).is_none_or(|group| {
                fits(group.referenced, group.limit.referenced()) && fits(group.exclusive, group.limit.exclusive())
            })
        })
    }

    /// Reserves the space of one tree block for a change of a subvolume's metadata, as [`Engine::reserve_quota`] does.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_quota`].
    pub fn reserve_metadata_quota(&self, root: RootId) -> Result<QuotaReservation> {
        self.reserve_quota(root, 0)
    }
}
