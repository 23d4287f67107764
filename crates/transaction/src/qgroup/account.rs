//! Updates the numbers of quota groups for the extents whose users changed in a transaction.
//!
//! Invariants:
//! - I1. Snapshots divide a commit into phases. If the users of an extent change in a phase, the extent is counted
//!   once: by its own [`OwnerChange`], by the arithmetic of a snapshot, or by the trace of a dropped tree.
//! - I2. The set of users before a phase is read from trees that no longer change: the trees of the last commit, or the
//!   trees right after the last snapshot of this commit ([`QuotaWork::base`]).
//! - I3. The remembered users of an extent ([`KnownUsers`]) are its users in the trees that changes are counted from.
//!   An [`OwnerChange`] replaces the remembered users of its extent. Snapshots, dropped trees and relocation can change
//!   the users of any extent, so after such a change all remembered users are forgotten.
//! - I4. A failure to account never fails the commit: the numbers are marked as inconsistent instead, as Linux does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::item::QgroupStatus;
use ubtrfs_format::{Generation, KeyType, Logical, RootId};
use ubtrfs_space::Extent;
use ubtrfs_tree::NodePtr;

use super::groups::QgroupId;
use super::state::QuotaMode;
use crate::backref::roots::{RootSet, RootsOf};
use crate::backref::view::{FixedTrees, TreesView};
use crate::engine::Engine;
use crate::extents::extent_tree::{ExtentOwners, OwnerChange};
use crate::handle::trans_handle::regular_extent;

/// Accounting that a commit has not done yet.
#[derive(Debug, Default)]
pub(crate) struct QuotaWork {
    /// Extents whose users changed. The extent tree already records the changed references.
    pub(crate) changes: Vec<OwnerChange>,
    /// Shared blocks that a dropped subvolume stopped using, each with the subvolume's id. The blocks below them are
    /// not listed.
    pub(crate) left: Vec<(RootId, NodePtr)>,
    /// Subvolumes that are dropped completely.
    pub(crate) dropped: Vec<RootId>,
    /// The trees as they were at the start of the current phase (I2), from which the users before a change are read.
    /// `None` in the first phase: the trees of the last commit.
    base: Option<FixedTrees>,
    /// Users of data extents, remembered from earlier changes. The remembered users are kept from commit to commit.
    known: KnownUsers,
}

/// The users of data extents that changed lately, if the users had to be searched. A program that overwrites a large
/// shared file in small pieces changes the same extents in each commit.
#[derive(Debug, Default)]
struct KnownUsers(HashMap<Logical, RootSet>);

impl QuotaWork {
    /// Forgets the work of the transaction that ended. Keeps the remembered users.
    pub(crate) fn reset(&mut self) {
        let known = std::mem::take(&mut self.known);
        *self = Self { known, ..Self::default() };
    }

    /// Forgets all remembered users (I3).
    pub(crate) fn forget_users(&mut self) {
        self.known.0.clear();
    }
}

impl KnownUsers {
    fn note(&mut self, bytenr: Logical, users: &ExtentUsers) {
        match users {
            ExtentUsers::Set(set) => {
                if self.0.len() >= KNOWN_MAX {
                    self.0.clear();
                }
                self.0.insert(bytenr, Arc::clone(set));
            }
            ExtentUsers::None | ExtentUsers::Alone(_) => drop(self.0.remove(&bytenr)),
        }
    }
}

impl Engine {
    /// Updates the numbers of the quota groups for all pending changes, and empties the lists of changes. The caller
    /// holds the commit lock, and has run the delayed refs.
    pub(crate) fn account_quotas(&self, work: &mut QuotaWork, transid: Generation) {
        let (changes, left) = (std::mem::take(&mut work.changes), std::mem::take(&mut work.left));
        let dropped = std::mem::take(&mut work.dropped);
        if !self.quotas.is_on() {
            work.forget_users();
            return;
        }
        debug_assert!(self.quotas.mode() == QuotaMode::Full || changes.is_empty() && left.is_empty());
        if (!changes.is_empty() || !left.is_empty())
            && let Err(error) = self.count_changes(work, &changes, &left, transid)
        {
            // I4
            tracing::error!("quota numbers are not reliable until a rescan: {error}");
            self.quotas.mark_inconsistent();
            work.forget_users();
        }
        if !left.is_empty() || !dropped.is_empty() {
            // I3
            work.forget_users();
        }
        let mut state = self.quotas.lock();
        let Some(state) = &mut *state else { return };
        for root in dropped {
            state.remove_group_of(root);
        }
        if state.groups.take_underflow() && !state.status.has(QgroupStatus::INCONSISTENT) {
            tracing::error!("quota numbers are wrong (one would have become negative); start a rescan");
            state.status.flags |= QgroupStatus::INCONSISTENT;
        }
    }

