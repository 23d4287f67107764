//! Enabling and disabling quotas, and changing groups, relations and limits.
//!
//! A change is made in memory under the commit lock, when the numbers are those of the last commit, and becomes durable
//! with the following commit.

use std::collections::BTreeSet;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::QgroupStatus;
use ubtrfs_format::superblock::Incompat;
use ubtrfs_format::{Generation, Key, KeyType, RootId};

use crate::engine::Engine;
use crate::qgroup::groups::{Limit, Qgroup, QgroupId, Qgroups};
use crate::qgroup::state::{QuotaMode, QuotaState};

/// The state of quotas as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaStatus {
    /// Whether the numbers are reliable. The numbers of full quotas become reliable when the first rescan has ended.
    pub consistent: bool,
    /// The first address that a running rescan has not reached.
    pub rescan: Option<u64>,
    /// Whether the quotas are simple quotas.
    pub simple: bool,
}

/// The kind of quotas to enable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaKind {
    /// An extent is charged to all subvolumes that use it.
    Full,
    /// An extent is charged to the subvolume that allocated it. Extents that exist already are not counted.
    Simple,
}

/// A quota group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QgroupSummary {
    /// Its id.
    pub id: QgroupId,
    /// Bytes of all extents that the group refers to.
    pub referenced: u64,
    /// Bytes of the extents that only the group's subvolumes refer to.
    pub exclusive: u64,
    /// Limit of the referenced bytes.
    pub max_referenced: Option<u64>,
    /// Limit of the exclusive bytes.
    pub max_exclusive: Option<u64>,
    /// Groups that this group belongs to.
    pub parents: Vec<QgroupId>,
    /// Groups that belong to this group.
    pub members: Vec<QgroupId>,
}

impl Engine {
    /// Enables quotas, and starts a rescan for full accounting. Does nothing if quotas of this kind are enabled
    /// already.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if quotas of the other kind are enabled; as for [`Engine::commit`].
    pub fn enable_quotas(&self, kind: QuotaKind) -> Result<()> {
        self.check_writable()?;
        self.check_not_held()?;
        if !self.quotas.is_on() && self.tree(RootId::QUOTA_TREE)?.is_some() {
            // Remove a quota tree that is not in use, for example because it could not be read.
            self.disable_quotas()?;
        }
        {
            let mut work = self.commit_state.lock();
            let enabled = match self.quotas.mode() {
                QuotaMode::Off => None,
                QuotaMode::Full => Some(QuotaKind::Full),
                QuotaMode::Simple => Some(QuotaKind::Simple),
            };
            if enabled == Some(kind) {
                return Ok(());
            }
            if let Some(enabled) = enabled {
                let name = if enabled == QuotaKind::Full { "full" } else { "simple" };
                return Err(Error::Refused {
                    what: format!("{name} quotas are enabled already"),
                    hint: "disable them first, which removes all groups and limits: ubtrfs quota disable",
                });
            }
            work.quota.forget_users();
            let mut groups = Qgroups::default();
            for id in self.subvolume_ids()? {
                groups.create(QgroupId::of_subvolume(id));
            }
            self.quotas.set(Some(match kind {
                QuotaKind::Full => QuotaState::fresh(groups, self.generation()),
                QuotaKind::Simple => {
                    self.commit_state.note_incompat(Incompat::SIMPLE_QUOTA.bits());
                    self.store.allow_simple_quotas();
                    QuotaState::fresh_simple(groups, self.generation())
                }
            }));
        }
        self.commit()
    }

