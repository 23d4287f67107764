//! Limits of quota groups.
//!
//! Invariants:
//! - I1. When a reservation is granted, the counted and reserved bytes of each group stay within its limits. Reserved
//!   bytes are the bytes before compression, and the tree blocks for the items of the data (I2 of
//!   `handle/quota_reservation.rs`); counted bytes are the bytes after compression. So any number of writers together
//!   exceed no limit. Only removals that split extents may exceed a limit: their new items are not reserved.

use ubtrfs_format::RootId;

use crate::engine::Engine;
use crate::handle::quota_reservation::{Need, QuotaReservation};

impl Engine {
    /// Reserves space for `nr_items` file extent items if the limits allow it now, without writing or committing.
    pub fn try_reserve_items_quota(&self, root: RootId, nr_items: u64) -> Option<QuotaReservation> {
        self.try_reserve_quota(root, Need::new_data(0, nr_items, self.geometry.nodesize.into()))
    }

    /// Whether any quota group has a limit.
    pub fn has_quota_limits(&self) -> bool {
        self.quotas.has_limits()
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
