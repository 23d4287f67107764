//! Emptying one block group.
//!
//! Invariants:
//! - I1. The group is read-only from the end of [`Engine::close_to_allocations`] to the group's removal, or until the
//!   relocation ends early. So the content of the group only shrinks, and each extent needs to be found only once. No
//!   other relocation makes the group writable: a relocation does so only while it has claimed its group.
//! - I2. An extent that cannot be moved stays in its group, which becomes writable again after the relocation.

use std::ops::Range;
use std::time::Duration;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::{BlockGroup, Extent, OtherGroups, RefKey, SpaceKind};
use ubtrfs_tree::{NodePtr, NodeSource};

use crate::engine::Engine;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::handle::trans_handle::regular_extent;
use crate::job::Job;
use crate::moving::data_copy::DataCopies;
use crate::race::race_point;
use crate::relocation::extent_record::{ExtentRecord, record_at};
use crate::relocation::step::{RelocationStep, extents_in_group};

/// The result of a relocation.
#[derive(Debug, Default)]
pub struct RelocatedGroup {
    /// Number of extents that moved out of the group.
    pub nr_moved: u64,
    /// Number of tree blocks that were copied because they refer to moved extents.
    pub nr_ancestors: u64,
    /// Bytes of data that moved.
    pub data_bytes: u64,
    /// Extents that could not be moved. The group stays if the list is not empty.
    pub failures: Vec<RelocationFailure>,
}

/// An extent that could not be moved.
#[derive(Debug)]
pub struct RelocationFailure {
    /// The address of the extent.
    pub bytenr: Logical,
    /// The reason.
    pub error: Error,
    /// Files that use the extent: subvolume and inode.
    pub users: Vec<(RootId, Ino)>,
}

impl Engine {
    /// Fails if Linux stopped in the middle of moving a block group. Linux then leaves relocation trees: copies of
    /// parts of subvolumes, with references to extents of the block group. Only Linux can complete these trees.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is a relocation tree; an error of reading the root tree.
    pub fn refuse_relocation_trees(&self) -> Result<()> {
        let roots = self.own_tree(RootId::ROOT_TREE)?;
        let key = |offset: u64| Key::new(RootId::TREE_RELOC.0, KeyType::ROOT_ITEM, offset);
        let Some((key, _)) = roots.last_le(&key(u64::MAX), &key(0))? else { return Ok(()) };
        let subvolume = key.offset;
        Err(Error::Refused {
            what: format!("Linux stopped while it moved a block group, and left a relocation tree of tree {subvolume}"),
            hint: "mount the filesystem with Linux once, which completes the move, then try again",
        })
    }

    /// Moves all extents out of the block group that starts at `start`, and removes the group. Returns when the removal
    /// is durable. Units of `job` are bytes of the group.
    ///
    /// The caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if there is no room for the copies; [`Error::Cancelled`]; [`Error::Refused`] if there is no
    /// such block group, or if there are relocation trees of Linux; [`Error::BlockGroupBusy`]; an error of a write or a
    /// commit. After an error, extents that were moved stay in their new places.
    pub fn relocate_block_group(&self, start: Logical, job: &Job) -> Result<RelocatedGroup> {
        self.check_writable()?;
        self.refuse_relocation_trees()?;
        self.claims.begin_emptying(start)?;
        // Look at the group only after it is claimed: nothing removes it then.
        let Some(group) = self.space.block_group_at(start).filter(|group| group.start == start) else {
            self.claims.end(start);
            return Err(Error::Refused {
                what: format!("there is no block group at {start}"),
                hint: "see: ubtrfs inspect dump-tree -t chunk",
            });
        };
        let mut emptied = self.empty_group(&group, job);
        if let Ok(report) = &mut emptied
            && report.failures.is_empty()
            && let Err(error) = self.remove_emptied(&group)
        {
            emptied = Err(error);
        }
        let is_removed = emptied.as_ref().is_ok_and(|report| report.failures.is_empty());
        if !is_removed {
            self.forget_moves(&group);
        }
        // The group is now removed, or an ordinary group again (I2). The claim ends last: then another relocation may
        // make the group read-only (I1).
        self.space.set_writable(start);
        race_point();
        self.claims.end(start);
        emptied
    }

