//! Checks the quota tree: whether its items match each other, and whether each group's referenced and exclusive bytes
//! are right.
//!
//! A group refers to an extent if a block or a file of one of its subvolumes refers to the extent. The group has the
//! extent exclusively if no subvolume outside of the group refers to the extent. Both facts depend only on the set of
//! subvolumes that refer to the extent, so the bytes of extents are summed for each such set. There are few sets, even
//! if there are many extents.
//!
//! Simple quotas count an extent in the group of the subvolume that allocated the extent. The item of a data extent
//! names that subvolume, and so does the header of a tree block.
//!
//! Invariants:
//! - I1. If full quotas are on, the check takes about 20 bytes for each tree block and data extent.
//! - I2. Set number 0 has no subvolumes. A set is added when it first occurs, and its subvolumes never change.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ubtrfs_format::item::InlineRef;
use ubtrfs_format::item::{QgroupInfo, QgroupStatus};
use ubtrfs_format::{KeyType, RootId};

use crate::block_table::TreeBlock;
use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::u64_at;
use crate::walk::WalkEvent;

/// The referenced and exclusive bytes of each group as the quota tree states them, and as the check counts them.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    /// Whether the bytes in the quota tree are compared with the counted bytes.
    active: bool,
    /// With simple quotas, the generation that enabled them. Simple quotas count extents of this and later generations.
    simple_since: Option<u64>,
    listed: BTreeMap<u64, (QgroupInfo, Place)>,
    /// For each group, the groups that contain it.
    parents: BTreeMap<u64, BTreeSet<u64>>,
    /// The current subvolume.
    current: Option<RootId>,
    /// For each extent, the set of subvolumes that refer to it.
    users: HashMap<u64, u32>,
    /// The sets (I2).
    sets: Vec<UserSet>,
    /// For simple quotas: the bytes of data extents by the subvolume that allocated them and by their generation.
    allocated: BTreeMap<(u64, u64), u64>,
    /// Maps a set and a subvolume to the set that results when the subvolume is added.
    with: HashMap<(u32, u64), u32>,
}

/// A set of subvolumes, formed from another set and one more subvolume. Subvolumes are visited one after the other, so
/// the subvolumes of a set always join it in the same order, and equal sets have the same number.
#[derive(Clone, Copy, Debug)]
struct UserSet {
    others: u32,
    /// The subvolume that joined the set last.
    last: u64,
    /// Bytes of the extents that exactly these subvolumes refer to.
    bytes: u64,
}

impl Quota {
    /// Whether full quotas are checked, so that the check must visit every block of every subvolume.
    pub(crate) fn is_active(&self) -> bool {
        self.active && self.simple_since.is_none()
    }

    /// Begins to count blocks and extents for this subvolume. Linux's data relocation tree, to which an interrupted
    /// balance may leave references, has no quota group and is not counted as a user, as in Linux.
    pub(crate) fn begin(&mut self, tree: Option<RootId>) {
        self.current = tree.filter(|tree| tree.is_subvolume());
    }

    /// Stops counting blocks and extents.
    pub(crate) fn pause(&mut self) {
        self.current = None;
    }

    fn count(&mut self, bytenr: u64, len_bytes: u64) {
        let Some(RootId(tree)) = self.current.filter(|_| self.is_active()) else { return };
        if self.sets.is_empty() {
            self.sets.push(UserSet { others: 0, last: 0, bytes: 0 });
        }
        let before = self.users.get(&bytenr).copied().unwrap_or(0);
        let Some(set) = self.sets.get_mut(before as usize).filter(|set| set.last != tree) else { return };
        // Lengths in a crafted image can have any value.
        if before != 0 {
            set.bytes = set.bytes.wrapping_sub(len_bytes);
        }
        let next = u32::try_from(self.sets.len()).unwrap_or(u32::MAX);
        let after = *self.with.entry((before, tree)).or_insert(next);
        if after == next {
            self.sets.push(UserSet { others: before, last: tree, bytes: 0 });
        }
        if let Some(set) = self.sets.get_mut(after as usize) {
            set.bytes = set.bytes.wrapping_add(len_bytes);
        }
        self.users.insert(bytenr, after);
    }

