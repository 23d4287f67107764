//! Deleted subvolumes: each commit frees a part of their space.
//!
//! The tree of a deleted subvolume, R, is walked from its root, lowest keys first. A block without other users is freed
//! after everything below it; a block with other users stays, and only R's reference to it is dropped. R's reference to
//! a block names R's id or, if R's pointer to the block lies in a node with full backrefs, the address of that node:
//!
//! | users of the block | its children | the block |
//! |---|---|---|
//! | only R | lose R's references, after everything below them is freed | loses R's reference |
//! | several, R owns it, no full backref | R's references name the block's address from now on, because R's id could not be resolved any more; the same is done below each child | full backref is set, loses R's reference |
//! | several otherwise | keep their references | loses R's reference |
//!
//! At the end of a part, the root item records the progress (`drop_progress`, `drop_level`): the first pointer that was
//! not followed, and the level of its node. Everything before that pointer is freed; the blocks above that pointer
//! still exist.
//!
//! Invariants:
//! - I1. A tree is dropped only after it is marked as deleted, and not in a transaction that changed it, so all of its
//!   blocks are recorded in the extent tree.
//! - I2. The changes of a part are put into the delayed refs only when the whole part has been read, so a tree that
//!   cannot be read stays unchanged.
//! - I3. References below a shared block are moved from the leaves up. If the move stops early, the next part repeats
//!   the move and skips the blocks whose references were moved.
//! - I4. Operations that began before [`Engine::drop_subvolume`] may still be under way after it. Their reads of the
//!   tree's blocks fail, and their changes are not applied ([`crate::delayed::tree_view::Tree::seal`]): only the walk
//!   reads the blocks.
//!
//! Source: the btrfs design notes on mixed back references, and the on-disk state that Linux leaves during deletions.

use ubtrfs_error::Result;
use ubtrfs_format::item::ExtentFlags;
use ubtrfs_format::{Generation, Key, KeyType, Logical, RootId, objectid};
use ubtrfs_space::{DelayedRefs, RefKey};
use ubtrfs_tree::{Batch, Node, NodePtr, NodeSource, RootPtr};

use crate::cow::child_refs::{ChildRefs, UserChange, kind_of};
use crate::cow::sink::no_references;
use crate::delayed::tree_view::RootState;
use crate::engine::Engine;
use crate::extents::extent_tree;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::lock_rank::{self, Rank};
use crate::qgroup::account::QuotaWork;
use crate::qgroup::state::QuotaMode;

/// The first pointer that was not followed, and the level of the node that it is in.
type DropProgress = (Key, u8);

impl Engine {
    /// Drops the next parts of deleted subvolumes, as far as this commit has room. The caller holds the commit lock.
    pub(crate) fn drop_dead_roots(
        &self,
        refs: &mut DelayedRefs,
        quota: &mut QuotaWork,
        transid: Generation,
    ) -> Result<()> {
        lock_rank::check_held(Rank::Commit, "I1: trees are dropped under the commit lock");
        let ids = self.roots.dead();
        if ids.is_empty() {
            return Ok(());
        }
        let mut budget = self.drop_budget();
        for id in ids {
            if budget <= 0 {
                break;
            }
            if self.drop_part(id, refs, quota, transid, &mut budget)? {
                self.roots.remove_dead(id);
            }
        }
        Ok(())
    }

    /// Number of references that a commit has room to change.
    fn drop_budget(&self) -> i64 {
        let mut budget = REFS_PER_COMMIT;
        let fits = |refs: i64| {
            let bytes = refs.unsigned_abs().saturating_mul(self.geometry.nodesize.into()) / REFS_PER_NODE;
            self.has_room_for_metadata_and(bytes, ReservationPurpose::SubvolumeDeletion)
        };
        while budget > REFS_PER_COMMIT_MIN && !fits(budget) {
            budget /= 2;
        }
        budget
    }

