//! The commit sequence, which makes a transaction durable.
//!
//! ```text
//! freeze -> apply subvolumes -> make, change and drop subvolumes ->
//! [ delayed refs -> csums -> block groups, free space -> chunks -> root items ]* ->
//! write nodes -> flush -> superblock -> flush -> its mirrors -> unpin
//! ```
//!
//! Crash argument. Until the first superblock copy is written, nothing that the last superblock reaches through its
//! trees or through a log is overwritten: freed extents are pinned, new nodes take new addresses, and data that was
//! written and dropped since the last commit keeps its place, because a log may refer to it. Everything that the new
//! superblock reaches was flushed before the superblock is written.
//!
//! Invariants:
//! - I1. The rounds end: a node that was copied in a transaction keeps its address, so each round copies fewer nodes.
//! - I2. An error before the superblock is written leaves the old state on disk; a later error leaves the old or the
//!   new state. Every error of a commit makes the filesystem read-only.

use std::collections::HashSet;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::BlockGroupItem;
use ubtrfs_format::superblock::{CompatRo, NR_ROOT_BACKUPS, Superblock};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId, objectid};
use ubtrfs_space::{DelayedRefHead, DirtyGroup, Extent, ExtentKind};
use ubtrfs_tree::Batch;

use crate::commit_state::CommitWork;
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::extents::chunk_alloc::remove_system_chunks;
use crate::extents::csum_tree;
use crate::extents::extent_tree::{self, LedgerConfig, SimpleConfig};
use crate::extents::free_space_tree::{self, GroupFreeSpace};
use crate::handle::root_change::RootChange;
use crate::handle::running::EndedTransaction;
use crate::health::stats::Span;
use crate::per_thread::ClosedGate;
use crate::race::race_point;
use crate::relocation::step::RelocationStep;

