//! Reservations within the limits of quota groups that wait: dirty data is written and committed before they fail.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::RootId;

use crate::engine::Engine;
use crate::handle::quota_reservation::{Need, QuotaReservation};
use crate::qgroup::state::QuotaMode;
use crate::reservation::ticket::RECLAIMS;

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
}