    /// Waits for the threads that have old addresses, drops the moves (I2 of [`crate::delayed::moved_extents`]), and
    /// discards the old places. The group must be read-only.
    fn forget_moves(&self, group: &BlockGroup) {
        if let Some(flusher) = self.flusher() {
            flusher.wait_for_readers();
        }
        race_point();
        let range = group.start.0..group.start.0.saturating_add(group.len_bytes);
        self.moved.forget(range.clone());
        self.discard_moved(&range);
    }

    fn empty_group(&self, group: &BlockGroup, job: &Job) -> Result<RelocatedGroup> {
        let range = group.start.0..group.start.0.saturating_add(group.len_bytes);
        {
            // This lock prevents two relocations from each relying on the other's group for the space that writers
            // need.
            let _closing = loop {
                job.check()?;
                if let Some(closing) = self.claims.try_lock_closing(WAIT) {
                    break closing;
                }
            };
            self.keep_kind(group)?;
            let mut close = || self.close_to_allocations(group, job);
            match self.flusher() {
                Some(flusher) => flusher.with_space_for_all_data(&mut close)?,
                None => close()?,
            }
        }
        race_point();
        if let Some(flusher) = self.flusher() {
            flusher.wait_for_writes_in_place();
        }
        // This commit records the group's chunk if it is pending, and drops a log whose blocks lie in the group.
        self.commit()?;
        job.add_total(group.used);
        let mut report = RelocatedGroup::default();
        let mut used = group.used;
        let mut nr_waits = 0_u32;
        loop {
            job.check()?;
            self.finish_drops(job)?;
            let done = self.move_some(&range, &mut report)?;
            debug_assert!(self.space.is_read_only(group.start), "I1: block group {} is writable", group.start);
            let now = self.space.block_group_at(group.start).map_or(0, |group| group.used);
            job.advance(used.saturating_sub(now));
            used = now;
            if done == MoveOutcome::Some {
                nr_waits = 0;
                continue;
            }
            if !report.failures.is_empty() || self.space.is_empty(group.start) {
                return Ok(report);
            }
            // The bytes that the group still holds are data that is being written, and extents that the last commit
            // freed.
            nr_waits = nr_waits.saturating_add(1);
            if nr_waits > MAX_WAITS {
                return Err(Error::Refused {
                    what: format!("block group {} cannot be emptied: {used} bytes are still in use", group.start),
                    hint: "write back dirty data (sync), then try again",
                });
            }
            self.flush_data()?;
            self.commit_with_step(&mut RelocationStep::default())?;
            if nr_waits > 2 {
                // Polls: threads that write data do not tell when an extent gets its items.
                std::thread::sleep(WAIT);
            }
        }
    }

    /// Waits until no deleted subvolume is partly dropped (I3 of [`crate::relocation::closure`]). Each commit drops a
    /// part of the deleted subvolumes.
    fn finish_drops(&self, job: &Job) -> Result<()> {
        while self.nr_dead_roots() > 0 {
            job.check()?;
            self.commit()?;
        }
        Ok(())
    }

    /// Makes the group read-only. If dirty data or admitted changes of metadata need its free space, first makes
    /// another group, or writes the data and the changes.
    fn close_to_allocations(&self, group: &BlockGroup, job: &Job) -> Result<()> {
        // Close the group and check the room without a commit in between. Such a commit could find no room for its blocks,
        // and would abort.
        let close = || {
            if !self.space.try_set_read_only(group.start) {
                return None;
            }
            let is_closed = !group.flags.contains(BlockGroupFlags::METADATA)
                || self.has_room_for_metadata(ReservationPurpose::Change);
            if !is_closed {
                self.space.set_writable(group.start);
            }
            is_closed.then_some(())
        };
        for _ in 0..MAX_ATTEMPTS_TO_CLOSE {
            job.check()?;
            if self.try_between_commits(close)?.is_some() {
                return Ok(());
            }
            if !self.add_chunk(SpaceKind::of(group.flags))? {
                self.flush_data()?;
                self.commit()?;
            }
        }
        Err(Error::NoSpace)
    }

    /// Makes another group if this group is the last writable one of its type: writers need space during the
    /// relocation, and new chunks take their profile from existing groups.
    fn keep_kind(&self, group: &BlockGroup) -> Result<()> {
        let has_writable = || self.space.other_groups(group) == OtherGroups::Writable;
        if has_writable() || self.add_chunk(SpaceKind::of(group.flags))? {
            return Ok(());
        }
        let types = group.flags & BlockGroupFlags::TYPES;
        let is_other = |other: &BlockGroup| other.flags & BlockGroupFlags::TYPES == types && other.start != group.start;
        let others = self.space.block_groups().into_iter().filter(is_other);
        match others.map(|other| self.claims.busy(other.start)).find(Option::is_some).flatten() {
            // The other operation makes this group writable, or removes it.
            Some(busy) => Err(busy),
            // It has ended just now.
            None if has_writable() => Ok(()),
            None => Err(Error::NoSpace),
        }
    }