    /// Returns a subvolume's group and all groups above it, as far as the quota tree lists them.
    fn above(&self, tree: u64) -> BTreeSet<u64> {
        let (mut found, mut open) = (BTreeSet::new(), vec![tree]);
        while let Some(group) = open.pop() {
            if self.listed.contains_key(&group) && found.insert(group) {
                open.extend(self.parents.get(&group).into_iter().flatten());
            }
        }
        found
    }

    /// If `reference` is the owner reference in a data extent's item, adds the extent's length to the bytes that the
    /// owner allocated.
    pub(crate) fn note_owner(&mut self, reference: &InlineRef, generation: u64, len_bytes: u64) {
        if let InlineRef::Owner(RootId(owner)) = reference {
            let sum = self.allocated.entry((*owner, generation)).or_default();
            // Lengths in a crafted image can have any value.
            *sum = sum.wrapping_add(len_bytes);
        }
    }

    /// Computes the bytes of each group: an extent counts in the group of the subvolume that allocated the extent, and
    /// in all groups that contain this group. Referenced and exclusive bytes are equal.
    fn simple_numbers(&self, since: u64, blocks: &[TreeBlock], nodesize: u64) -> BTreeMap<u64, (u64, u64)> {
        let data = self.allocated.iter().map(|((owner, generation), bytes)| (*owner, *generation, *bytes));
        let blocks = blocks.iter().map(|block| (block.owner, block.generation, nodesize));
        let mut charged: BTreeMap<u64, u64> = BTreeMap::new();
        for (owner, _, bytes) in data.chain(blocks).filter(|(_, generation, _)| *generation >= since) {
            if RootId(owner).is_subvolume() {
                let sum = charged.entry(owner).or_default();
                *sum = sum.wrapping_add(bytes);
            }
        }
        let mut found: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (owner, bytes) in charged {
            for group in self.above(owner) {
                let numbers = found.entry(group).or_default();
                *numbers = (numbers.0.wrapping_add(bytes), numbers.1.wrapping_add(bytes));
            }
        }
        found
    }

    /// Computes the referenced and exclusive bytes of each group.
    fn numbers(&self) -> BTreeMap<u64, (u64, u64)> {
        let mut above: HashMap<u64, BTreeSet<u64>> = HashMap::new();
        let mut found: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for users in self.sets.iter().skip(1).filter(|users| users.bytes > 0) {
            let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
            let (mut nr_users, mut set) = (0u32, Some(users));
            // The set that `others` names has a lower number, so the loop ends at set 0, which has no subvolumes.
            while let Some(UserSet { others, last, .. }) = set.copied() {
                nr_users = nr_users.saturating_add(1);
                let groups = above.entry(last).or_insert_with(|| self.above(last));
                for group in groups.iter() {
                    let count = counts.entry(*group).or_default();
                    *count = count.saturating_add(1);
                }
                set = self.sets.get(others as usize).filter(|_| others != 0);
            }
            for (group, count) in counts {
                let numbers = found.entry(group).or_default();
                numbers.0 = numbers.0.wrapping_add(users.bytes);
                if count == nr_users {
                    numbers.1 = numbers.1.wrapping_add(users.bytes);
                }
            }
        }
        found
    }
}

impl<'a> Checker<'a> {
    /// Counts a tree block for the current subvolume.
    pub(crate) fn quota_block(&mut self, bytenr: u64) {
        self.quota.count(bytenr, self.nodesize as u64);
    }

    /// Counts a data extent for the current subvolume.
    pub(crate) fn quota_data(&mut self, bytenr: u64, len_bytes: u64) {
        self.quota.count(bytenr, len_bytes);
    }