    /// Notes that extents moved, which changes no numbers. A running rescan, which counts in the order of addresses,
    /// begins anew: otherwise it would miss extents that moved to addresses that it has passed, and count extents twice
    /// that moved away from such addresses.
    pub(crate) fn quotas_moved(&self, work: &mut QuotaWork, nr_extents: u64, transid: Generation) {
        // I3
        work.forget_users();
        if let Some(state) = &mut *self.quotas.lock()
            && nr_extents > 0
            && state.is_rescanning()
        {
            state.start_rescan(transid);
        }
    }

    /// Makes the current trees the base from which later changes are counted.
    pub(crate) fn rebase_quotas(&self, work: &mut QuotaWork) -> Result<()> {
        // I3
        work.forget_users();
        if self.quotas.is_on() {
            work.base = Some(FixedTrees::of(self)?);
        }
        Ok(())
    }

    fn count_changes(
        &self,
        work: &mut QuotaWork,
        changes: &[OwnerChange],
        left: &[(RootId, NodePtr)],
        transid: Generation,
    ) -> Result<()> {
        let before = match &work.base {
            Some(base) => base.view(),
            None => TreesView::committed(self)?,
        };
        let mut account = Account {
            engine: self,
            before: RootsOf::new(before),
            after: RootsOf::new(TreesView::running(self)?),
            transid,
            limit: self.quotas.lock().as_ref().filter(|state| state.is_rescanning()).map(|state| state.status.rescan),
            alone: HashMap::new(),
            known: &mut work.known,
        };
        changes.iter().try_for_each(|change| account.change(change))?;
        account.finish_alone();
        if !left.is_empty() {
            let mut seen: HashSet<Logical> = changes.iter().map(|change| change.extent.bytenr).collect();
            left.iter().try_for_each(|(root, ptr)| account.trace(*root, ptr, &mut seen))?;
        }
        Ok(())
    }
}

/// The state of one call of [`Engine::account_quotas`].
struct Account<'a> {
    engine: &'a Engine,
    before: RootsOf<'a>,
    after: RootsOf<'a>,
    transid: Generation,
    /// The first address that a running rescan has not reached; `None` if no rescan runs.
    limit: Option<u64>,
    /// For each subvolume: the bytes that it gained and the bytes that it lost in extents without other users.
    alone: HashMap<RootId, (u64, u64)>,
    known: &'a mut KnownUsers,
}

