//! One step of a relocation, inside a commit: moves a bounded number of extents out of a block group.
//!
//! ```text
//! commit: subvolumes applied -> delayed refs run (the extent tree is exact) -> STEP -> the ordinary rounds
//!
//! STEP: closure of the extents -> copies -> checksums of moved data -> copies become visible -> their references ->
//!       blocks of the filesystem's own trees
//! ```
//!
//! Crash argument: a step is a part of a commit and changes only what the next superblock will reach. Nothing on disk
//! records that a block group is being emptied, so a power cut leaves a filesystem in which some extents have moved.
//!
//! Invariants:
//! - I1. A step begins when no delayed ref concerns a subvolume's block or a data extent, and it moves all references
//!   that the extent tree records ([`crate::relocation::copy`]). So each block stays shared by the same set of trees,
//!   and no number of a quota group changes.
//! - I2. Copies of shared blocks, and of blocks with full backrefs, are newer than the last snapshot of their trees, so
//!   a later cow would take them for unshared blocks. So each tree with such copies notes this transaction as the
//!   transaction of its last snapshot: then the cow looks up the references and flags of the copies
//!   ([`crate::cow::sink`]).
//! - I3. While data extents move, no operation can begin, so no item of the next transaction has an old address. An old
//!   address that an operation looked up before the move is translated ([`crate::delayed::moved_extents`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Generation, Key, Logical, RootId};
use ubtrfs_space::{DelayedRefs, Extent, RefKey};
use ubtrfs_tree::{Batch, Node, NodePtr, NodeSource};

use crate::engine::Engine;
use crate::extents::csum_tree;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::race::race_point;
use crate::relocation::closure::Closure;
use crate::relocation::copy::{Copies, CopySpace, NewRoot, copy_closure};
use crate::relocation::extent_record::{ExtentRecord, record_at};

/// A data extent that was copied, with verified checksums, before the step.
#[derive(Clone, Debug)]
pub(crate) struct CopiedData {
    pub(crate) from: Extent,
    pub(crate) to: Extent,
    /// Runs of checksums of consecutive sectors, each with the offset of its first sector in the extent.
    pub(crate) csums: Vec<(u64, Vec<u8>)>,
}

/// The extents that a commit must move, and the result.
#[derive(Debug, Default)]
pub(crate) struct RelocationStep {
    /// Tree blocks to move, by address.
    pub(crate) blocks: Vec<ExtentRecord>,
    /// Data extents to move.
    pub(crate) data: Vec<CopiedData>,
    /// Extents that could not be moved.
    pub(crate) failures: Vec<(Logical, Error)>,
    /// The addresses of those data copies that trees use now.
    pub(crate) used: Vec<Logical>,
    /// Number of blocks and data extents that moved.
    pub(crate) nr_moved: u64,
    /// Number of blocks that were copied because they refer to moved extents.
    pub(crate) nr_ancestors: u64,
}

impl RelocationStep {
    /// Whether no operation may run during the step (I3).
    pub(crate) fn moves_data(&self) -> bool {
        !self.data.is_empty()
    }

    fn fail(&mut self, bytenr: Logical, error: Error) {
        tracing::warn!("relocation: the extent at {bytenr} cannot be moved: {error}");
        self.failures.push((bytenr, error));
    }
}