    /// Runs one step. Returns [`MoveOutcome::Nothing`] if no extents are left, or only those that could not be moved.
    fn move_some(&self, range: &Range<u64>, report: &mut RelocatedGroup) -> Result<MoveOutcome> {
        let failed = |bytenr: Logical| report.failures.iter().any(|failure| failure.bytenr == bytenr);
        let most = STEP_EXTENTS.saturating_add(report.failures.len());
        let found = extents_in_group(self, range.clone(), most)?;
        let mut step = RelocationStep::default();
        let (mut data, mut data_bytes) = (Vec::new(), 0_u64);
        for record in found.into_iter().filter(|record| !failed(record.extent.bytenr)) {
            if record.level.is_some() {
                step.blocks.push(record);
            } else if data_bytes < STEP_DATA_BYTES {
                // The tree checker does not bound the length of an extent.
                data_bytes = data_bytes.saturating_add(record.extent.len_bytes);
                data.push(record.extent);
            }
        }
        if step.blocks.is_empty() && data.is_empty() {
            return Ok(MoveOutcome::Nothing);
        }
        let mut copies = DataCopies::make(self, &data)?;
        race_point();
        step.data.clone_from(&copies.copies);
        step.failures = std::mem::take(&mut copies.failures);
        // The step may make all extents of a subvolume count as shared (I2 of relocation::step).
        let mut run = || self.commit_with_step(&mut step);
        match self.flusher().filter(|_| self.trees.shares_blocks()) {
            Some(flusher) => flusher.with_space_for_all_data(&mut run)?,
            None => run()?,
        }
        let used: Vec<Extent> =
            copies.copies.iter().filter(|copy| step.used.contains(&copy.to.bytenr)).map(|copy| copy.to).collect();
        copies.keep_used(&step.used);
        report.data_bytes = used.iter().fold(report.data_bytes, |sum, extent| sum.saturating_add(extent.len_bytes));
        report.nr_moved = report.nr_moved.saturating_add(step.nr_moved);
        report.nr_ancestors = report.nr_ancestors.saturating_add(step.nr_ancestors);
        for (bytenr, error) in step.failures {
            if matches!(error, Error::NoSpace) {
                return Err(error);
            }
            // The extent may have been freed since it was found, and its content may have been discarded on the
            // devices. A failed read of a freed extent loses no data.
            if self.is_gone(bytenr)? {
                continue;
            }
            let users = self.users_of(bytenr).unwrap_or_default();
            report.failures.push(RelocationFailure { bytenr, error, users });
        }
        Ok(MoveOutcome::Some)
    }

    fn remove_emptied(&self, group: &BlockGroup) -> Result<()> {
        self.forget_moves(group);
        race_point();
        self.claims.condemn(group.start);
        self.commit_with_step(&mut RelocationStep::default())?;
        match self.space.block_group_at(group.start) {
            None => Ok(()),
            Some(_) => Err(Error::Bug { what: format!("the empty block group {} was not removed", group.start) }),
        }
    }

    /// Whether the extent tree has no extent at this address.
    fn is_gone(&self, bytenr: Logical) -> Result<bool> {
        let tree = self.own_tree(RootId::EXTENT_TREE)?;
        let record = tree.with_root(|source, root| record_at(source, root, bytenr, self.geometry.nodesize))?;
        Ok(record.is_none())
    }

    /// The files that use a data extent.
    fn users_of(&self, bytenr: Logical) -> Result<Vec<(RootId, Ino)>> {
        let tree = self.own_tree(RootId::EXTENT_TREE)?;
        let nodesize = self.geometry.nodesize;
        let record = tree.with_root(|source, root| record_at(source, root, bytenr, nodesize))?;
        let mut users = Vec::new();
        for (reference, _) in record.iter().flat_map(|record| &record.refs).take(MAX_USERS) {
            match *reference {
                RefKey::Data { root, ino, .. } => users.push((root, ino)),
                RefKey::SharedData(leaf) => users.extend(self.users_in_leaf(bytenr, leaf)?),
                RefKey::TreeBlock(_) | RefKey::SharedBlock(_) => {}
            }
        }
        users.sort_unstable();
        users.dedup();
        Ok(users)
    }

