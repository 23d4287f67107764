//! [`Copies`]: new blocks for the members of a [`Closure`], and the references that they take over.
//!
//! A copy takes over the references of its original. Each pointer in a copied block is one reference to the child,
//! under the id of the block's owner or, with full backrefs, under the block's address:
//!
//! | the block | its child | references |
//! |---|---|---|
//! | full backrefs | any | the reference to the child names the block's new address instead of the old one |
//! | no full backrefs | copied or moved | the reference to the child moves to the child's new address |
//! | no full backrefs | neither | the reference to the child is unchanged |
//! | a root | | the tree's reference moves to the block's new address |
//!
//! So the number of each block's users stays the same, and no extent changes its owner.
//!
//! Invariants:
//! - I1. The references that the copies take over are exactly those that the extent tree records for the originals.
//!   If the references to take over differ from the recorded references, nothing is copied.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentFlags, FileExtent};
use ubtrfs_format::node::{HEADER_SIZE, KEY_PTR_SIZE, NodeHeader, write_header};
use ubtrfs_format::{Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::{DelayedRefs, Extent, RefKey, SpaceKind};
use ubtrfs_tree::{Node, RootPtr};
use uuid::Uuid;

use crate::cow::child_refs::{ChildRefs, UserChange, kind_of};
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::handle::trans_handle::regular_extent;
use crate::qgroup::state::QuotaMode;
use crate::relocation::closure::{Closure, ClosureBlock};
use crate::relocation::extent_record::ExtentRecord;

/// The new blocks of a step, before they are published.
pub(crate) struct Copies {
    /// The nodes, from the leaves up.
    pub(crate) nodes: Vec<Arc<Node>>,
    /// References that move.
    pub(crate) refs: DelayedRefs,
    pub(crate) roots: Vec<NewRoot>,
}

/// A tree whose root was copied.
pub(crate) struct NewRoot {
    pub(crate) tree: Arc<Tree>,
    pub(crate) root: RootPtr,
    /// Whether a copied block of the tree has full backrefs or several references, or lies below such a block
    /// ([`shared_members`]).
    pub(crate) has_shared_copies: bool,
}

/// Addresses allocated for copies. Dropping this value releases all of them; [`Self::keep`] excepts the used addresses.
pub(crate) struct CopySpace<'e> {
    engine: &'e Engine,
    allocated: Vec<Extent>,
    used: usize,
}

impl<'e> CopySpace<'e> {
    /// Allocates addresses for `nr_nodes` blocks, consecutive addresses if possible.
    pub(crate) fn allocate(engine: &'e Engine, nr_nodes: usize) -> Result<Self> {
        let mut space = Self { engine, allocated: Vec::with_capacity(nr_nodes), used: 0 };
        let nodesize = u64::from(engine.geometry.nodesize);
        while space.allocated.len() < nr_nodes {
            let missing = nr_nodes.saturating_sub(space.allocated.len()) as u64;
            let want = missing.min(PIECE_NODES).saturating_mul(nodesize);
            let piece = engine.allocate_or_make_chunk(SpaceKind::Metadata, want, nodesize, None)?;
            let piece = piece.ok_or(Error::NoSpace)?;
            let starts = (piece.bytenr.0..piece.end()).step_by(engine.geometry.nodesize as usize);
            space.allocated.extend(starts.map(|start| Extent::new(Logical(start), nodesize)));
        }
        Ok(space)
    }

    fn next(&mut self) -> Result<Extent> {
        let extent = self.allocated.get(self.used).copied();
        self.used = self.used.saturating_add(1);
        extent.ok_or_else(|| Error::Bug { what: "too few addresses were allocated for copies".to_owned() })
    }

    /// Keeps the addresses that copies use; the other addresses are released.
    pub(crate) fn keep(mut self) {
        self.allocated.drain(..self.used.min(self.allocated.len()));
    }
}

impl Drop for CopySpace<'_> {
    fn drop(&mut self) {
        self.allocated.iter().for_each(|extent| self.engine.space.release(*extent));
    }
}

/// A mismatch between the references of an extent and its users (I1).
pub(crate) struct Mismatch {
    /// The extents whose references do not match.
    pub(crate) extents: Vec<Logical>,
}