    /// Reads the quota tree.
    pub(crate) fn quota_tree(&mut self) {
        let Some(root) = self.tree_root(RootId::QUOTA_TREE) else { return };
        let mut status = None;
        let mut groups = BTreeSet::new();
        let mut limits = BTreeMap::new();
        let mut relations = BTreeMap::new();
        let complete = self.walk_tree(root, &mut |checker, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items() {
                let place = leaf.place(slot);
                match key.item_type {
                    KeyType::QGROUP_STATUS => status = u64_at(data, 16).map(|flags| (flags, u64_at(data, 32))),
                    KeyType::QGROUP_INFO => {
                        groups.insert(key.offset);
                        if let Ok(info) = QgroupInfo::decode(data) {
                            checker.quota.listed.insert(key.offset, (info, place));
                        }
                    }
                    KeyType::QGROUP_LIMIT => drop(limits.insert(key.offset, place)),
                    KeyType::QGROUP_RELATION => drop(relations.insert((key.objectid, key.offset), place)),
                    _ => {}
                }
            }
        });
        if !complete {
            return;
        }
        for (group, place) in &limits {
            if !groups.contains(group) {
                let text = format!("limits of quota group {}, which does not exist", name(*group));
                self.sink.report(Code::QgroupItem, *place, text);
            }
        }
        for group in &groups {
            if !limits.contains_key(group) {
                let place = self.quota.listed.get(group).map(|(_, place)| *place).unwrap_or_default();
                self.sink.report(Code::QgroupItem, place, format!("quota group {} has no limits item", name(*group)));
            }
        }
        for ((a, b), place) in &relations {
            if !groups.contains(a) || !groups.contains(b) || !relations.contains_key(&(*b, *a)) {
                let text = format!("the relation of quota groups {} and {} is one-sided", name(*a), name(*b));
                self.sink.report(Code::QgroupItem, *place, text);
            }
        }
        for (member, parent) in relations.into_keys().filter(|(member, parent)| member < parent) {
            self.quota.parents.entry(member).or_default().insert(parent);
        }
        let Some((status, enabled)) = status else {
            let text = "the quota tree has no status item";
            return self.sink.report(Code::QgroupItem, Place::tree(RootId::QUOTA_TREE), text);
        };
        let unsure = QgroupStatus::INCONSISTENT | QgroupStatus::RESCAN;
        self.quota.active = status & QgroupStatus::ON != 0 && status & unsure == 0;
        if status & QgroupStatus::SIMPLE_MODE != 0 {
            self.quota.simple_since = Some(enabled.unwrap_or(u64::MAX));
        }
    }

    /// Compares the bytes that the quota tree lists for each group with the counted bytes. With full quotas, skips the
    /// groups of subvolumes that no longer exist.
    pub(crate) fn compare_quota(&mut self) {
        if !self.quota.active || self.has_gaps {
            return;
        }
        // Skip the comparison while the blocks of a deleted subvolume are not all freed, because the remaining blocks
        // count as users of shared extents. Simple quotas do not depend on the users of an extent.
        let is_simple = self.quota.simple_since.is_some();
        if !is_simple && self.roots.trees.values().any(|root| root.refs == 0) {
            return;
        }
        let found = match self.quota.simple_since {
            Some(since) => self.quota.simple_numbers(since, self.blocks.recorded(), self.nodesize as u64),
            None => self.quota.numbers(),
        };
        for (group, (info, place)) in std::mem::take(&mut self.quota.listed) {
            if !is_simple && group >> 48 == 0 && !self.roots.trees.contains_key(&group) {
                continue;
            }
            let (referenced, exclusive) = found.get(&group).copied().unwrap_or_default();
            if (info.rfer, info.excl) != (referenced, exclusive) {
                let text = format!(
                    "quota group {} has {} bytes referenced and {} exclusive, found {referenced} and {exclusive}",
                    name(group),
                    info.rfer,
                    info.excl
                );
                self.sink.report(Code::Qgroup, place, text);
            }
        }
    }
}

/// The text form of a quota group: `level/number`.
fn name(group: u64) -> String {
    format!("{}/{}", group >> 48, group & 0xffff_ffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_relocation_tree_shares_no_extent() {
        let listed = BTreeMap::from([(5, (QgroupInfo::decode(&[0; 40]).unwrap(), Place::default()))]);
        let mut quota = Quota { active: true, listed, ..Quota::default() };
        for tree in [RootId::DATA_RELOC_TREE, RootId::FS_TREE] {
            quota.begin(Some(tree));
            quota.count(1 << 20, 24576);
        }
        assert_eq!(quota.numbers(), BTreeMap::from([(5, (24576, 24576))]));
    }
}