impl Engine {
    /// Makes all changes put so far durable. Waits for a running commit, and writes nothing if nothing changed.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if the filesystem is read-only. Any other error is the failure of this commit, or of an
    /// earlier commit that this call waited for. After a failure the filesystem is read-only.
    pub fn commit(&self) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        let wanted = self.running.transid();
        let mut work = self.commit_state.lock();
        self.check_not_held()?;
        self.commit_through(wanted, &mut work)
    }

    /// Commits to free space, as [`Engine::commit`] does. Does nothing while commits are held back (H2 of
    /// `commit::held`).
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`].
    pub fn commit_to_reclaim(&self) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        let wanted = self.running.transid();
        let mut work = self.commit_state.lock();
        // Another thread may have begun to hold commits back while this thread waited for the lock.
        if self.holds_commits() { Ok(()) } else { self.commit_through(wanted, &mut work) }
    }

    /// Commits the transaction `wanted` and all earlier ones, unless that is done.
    fn commit_through(&self, wanted: Generation, work: &mut CommitWork) -> Result<()> {
        if self.commit_state.committed() < wanted {
            self.commit_changes(work)?;
        }
        // C4 of volumes::commit_super: after a device was kicked, one commit promises nothing.
        while self.read_only().is_none() && self.volumes.needs_full_commit() {
            self.commit_changes(work)?;
        }
        self.abort_state.check_not_aborted()
    }

    /// Calls `ask` while no commit runs. If `ask` returns `None`, commits and calls `ask` again before another commit
    /// can begin, so that the space that was just freed is still available.
    pub(crate) fn try_between_commits<T>(&self, ask: impl Fn() -> Option<T>) -> Result<Option<T>> {
        self.abort_state.check_not_aborted()?;
        let mut work = self.commit_state.lock();
        if let Some(answer) = ask() {
            return Ok(Some(answer));
        }
        if self.holds_commits() {
            return Ok(None);
        }
        self.commit_changes(&mut work)?;
        Ok(ask())
    }

    fn commit_changes(&self, work: &mut CommitWork) -> Result<()> {
        self.abort_state.check_not_failed()?;
        let is_needed = || self.volumes.have_stats_changed() || self.volumes.needs_full_commit();
        let has_news = self.has_changes() || (self.read_only().is_none() && is_needed());
        if has_news {
            self.check_writable()?;
            return self.abort_state.or_abort("commit", || self.commit_locked(work, None));
        }
        if self.read_only().is_some() {
            return Ok(());
        }
        // Returning `Ok` reports everything as durable, which is true only while the devices are in place.
        self.abort_state.or_abort("commit", || self.volumes.check_devices_in_place())
    }

    /// Commits all changes and the device error counters. No other function of the engine may be called afterwards.
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`]. Also fails if the filesystem became read-only while it was open.
    pub fn close(&self) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        if self.read_only().is_none() {
            self.commit()?;
            // Store the device errors that the last commit counted, but not errors that occur while the counters are
            // stored.
            if self.volumes.have_stats_changed() {
                self.commit()?;
            }
            // A close promises everything, so the second commit of C4 of `volumes::commit_super` comes before it.
            if self.volumes.needs_full_commit() {
                self.commit()?;
            }
        }
        Ok(())
    }

    /// Commits, and moves extents in the commit. If data moves, first commits everything else, because no operation can
    /// begin until the data has moved.
    pub(crate) fn commit_with_step(&self, step: &mut RelocationStep) -> Result<()> {
        if step.moves_data() {
            self.commit()?;
        }
        self.abort_state.check_not_aborted()?;
        let mut work = self.commit_state.lock();
        self.check_not_held()?;
        self.abort_state.check_not_failed()?;
        self.check_writable()?;
        self.abort_state.or_abort("commit", || self.commit_locked(&mut work, Some(step)))
    }

    fn commit_locked(&self, work: &mut CommitWork, step: Option<&mut RelocationStep>) -> Result<()> {
        let _commit = self.stats.span(Span::Commit);
        // Check before any node is written: nothing is written to a filesystem that another program has written to.
        self.volumes.check_superblocks_are_ours()?;
        let mut superblock = self.superblock();
        let _progress = self.admission.begin_flush();
        let gate = self.running.close_gate();
        let (transid, frozen, root_changes) = self.freeze_transaction(&gate);
        // While data moves, the gate stays closed, so no operation can begin (I3 of relocation::step).
        let gate = step.as_ref().is_some_and(|step| step.moves_data()).then_some(gate);
        race_point();
        let apply = self.stats.span(Span::Apply);
        self.apply_frozen(&frozen, &mut work.refs, transid)?;
        self.change_roots(root_changes, work, transid)?;
        race_point();
        // A relocation step requires that no tree is partly dropped (I3 of relocation::closure), so its commit drops no
        // trees.
        if step.is_none() {
            self.drop_dead_roots(&mut work.refs, &mut work.quota, transid)?;
        }
        drop(apply);
        let rounds = self.stats.span(Span::Rounds);
        self.store_dev_stats(&mut work.refs, transid)?;
        self.change_quota_tree(work, transid)?;
        let removed_chunks = self.remove_block_groups(work, transid, &mut superblock)?;
        let migrated_chunks = self.move_block_groups(work, transid, &mut superblock)?;
        self.run_rounds(work, transid, &mut superblock, step, gate)?;
        drop(rounds);

        let nodes = self.store.dirty_nodes();
        self.node_writer().write_nodes(&nodes)?;
        {
            let _flush = self.stats.span(Span::FlushDevices);
            self.volumes.settle_failed_writes()?;
            self.volumes.flush()?;
        }
        let written = self.stats.span(Span::Superblock);
        self.fill_superblock(&mut superblock, transid, work)?;
        // Check again: since the first check, a thread may have panicked, or a flush may have failed.
        self.abort_state.check_not_aborted()?;
        // The primary superblock is durable on return; its mirrors wait for the next flush.
        self.volumes.write_superblock(&superblock)?;
        drop(written);

        race_point();
        self.finish_migrations(&migrated_chunks)?;
        let _unpin = self.stats.span(Span::Unpin);
        self.commit_state.set_committed(superblock, work);
        self.store.written(nodes);
        race_point();
        self.ledger.drop_frozen();
        race_point();
        self.unpin(transid);
        self.commit_state.take_retired().into_iter().for_each(|extent| self.space.release(extent));
        work.quota.reset();
        race_point();
        self.quotas.reserved.committed();
        work.unreferenced.drain(..).for_each(|extent| self.space.release(extent));
        self.tree_log.forget(&self.space);
        self.note_extent_tree_bytes();
        self.end_frozen_load();
        self.forget_chunks(&removed_chunks);
        self.unload_committed_trees();
        Ok(())
    }

    /// Ends the running transaction: its items become the frozen items, and the next transaction begins.
    fn freeze_transaction(&self, gate: &ClosedGate<'_>) -> (Generation, Vec<Arc<Tree>>, Vec<RootChange>) {
        let _freeze = self.stats.span(Span::Freeze);
        let EndedTransaction { transid, listed, root_changes } = self.running.end(gate);
        let mut frozen = Vec::with_capacity(listed.len());
        for id in listed {
            // Discard changes of a deleted subvolume whose tree is being dropped.
            let Some(tree) = self.trees.get(id).filter(|tree| !tree.is_sealed()) else { continue };
            tree.freeze();
            frozen.push(tree);
        }
        self.ledger.freeze();
        self.quotas.reserved.freeze();
        self.freeze_load();
        self.store.set_generation_limit(Generation(transid.0.saturating_add(1)));
        (transid, frozen, root_changes)
    }

    fn remove_block_groups(
        &self,
        work: &mut CommitWork,
        transid: Generation,
        superblock: &mut Superblock,
    ) -> Result<Vec<Logical>> {
        let (group_tree, free_space) = (self.block_group_tree()?, self.free_space_tree()?);
        let Some(removed) = self.remove_empty_block_groups(free_space.as_deref())? else { return Ok(Vec::new()) };
        let (chunk_tree, dev_tree) = (self.own_tree(RootId::CHUNK_TREE)?, self.own_tree(RootId::DEV_TREE)?);
        self.apply_batch(&group_tree, &removed.group_batch, &mut work.refs, transid)?;
        if let Some(tree) = &free_space {
            self.apply_batch(tree, &removed.free_space_batch, &mut work.refs, transid)?;
        }
        self.apply_batch(&chunk_tree, &removed.chunk_batch, &mut work.refs, transid)?;
        self.apply_batch(&dev_tree, &removed.dev_batch, &mut work.refs, transid)?;
        if removed.has_system {
            remove_system_chunks(superblock, &removed.chunks)?;
        }
        Ok(removed.chunks)
    }

    /// Records changes of devices, and the migrated chunks.
    fn move_block_groups(
        &self,
        work: &mut CommitWork,
        transid: Generation,
        superblock: &mut Superblock,
    ) -> Result<Vec<Logical>> {
        if let Some(changed) = self.record_device_changes(superblock, transid)? {
            let (chunk_tree, dev_tree) = (self.own_tree(RootId::CHUNK_TREE)?, self.own_tree(RootId::DEV_TREE)?);
            self.apply_batch(&chunk_tree, &changed.chunk_batch, &mut work.refs, transid)?;
            self.apply_batch(&dev_tree, &changed.dev_batch, &mut work.refs, transid)?;
        }
        let Some(moved) = self.record_migrations(superblock)? else { return Ok(Vec::new()) };
        let (chunk_tree, dev_tree) = (self.own_tree(RootId::CHUNK_TREE)?, self.own_tree(RootId::DEV_TREE)?);
        self.apply_batch(&chunk_tree, &moved.chunk_batch, &mut work.refs, transid)?;
        self.apply_batch(&dev_tree, &moved.dev_batch, &mut work.refs, transid)?;
        Ok(moved.chunks)
    }

    /// The tree that holds the block group items.
    pub(crate) fn block_group_tree(&self) -> Result<Arc<Tree>> {
        let own = self.commit_state.superblock().compat_ro().contains(CompatRo::BLOCK_GROUP_TREE);
        self.own_tree(if own { RootId::BLOCK_GROUP_TREE } else { RootId::EXTENT_TREE })
    }

    fn free_space_tree(&self) -> Result<Option<Arc<Tree>>> {
        if !self.commit_state.superblock().compat_ro().contains(CompatRo::FREE_SPACE_TREE) {
            return Ok(None);
        }
        self.own_tree(RootId::FREE_SPACE_TREE).map(Some)
    }

    /// Updates the accounting trees (extent, csum, quota, free space, block group, chunk, device and root tree) until
    /// all of them agree.
    fn run_rounds(
        &self,
        work: &mut CommitWork,
        transid: Generation,
        superblock: &mut Superblock,
        mut step: Option<&mut RelocationStep>,
        mut gate: Option<ClosedGate<'_>>,
    ) -> Result<()> {
        let mut csums_done = false;
        for round in 0..MAX_ROUNDS {
            let mut busy = self.run_delayed_refs(work, transid)?;
            busy |= self.update_quotas(work, transid, round == 0)?;
            let freed_data = std::mem::take(&mut work.freed_data);
            if !csums_done || !freed_data.is_empty() {
                busy |= self.update_csums(work, transid, &freed_data, !csums_done)?;
                csums_done = true;
            }
            race_point();
            if let Some(step) = step.take() {
                self.run_step(step, work, transid)?;
                gate = None;
                busy = true;
            }
            busy |= self.update_block_groups(work, transid)?;
            if let Some((chunks, dev_extents)) = self.record_pending_chunks(superblock)? {
                busy = true;
                let (chunk_tree, dev_tree) = (self.own_tree(RootId::CHUNK_TREE)?, self.own_tree(RootId::DEV_TREE)?);
                self.apply_batch(&chunk_tree, &chunks, &mut work.refs, transid)?;
                self.apply_batch(&dev_tree, &dev_extents, &mut work.refs, transid)?;
            }
            busy |= self.update_root_items(work, transid)?;
            if !busy && !self.renew_root_tree(work, transid)? {
                return Ok(());
            }
        }
        drop(gate);
        Err(Error::Bug { what: format!("the accounting trees still changed after {MAX_ROUNDS} rounds") })
    }

    /// Runs the delayed refs. Returns whether there were delayed refs.
    pub(crate) fn run_delayed_refs(&self, work: &mut CommitWork, transid: Generation) -> Result<bool> {
        if let Some(extent) = work.refs.conflict() {
            let cause = FormatError::Value {
                what: "FileExtent",
                field: "disk_num_bytes",
                value: extent.len_bytes,
                expected: "expected the length that other references give",
            };
            return Err(Corrupt::new(cause).at(extent.bytenr).into());
        }
        if work.refs.is_empty() {
            return Ok(false);
        }
        let heads = work.refs.take();
        self.run_heads(heads, work, transid)?;
        Ok(true)
    }

    /// Moves extents out of a block group. Called when the extent tree records all references of subvolumes.
    fn run_step(&self, step: &mut RelocationStep, work: &mut CommitWork, transid: Generation) -> Result<()> {
        let mut moved = self.move_extents(step, &mut work.refs, transid)?;
        race_point();
        // Run the refs of moved extents apart from the other refs, because a move does not change which subvolumes
        // reach an extent.
        self.run_heads(moved.take(), work, transid)?;
        self.quotas_moved(&mut work.quota, step.nr_moved, transid);
        self.move_own_blocks(step, &mut work.refs, transid)?;
        let freed_data = std::mem::take(&mut work.freed_data);
        if !freed_data.is_empty() {
            self.update_csums(work, transid, &freed_data, false)?;
        }
        Ok(())
    }

    fn run_heads(
        &self,
        heads: impl ExactSizeIterator<Item = DelayedRefHead>,
        work: &mut CommitWork,
        transid: Generation,
    ) -> Result<()> {
        if heads.len() == 0 {
            return Ok(());
        }
        let extents = self.own_tree(RootId::EXTENT_TREE)?;
        let config = LedgerConfig {
            geometry: self.geometry,
            simple: self.quotas.simple_since().map(|since| SimpleConfig { since, ledger: &self.ledger }),
        };
        let mut dropped = Vec::new();
        let heads = heads.inspect(|head| {
            if head.kind == ExtentKind::Data {
                let negative = head.deltas.iter().filter(|(_, delta)| *delta < 0);
                dropped.extend(negative.map(|(reference, _)| (head.extent.bytenr, *reference)));
            }
        });
        let changes = extent_tree::run_delayed_refs(&extents.source_ahead(), &extents.root_ptr(), heads, &config)?;
        let removed: HashSet<Logical> = changes.removed.iter().map(|(extent, _)| extent.bytenr).collect();
        dropped.retain(|(bytenr, _)| !removed.contains(bytenr));
        self.ledger.note_dropped(dropped);
        work.quota.changes.extend(changes.owners);
        self.count_charges(&changes.charges, transid);
        self.ledger.forget_allocated_all(&changes.added);
        race_point();
        self.space.extents_added(&changes.added)?;
        for (extent, is_data) in changes.removed {
            self.space.extent_removed(extent, transid)?;
            if is_data {
                work.freed_data.push(extent.bytenr.0..extent.end());
            }
        }
        self.apply_batch(&extents, &changes.batch, &mut work.refs, transid)?;
        Ok(())
    }

    fn update_csums(
        &self,
        work: &mut CommitWork,
        transid: Generation,
        freed: &[std::ops::Range<u64>],
        insert: bool,
    ) -> Result<bool> {
        if insert {
            work.unreferenced.extend(self.ledger.take_unreferenced());
        }
        let mut csums = if insert { self.ledger.frozen_csums() } else { Arc::default() };
        // Data may have been written into a preallocated extent that was freed in the same transaction. Freed space is
        // not reused before the end of the commit, so all checksums of freed ranges are stale.
        for range in freed {
            let stale: Vec<u64> = csums.range(range.clone()).map(|(at, _)| *at).collect();
            if !stale.is_empty() {
                let csums = Arc::make_mut(&mut csums);
                stale.iter().for_each(|at| drop(csums.remove(at)));
            }
        }
        if csums.is_empty() && freed.is_empty() {
            return Ok(false);
        }
        let tree = self.own_tree(RootId::CSUM_TREE)?;
        let geometry = &self.geometry;
        let csum_size = geometry.csum_type.size();
        let batch = tree.with_root(|source, root| {
            csum_tree::csum_changes(source, root, &csums, freed, csum_size, geometry.sectorsize, geometry.nodesize)
        })?;
        self.apply_batch(&tree, &batch, &mut work.refs, transid)?;
        if insert {
            self.ledger.csums_applied();
        }
        Ok(true)
    }

    /// Writes the items and the free space of block groups that changed.
    fn update_block_groups(&self, work: &mut CommitWork, transid: Generation) -> Result<bool> {
        let dirty = self.space.take_dirty_groups();
        if dirty.is_empty() {
            return Ok(false);
        }
        let (group_tree, free_space_tree) = (self.block_group_tree()?, self.free_space_tree()?);
        let mut items = Batch::with_capacity(dirty.len());
        let mut free_space = Batch::new();
        for DirtyGroup { start, changed } in dirty {
            let Some(group) = self.space.block_group_at(start) else { continue };
            let item = BlockGroupItem {
                used: group.used,
                chunk_objectid: objectid::FIRST_CHUNK_TREE,
                flags: group.flags.bits(),
            };
            let key = Key::new(start.0, KeyType::BLOCK_GROUP_ITEM, group.len_bytes);
            items.push((key, Some(item.encode().into())));
            if let Some(tree) = &free_space_tree {
                let free = GroupFreeSpace {
                    start,
                    len_bytes: group.len_bytes,
                    nr_ranges: self.space.nr_disk_free(start),
                    touching: &|window| self.space.disk_free(start, window),
                };
                let (source, root, sectorsize) = (tree.source(), tree.root_ptr(), self.geometry.sectorsize);
                free_space.extend(free_space_tree::free_space_changes(source, &root, &free, &changed, sectorsize)?);
            }
        }
        items.sort_by_key(|(key, _)| *key);
        free_space.sort_by_key(|(key, _)| *key);
        self.apply_batch(&group_tree, &items, &mut work.refs, transid)?;
        if let Some(tree) = &free_space_tree {
            self.apply_batch(tree, &free_space, &mut work.refs, transid)?;
        }
        Ok(true)
    }

    /// Writes the root items of the trees whose root or root item changed.
    fn update_root_items(&self, work: &mut CommitWork, transid: Generation) -> Result<bool> {
        let changed = self.trees.take_changed();
        let written = self.write_root_items(&changed, work, transid);
        if written.is_err() {
            // A tree must not leave memory before its root item is written.
            changed.iter().for_each(|tree| self.trees.note_changed(tree.id()));
        }
        written
    }

    fn write_root_items(&self, changed: &[Arc<Tree>], work: &mut CommitWork, transid: Generation) -> Result<bool> {
        let mut batch = Batch::new();
        for tree in changed {
            let root = tree.root_ptr();
            let mut state = tree.root.lock();
            let key_offset = state.key_offset;
            let Some(item) = state.item.as_mut() else { continue };
            item.bytenr = root.bytenr;
            item.level = root.level;
            item.generation = root.generation;
            item.generation_v2 = root.generation;
            let key = Key::new(tree.id().0, KeyType::ROOT_ITEM, key_offset);
            batch.push((key, Some(item.encode().into())));
        }
        if batch.is_empty() {
            return Ok(false);
        }
        let roots = self.own_tree(RootId::ROOT_TREE)?;
        self.apply_batch(&roots, &batch, &mut work.refs, transid)?;
        Ok(true)
    }

    /// If the root tree is older than this transaction, puts one of its items again, so that the root tree is written
    /// in this transaction. A superblock must refer to a root tree of its own transaction, but changes may cancel out,
    /// for example if a file was made and deleted.
    fn renew_root_tree(&self, work: &mut CommitWork, transid: Generation) -> Result<bool> {
        let roots = self.own_tree(RootId::ROOT_TREE)?;
        if roots.root_ptr().generation == transid {
            return Ok(false);
        }
        let Some((key, item)) = roots.first_ge(&Key::MIN, &Key::MAX)? else { return Ok(false) };
        self.apply_batch(&roots, &vec![(key, Some((*item).into()))], &mut work.refs, transid)?;
        Ok(true)
    }

    fn fill_superblock(&self, superblock: &mut Superblock, transid: Generation, work: &CommitWork) -> Result<()> {
        let root = self.own_tree(RootId::ROOT_TREE)?.root_ptr();
        if root.generation != transid {
            let what = format!("the root tree of transaction {transid} is of generation {}", root.generation);
            return Err(Error::Bug { what });
        }
        let chunk_root = self.own_tree(RootId::CHUNK_TREE)?.root_ptr();
        superblock.generation = transid;
        superblock.incompat_flags |= self.commit_state.noted_incompat();
        superblock.root = root.bytenr;
        superblock.root_level = root.level;
        superblock.chunk_root = chunk_root.bytenr;
        superblock.chunk_root_generation = chunk_root.generation;
        superblock.chunk_root_level = chunk_root.level;
        superblock.log_root = Logical(0);
        superblock.log_root_level = 0;
        superblock.bytes_used = self.space.used_bytes();
        if let Some(label) = self.commit_state.take_noted_label() {
            superblock.label = label;
        }
        if work.uuid_tree_in_step {
            superblock.uuid_tree_generation = transid.0;
        }
        self.fill_root_backup(superblock)
    }

    /// Overwrites the oldest root backup.
    fn fill_root_backup(&self, superblock: &mut Superblock) -> Result<()> {
        let newest = (0..NR_ROOT_BACKUPS).max_by_key(|&slot| superblock.super_roots[slot].tree_root_gen).unwrap_or(0);
        let any = superblock.super_roots[newest].tree_root_gen.0 != 0;
        let slot = if any { newest.saturating_add(1) % NR_ROOT_BACKUPS } else { 0 };
        let (total_bytes, bytes_used, num_devices) =
            (superblock.total_bytes, superblock.bytes_used, superblock.num_devices);
        let backup = &mut superblock.super_roots[slot];
        let root_of = |id| self.own_tree(id).map(|tree| tree.root_ptr());
        let roots = [
            (RootId::ROOT_TREE, &mut backup.tree_root, &mut backup.tree_root_gen, &mut backup.tree_root_level),
            (RootId::CHUNK_TREE, &mut backup.chunk_root, &mut backup.chunk_root_gen, &mut backup.chunk_root_level),
            (RootId::EXTENT_TREE, &mut backup.extent_root, &mut backup.extent_root_gen, &mut backup.extent_root_level),
            (RootId::FS_TREE, &mut backup.fs_root, &mut backup.fs_root_gen, &mut backup.fs_root_level),
            (RootId::DEV_TREE, &mut backup.dev_root, &mut backup.dev_root_gen, &mut backup.dev_root_level),
            (RootId::CSUM_TREE, &mut backup.csum_root, &mut backup.csum_root_gen, &mut backup.csum_root_level),
        ];
        for (id, bytenr, generation, level) in roots {
            let root = root_of(id)?;
            (*bytenr, *generation, *level) = (root.bytenr, root.generation, root.level);
        }
        (backup.total_bytes, backup.bytes_used, backup.num_devices) = (total_bytes, bytes_used, num_devices);
        Ok(())
    }

    /// Makes the space that this commit freed usable again. With the discard option, discards freed space before it
    /// becomes usable; with asynchronous discards, notes the space for later.
    fn unpin(&self, transid: Generation) {
        if !self.options.discard && !self.options.discard_later {
            self.space.unpin(transid);
            return;
        }
        let extents = self.space.start_unpin(transid);
        race_point();
        if self.options.discard_later {
            self.space.finish_unpin(&extents);
            self.freed.note(&extents);
            return;
        }
        // Threads may still read old addresses of moved data: they are discarded when no thread has one.
        let (moved, unused): (Vec<Extent>, Vec<Extent>) =
            extents.iter().partition(|extent| self.moved.covers(**extent));
        self.freed.note(&moved);
        self.discard_unused(unused.into_iter());
        self.space.finish_unpin(&extents);
    }
}

/// Maximum number of rounds. Three to six rounds are usual; reaching the maximum is a bug.
const MAX_ROUNDS: usize = 64;