/// Copies the members of a closure. Returns the extents whose references do not match their users, if there are any.
pub(crate) fn copy_closure(
    closure: &Closure<'_>,
    space: &mut CopySpace<'_>,
    nodesize: u32,
    transid: Generation,
) -> Result<Result<Copies, Mismatch>> {
    let fsid = space.engine.commit_state.superblock().node_fsid();
    let mut work = BlockCopier { closure, fsid, nodesize, transid, moved: HashMap::new(), refs: DelayedRefs::new() };
    let shared = shared_members(closure);
    let reach = reach_shared(closure, &shared);
    let (mut nodes, mut roots) = (Vec::with_capacity(closure.members.len()), Vec::new());
    for (place, member) in &closure.members {
        let to = space.next()?;
        work.moved.insert(member.node.bytenr(), to.bytenr);
        let node = Arc::new(work.copy(member, to.bytenr)?);
        work.take_over_children(member, &node);
        for tree in &member.roots {
            work.move_ref(&member.record, node.first_key(), to, RefKey::TreeBlock(tree.id()));
            let root = RootPtr { tree: tree.id(), bytenr: to.bytenr, generation: transid, level: member.node.level() };
            roots.push(NewRoot { tree: Arc::clone(tree), root, has_shared_copies: reach.contains(place) });
        }
        if member.record.has_full_backrefs() {
            work.refs.set_flags(to, kind_of(&node), ExtentFlags::FULL_BACKREF, transid);
        }
        nodes.push(node);
    }
    let extents = work.mismatches();
    if !extents.is_empty() {
        return Ok(Err(Mismatch { extents }));
    }
    work.note_owners();
    Ok(Ok(Copies { nodes, refs: work.refs, roots }))
}

struct BlockCopier<'c, 'e> {
    closure: &'c Closure<'e>,
    fsid: Uuid,
    nodesize: u32,
    transid: Generation,
    /// New addresses of copied blocks.
    moved: HashMap<Logical, Logical>,
    refs: DelayedRefs,
}

impl BlockCopier<'_, '_> {
    /// The copy of a block, with pointers to the copies of its children.
    #[allow(clippy::arithmetic_side_effects, reason = "places in a block whose layout was checked when it was read")]
    fn copy(&self, member: &ClosureBlock, at: Logical) -> Result<Node> {
        let node = &member.node;
        let view = node.view();
        let mut raw = node.raw().to_vec();
        let header = NodeHeader {
            // A block on a seed has the fsid of the seed.
            fsid: self.fsid,
            chunk_tree_uuid: view.chunk_tree_uuid(),
            bytenr: at,
            generation: self.transid,
            owner: node.owner(),
            level: node.level(),
            flags: view.flags(),
        };
        write_header(&mut raw, &header, node.nritems());
        let mut put = |at: usize, value: u64| raw[at..at + size_of::<u64>()].copy_from_slice(&value.to_le_bytes());
        for slot in 0..node.nritems() {
            if !node.is_leaf() {
                if let Some(to) = self.moved.get(&node.child(slot).0) {
                    let pointer = HEADER_SIZE + slot * KEY_PTR_SIZE + Key::SIZE;
                    put(pointer, to.0);
                    put(pointer + size_of::<u64>(), self.transid.0);
                }
            } else if node.key(slot).item_type == KeyType::EXTENT_DATA
                && let Some(extent) = regular_extent(node.item(slot))
                && let Some(moved) = self.closure.data.get(&extent.disk_bytenr)
                && let Some(item) = view.item_range(slot)
            {
                put(item.start + FileExtent::HEADER_SIZE, moved.to.bytenr.0);
            }
        }
        Ok(Node::new(raw.into_boxed_slice())?)
    }