impl Engine {
    /// Moves extents of subvolumes. Returns the references that move with the extents. Adding checksums to the csum
    /// tree changes references too; these changes are put into `refs`.
    #[allow(clippy::arithmetic_side_effects, reason = "the node size is at least 4096")]
    pub(crate) fn move_extents(
        &self,
        step: &mut RelocationStep,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<DelayedRefs> {
        let mut most = MEMBERS_MAX_BYTES / self.geometry.nodesize as usize;
        let (closure, space, copies) = loop {
            let closure = self.closure_of(step, most)?;
            if closure.members.is_empty() {
                return Ok(DelayedRefs::new());
            }
            let nr_nodes = closure.members.len();
            if !self.has_room_for_copies(nr_nodes) {
                if most <= MEMBERS_MIN {
                    self.fail_all(step, &closure, &Error::NoSpace);
                    return Ok(DelayedRefs::new());
                }
                most = (most.min(nr_nodes) / 2).max(MEMBERS_MIN);
                continue;
            }
            let mut space = CopySpace::allocate(self, nr_nodes)?;
            match copy_closure(&closure, &mut space, self.geometry.nodesize, transid)? {
                Ok(copies) => break (closure, space, copies),
                Err(mismatch) => {
                    // The loop ends, because each mismatch leaves out at least one extent.
                    if !self.leave_out(step, &closure, &mismatch.extents) {
                        return Ok(DelayedRefs::new());
                    }
                }
            }
        };
        space.keep();
        let wanted = step.blocks.iter().filter(|block| {
            block.level.is_some_and(|level| closure.members.contains_key(&(level, block.extent.bytenr)))
        });
        let nr_blocks = wanted.count();
        step.nr_moved = step.nr_moved.saturating_add(nr_blocks.saturating_add(closure.data.len()) as u64);
        let nr_ancestors = closure.members.len().saturating_sub(nr_blocks) as u64;
        step.nr_ancestors = step.nr_ancestors.saturating_add(nr_ancestors);
        self.add_csums_of_copies(step, &closure, refs, transid)?;
        debug_assert!(
            closure.members.values().all(|member| {
                let parent = |at: &Logical| closure.members.contains_key(&(member.node.level().saturating_add(1), *at));
                member.parents.iter().all(parent)
            }),
            "I1 of closure: a block moves, but its parent is not copied"
        );
        step.used.extend(closure.data.values().map(|data| data.to.bytenr));
        // I1 of moved_extents: note the moves before the references to the old addresses, and the checksums there, are
        // deleted.
        self.moved.note(closure.data.values().map(|data| (data.record.extent, data.to.bytenr)));
        Ok(self.publish_copies(&closure, copies, transid))
    }

    /// The closure ([`Closure`]) of as many of the step's extents as give about `most` members, taken from the first
    /// extent on.
    fn closure_of(&self, step: &mut RelocationStep, most: usize) -> Result<Closure<'_>> {
        let mut closure = Closure::new(self)?;
        let failed: Vec<Logical> = step.failures.iter().map(|(bytenr, _)| *bytenr).collect();
        let mut failures = Vec::new();
        for block in &step.blocks {
            let bytenr = block.extent.bytenr;
            if closure.members.len() >= most {
                break;
            }
            if failed.contains(&bytenr) {
                continue;
            }
            // The block may have been freed or changed since the step listed it.
            let record = closure.record(bytenr)?.filter(|record| record.level == block.level);
            let Some(record) = record.filter(is_of_subvolumes) else { continue };
            if let Err(error) = closure.add_block(record) {
                failures.push((bytenr, error));
            }
        }
        for data in &step.data {
            let bytenr = data.from.bytenr;
            if closure.members.len() >= most {
                break;
            }
            if failed.contains(&bytenr) {
                continue;
            }
            let record = closure.record(bytenr)?.filter(|record| record.extent == data.from && record.level.is_none());
            let Some(record) = record else { continue };
            if let Err(error) = closure.add_data(record, data.to) {
                failures.push((bytenr, error));
            }
        }
        for (bytenr, error) in failures {
            // The extent may belong to a subvolume that was deleted after the step was planned. The subvolume's
            // deletion continues after the step, and a later step finds the extent again.
            if !matches!(error, Error::Refused { .. }) || self.nr_dead_roots() == 0 {
                step.fail(bytenr, error);
            }
        }
        Ok(closure)
    }

    /// Whether there is room for the copies and for the changes of the extent tree.
    fn has_room_for_copies(&self, nr_nodes: usize) -> bool {
        let bytes = (nr_nodes as u64).saturating_mul(u64::from(self.geometry.nodesize));
        self.has_room_for_metadata_and(bytes.saturating_add(bytes / 4), ReservationPurpose::Removal)
    }

    fn fail_all(&self, step: &mut RelocationStep, closure: &Closure<'_>, error: &Error) {
        let blocks = closure.members.values().map(|member| member.record.extent.bytenr);
        let wanted: Vec<Logical> = blocks.chain(closure.data.keys().copied()).collect();
        for bytenr in wanted {
            step.fail(bytenr, error.clone());
        }
    }

