//! Reservations of data space, within the limits of quota groups.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::RootId;
use ubtrfs_space::{Reservation, SpaceKind};

use crate::engine::Engine;
use crate::extents::data_io::DataReservation;
use crate::handle::quota_reservation::{Need, QuotaReservation};

impl Engine {
    /// Reserves data space. May make chunks, flush and commit, so the caller must hold no inode lock.
    ///
    /// Only existing space is reserved: data that was accepted without space would be lost.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if reclaim does not help, [`Error::ReadOnly`], or an error of a commit or of writeback during
    /// reclaim.
    pub fn reserve_data(&self, bytes: u64) -> Result<DataReservation> {
        self.check_writable()?;
        #[cfg(debug_assertions)]
        crate::handle::refusal::check()?;
        let granted = || {
            Ok::<_, Error>(
                self.try_reserve_data(bytes)?
                    .map(|inner| DataReservation { inner, quota: QuotaReservation::default() }),
            )
        };
        if self.tickets.data.is_empty()
            && let Some(reservation) = granted()?
        {
            return Ok(reservation);
        }
        // Writeback replaces pessimistic reservations by extents; a commit frees pinned space.
        let reclaimed = self.reserve_with_reclaim(Some(&self.tickets.data), granted, |round| self.reclaim_data(round));
        match reclaimed {
            // While another thread commits, less space is free than after the commit: space is pinned, and in mixed
            // block groups the need of metadata is counted twice (I4 of `handle/metadata_reservation.rs`). So the last
            // attempt is made between two commits.
            Err(Error::NoSpace) => {
                let reserve =
                    || self.space.reserve(SpaceKind::Data, bytes).ok().filter(|_| self.data_leaves_room_for_metadata());
                let inner = self.try_between_commits(reserve)?.ok_or(Error::NoSpace)?;
                Ok(DataReservation { inner, quota: QuotaReservation::default() })
            }
            done => done,
        }
    }

    /// Reserves data space for a subvolume, within the limits of its quota groups.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_data`] and [`Engine::reserve_quota`].
    pub fn reserve_data_for(&self, root: RootId, bytes: u64) -> Result<DataReservation> {
        self.reserve_data_with_items(root, bytes, 1)
    }

    /// Reserves data space as [`Engine::reserve_data_for`] does, for data with `nr_items` file extent items.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_data_for`].
    pub fn reserve_data_with_items(&self, root: RootId, bytes: u64, nr_items: u64) -> Result<DataReservation> {
        let quota = self.reserve_quota(root, bytes, nr_items)?;
        let mut reservation = self.reserve_data(bytes)?;
        reservation.add_quota(quota);
        Ok(reservation)
    }

    /// Reserves data space as [`Engine::reserve_data_for`] does, if there is space now and no other reservation is
    /// waiting for it. Neither writes nor commits.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_data`].
    pub fn try_reserve_data_for(&self, root: RootId, bytes: u64) -> Result<Option<DataReservation>> {
        self.check_writable()?;
        #[cfg(debug_assertions)]
        crate::handle::refusal::check()?;
        if !self.tickets.data.is_empty() {
            return Ok(None);
        }
        let need = Need::new_data(bytes, 1, self.geometry.nodesize.into());
        let Some(quota) = self.try_reserve_quota(root, need) else { return Ok(None) };
        Ok(self.try_reserve_data(bytes)?.map(|inner| DataReservation { inner, quota }))
    }

    /// Reserves what a write of `bytes` of data into preallocated extents needs: only quota for the items. Returns
    /// `None` if the limits of the subvolume's quota groups do not allow it. Neither writes nor commits.
    pub fn try_reserve_preallocated_for(&self, root: RootId, bytes: u64) -> Option<DataReservation> {
        let quota = self.try_reserve_quota(root, Need::preallocated(bytes, self.geometry.nodesize.into()))?;
        Some(DataReservation { quota, ..self.empty_data_reservation() })
    }

    /// Reserves the largest part of `bytes` that fits, in whole sectors, after [`Engine::reserve_data_for`] refused to
    /// reserve `bytes`, so that a write can be done in part. Returns the reservation and its bytes; `None` if there is
    /// room for less than two sectors, or if other reservations are waiting. Neither writes nor commits.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve_data`].
    pub fn reserve_data_left_for(&self, root: RootId, bytes: u64) -> Result<Option<(DataReservation, u64)>> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let mut left = self.empty_data_reservation();
        let mut nr_left = 0u64;
        // Find the number of sectors bit by bit, from the highest bit down.
        let mut step = bytes.checked_div(sectorsize).and_then(u64::checked_next_power_of_two).unwrap_or(0);
        while step > 0 && self.tickets.data.is_empty() {
            let more = step.saturating_mul(sectorsize);
            if nr_left.saturating_add(step).saturating_mul(sectorsize) < bytes
                && let Some(quota) =
                    self.try_reserve_quota(root, Need::new_data(more, 1, self.geometry.nodesize.into()))
                && let Some(inner) = self.try_reserve_data(more)?
            {
                left.merge(DataReservation { inner, quota });
                nr_left = nr_left.saturating_add(step);
            }
            step >>= 1;
        }
        Ok((nr_left >= 2).then(|| (left, nr_left.saturating_mul(sectorsize))))
    }

    /// Reserves space that exists or can be added with new chunks.
    fn try_reserve_data(&self, bytes: u64) -> Result<Option<Reservation>> {
        loop {
            match self.space.reserve(SpaceKind::Data, bytes) {
                // In mixed block groups, data must leave room for the metadata that the running transaction needs.
                Ok(inner) if self.data_leaves_room_for_metadata() => {
                    return Ok(Some(inner));
                }
                Ok(_) => return Ok(None),
                Err(shortage) if shortage.unallocated_bytes == 0 => return Ok(None),
                Err(shortage) => {
                    if !self.add_chunk_for_promise(shortage)? {
                        return Ok(None);
                    }
                }
            }
        }
    }
}