    /// Moves the references that the pointers of a block represent. `copy` is the block's copy.
    fn take_over_children(&mut self, member: &ClosureBlock, copy: &Node) {
        let node = &member.node;
        let full = member.record.has_full_backrefs();
        // Moving a block does not change its users, so quotas need not count it again.
        let (nodesize, transid) = (self.nodesize, self.transid);
        let child_refs = ChildRefs { owner: node.owner(), nodesize, transid, quotas: QuotaMode::Off };
        if full {
            child_refs.add_children(&mut self.refs, node, Some(node.bytenr()), -1, UserChange::Same);
            child_refs.add_children(&mut self.refs, copy, Some(copy.bytenr()), 1, UserChange::Same);
            return;
        }
        for slot in 0..node.nritems() {
            if !node.is_leaf() {
                if self.moved.contains_key(&node.child(slot).0) {
                    child_refs.add_child(&mut self.refs, node, slot, (None, -1), UserChange::Same);
                    child_refs.add_child(&mut self.refs, copy, slot, (None, 1), UserChange::Same);
                }
                continue;
            }
            let key = node.key(slot);
            let is_moved =
                |item| regular_extent(item).is_some_and(|extent| self.closure.data.contains_key(&extent.disk_bytenr));
            if key.item_type == KeyType::EXTENT_DATA && is_moved(node.item(slot)) {
                child_refs.add_data(&mut self.refs, &key, node.item(slot), (None, -1), UserChange::Same);
                child_refs.add_data(&mut self.refs, &key, copy.item(slot), (None, 1), UserChange::Same);
            }
        }
    }

    fn move_ref(&mut self, record: &ExtentRecord, first_key: Option<Key>, to: Extent, reference: RefKey) {
        let kind = record.kind(first_key.unwrap_or_default());
        self.refs.add(record.extent, kind, reference, -1, self.transid);
        self.refs.add(to, kind, reference, 1, self.transid);
    }

    /// Notes the trees that allocated the originals, to which simple quotas also charge the copies.
    fn note_owners(&mut self) {
        for member in self.closure.members.values() {
            let from = member.node.bytenr();
            for at in std::iter::once(from).chain(self.moved.get(&from).copied()) {
                self.refs.note_allocated_by(at, member.node.owner());
            }
        }
        for data in self.closure.data.values() {
            // As in Linux, an extent from before simple quotas is charged to no subvolume.
            let owner = data.record.owner.unwrap_or(RootId::DATA_RELOC_TREE);
            self.refs.note_allocated_by(data.to.bytenr, owner);
        }
    }

    /// The moved extents whose recorded references differ from the references that move (I1).
    fn mismatches(&self) -> Vec<Logical> {
        let moves_all = |record: &ExtentRecord| {
            let mut expected: BTreeMap<RefKey, i64> = BTreeMap::new();
            for (reference, count) in &record.refs {
                let expected = expected.entry(*reference).or_default();
                *expected = expected.saturating_sub_unsigned(*count);
            }
            let head = self.refs.get(record.extent.bytenr);
            head.is_some_and(|head| {
                head.extent == record.extent
                    && head.deltas.iter().eq(expected.iter().map(|(reference, count)| (reference, *count)))
            })
        };
        let blocks = self.closure.members.values().map(|member| &member.record);
        let data = self.closure.data.values().map(|data| &data.record);
        blocks.chain(data).filter(|record| !moves_all(record)).map(|record| record.extent.bytenr).collect()
    }
}

/// Members whose references a later cow must look up: blocks with full backrefs, blocks with several references, and
/// all blocks below such blocks.
fn shared_members(closure: &Closure<'_>) -> BTreeSet<(u8, Logical)> {
    let mut shared = BTreeSet::new();
    for (place @ (level, _), member) in closure.members.iter().rev() {
        let above = |parent: &Logical| shared.contains(&(level.saturating_add(1), *parent));
        let own = member.record.refs.len() > 1 || member.record.has_full_backrefs();
        if own || member.parents.iter().any(above) {
            shared.insert(*place);
        }
    }
    shared
}

/// Members that are shared, or have shared members below them.
fn reach_shared(closure: &Closure<'_>, shared: &BTreeSet<(u8, Logical)>) -> BTreeSet<(u8, Logical)> {
    let mut reach = shared.clone();
    for (place @ (level, _), member) in &closure.members {
        if reach.contains(place) {
            reach.extend(member.parents.iter().map(|parent| (level.saturating_add(1), *parent)));
        }
    }
    reach
}

/// Maximum number of blocks allocated in one piece.
const PIECE_NODES: u64 = 256;