    /// Notes that the references of `extents` do not match their users: each of `extents` that the step was to move is
    /// left out of the step and reported as a failure. If the step was to move none of `extents`, all extents of the
    /// closure are reported as failures, and the call returns false.
    fn leave_out(&self, step: &mut RelocationStep, closure: &Closure<'_>, extents: &[Logical]) -> bool {
        let blocks = step.blocks.iter().map(|block| block.extent.bytenr);
        let asked: Vec<Logical> = blocks.chain(step.data.iter().map(|data| data.from.bytenr)).collect();
        let wrong = || {
            let expected = "expected the references that trees hold";
            crate::relocation::extent_record::corrupt(extents.first().copied().unwrap_or_default(), "refs", 0, expected)
        };
        let mut any = false;
        for bytenr in extents.iter().filter(|bytenr| asked.contains(bytenr)) {
            step.fail(*bytenr, wrong());
            any = true;
        }
        if !any {
            self.fail_all(step, closure, &wrong());
        }
        any
    }

    /// Adds the checksums of moved data under the data's new addresses, before readers can find the new addresses.
    fn add_csums_of_copies(
        &self,
        step: &RelocationStep,
        closure: &Closure<'_>,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<()> {
        let mut csums = BTreeMap::new();
        for data in step.data.iter().filter(|data| closure.data.contains_key(&data.from.bytenr)) {
            csums.extend(data.csums.iter().map(|(offset, sums)| (data.to.bytenr.advance(*offset).0, sums.clone())));
        }
        if csums.is_empty() {
            return Ok(());
        }
        let tree = self.own_tree(RootId::CSUM_TREE)?;
        let geometry = &self.geometry;
        let csum_size = geometry.csum_type.size();
        let batch = tree.with_root(|source, root| {
            csum_tree::csum_changes(source, root, &csums, &[], csum_size, geometry.sectorsize, geometry.nodesize)
        })?;
        self.apply_batch(&tree, &batch, refs, transid)?;
        Ok(())
    }

    /// Publishes the copies to readers, and returns the references that move.
    fn publish_copies(&self, closure: &Closure<'_>, copies: Copies, transid: Generation) -> DelayedRefs {
        let Copies { nodes, refs, roots } = copies;
        // No tree leads to the new nodes yet.
        nodes.into_iter().for_each(|node| self.store.put_dirty(node));
        for NewRoot { tree, root, has_shared_copies } in roots {
            tree.publish_moved(root);
            race_point();
            let mut state = tree.root.lock();
            self.trees.note_changed(tree.id());
            if has_shared_copies {
                // I2
                state.last_snapshot = transid;
                if let Some(item) = &mut state.item {
                    item.last_snapshot = transid;
                }
            }
        }
        for member in closure.members.values() {
            let bytenr = member.node.bytenr();
            // A block of this transaction that was copied need not be written.
            self.store.drop_dirty(bytenr);
            self.store.forget(bytenr);
        }
        refs
    }