    /// Disables quotas, and removes all groups.
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`].
    pub fn disable_quotas(&self) -> Result<()> {
        self.check_writable()?;
        self.check_not_held()?;
        {
            let _work = self.commit_state.lock();
            if self.tree(RootId::QUOTA_TREE)?.is_none() {
                return Ok(());
            }
            self.quotas.set(None);
            self.quotas.request_removal();
        }
        self.commit()
    }

    /// Starts a rescan, which the following commits carry out.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled, if they are simple quotas, or if a rescan is running; otherwise as for
    /// [`Engine::commit`].
    pub fn start_quota_rescan(&self) -> Result<()> {
        self.change_quotas(|state, transid| {
            if state.simple_since().is_some() {
                let what = "simple quotas need no rescan".to_owned();
                return Err(Error::Qgroup { what, errno: EINVAL });
            }
            if state.is_rescanning() {
                return Err(Error::Qgroup { what: "a rescan is running".to_owned(), errno: EINPROGRESS });
            }
            state.start_rescan(transid);
            Ok(())
        })
    }

    /// The state of quotas; `None` if quotas are disabled.
    pub fn quota_status(&self) -> Option<QuotaStatus> {
        self.quotas.lock().as_ref().map(|state| QuotaStatus {
            consistent: !state.status.has(QgroupStatus::INCONSISTENT),
            rescan: state.is_rescanning().then_some(state.status.rescan),
            simple: state.simple_since().is_some(),
        })
    }

    /// All groups by id, with the numbers of the last commit.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled.
    pub fn qgroups(&self) -> Result<Vec<QgroupSummary>> {
        let state = self.quotas.lock();
        let state = state.as_ref().ok_or_else(quotas_are_off)?;
        Ok(state.groups.iter().map(|(id, group)| QgroupSummary::of(id, group)).collect())
    }

    /// The quota groups whose ids are at least `from`, as [`Engine::qgroups`], at most `limit`.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled.
    pub fn qgroups_from(&self, from: QgroupId, limit: usize) -> Result<Vec<QgroupSummary>> {
        let state = self.quotas.lock();
        let state = state.as_ref().ok_or_else(quotas_are_off)?;
        let groups = state.groups.iter().filter(|(id, _)| *id >= from).take(limit);
        Ok(groups.map(|(id, group)| QgroupSummary::of(id, group)).collect())
    }

    /// Makes a group.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled, the group exists, or the group has level 0 and there is no such
    /// subvolume; otherwise as for [`Engine::commit`].
    pub fn create_qgroup(&self, id: QgroupId) -> Result<()> {
        // A group of level 0 without a subvolume would pass its limits on to a later subvolume of that id.
        if id.level() == 0 && (!RootId(id.0).is_subvolume() || self.root_item(RootId(id.0))?.is_none()) {
            let what =
                format!("quota group {id} needs a subvolume {}; groups of level 1 and above can be created", id.0);
            return Err(Error::Qgroup { what, errno: EINVAL });
        }
        self.change_quotas(|state, _| match state.groups.create(id) {
            true => Ok(()),
            false => Err(Error::Qgroup { what: format!("quota group {id} already exists"), errno: EEXIST }),
        })
    }

    /// Removes a group that has no members and does not belong to a subvolume.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled, or the group does not exist or is in use; otherwise as for
    /// [`Engine::commit`].
    pub fn destroy_qgroup(&self, id: QgroupId) -> Result<()> {
        let is_subvolume = id.level() == 0 && self.root_item(RootId(id.0))?.is_some();
        self.change_quotas(|state, _| {
            let group = state.groups.get(id).ok_or_else(|| no_group(id))?;
            let is_charged = state.is_charged(group);
            if is_subvolume || is_charged || !group.members.is_empty() {
                let member = group.members.first().filter(|_| !is_charged);
                let of = match member {
                    _ if is_subvolume => "belongs to a subvolume; it goes when the subvolume is deleted".to_owned(),
                    Some(member) => {
                        format!("has members; take them out first: ubtrfs qgroup remove {member} {id} PATH")
                    }
                    None => "is charged for extents that other subvolumes still use".to_owned(),
                };
                return Err(Error::Qgroup { what: format!("quota group {id} {of}"), errno: EBUSY });
            }
            state.groups.remove(id);
            Ok(())
        })
    }

    /// Removes the groups of subvolumes that no longer exist, except groups to which simple quotas still charge
    /// extents. Returns the number of removed groups.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled; otherwise as for [`Engine::commit`].
    pub fn clear_stale_qgroups(&self) -> Result<usize> {
        let alive = self.subvolume_ids()?;
        let mut nr_removed = 0;
        self.change_quotas(|state, _| {
            let is_stale =
                |id: QgroupId, group| id.level() == 0 && !alive.contains(&RootId(id.0)) && !state.is_charged(group);
            let stale = state.groups.iter().filter(|(id, group)| is_stale(*id, group)).map(|(id, _)| id);
            let stale: Vec<QgroupId> = stale.collect();
            nr_removed = stale.len();
            stale.into_iter().for_each(|id| state.groups.remove(id));
            Ok(())
        })?;
        Ok(nr_removed)
    }

    /// Makes a group a member of a group of a higher level. Returns whether the numbers of the higher groups need a
    /// rescan, which the call does not start.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled, a group does not exist, the levels do not ascend, or the relation
    /// exists; otherwise as for [`Engine::commit`].
    pub fn assign_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.relate_qgroups(member, parent, true)
    }

    /// Removes a member from a group. Returns whether the numbers of the higher groups need a rescan, which the call
    /// does not start.
    ///
    /// # Errors
    ///
    /// As for [`Engine::assign_qgroup`]; also if the relation does not exist.
    pub fn remove_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.relate_qgroups(member, parent, false)
    }

    fn relate_qgroups(&self, member: QgroupId, parent: QgroupId, assign: bool) -> Result<bool> {
        let mut needs_rescan = false;
        self.change_quotas(|state, transid| {
            let groups = &mut state.groups;
            // As in Linux, an assignment reports a missing group with another errno than other calls do.
            let missing = |id| match no_group(id) {
                Error::Qgroup { what, .. } if assign => Error::Qgroup { what, errno: EINVAL },
                other => other,
            };
            groups.get(parent).ok_or_else(|| missing(parent))?;
            let group = groups.get(member).ok_or_else(|| missing(member))?;
            if member.level() >= parent.level() {
                let what = format!("quota group {member} cannot belong to {parent}, which is not of a higher level");
                return Err(Error::Qgroup { what, errno: EINVAL });
            }
            if group.parents.contains(&parent) == assign {
                let (is, errno) = if assign { ("already belongs", EEXIST) } else { ("does not belong", ENOENT) };
                return Err(Error::Qgroup { what: format!("quota group {member} {is} to {parent}"), errno });
            }
            let (referenced, exclusive) = (group.referenced, group.exclusive);
            let is_simple_mode = state.status.has(QgroupStatus::SIMPLE_MODE);
            let affected = groups.subvolumes_below(member);
            let above = |groups: &mut Qgroups| -> Vec<BTreeSet<QgroupId>> {
                affected.iter().map(|root| groups.above(*root).iter().copied().collect()).collect()
            };
            let before = above(groups);
            if assign {
                groups.relate(member, parent);
            } else {
                groups.unrelate(member, parent);
            }
            let after = above(groups);
            let (more, less, sign) = if assign { (after, before, 1) } else { (before, after, -1) };
            let mut moved: Vec<BTreeSet<QgroupId>> =
                more.iter().zip(&less).map(|(more, less)| more.difference(less).copied().collect()).collect();
            if is_simple_mode {
                // Simple quotas charge no extent to two subvolumes, so a subvolume's numbers can be added or subtracted
                // as they are.
                for (root, ids) in affected.iter().zip(moved) {
                    let bytes = groups.get(QgroupId::of_subvolume(*root)).map_or(0, |group| group.referenced);
                    ids.into_iter().for_each(|id| groups.add(id, (sign, bytes), (sign, bytes), transid));
                }
                return Ok(());
            }
            moved.dedup();
            // If all bytes that a group refers to are exclusive, the higher groups gain or lose all these bytes, unless
            // some of the group's subvolumes belong to the higher groups through other relations too. In cases that
            // this arithmetic does not cover, only a rescan can find the shared bytes.
            let is_simple = referenced == exclusive && moved.len() <= 1;
            if !is_simple && referenced > 0 {
                needs_rescan = true;
                state.status.flags |= QgroupStatus::INCONSISTENT;
                return Ok(());
            }
            for id in moved.into_iter().flatten() {
                groups.add(id, (sign, referenced), (sign, exclusive), transid);
            }
            Ok(())
        })?;
        Ok(needs_rescan)
    }

    /// Sets (`Some(Some)`) or removes (`Some(None)`) limits of a group; `None` leaves a limit unchanged. As in Linux,
    /// setting a limit of a group that does not exist is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Qgroup`] if quotas are disabled or the group does not exist; otherwise as for [`Engine::commit`].
    pub fn limit_qgroup(
        &self,
        id: QgroupId,
        max_referenced: Option<Option<u64>>,
        max_exclusive: Option<Option<u64>>,
    ) -> Result<()> {
        self.change_quotas(|state, _| {
            let mut limit = state.groups.get(id).ok_or_else(|| no_group(id))?.limit;
            let set = |flag: u64, field: &mut u64, wanted: Option<Option<u64>>, flags: &mut u64| match wanted {
                Some(Some(bytes)) => {
                    *flags |= flag;
                    *field = bytes;
                }
                Some(None) => {
                    *flags &= !flag;
                    *field = 0;
                }
                None => {}
            };
            let Limit { flags, max_referenced: referenced, max_exclusive: exclusive, .. } = &mut limit;
            set(Limit::MAX_REFERENCED, referenced, max_referenced, flags);
            set(Limit::MAX_EXCLUSIVE, exclusive, max_exclusive, flags);
            state.groups.set_limit(id, limit);
            Ok(())
        })
    }

    /// Changes the state of quotas under the commit lock, and commits the change.
    fn change_quotas(&self, change: impl FnOnce(&mut QuotaState, Generation) -> Result<()>) -> Result<()> {
        self.check_writable()?;
        self.check_not_held()?;
        {
            let _work = self.commit_state.lock();
            let mut state = self.quotas.lock();
            change(state.as_mut().ok_or_else(quotas_are_off)?, self.generation())?;
            if !state.as_ref().is_some_and(|state| state.groups.has_changes() || state.is_rescanning()) {
                return Ok(());
            }
        }
        self.quotas.note_limits();
        self.commit()
    }

    /// Ids of all subvolumes that are not deleted.
    fn subvolume_ids(&self) -> Result<Vec<RootId>> {
        let roots = self.own_tree(RootId::ROOT_TREE)?;
        let mut found = Vec::new();
        let mut start = Key::new(RootId::FS_TREE.0, KeyType::ROOT_ITEM, 0);
        let end = Key::new(RootId::LAST_FREE.0, KeyType::ROOT_ITEM, u64::MAX);
        while let Some((key, _)) = roots.first_ge(&start, &end)? {
            let id = RootId(key.objectid);
            let is_root = key.item_type == KeyType::ROOT_ITEM && id.is_subvolume();
            if is_root && self.root_item(id)?.is_some_and(|item| item.refs > 0) {
                found.push(id);
            }
            let past = match key.item_type < KeyType::ROOT_ITEM {
                true => Some(Key::new(key.objectid, KeyType::ROOT_ITEM, 0)),
                false => key.objectid.checked_add(1).map(|next| Key::new(next, KeyType(0), 0)),
            };
            let Some(next) = past else { break };
            start = next;
        }
        Ok(found)
    }
}

