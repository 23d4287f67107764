//! Simple quotas: an extent is charged to the subvolume that allocated it, for as long as the extent exists, no matter
//! which subvolumes use it.
//!
//! The item of a data extent names that subvolume (`EXTENT_OWNER_REF`), and so does the header of a tree block. So the
//! numbers follow from the extents that the extent tree gains and loses ([`crate::extents::extent_tree`]): no
//! references are searched, and a snapshot or the deletion of a subvolume needs no accounting of its own. Referenced
//! and exclusive bytes are equal.
//!
//! Invariants:
//! - I1. Exactly the extents that were allocated since simple quotas were enabled are counted. The generation of an
//!   extent shows whether it is counted, so no rescan is needed.
//! - I2. A moved extent keeps its owner.
//! - I3. The group of a deleted subvolume remains as long as extents are charged to it.

use ubtrfs_format::{Generation, RootId};

use super::groups::QgroupId;
use super::state::QuotaState;
use crate::engine::Engine;
use crate::extents::extent_tree::Charges;

impl Engine {
    /// Updates the groups' numbers for the extents that the extent tree gained and lost. The caller holds the commit
    /// lock.
    pub(crate) fn count_charges(&self, charges: &Charges, transid: Generation) {
        if charges.is_empty() {
            return;
        }
        let Some(state) = &mut *self.quotas.lock() else { return };
        for (&root, &(gained, lost)) in charges {
            state.groups.count(&[], &[root], gained, transid);
            state.groups.count(&[root], &[], lost, transid);
        }
        if state.groups.take_underflow() {
            tracing::error!("simple quotas are wrong: a group would have less than 0 bytes");
        }
    }
}

impl QuotaState {
    /// Removes the group of a subvolume that was dropped, unless simple quotas still charge extents to it (I3).
    pub(super) fn remove_group_of(&mut self, root: RootId) {
        let id = QgroupId::of_subvolume(root);
        if self.groups.get(id).is_some_and(|group| !self.is_charged(group)) {
            self.groups.remove(id);
        }
    }

    /// The groups that a new subvolume joins if its creator names no groups: the parents of the group of `holder`, the
    /// subvolume that holds the new subvolume's name.
    pub(super) fn inherited_parents(&self, holder: RootId) -> Vec<QgroupId> {
        let group = self.groups.get(QgroupId::of_subvolume(holder));
        group.into_iter().flat_map(|group| group.parents.iter().copied()).collect()
    }
}