    /// Moves blocks of the filesystem's own trees: each block has one user, so changing a leaf below a block copies the
    /// block.
    #[allow(clippy::arithmetic_side_effects, reason = "a number of blocks")]
    pub(crate) fn move_own_blocks(
        &self,
        step: &mut RelocationStep,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<()> {
        let mut by_tree: BTreeMap<RootId, Vec<&ExtentRecord>> = BTreeMap::new();
        for block in &step.blocks {
            if let (Some(tree), false) = (own_tree_of(block), is_of_subvolumes(block)) {
                by_tree.entry(tree).or_default().push(block);
            }
        }
        let (mut nr_moved, mut failures) = (0, Vec::new());
        for (id, blocks) in by_tree {
            let Some(tree) = self.tree(id)? else {
                let expected = "expected the id of a tree";
                let error = |bytenr| crate::relocation::extent_record::corrupt(bytenr, "reference to", id.0, expected);
                failures.extend(blocks.iter().map(|block| (block.extent.bytenr, error(block.extent.bytenr))));
                continue;
            };
            let mut batch: BTreeMap<Key, Box<[u8]>> = BTreeMap::new();
            let mut has_empty_root = false;
            for block in blocks {
                match self.leaf_below(&tree, block) {
                    Ok(Below::Leaf(leaf)) => {
                        batch.insert(leaf.key(0), leaf.item(0).into());
                        nr_moved += 1;
                    }
                    Ok(Below::EmptyRoot) => has_empty_root = true,
                    Ok(Below::Gone) => {}
                    Err(error) => failures.push((block.extent.bytenr, error)),
                }
            }
            if has_empty_root {
                // A root leaf without items is moved by inserting and deleting an item.
                self.apply_batch(&tree, &vec![(Key::MIN, Some(Arc::default()))], refs, transid)?;
                self.apply_batch(&tree, &vec![(Key::MIN, None)], refs, transid)?;
                nr_moved += 1;
            }
            let batch: Batch = batch.into_iter().map(|(key, value)| (key, Some(value.into()))).collect();
            self.apply_batch(&tree, &batch, refs, transid)?;
        }
        step.nr_moved += nr_moved;
        failures.into_iter().for_each(|(bytenr, error)| step.fail(bytenr, error));
        Ok(())
    }

    /// The first leaf at or below a block, if the block is still a part of the tree.
    fn leaf_below(&self, tree: &crate::delayed::tree_view::Tree, block: &ExtentRecord) -> Result<Below> {
        let (bytenr, level) = (block.extent.bytenr, block.level.unwrap_or_default());
        let root = tree.root_ptr();
        // A block that was freed since the step listed it may be discarded on the devices.
        let extents = self.own_tree(RootId::EXTENT_TREE)?.root_ptr();
        let record = record_at(&*self.store, &extents, bytenr, self.geometry.nodesize)?;
        if record.is_none_or(|record| (record.level, record.generation) != (block.level, block.generation)) {
            return Ok(Below::Gone);
        }
        let ptr = NodePtr { tree: tree.id(), bytenr, generation: block.generation, level, first_key: None };
        let node = self.store.read_node(&ptr)?;
        let Some(key) = node.first_key() else {
            return Ok(if root.bytenr == bytenr { Below::EmptyRoot } else { Below::Gone });
        };
        let mut at = self.store.read_node(&root.node_ptr())?;
        while at.level() > level {
            at = self.store.read_node(&at.child_ptr(at.child_slot(&key), tree.id()))?;
        }
        if at.bytenr() != bytenr {
            // A change in this commit has already replaced the block.
            return Ok(Below::Gone);
        }
        while !at.is_leaf() {
            at = self.store.read_node(&at.child_ptr(0, tree.id()))?;
        }
        Ok(if at.nritems() > 0 { Below::Leaf(at) } else { Below::Gone })
    }
}

/// The part of a tree below a block.
enum Below {
    /// The first leaf at or below the block.
    Leaf(Arc<Node>),
    /// The block is a root without items.
    EmptyRoot,
    /// The block is not in the tree any more.
    Gone,
}

/// Whether a tree block belongs to one or more subvolumes, not to one of the filesystem's own trees.
fn is_of_subvolumes(record: &ExtentRecord) -> bool {
    own_tree_of(record).is_none_or(RootId::is_fs_tree)
}

/// The tree that a block's single reference names.
fn own_tree_of(record: &ExtentRecord) -> Option<RootId> {
    match record.refs.as_slice() {
        [(RefKey::TreeBlock(tree), _)] => Some(*tree),
        _ => None,
    }
}

/// The first extents, at most `most`, that start in a range of addresses of a block group.
pub(crate) fn extents_in_group(engine: &Engine, range: Range<u64>, most: usize) -> Result<Vec<ExtentRecord>> {
    let tree = engine.own_tree(RootId::EXTENT_TREE)?;
    tree.with_root(|source, root| {
        let mut records =
            crate::relocation::extent_record::ExtentRecords::new(source, root, range, engine.geometry.nodesize)?;
        let mut found = Vec::new();
        while found.len() < most {
            let Some(record) = records.next()? else { break };
            found.push(record);
        }
        Ok(found)
    })
}

/// Approximate bytes of blocks that a step copies.
const MEMBERS_MAX_BYTES: usize = 32 << 20;
/// Approximate number of blocks that a step copies if room is short.
const MEMBERS_MIN: usize = 16;
