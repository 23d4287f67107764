//! Metadata reservations that wait: flushes, commits, and tries again.
//!
//! [`crate::handle::metadata_reservation`] decides whether the changes fit.

use std::time::{Duration, Instant};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::RootId;
use ubtrfs_space::SpaceKind;

use crate::engine::Engine;
use crate::handle::metadata_reservation::{CHANGES_PER_SUBVOLUME_DELETION, ReservationPurpose};
use crate::handle::trans_handle::MetadataReservation;
use crate::health::stats::Span;
use crate::lock_rank;

impl Engine {
    /// Reserves metadata space for about `nr_items` item changes.
    ///
    /// May flush and commit, so the caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`](ubtrfs_error::Error::NoSpace) if reclaim does not help,
    /// [`Error::ReadOnly`](ubtrfs_error::Error::ReadOnly), or an error of a commit or of writeback during reclaim.
    pub fn reserve(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(nr_items, nr_items, ReservationPurpose::Change)
    }

    /// Reserves metadata space for changes that free space. Changes that free space may use the global reserve.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve`].
    pub fn reserve_for_removal(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(nr_items, nr_items, ReservationPurpose::Removal)
    }

    /// Reserves metadata space for the deletion of a subvolume. The reservation may use space that other removals must
    /// leave, because removals in a subvolume with snapshots can take more space than they free.
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve`].
    pub fn reserve_for_subvolume_deletion(&self) -> Result<MetadataReservation<'_>> {
        let nr_items = CHANGES_PER_SUBVOLUME_DELETION as usize;
        self.reserve_metadata(nr_items, nr_items, ReservationPurpose::SubvolumeDeletion)
    }

    /// Reserves metadata space for a removal that can be done in steps: for `most` changes or, if space is short, for
    /// fewer, but at least for `least`; see [`MetadataReservation::nr_items`].
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve`].
    pub fn reserve_for_removal_steps(&self, most: usize, least: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(most, least, ReservationPurpose::Removal)
    }

    /// Reserves metadata space for a snapshot of this subvolume: for `nr_items` changes and a reference for each child
    /// of the subvolume's root node. While the reservation exists, all estimates assume shared blocks, even the
    /// estimates for changes admitted earlier.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such subvolume; otherwise as for [`Engine::tree`] and [`Engine::reserve`].
    pub fn reserve_for_snapshot(&self, source: RootId, nr_items: usize) -> Result<MetadataReservation<'_>> {
        let tree = self.tree(source)?.ok_or_else(|| Error::Refused {
            what: format!("subvolume {source} does not exist"),
            hint: "it may have been deleted: list the subvolumes and choose one of them",
        })?;
        let nr_children = tree.with_root(|nodes, root| Ok::<_, Error>(nodes.read_node(&root.node_ptr())?.nritems()))?;
        let nr_items = nr_items.saturating_add(nr_children);
        self.reserve_metadata(nr_items, nr_items, ReservationPurpose::Snapshot)
    }

    /// Reserves metadata space for the items of dirty data. Room for these items was set aside when data space was
    /// reserved. Reserves for `most` changes or, if space is short, for fewer, but at least for `least`; see
    /// [`MetadataReservation::nr_items`].
    ///
    /// # Errors
    ///
    /// As for [`Engine::reserve`].
    pub fn reserve_for_writeback_steps(&self, most: usize, least: usize) -> Result<MetadataReservation<'_>> {
        self.reserve_metadata(most, least, ReservationPurpose::Writeback)
    }

    /// Admits `most` changes, or fewer but at least `least`. Reclaims space if the changes do not fit.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`](ubtrfs_error::Error::NoSpace) if reclaim does not help, or an error of a commit or of
    /// writeback during reclaim.
    pub(crate) fn reserve_metadata(
        &self,
        most: usize,
        least: usize,
        purpose: ReservationPurpose,
    ) -> Result<MetadataReservation<'_>> {
        lock_rank::check_no_operation("I2 of lock_rank: an operation reserves nothing");
        self.check_writable()?;
        #[cfg(debug_assertions)]
        crate::handle::refusal::check()?;
        self.limit_delayed_items()?;
        let granted = || self.admit_most(most, least, purpose);
        if !purpose.is_ordinary() || self.tickets.metadata.is_empty() {
            // A snapshot takes nothing from the thread's stock ([`LoadShare`]). The stock was admitted before this
            // snapshot was counted, so its need does not include the copies of blocks that the snapshot will share.
            if purpose != ReservationPurpose::Snapshot && self.admission.load.take_admitted(most as u64) {
                return Ok(MetadataReservation::counted(self, most as u64, purpose));
            }
            if let Some(reservation) = granted() {
                self.admit_ahead();
                return Ok(reservation);
            }
        }
        if !purpose.is_ordinary() {
            let _waited = self.stats.span(Span::ReserveWait);
            let patience = if purpose == ReservationPurpose::Writeback { WRITEBACK_PATIENCE } else { PATIENCE };
            return self.admit_between_commits(&granted, purpose, patience)?.ok_or(Error::NoSpace);
        }
        // Try cheap steps first. A commit replaces estimates by exact numbers and frees pinned space; writing dirty
        // data before the commit replaces more estimates.
        let reclaimed = self.reserve_with_reclaim(
            Some(&self.tickets.metadata),
            || Ok(granted()),
            |round| {
                if round > 0 {
                    self.flush_data()?;
                }
                self.commit_to_reclaim()
            },
        );
        match reclaimed {
            Err(Error::NoSpace) => {
                // If a larger reservation of another thread failed, reclaim ended early for all waiting threads. Then
                // the admitted need still contains estimates for dirty data and for changes in progress, so write the
                // dirty data now.
                self.flush_data()?;
                self.admit_between_commits(&granted, purpose, CHANGE_PATIENCE)?.ok_or(Error::NoSpace)
            }
            done => done,
        }
    }

    /// Admits changes between two commits (I4 of [`crate::handle::metadata_reservation`]). If the changes do not fit,
    /// tries again until other threads have put their admitted changes, but for at most `patience`: the other threads may
    /// be waiting for a lock that the caller holds.
    fn admit_between_commits<T>(
        &self,
        granted: &dyn Fn() -> Option<T>,
        purpose: ReservationPurpose,
        patience: Duration,
    ) -> Result<Option<T>> {
        let begun = Instant::now();
        loop {
            if let Some(reservation) = self.try_between_commits(granted)? {
                return Ok(Some(reservation));
            }
            if !self.admission.load.may_get_less(purpose) || begun.elapsed() >= patience {
                // Try once more: the last reservation of another thread may have ended just now.
                return Ok(granted());
            }
            // Polls: each attempt commits, so the pause limits the number of commits.
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Writes dirty data. This replaces the estimated need of the data's items by their actual need.
    pub(crate) fn flush_data(&self) -> Result<()> {
        self.flusher().map_or(Ok(()), |flusher| flusher.flush_delalloc(None))
    }

    /// Checks I1 of `handle/admission.rs` in debug builds. Called when the filesystem was closed without a failure: no
    /// change runs, and all data is written.
    pub fn check_nothing_reserved(&self) {
        if cfg!(debug_assertions) {
            let nr_changes = self.admission.load.nr_reserved();
            assert_eq!(nr_changes, 0, "I1: reservations of changes were not given back");
            let may_use = [SpaceKind::Data, SpaceKind::Metadata].map(|kind| self.space.info(kind).may_use);
            assert_eq!(may_use, [0; 2], "I1: bytes of reservations were not given back");
            assert!(!self.quotas.reserved.is_held(), "I1: quota was not given back");
        }
    }
}

/// Time for which removals wait for reservations that were admitted before them.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which an ordinary change waits for the changes of other threads before it fails for lack of space.
const CHANGE_PATIENCE: Duration = Duration::from_millis(20);
/// Time for which writeback waits for the changes of other threads.
const WRITEBACK_PATIENCE: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