    /// Drops a part of one subvolume. Returns whether the work on the subvolume has ended, by success or by failure.
    fn drop_part(
        &self,
        id: RootId,
        refs: &mut DelayedRefs,
        quota: &mut QuotaWork,
        transid: Generation,
        budget: &mut i64,
    ) -> Result<bool> {
        let Some(tree) = self.tree(id)? else { return Ok(true) };
        let root = tree.root_ptr();
        let RootState { key_offset, item, .. } = tree.root.lock().clone();
        let Some(item) = item else { return Ok(true) };
        // I1: wait until the subvolume is marked as deleted and the last change of its tree is committed.
        if item.refs > 0 || root.generation == transid {
            return Ok(false);
        }
        let progress = (item.drop_progress != Key::MIN).then_some((item.drop_progress, item.drop_level));
        let quotas = self.quotas.mode();
        let mut walk = Drop {
            engine: self,
            before: refs,
            refs: DelayedRefs::new(),
            extent_root: self.own_tree(RootId::EXTENT_TREE)?.root_ptr(),
            child_refs: ChildRefs { owner: id, nodesize: self.geometry.nodesize, transid, quotas },
            left: Vec::new(),
            created: Generation(key_offset),
            budget,
        };
        let stopped = match walk.drop_tree(&root, progress) {
            Ok(stopped) => stopped,
            Err(error) => {
                // I2
                let error = error.in_tree(id);
                tracing::error!("dropping deleted subvolume {id} failed; the rest of it stays allocated: {error}");
                self.roots.note_drop_failure(error);
                return Ok(true);
            }
        };
        let Drop { refs: new_refs, left, .. } = walk;
        refs.append(new_refs);
        if quotas == QuotaMode::Full {
            quota.left.extend(left.into_iter().map(|ptr| (id, ptr)));
        }
        if let Some((key, level)) = stopped {
            let mut state = tree.root.lock();
            if let Some(item) = &mut state.item {
                (item.drop_progress, item.drop_level) = (key, level);
            }
            self.trees.note_changed(id);
            return Ok(false);
        }
        self.trees.forget(id);
        if quotas != QuotaMode::Off {
            quota.dropped.push(id);
        }
        // The batch is in key order: the objectid of orphans is above all subvolume ids.
        let gone: Batch = vec![
            (Key::new(id.0, KeyType::ROOT_ITEM, key_offset), None),
            (Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, id.0), None),
        ];
        self.apply_batch(&*self.own_tree(RootId::ROOT_TREE)?, &gone, refs, transid)?;
        Ok(true)
    }
}

/// One walk through a deleted tree.
struct Drop<'a> {
    engine: &'a Engine,
    /// Delayed refs from before the walk.
    before: &'a DelayedRefs,
    /// Delayed refs that the walk adds.
    refs: DelayedRefs,
    extent_root: RootPtr,
    child_refs: ChildRefs,
    /// If the subvolume is a snapshot, the transaction that made it; otherwise 0. Blocks that the snapshot owns are
    /// newer than that transaction, except its first root node; older blocks belong to the snapshot's source.
    created: Generation,
    /// Approximate number of references that this commit may still change.
    budget: &'a mut i64,
    /// With full quotas: the shared blocks that the tree stopped using, for the quota numbers.
    left: Vec<NodePtr>,
}