impl QgroupSummary {
    fn of(id: QgroupId, group: &Qgroup) -> Self {
        Self {
            id,
            referenced: group.referenced,
            exclusive: group.exclusive,
            max_referenced: group.limit.referenced(),
            max_exclusive: group.limit.exclusive(),
            parents: group.parents.iter().copied().collect(),
            members: group.members.iter().copied().collect(),
        }
    }
}

fn quotas_are_off() -> Error {
    Error::Qgroup { what: "quotas are disabled; enable them with: ubtrfs quota enable".to_owned(), errno: ENOTCONN }
}

fn no_group(id: QgroupId) -> Error {
    Error::Qgroup {
        what: format!("quota group {id} does not exist; list them with: ubtrfs qgroup show PATH"),
        errno: ENOENT,
    }
}

const ENOENT: i32 = ubtrfs_error::Errno::NOENT.raw_os_error();
const EBUSY: i32 = ubtrfs_error::Errno::BUSY.raw_os_error();
const EEXIST: i32 = ubtrfs_error::Errno::EXIST.raw_os_error();
const EINVAL: i32 = ubtrfs_error::Errno::INVAL.raw_os_error();
const ENOTCONN: i32 = ubtrfs_error::Errno::NOTCONN.raw_os_error();
const EINPROGRESS: i32 = ubtrfs_error::Errno::INPROGRESS.raw_os_error();