    fn users_in_leaf(&self, bytenr: Logical, leaf: Logical) -> Result<Vec<(RootId, Ino)>> {
        let tree = self.own_tree(RootId::EXTENT_TREE)?;
        let record: Option<ExtentRecord> =
            tree.with_root(|source, root| record_at(source, root, leaf, self.geometry.nodesize))?;
        let Some(record) = record.filter(|record| record.level == Some(0)) else { return Ok(Vec::new()) };
        let ptr = NodePtr {
            tree: RootId::TREE_RELOC,
            bytenr: leaf,
            generation: record.generation,
            level: 0,
            first_key: None,
        };
        let node = self.store.read_node(&ptr)?;
        let user = |slot: usize| {
            let key = node.key(slot);
            let extent = (key.item_type == KeyType::EXTENT_DATA).then(|| regular_extent(node.item(slot))).flatten()?;
            (extent.disk_bytenr == bytenr).then_some((node.owner(), Ino(key.objectid)))
        };
        Ok((0..node.nritems()).filter_map(user).collect())
    }
}

/// Whether a step had extents to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MoveOutcome {
    Some,
    Nothing,
}

/// Maximum number of extents in one step.
const STEP_EXTENTS: usize = 8192;
/// Approximate bytes of data in one step.
const STEP_DATA_BYTES: u64 = 128 << 20;
/// Maximum number of attempts to close a group to allocations while other threads need its free space.
const MAX_ATTEMPTS_TO_CLOSE: u32 = 8;
/// Maximum number of commits that a relocation makes while it waits for its group to become empty.
const MAX_WAITS: u32 = 100;
const WAIT: Duration = Duration::from_millis(50);
/// Maximum number of references of an extent that are read to find its files.
const MAX_USERS: usize = 256;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ubtrfs_device::MemoryDevice;
    use ubtrfs_format::item::{ExtentFlags, RegularExtent};
    use ubtrfs_space::DelayedRefs;
    use ubtrfs_tree::Batch;

    use super::*;
    use crate::EngineOptions;

    #[test]
    fn a_copy_counts_as_shared_until_it_has_an_extent_item() {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
        let group = engine.space.block_groups().into_iter().find(|group| SpaceKind::of(group.flags) == SpaceKind::Data);
        let from = Extent::new(group.expect("there is one").start, 4096);
        let copies = DataCopies::make(&engine, &[from]).expect("copied");
        let to = copies.copies[0].to;
        // A writer finds the copy in a tree between the publication of the tree and the update of the extent tree.
        let extent = RegularExtent { disk_bytenr: to.bytenr, disk_num_bytes: 4096, offset: 0, num_bytes: 4096 };
        let is_shared = || engine.extent_is_shared(RootId::FS_TREE, Ino(257), 0, &extent).expect("read");
        assert!(is_shared());
        engine.ledger.forget_allocated_all(&[to]);
        assert!(is_shared(), "no extent item yet");
        engine.ledger.allocated(to);
    }

    #[test]
    fn a_crafted_length_of_an_extent_fails_the_move_without_a_panic() {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
        let groups = engine.space.block_groups();
        let data = groups.iter().find(|group| SpaceKind::of(group.flags) == SpaceKind::Data).expect("there is one");
        let start = data.start.0;
        let item: Arc<[u8]> = [0, 1, ExtentFlags::DATA.bits()].iter().flat_map(|field| field.to_le_bytes()).collect();
        // Extents of two leaves may overlap: the tree checker checks each leaf on its own.
        let extents = [(start, 64 << 20), (start + 4096, u64::MAX - 4095 - start - 4096)];
        let extent = |(bytenr, len)| (Key::new(bytenr, KeyType::EXTENT_ITEM, len), Some(item.clone()));
        let batch: Batch = extents.map(extent).to_vec();
        let tree = engine.own_tree(RootId::EXTENT_TREE).expect("there");
        engine.apply_batch(&tree, &batch, &mut DelayedRefs::new(), engine.generation()).expect("applied");
        let moved = engine.move_some(&(start..start + data.len_bytes), &mut RelocatedGroup::default());
        assert!(moved.is_err(), "{moved:?}");
    }
}
