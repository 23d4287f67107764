//! [`Qgroups`]: the quota groups with their numbers and relations, and how the numbers change when the users of an
//! extent change.
//!
//! A group refers to an extent if a subvolume below the group refers to it. A group has an extent exclusively if all
//! subvolumes that refer to the extent are below the group.
//!
//! Invariants:
//! - I1. A relation leads from a lower level to a higher one, so relations form no cycle.
//! - I2. The `members` of a group are exactly the groups that list it in their `parents`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ubtrfs_format::item::QgroupLimit;
use ubtrfs_format::{Generation, RootId};

pub(crate) use crate::handle::quota_reservation::QgroupId;

/// A quota group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Qgroup {
    /// Bytes of all extents that the group refers to.
    pub(crate) referenced: u64,
    /// Bytes of the extents that the group has exclusively.
    pub(crate) exclusive: u64,
    /// The last transaction that changed the numbers.
    pub(crate) generation: Generation,
    /// Its limits.
    pub(crate) limit: Limit,
    /// Groups of higher levels that this group belongs to.
    pub(crate) parents: BTreeSet<QgroupId>,
    /// Groups of lower levels that belong to this group.
    pub(crate) members: BTreeSet<QgroupId>,
}

/// Limits of a group, with the fields as on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) flags: u64,
    pub(crate) max_referenced: u64,
    pub(crate) max_exclusive: u64,
    pub(crate) rsv_referenced: u64,
    pub(crate) rsv_exclusive: u64,
}

/// All groups of a filesystem.
#[derive(Debug, Default)]
pub(crate) struct Qgroups {
    groups: BTreeMap<QgroupId, Qgroup>,
    /// For each subvolume: its group and all groups above it.
    above: HashMap<RootId, Arc<[QgroupId]>>,
    /// Groups whose items in memory differ from the items on disk.
    changed: BTreeSet<QgroupId>,
    /// Relations `(member, parent)` to write (true) or delete (false).
    changed_relations: BTreeMap<(QgroupId, QgroupId), bool>,
    /// Relations `(member, parent)` on disk of which a group does not exist. The next commit deletes them.
    leftover: BTreeSet<(QgroupId, QgroupId)>,
    /// Whether a number would have become negative or too large for 64 bits, which means that earlier numbers were
    /// wrong.
    underflow: bool,
}

impl Limit {
    /// Flag: the referenced bytes are limited.
    pub(crate) const MAX_REFERENCED: u64 = 1;
    /// Flag: the exclusive bytes are limited.
    pub(crate) const MAX_EXCLUSIVE: u64 = 2;

    pub(crate) fn from_item(item: &QgroupLimit) -> Self {
        Self {
            flags: item.flags,
            max_referenced: item.max_rfer,
            max_exclusive: item.max_excl,
            rsv_referenced: item.rsv_rfer,
            rsv_exclusive: item.rsv_excl,
        }
    }

    pub(crate) fn to_item(self) -> QgroupLimit {
        QgroupLimit {
            flags: self.flags,
            max_rfer: self.max_referenced,
            max_excl: self.max_exclusive,
            rsv_rfer: self.rsv_referenced,
            rsv_excl: self.rsv_exclusive,
        }
    }

    /// Limit of the referenced bytes, if any.
    pub(crate) fn referenced(&self) -> Option<u64> {
        (self.flags & Self::MAX_REFERENCED != 0).then_some(self.max_referenced)
    }

    /// Limit of the exclusive bytes, if any.
    pub(crate) fn exclusive(&self) -> Option<u64> {
        (self.flags & Self::MAX_EXCLUSIVE != 0).then_some(self.max_exclusive)
    }
}

/// Number of subvolumes below a group that use an extent, before and after a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UserCounts {
    before: usize,
    after: usize,
}

impl Qgroups {
    /// The group with this id.
    pub(crate) fn get(&self, id: QgroupId) -> Option<&Qgroup> {
        self.groups.get(&id)
    }

