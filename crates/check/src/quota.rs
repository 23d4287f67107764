//! The quota tree: items that belong together, and the numbers of each subvolume's own group.
//!
//! A subvolume refers to an extent if any of its blocks or files does. An extent is exclusive while no other subvolume refers
//! to it. The numbers of higher groups follow from their members and are not compared.
//!
//! Invariants:
//! - I1. With quotas on, about 50 bytes for each tree block and data extent; otherwise nothing.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_format::item::{QgroupInfo, QgroupStatus};
use ubtrfs_format::{KeyType, RootId};

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::u64_at;
use crate::walk::Event;

/// The numbers of the quota tree, and the numbers found.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    /// Whether the numbers are compared.
    active: bool,
    listed: BTreeMap<u64, (QgroupInfo, Place)>,
    found: BTreeMap<u64, (u64, u64)>,
    /// The current subvolume.
    current: Option<RootId>,
    /// For each extent: the first subvolume that refers to it, the last one, and whether there are several.
    users: std::collections::HashMap<u64, Users>,
}

#[derive(Clone, Copy, Debug)]
struct Users {
    first: u64,
    last: u64,
    several: bool,
}

impl Quota {
    /// Whether the check must visit every block of every subvolume.
    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// Counts the next blocks and extents for this subvolume.
    pub(crate) fn begin(&mut self, tree: Option<RootId>) {
        self.current = tree;
    }

    /// Stops counting.
    pub(crate) fn pause(&mut self) {
        self.current = None;
    }

    fn count(&mut self, bytenr: u64, len_bytes: u64) {
        let Some(RootId(tree)) = self.current.filter(|_| self.active) else { return };
        let users = self.users.entry(bytenr).or_insert(Users { first: tree, last: 0, several: false });
        if users.last == tree {
            return;
        }
        users.last = tree;
        let exclusive_of = match (users.first == tree, users.several) {
            (true, _) => Some((tree, true)),
            (false, false) => Some((users.first, false)),
            (false, true) => None,
        };
        if users.first != tree {
            users.several = true;
        }
        // A crafted image can have any length.
        let found = self.found.entry(tree).or_default();
        found.0 = found.0.wrapping_add(len_bytes);
        if let Some((tree, gains)) = exclusive_of {
            let exclusive = &mut self.found.entry(tree).or_default().1;
            *exclusive = if gains { exclusive.wrapping_add(len_bytes) } else { exclusive.wrapping_sub(len_bytes) };
        }
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
            let Event::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items() {
                let place = leaf.place(slot);
                match key.item_type {
                    KeyType::QGROUP_STATUS => status = u64_at(data, 16),
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
        let Some(status) = status else {
            let text = "the quota tree has no status item";
            return self.sink.report(Code::QgroupItem, Place::tree(RootId::QUOTA_TREE), text);
        };
        let unsure = QgroupStatus::INCONSISTENT | QgroupStatus::RESCAN | QgroupStatus::SIMPLE_MODE;
        self.quota.active = status & QgroupStatus::ON != 0 && status & unsure == 0;
    }

    /// Compares the numbers of each subvolume's group.
    pub(crate) fn compare_quota(&mut self) {
        if !self.quota.active || self.has_gaps {
            return;
        }
        // Until a deleted subvolume is gone, its remains count as a user of shared extents.
        if self.roots.trees.values().any(|root| root.refs == 0) {
            return;
        }
        for (group, (info, place)) in std::mem::take(&mut self.quota.listed) {
            if group >> 48 != 0 || !self.roots.trees.contains_key(&group) {
                continue;
            }
            let (referenced, exclusive) = self.quota.found.get(&group).copied().unwrap_or_default();
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

/// A quota group as users write it: `level/number`.
fn name(group: u64) -> String {
    format!("{}/{}", group >> 48, group & 0xffff_ffff_ffff)
}