impl Account<'_> {
    fn change(&mut self, change: &OwnerChange) -> Result<()> {
        let extent = change.extent;
        if self.limit.is_some_and(|limit| extent.bytenr.0 >= limit) {
            self.known.note(extent.bytenr, &ExtentUsers::None);
            return Ok(());
        }
        let before = match change.before {
            ExtentOwners::None => ExtentUsers::None,
            ExtentOwners::Sole(root) if !root.is_subvolume() => ExtentUsers::None,
            ExtentOwners::Sole(root) if change.was_private || self.shares_nothing(true, change, root)? => {
                ExtentUsers::Alone(root)
            }
            _ => ExtentUsers::Set(self.users_before(extent, change.is_tree)?),
        };
        let after = match change.after {
            ExtentOwners::None => ExtentUsers::None,
            ExtentOwners::Sole(root) if !root.is_subvolume() => ExtentUsers::None,
            ExtentOwners::Sole(root)
                if (change.before == ExtentOwners::None && self.is_unshared_since(root)?)
                    || self.shares_nothing(false, change, root)? =>
            {
                ExtentUsers::Alone(root)
            }
            _ => ExtentUsers::Set(self.users_after(change, &before)?),
        };
        if !change.is_tree {
            self.known.note(extent.bytenr, &after);
        }
        self.count(&before, &after, extent.len_bytes);
        Ok(())
    }

    fn users_before(&mut self, extent: Extent, is_tree: bool) -> Result<RootSet> {
        let known = if is_tree { None } else { self.known.0.get(&extent.bytenr) };
        let Some(known) = known.map(Arc::clone) else { return self.before.of_extent(extent, is_tree) };
        debug_assert_eq!(known, self.before.of_extent(extent, is_tree)?, "I3: {extent:?}");
        Ok(known)
    }

    /// The users of an extent after a change. Only the previous users of a data extent and the tree in `gained` can be
    /// its users after the change, so the search can stop early.
    fn users_after(&mut self, change: &OwnerChange, before: &ExtentUsers) -> Result<RootSet> {
        let extent = change.extent;
        let gained = match change.gained {
            ExtentOwners::None => None,
            ExtentOwners::Sole(root) => Some(root),
            ExtentOwners::Many => return self.after.of_extent(extent, change.is_tree),
        };
        if change.is_tree {
            return self.after.of_extent(extent, true);
        }
        let mut room = [RootId(0)];
        let most: BTreeSet<RootId> = before.as_slice(&mut room).iter().copied().chain(gained).collect();
        let most: Vec<RootId> = most.into_iter().collect();
        let found = self.after.of_data_among(extent, &most)?;
        debug_assert_eq!(found, self.after.of_extent(extent, false)?, "{change:?} of {most:?}");
        Ok(found)
    }

    /// Whether the subvolume is the only user of a data extent, because it is not a snapshot and was never snapshotted.
    /// Only this subvolume's items must refer to the extent. Returns false for tree blocks.
    fn shares_nothing(&self, in_before: bool, change: &OwnerChange, root: RootId) -> Result<bool> {
        let roots = if in_before { &self.before } else { &self.after };
        Ok(!change.is_tree && roots.view().subvolume(root)?.is_some_and(|found| found.last_snapshot.0 == 0))
    }

    /// Whether no snapshot of a subvolume was taken in this transaction, so that extents that it allocated in this
    /// transaction have no other users.
    fn is_unshared_since(&self, root: RootId) -> Result<bool> {
        Ok(self.after.view().subvolume(root)?.is_some_and(|found| found.last_snapshot < self.transid))
    }

    fn count(&mut self, before: &ExtentUsers, after: &ExtentUsers, bytes: u64) {
        match (before, after) {
            (ExtentUsers::None, ExtentUsers::Alone(root)) => self.gain(*root, bytes),
            (ExtentUsers::Alone(root), ExtentUsers::None) => self.lose(*root, bytes),
            _ => {
                let (mut one, mut other) = ([RootId(0)], [RootId(0)]);
                let (before, after) = (before.as_slice(&mut one), after.as_slice(&mut other));
                if before != after
                    && let Some(state) = &mut *self.engine.quotas.lock()
                {
                    state.groups.count(before, after, bytes, self.transid);
                }
            }
        }
    }

    fn gain(&mut self, root: RootId, bytes: u64) {
        let (gained, _) = self.alone.entry(root).or_default();
        *gained = gained.saturating_add(bytes);
    }

    fn lose(&mut self, root: RootId, bytes: u64) {
        let (_, lost) = self.alone.entry(root).or_default();
        *lost = lost.saturating_add(bytes);
    }

    fn finish_alone(&mut self) {
        let Some(state) = &mut *self.engine.quotas.lock() else { return };
        for (root, (gained, lost)) in self.alone.drain() {
            state.groups.count(&[], &[root], gained, self.transid);
            state.groups.count(&[root], &[], lost, self.transid);
        }
    }

    /// Updates the groups' numbers for a shared block that a dropped subvolume stopped using, and for everything below
    /// the block. All users of a block also use everything below the block, so the walk does not descend where the loss
    /// of a user changes no number of a group. The group of the dropped subvolume does not make the walk descend,
    /// because this group is removed.
    fn trace(&mut self, root: RootId, ptr: &NodePtr, seen: &mut HashSet<Logical>) -> Result<()> {
        let own = QgroupId::of_subvolume(root);
        let mut open = vec![*ptr];
        while let Some(ptr) = open.pop() {
            let (before, after) = (self.before.of_block(ptr.bytenr)?, self.after.of_block(ptr.bytenr)?);
            if seen.insert(ptr.bytenr) {
                self.count_traced(&before, &after, ptr.bytenr, self.before.view().nodesize());
            }
            let matters =
                self.engine.quotas.lock().as_mut().is_some_and(|state| state.groups.matters(&before, &after, own));
            if !matters {
                continue;
            }
            let node = self.before.view().source().read_node(&ptr)?;
            for slot in 0..node.nritems() {
                if !node.is_leaf() {
                    open.push(node.child_ptr(slot, root));
                    continue;
                }
                if node.key(slot).item_type != KeyType::EXTENT_DATA {
                    continue;
                }
                let Some(item) = regular_extent(node.item(slot)) else { continue };
                if seen.insert(item.disk_bytenr) {
                    let extent = Extent::new(item.disk_bytenr, item.disk_num_bytes);
                    let (before, after) = (self.before.of_extent(extent, false)?, self.after.of_extent(extent, false)?);
                    self.count_traced(&before, &after, extent.bytenr, extent.len_bytes);
                }
            }
        }
        Ok(())
    }

    fn count_traced(&mut self, before: &RootSet, after: &RootSet, bytenr: Logical, bytes: u64) {
        if self.limit.is_none_or(|limit| bytenr.0 < limit) {
            self.count(&ExtentUsers::Set(before.clone()), &ExtentUsers::Set(after.clone()), bytes);
        }
    }
}

/// The users of an extent: none, a single subvolume, or a set.
enum ExtentUsers {
    None,
    Alone(RootId),
    Set(RootSet),
}

impl ExtentUsers {
    fn as_slice<'u>(&'u self, room: &'u mut [RootId; 1]) -> &'u [RootId] {
        match self {
            Self::None => &[],
            Self::Alone(root) => {
                room[0] = *root;
                room
            }
            Self::Set(set) => set,
        }
    }
}

/// Maximum number of extents whose users are remembered.
const KNOWN_MAX: usize = 1 << 16;