    /// All groups by id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (QgroupId, &Qgroup)> {
        self.groups.iter().map(|(id, group)| (*id, group))
    }

    /// Adds a group as it is on disk. Relations are added with [`Self::relate_as_on_disk`].
    pub(crate) fn insert_as_on_disk(&mut self, id: QgroupId, group: Qgroup) {
        self.above.clear();
        self.groups.insert(id, group);
    }

    /// Adds a relation as it is on disk. Returns false, without a change, if the relation violates I1 or a group does
    /// not exist.
    pub(crate) fn relate_as_on_disk(&mut self, member: QgroupId, parent: QgroupId) -> bool {
        let known = member.level() < parent.level() && self.groups.contains_key(&member);
        if !known || !self.groups.contains_key(&parent) {
            return false;
        }
        self.link(member, parent);
        true
    }

    /// Notes a relation that is on disk although one of its groups is not.
    pub(crate) fn note_leftover(&mut self, member: QgroupId, parent: QgroupId) {
        self.leftover.insert((member, parent));
    }

    fn link(&mut self, member: QgroupId, parent: QgroupId) {
        assert!(member.level() < parent.level(), "I1: {member} would be a member of {parent}");
        self.above.clear();
        if let Some(group) = self.groups.get_mut(&member) {
            group.parents.insert(parent);
        }
        if let Some(group) = self.groups.get_mut(&parent) {
            group.members.insert(member);
        }
    }

    /// Adds an empty group; returns false if the group exists already.
    pub(crate) fn create(&mut self, id: QgroupId) -> bool {
        if self.groups.contains_key(&id) {
            return false;
        }
        self.insert_as_on_disk(id, Qgroup::default());
        self.changed.insert(id);
        true
    }

    /// Removes a group and its relations.
    pub(crate) fn remove(&mut self, id: QgroupId) {
        let Some(group) = self.groups.get(&id).cloned() else { return };
        group.parents.iter().for_each(|parent| self.unrelate(id, *parent));
        group.members.iter().for_each(|member| self.unrelate(*member, id));
        self.above.clear();
        self.groups.remove(&id);
        debug_assert!(
            self.groups.values().all(|other| !other.parents.contains(&id) && !other.members.contains(&id)),
            "I2: a group still lists {id}"
        );
        self.changed.insert(id);
    }

    /// Adds a relation. The caller has checked that both groups exist and that the relation satisfies I1.
    pub(crate) fn relate(&mut self, member: QgroupId, parent: QgroupId) {
        self.link(member, parent);
        self.changed_relations.insert((member, parent), true);
    }

    /// Removes a relation.
    pub(crate) fn unrelate(&mut self, member: QgroupId, parent: QgroupId) {
        self.above.clear();
        if let Some(group) = self.groups.get_mut(&member) {
            group.parents.remove(&parent);
        }
        if let Some(group) = self.groups.get_mut(&parent) {
            group.members.remove(&member);
        }
        self.changed_relations.insert((member, parent), false);
    }

    /// Sets the limits of a group.
    pub(crate) fn set_limit(&mut self, id: QgroupId, limit: Limit) {
        if let Some(group) = self.groups.get_mut(&id).filter(|group| group.limit != limit) {
            group.limit = limit;
            self.changed.insert(id);
        }
    }

    /// Whether any group has a limit.
    pub(crate) fn have_limits(&self) -> bool {
        self.groups.values().any(|group| group.limit.referenced().is_some() || group.limit.exclusive().is_some())
    }

    /// Sets all numbers to zero.
    pub(crate) fn zero(&mut self, generation: Generation) {
        for (id, group) in &mut self.groups {
            (group.referenced, group.exclusive, group.generation) = (0, 0, generation);
            self.changed.insert(*id);
        }
    }

    /// Whether any group or relation differs from its item on disk.
    pub(crate) fn has_changes(&self) -> bool {
        !self.changed.is_empty() || !self.changed_relations.is_empty()
    }

    /// Takes the groups whose items in memory differ from the items on disk.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<QgroupId> {
        std::mem::take(&mut self.changed)
    }

    /// Takes the relations `(member, parent)` to write (true) or delete (false).
    pub(crate) fn take_changed_relations(&mut self) -> BTreeMap<(QgroupId, QgroupId), bool> {
        let mut all: BTreeMap<_, _> =
            std::mem::take(&mut self.leftover).into_iter().map(|pair| (pair, false)).collect();
        all.append(&mut self.changed_relations);
        all
    }

    /// Returns whether a number would have become negative or too large for 64 bits since the last call.
    pub(crate) fn take_underflow(&mut self) -> bool {
        std::mem::take(&mut self.underflow)
    }

    /// The group of a subvolume and all groups above it; empty if the subvolume has no group.
    pub(crate) fn above(&mut self, root: RootId) -> Arc<[QgroupId]> {
        if let Some(known) = self.above.get(&root) {
            return Arc::clone(known);
        }
        let mut all = BTreeSet::new();
        let mut open = vec![QgroupId::of_subvolume(root)];
        while let Some(id) = open.pop() {
            if let Some(group) = self.groups.get(&id)
                && all.insert(id)
            {
                open.extend(&group.parents);
            }
        }
        let all: Arc<[QgroupId]> = all.into_iter().collect();
        self.above.insert(root, Arc::clone(&all));
        all
    }

    /// The subvolumes whose own groups are below this group, or are this group.
    pub(crate) fn subvolumes_below(&self, id: QgroupId) -> BTreeSet<RootId> {
        let mut found = BTreeSet::new();
        let (mut open, mut seen) = (vec![id], BTreeSet::new());
        while let Some(id) = open.pop() {
            if !seen.insert(id) {
                continue;
            }
            if id.level() == 0 {
                found.insert(RootId(id.0));
            }
            open.extend(self.groups.get(&id).into_iter().flat_map(|group| &group.members));
        }
        found
    }

    /// Updates the numbers of all groups for an extent of `bytes` whose users change from the subvolumes `before` to
    /// the subvolumes `after`.
    pub(crate) fn count(&mut self, before: &[RootId], after: &[RootId], bytes: u64, transid: Generation) {
        if before == after {
            return;
        }
        for (id, view) in self.views(before, after) {
            self.change(id, &view, before.len(), after.len(), bytes, transid);
        }
    }

    /// Whether a change of an extent's users from one set to another changes the numbers of any group other than
    /// `except`.
    pub(crate) fn matters(&mut self, before: &[RootId], after: &[RootId], except: QgroupId) -> bool {
        let (nr_before, nr_after) = (before.len(), after.len());
        self.views(before, after).into_iter().any(|(id, view)| {
            let is_same = (view.before > 0) == (view.after > 0)
                && (view.before == nr_before && view.before > 0) == (view.after == nr_after && view.after > 0);
            id != except && !is_same
        })
    }

    #[allow(clippy::arithmetic_side_effects, reason = "numbers of subvolumes")]
    fn views(&mut self, before: &[RootId], after: &[RootId]) -> BTreeMap<QgroupId, UserCounts> {
        let mut views: BTreeMap<QgroupId, UserCounts> = BTreeMap::new();
        for root in before {
            self.above(*root).iter().for_each(|id| views.entry(*id).or_default().before += 1);
        }
        for root in after {
            self.above(*root).iter().for_each(|id| views.entry(*id).or_default().after += 1);
        }
        views
    }

    fn change(
        &mut self,
        id: QgroupId,
        view: &UserCounts,
        nr_before: usize,
        nr_after: usize,
        bytes: u64,
        transid: Generation,
    ) {
        let sign = |had: bool, has: bool| i8::from(has).saturating_sub(i8::from(had));
        let referenced = sign(view.before > 0, view.after > 0);
        let exclusive = sign(view.before > 0 && view.before == nr_before, view.after > 0 && view.after == nr_after);
        self.add(id, (referenced, bytes), (exclusive, bytes), transid);
    }

    /// Adds bytes to a group's numbers (sign 1), subtracts bytes (sign -1), or changes nothing (sign 0). A number that
    /// would become negative or too large becomes 0.
    pub(crate) fn add(&mut self, id: QgroupId, referenced: (i8, u64), exclusive: (i8, u64), transid: Generation) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let mut underflow = false;
        let mut change = |number: &mut u64, (sign, bytes): (i8, u64)| {
            let sum = match sign {
                1 => number.checked_add(bytes),
                -1 => number.checked_sub(bytes),
                _ => Some(*number),
            };
            underflow |= sum.is_none();
            let sum = sum.unwrap_or(0);
            let is_new = sum != *number;
            *number = sum;
            is_new
        };
        let is_new = change(&mut group.referenced, referenced) | change(&mut group.exclusive, exclusive);
        self.underflow |= underflow;
        if is_new {
            group.generation = transid;
            self.changed.insert(id);
        }
    }

    /// Sets a group's numbers.
    pub(crate) fn set_numbers(&mut self, id: QgroupId, referenced: u64, exclusive: u64, transid: Generation) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if (group.referenced, group.exclusive) != (referenced, exclusive) {
            (group.referenced, group.exclusive, group.generation) = (referenced, exclusive, transid);
            self.changed.insert(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRANSID: Generation = Generation(9);

    fn id(level: u16, number: u64) -> QgroupId {
        QgroupId::new(level, number).expect("small")
    }

    fn numbers(groups: &Qgroups, id: QgroupId) -> (u64, u64) {
        let group = groups.get(id).expect("there");
        (group.referenced, group.exclusive)
    }

    #[test]
    fn numbers_after_random_changes_equal_a_count_from_nothing() {
        let mut rng = ubtrfs_testkit::Rng::new(ubtrfs_testkit::Rng::seed_or(1));
        let roots: Vec<RootId> = (256..262).map(RootId).collect();
        let mut groups = Qgroups::default();
        roots.iter().for_each(|root| assert!(groups.create(QgroupId::of_subvolume(*root))));
        for (member, parent) in [
            (id(0, 256), id(1, 1)),
            (id(0, 257), id(1, 1)),
            (id(0, 257), id(1, 2)),
            (id(0, 258), id(1, 2)),
            (id(1, 1), id(2, 1)),
            (id(1, 2), id(2, 1)),
        ] {
            groups.create(parent);
            groups.relate(member, parent);
        }
        let mut extents: Vec<(u64, Vec<RootId>)> = (0..40).map(|_| (1 + rng.below(100), Vec::new())).collect();
        for _ in 0..2000 {
            let (bytes, users) = &mut extents[rng.below(40) as usize];
            // Subvolume 270 has no group, but counts as a user.
            let after: Vec<RootId> = roots.iter().copied().chain([RootId(270)]).filter(|_| rng.below(3) == 0).collect();
            groups.count(users, &after, *bytes, TRANSID);
            *users = after;
        }
        let all: Vec<QgroupId> = groups.iter().map(|(id, _)| id).collect();
        for group in all {
            let below = groups.subvolumes_below(group);
            let referenced = |(_, users): &&(u64, Vec<RootId>)| users.iter().any(|user| below.contains(user));
            let exclusive =
                |(_, users): &&(u64, Vec<RootId>)| !users.is_empty() && users.iter().all(|user| below.contains(user));
            let expected = (
                extents.iter().filter(referenced).map(|(bytes, _)| bytes).sum(),
                extents.iter().filter(exclusive).map(|(bytes, _)| bytes).sum(),
            );
            assert_eq!(numbers(&groups, group), expected, "{group}");
        }
        assert!(!groups.take_underflow());
    }

    #[test]
    fn a_number_that_would_become_negative_is_noticed() {
        let mut groups = Qgroups::default();
        groups.create(id(0, 256));
        groups.count(&[RootId(256)], &[], 4096, TRANSID);
        assert!(groups.take_underflow() && !groups.take_underflow());
        assert_eq!(numbers(&groups, id(0, 256)), (0, 0));
    }

    #[test]
    fn losing_one_of_three_users_matters_to_nobody_else() {
        let mut groups = Qgroups::default();
        (256..259).for_each(|number| assert!(groups.create(id(0, number))));
        let [a, b, c] = [256, 257, 258].map(RootId);
        assert!(!groups.matters(&[a, b, c], &[b, c], id(0, 256)));
        assert!(groups.matters(&[a, b], &[b], id(0, 256)));
        groups.create(id(1, 1));
        groups.relate(id(0, 256), id(1, 1));
        assert!(groups.matters(&[a, b, c], &[b, c], id(0, 256)), "1/1 loses it");
    }
}