impl Drop<'_> {
    fn drop_tree(&mut self, root: &RootPtr, progress: Option<DropProgress>) -> Result<Option<DropProgress>> {
        let node = self.engine.store.read_node(&root.node_ptr())?;
        let (nr_users, flags) = self.users_of(root.bytenr)?;
        if nr_users > 1 {
            if !self.move_refs(&root.node_ptr())? {
                // No part of the tree is dropped yet, so the next part begins at the start of the tree.
                return Ok(Some((Key::MIN, 0)));
            }
        } else if let Some(progress) = self.drop_below(&node, flags, progress)? {
            return Ok(Some(progress));
        }
        self.child_refs.add_node(
            &mut self.refs,
            &node,
            RefKey::TreeBlock(self.child_refs.owner),
            -1,
            UserChange::Change,
        );
        self.engine.store.forget(root.bytenr);
        Ok(None)
    }

    /// Drops everything below a block without other users, starting where the last part ended.
    fn drop_below(
        &mut self,
        node: &Node,
        flags: ExtentFlags,
        progress: Option<DropProgress>,
    ) -> Result<Option<DropProgress>> {
        let parent = flags.contains(ExtentFlags::FULL_BACKREF).then_some(node.bytenr());
        if node.is_leaf() {
            self.spend(node.nritems());
            self.child_refs.add_children(&mut self.refs, node, parent, -1, UserChange::Change);
            return Ok(None);
        }
        let first = progress.map_or(0, |(key, _)| node.child_slot(&key));
        for slot in first..node.nritems() {
            let below = progress.filter(|(_, level)| slot == first && *level < node.level());
            // Follow the path to the position where the last part ended even if the budget is used up: a position
            // higher up would mean that nothing below it is dropped yet.
            if *self.budget <= 0 && below.is_none() {
                return Ok(Some((node.key(slot), node.level())));
            }
            if let Some(stopped) = self.drop_child(node, slot, parent, below)? {
                return Ok(Some(stopped));
            }
        }
        Ok(None)
    }

    /// Drops everything below a child, and then the reference to the child. `parent` is the address of `node` if `node`
    /// has full backrefs.
    fn drop_child(
        &mut self,
        node: &Node,
        slot: usize,
        parent: Option<Logical>,
        progress: Option<DropProgress>,
    ) -> Result<Option<DropProgress>> {
        let ptr = node.child_ptr(slot, self.child_refs.owner);
        let (nr_users, flags) = self.users_of(ptr.bytenr)?;
        self.spend(1);
        if nr_users > 1 {
            let moved = self.move_refs(&ptr)?;
            if moved {
                self.child_refs.add_child(&mut self.refs, node, slot, (parent, -1), UserChange::Change);
            }
            if moved && self.child_refs.quotas == QuotaMode::Full {
                self.left.push(ptr);
            }
            return Ok((!moved).then(|| (node.key(slot), node.level())));
        }
        let child = self.engine.store.read_node(&ptr)?;
        let stopped = self.drop_below(&child, flags, progress)?;
        if stopped.is_none() {
            self.child_refs.add_child(&mut self.refs, node, slot, (parent, -1), UserChange::Change);
            self.child_refs.note_allocated_by(&mut self.refs, &child);
            self.engine.store.forget(ptr.bytenr);
        }
        Ok(stopped)
    }

    /// Takes references from the budget, which may become negative.
    fn spend(&mut self, nr_refs: usize) {
        *self.budget = self.budget.saturating_sub(i64::try_from(nr_refs).unwrap_or(i64::MAX));
    }

    /// Moves this tree's references in a shared block, and in the blocks below it, from the tree's id to the blocks'
    /// addresses. Returns false if the move stopped early (I3).
    fn move_refs(&mut self, ptr: &NodePtr) -> Result<bool> {
        let owner = self.child_refs.owner;
        // Blocks that are not newer than the snapshot belong to the snapshot's source.
        if ptr.generation <= self.created {
            return Ok(true);
        }
        let (_, flags) = self.users_of(ptr.bytenr)?;
        if flags.contains(ExtentFlags::FULL_BACKREF) {
            return Ok(true);
        }
        let node = self.engine.store.read_node(ptr)?;
        if node.owner() != owner {
            return Ok(true);
        }
        if *self.budget <= 0 {
            return Ok(false);
        }
        for slot in 0..if node.is_leaf() { 0 } else { node.nritems() } {
            if !self.move_refs(&node.child_ptr(slot, owner))? {
                return Ok(false);
            }
        }
        self.spend(node.nritems().saturating_add(1));
        self.child_refs.add_children(&mut self.refs, &node, Some(node.bytenr()), 1, UserChange::Same);
        self.child_refs.add_children(&mut self.refs, &node, None, -1, UserChange::Same);
        let extent = self.child_refs.extent_at(node.bytenr());
        self.refs.set_flags(extent, kind_of(&node), ExtentFlags::FULL_BACKREF, self.child_refs.transid);
        Ok(true)
    }

    /// The number of references and the flags of a block, including delayed refs.
    fn users_of(&self, bytenr: Logical) -> Result<(u64, ExtentFlags)> {
        let nodesize = u64::from(self.child_refs.nodesize);
        let info = extent_tree::lookup_extent(&*self.engine.store, &self.extent_root, bytenr, nodesize, true)?;
        let (mut refs, mut flags) = info.map_or((0, ExtentFlags::empty()), |info| (info.refs, info.flags));
        for (delta, set_flags) in [self.before, &self.refs].into_iter().filter_map(|queue| queue.net(bytenr)) {
            refs = refs.saturating_add_signed(delta);
            flags |= set_flags;
        }
        if refs == 0 {
            return Err(no_references(bytenr).into());
        }
        Ok((refs, flags))
    }
}

/// Approximate number of references that a commit changes for deleted subvolumes.
const REFS_PER_COMMIT: i64 = 16 << 10;
/// Approximate number of references that a commit changes for deleted subvolumes if room is short.
const REFS_PER_COMMIT_MIN: i64 = 32;
/// Lower bound of the number of references whose items lie in one node of the extent tree.
const REFS_PER_NODE: u64 = 8;
