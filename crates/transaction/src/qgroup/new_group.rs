//! The groups of new subvolumes and snapshots, and the numbers of a new snapshot.

use ubtrfs_format::item::QgroupLimit;
use ubtrfs_format::{Generation, RootId};
use ubtrfs_tree::RootPtr;

use super::groups::{Limit, Qgroup, QgroupId};
use super::state::QuotaState;
use crate::engine::Engine;

impl Engine {
    /// Makes the group of a new subvolume with these limits, and adds it to the groups `parents`. With simple quotas
    /// and no `parents`, the new group joins the groups of `holder`, the subvolume that holds the new subvolume's name,
    /// as in Linux.
    pub(crate) fn add_group(&self, id: RootId, holder: RootId, parents: &[QgroupId], limit: Option<&QgroupLimit>) {
        if let Some(state) = &mut *self.quotas.lock() {
            let inherits = state.simple_since().is_some() && parents.is_empty();
            let inherited = if inherits { state.inherited_parents(holder) } else { Vec::new() };
            let group = QgroupId::of_subvolume(id);
            state.join(group, if inherits { &inherited } else { parents });
            if let Some(limit) = limit {
                state.groups.set_limit(group, Limit::from_item(limit));
            }
        }
        if limit.is_some() {
            self.quotas.note_limits();
        }
    }

    /// Makes the group of a new snapshot, and adds it to the requested groups. As in Linux, the group gets the limits
    /// of the source's group. Computes the numbers: from now on, the source and the snapshot share all extents except
    /// their root nodes. The caller has accounted all earlier changes.
    pub(crate) fn share_numbers(
        &self,
        source: &RootPtr,
        snapshot: &RootPtr,
        parents: &[QgroupId],
        transid: Generation,
    ) {
        let Some(state) = &mut *self.quotas.lock() else { return };
        let nodesize = u64::from(self.geometry.nodesize);
        let counted = |root: &RootPtr| if state.counts(root.bytenr.0) { nodesize } else { 0 };
        let (source_root, snapshot_root) = (counted(source), counted(snapshot));
        let (from, to) = (QgroupId::of_subvolume(source.tree), QgroupId::of_subvolume(snapshot.tree));
        state.join(to, parents);
        let groups = &mut state.groups;
        let Some(Qgroup { referenced, exclusive, limit, .. }) = groups.get(from).cloned() else {
            state.mark_unknown_and_rescan(transid);
            return;
        };
        groups.set_limit(to, limit);
        let was_alone = referenced == exclusive;
        let (above_source, above_snapshot) = (groups.above(source.tree), groups.above(snapshot.tree));
        let shared = referenced.saturating_sub(source_root);
        let Some(of_snapshot) = shared.checked_add(snapshot_root) else {
            state.mark_unknown_and_rescan(transid);
            return;
        };
        let mut is_known = true;
        for &id in above_source.iter().filter(|id| **id != from) {
            if above_snapshot.contains(&id) {
                groups.add(id, (1, snapshot_root), (1, snapshot_root), transid);
            } else if was_alone {
                groups.add(id, (0, 0), (-1, shared), transid);
            } else if groups.subvolumes_below(id).len() == 1 {
                let referenced = groups.get(id).map_or(0, |group| group.referenced);
                groups.set_numbers(id, referenced, source_root, transid);
            } else {
                is_known &= groups.get(id).is_none_or(|group| group.exclusive == 0);
            }
        }
        for &id in above_snapshot.iter().filter(|id| **id != to && !above_source.contains(id)) {
            let is_only_member = groups.subvolumes_below(id).len() == 1;
            if is_only_member {
                groups.set_numbers(id, of_snapshot, snapshot_root, transid);
            } else if was_alone {
                groups.add(id, (1, of_snapshot), (1, snapshot_root), transid);
            } else {
                is_known = false;
            }
        }
        groups.set_numbers(from, referenced, source_root, transid);
        groups.set_numbers(to, of_snapshot, snapshot_root, transid);
        if !is_known {
            state.mark_unknown_and_rescan(transid);
        }
    }
}

impl QuotaState {
    /// Makes a group if it does not exist, and adds it to the groups `parents`.
    fn join(&mut self, id: QgroupId, parents: &[QgroupId]) {
        self.groups.create(id);
        for parent in parents {
            let is_new = self.groups.get(id).is_some_and(|group| !group.parents.contains(parent));
            if is_new && parent.level() > id.level() && self.groups.get(*parent).is_some() {
                self.groups.relate(id, *parent);
            }
        }
    }
}
