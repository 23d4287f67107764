//! Walks a tree in key order, one window of each level at a time, and records references.
//!
//! Invariants:
//! - I1. A walk visits each block once: the level decreases from a block to its children, and a block that this walk
//!   visited before is reported and skipped.
//! - I2. In each round of walks (the first and the second), the references in a block are recorded only when a walk
//!   first reaches the block.
//! - I3. A walk takes memory for a window of leaves ([`WINDOW_BYTES`]), and for the pointers of [`NODES_AT_ONCE`] nodes
//!   of each level.

use ubtrfs_format::check::CheckContext;
use ubtrfs_format::item::ExtentFlags;
use ubtrfs_format::node::{BACKREF_REV_MIXED, HEADER_FLAG_RELOC, LEVEL_MAX, NodeView};
use ubtrfs_format::{Generation, Key, KeyType, RootId};

use crate::block_table::{BY_OWNER, FULL, LOST, REACHED, REACHED_IN_ROUND, RECORDED, RELOC};
use crate::checker::Checker;
use crate::fingerprint::Fact;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::reader::{BlockPtr, BlockReader, ReadMode};
use crate::segment::Known;

/// Maximum number of bytes of leaves that are read together.
const WINDOW_BYTES: usize = 8 << 20;
/// Maximum number of internal nodes that are read together. Their children are walked before the next nodes are read.
const NODES_AT_ONCE: usize = 4;

/// The kind of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeKind {
    /// A tree that shares no blocks with other trees.
    Plain,
    /// A tree that holds inodes and may share blocks with other trees.
    Files,
    /// A relocation tree, whose blocks have full backrefs.
    Reloc,
    /// A tree of the log, whose blocks are not in the extent tree.
    Log,
}

/// The root of a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeRoot {
    pub(crate) id: RootId,
    pub(crate) kind: TreeKind,
    pub(crate) bytenr: u64,
    pub(crate) level: u8,
    pub(crate) generation: Option<Generation>,
    /// The drop progress of a tree that is being deleted. Items before the drop progress are already gone.
    pub(crate) drop: Option<(Key, u8)>,
}

/// A leaf that a walk visits.
pub(crate) struct Leaf<'b> {
    pub(crate) tree: RootId,
    pub(crate) bytenr: u64,
    pub(crate) view: NodeView<'b>,
}

impl<'b> Leaf<'b> {
    /// Returns the leaf's items: slot, key, data. An item that lies outside of the block is returned without data.
    pub(crate) fn items(&self) -> impl Iterator<Item = (usize, Key, &'b [u8])> + use<'b> {
        let view = self.view;
        (0..view.nritems()).map_while(move |slot| Some((slot, view.key(slot)?, view.item(slot).unwrap_or_default())))
    }

    pub(crate) fn place(&self, slot: usize) -> Place {
        Place::item(self.tree, self.bytenr, slot)
    }
}

/// An event of a walk.
pub(crate) enum WalkEvent<'l, 'b> {
    /// A leaf, in key order.
    Leaf(&'l Leaf<'b>),
    /// A run of leaves that was checked in another subvolume, without a problem.
    Known(&'l Known),
    /// A block could not be read.
    Gap,
}

type OnEvent<'f, 'a> = dyn FnMut(&mut Checker<'a>, WalkEvent<'_, '_>) + 'f;

struct WalkState {
    walk: u32,
    last_key: [Option<Key>; LEVEL_MAX as usize + 1],
    complete: bool,
}

impl<'a> Checker<'a> {
    /// Visits every leaf in key order; a remembered run of leaves is one event ([`WalkEvent::Known`]). Returns `false`
    /// if a part could not be read.
    pub(crate) fn walk(&mut self, tree: &TreeRoot, on_event: &mut OnEvent<'_, 'a>) -> bool {
        self.nr_walks = self.nr_walks.saturating_add(1);
        let mut state = WalkState { walk: self.nr_walks, last_key: [None; LEVEL_MAX as usize + 1], complete: true };
        let counts_for = match tree.kind {
            TreeKind::Plain | TreeKind::Files => tree.id.0,
            TreeKind::Reloc | TreeKind::Log => 0,
        };
        if tree.kind != TreeKind::Log {
            let (kind, part) = match counts_for {
                0 => (KeyType::SHARED_BLOCK_REF, tree.bytenr),
                root => (KeyType::TREE_BLOCK_REF, root),
            };
            self.refs.add(block_fact(tree.bytenr, kind, part), -1, (tree.id.0, tree.bytenr, 0));
        }
        let root = BlockPtr {
            bytenr: tree.bytenr,
            generation: tree.generation,
            key: None,
            level: tree.level,
            on_drop_path: tree.drop.is_some(),
        };
        self.walk_level(tree, &[root], tree.level, &mut state, on_event);
        self.has_gaps |= !state.complete;
        state.complete
    }

    fn walk_level(
        &mut self,
        tree: &TreeRoot,
        edges: &[BlockPtr],
        level: u8,
        state: &mut WalkState,
        on_event: &mut OnEvent<'_, 'a>,
    ) {
        if level == 0 && tree.kind == TreeKind::Files && tree.drop.is_none() {
            return self.walk_leaves(tree, edges, state, on_event);
        }
        self.walk_edges(tree, edges, level, state, on_event);
    }

    /// Visits leaves, except for runs that were already checked in another subvolume.
    fn walk_leaves(
        &mut self,
        tree: &TreeRoot,
        edges: &[BlockPtr],
        state: &mut WalkState,
        on_event: &mut OnEvent<'_, 'a>,
    ) {
        let known = self.known_segments(edges);
        let mut from = 0;
        let mut at: usize = 0;
        while at < edges.len() {
            let Some((to, segment)) = known.get(&at).filter(|(to, _)| self.were_reached(&edges[at..*to])) else {
                at = at.saturating_add(1);
                continue;
            };
            self.walk_edges(tree, &edges[from..at], 0, state, on_event);
            self.visit_known(tree, &edges[at..*to], segment, state);
            on_event(self, WalkEvent::Known(segment));
            (from, at) = (*to, *to);
        }
        self.walk_edges(tree, &edges[from..], 0, state, on_event);
    }

    fn were_reached(&self, edges: &[BlockPtr]) -> bool {
        let reached = |edge: &BlockPtr| {
            let block = self.blocks.get(edge.bytenr);
            block.is_some_and(|block| block.flags & REACHED_IN_ROUND != 0 && block.flags & LOST == 0)
        };
        edges.iter().all(reached)
    }

    /// Records a visit of leaves that are not read again.
    fn visit_known(&mut self, tree: &TreeRoot, edges: &[BlockPtr], segment: &Known, state: &mut WalkState) {
        for edge in edges {
            let block = self.blocks.entry(edge.bytenr);
            let twice = std::mem::replace(&mut block.last_walk, state.walk) == state.walk;
            if tree.id.0 == block.owner {
                block.flags |= BY_OWNER;
            }
            if twice {
                let text = "a tree block is reached twice in one tree";
                self.sink.report(Code::BlockTwice, Place::block(tree.id, edge.bytenr), text);
            }
        }
        let first = edges.first().and_then(|edge| Some((edge.key?, edge.bytenr)));
        if let (Some((key, bytenr)), Some(last)) = (first, state.last_key[0])
            && last >= key
        {
            let text = format!("the first key {key} is not above the last key of the block before it, {last}");
            self.sink.report(Code::KeyOrder, Place::block(tree.id, bytenr), text);
        }
        state.last_key[0] = Some(segment.last_key);
    }

    fn walk_edges(
        &mut self,
        tree: &TreeRoot,
        edges: &[BlockPtr],
        level: u8,
        state: &mut WalkState,
        on_event: &mut OnEvent<'_, 'a>,
    ) {
        let leaves = WINDOW_BYTES.checked_div(self.nodesize).unwrap_or(1).max(1);
        let window = if level == 0 { leaves } else { NODES_AT_ONCE };
        for edges in edges.chunks(window) {
            let mut buf = std::mem::take(&mut self.buf);
            let places = self.read_window(tree, edges, &mut buf);
            let mut children = Vec::new();
            for (edge, place) in edges.iter().zip(places) {
                let view = place.and_then(|at| NodeView::new(buf.get(at..)?.get(..self.nodesize)?).ok());
                let Some(view) = view else {
                    state.complete = false;
                    on_event(self, WalkEvent::Gap);
                    continue;
                };
                if !self.visit(tree, edge, &view, state, &mut children) {
                    continue;
                }
                if level == 0 {
                    let leaf = Leaf { tree: tree.id, bytenr: edge.bytenr, view };
                    on_event(self, WalkEvent::Leaf(&leaf));
                }
            }
            self.buf = buf;
            if let Some(below) = level.checked_sub(1).filter(|_| !children.is_empty()) {
                self.walk_level(tree, &children, below, state, on_event);
            }
        }
    }

    /// Reads the blocks of a window. Returns each usable block's position in `buf`.
    fn read_window(&mut self, tree: &TreeRoot, edges: &[BlockPtr], buf: &mut Vec<u8>) -> Vec<Option<usize>> {
        let mut order: Vec<u32> = (0..edges.len() as u32).collect();
        order.sort_by_key(|&at| edges[at as usize].bytenr);
        let mut care: Vec<ReadMode> = edges.iter().map(|edge| self.care(edge)).collect();
        let nr_rereads = care.iter().filter(|care| **care == ReadMode::Again).count() as u64;
        self.nr_rereads = self.nr_rereads.saturating_add(nr_rereads);
        if self.nr_rereads > self.again_max {
            care.iter_mut().filter(|care| **care == ReadMode::Again).for_each(|care| *care = ReadMode::Skip);
            let text = "subvolumes share blocks in more ways than can be checked";
            self.sink.report(Code::Limit, Place { slot: Some(0), ..Place::block(tree.id, 0) }, text);
        }
        let window_bytes = edges.len().saturating_mul(self.nodesize);
        buf.resize(window_bytes, 0);
        // The log belongs to the transaction after the superblock's transaction.
        let newest = self.newest().0.saturating_add(u64::from(tree.kind == TreeKind::Log));
        let ctx = CheckContext { generation_limit: Some(Generation(newest)), ..self.ctx };
        let reader = BlockReader {
            array: self.array,
            ctx: &ctx,
            spans: &self.spans,
            tree: tree.id,
            nodesize: self.nodesize,
            threads: self.threads,
        };
        let outcomes = reader.read(edges, &care, &order, buf);
        let mut places = vec![None; edges.len()];
        for (position, (&at, outcome)) in order.iter().zip(outcomes).enumerate() {
            let edge = &edges[at as usize];
            for (code, slot, text) in outcome.problems {
                self.sink.report(code, Place { slot, ..Place::block(tree.id, edge.bytenr) }, text);
            }
            if outcome.usable {
                places[at as usize] = Some(position.saturating_mul(self.nodesize));
            }
            if care[at as usize] == ReadMode::Verify && tree.kind != TreeKind::Log {
                let flags = if outcome.usable { REACHED } else { LOST | REACHED };
                self.blocks.entry(edge.bytenr).flags |= flags;
            }
        }
        self.progress.advance(window_bytes as u64);
        places
    }

    fn care(&self, edge: &BlockPtr) -> ReadMode {
        match self.blocks.get(edge.bytenr) {
            Some(block) if block.flags & LOST != 0 => ReadMode::Skip,
            Some(block) if block.flags & REACHED != 0 => ReadMode::Again,
            _ => ReadMode::Verify,
        }
    }

    /// Records a visit of a block and lists its children. Returns `false` if this walk visited the block before (I1).
    fn visit(
        &mut self,
        tree: &TreeRoot,
        edge: &BlockPtr,
        view: &NodeView<'_>,
        state: &mut WalkState,
        children: &mut Vec<BlockPtr>,
    ) -> bool {
        let place = Place::block(tree.id, edge.bytenr);
        let mut full = false;
        let mut first = true;
        if tree.kind == TreeKind::Log {
            if !self.log_blocks.insert(edge.bytenr) {
                self.sink.report(Code::BlockTwice, place, "a log block is reached twice");
                return false;
            }
        } else {
            let block = self.blocks.entry(edge.bytenr);
            if block.last_walk == state.walk {
                self.sink.report(Code::BlockTwice, place, "a tree block is reached twice in one tree");
                return false;
            }
            block.last_walk = state.walk;
            first = block.flags & REACHED_IN_ROUND == 0;
            block.flags |= REACHED | REACHED_IN_ROUND;
            block.owner = view.owner().0;
            full = block.flags & FULL != 0;
            if tree.id == view.owner() {
                block.flags |= BY_OWNER;
            }
            if view.flags() & HEADER_FLAG_RELOC != 0
                || tree.kind == TreeKind::Reloc
                || view.owner() == RootId::TREE_RELOC
            {
                block.flags |= RELOC;
            }
            if first && block.flags & RECORDED == 0 {
                block.generation = view.generation().0;
                block.level = view.level();
            } else if first {
                let (level, generation) = (block.level, block.generation);
                self.compare_record(tree, edge, view, level, generation);
            }
            if !first && tree.kind == TreeKind::Plain {
                self.sink.report(Code::BlockTwice, place, "a tree block belongs to two trees that cannot share it");
            }
        }
        if view.backref_rev() != BACKREF_REV_MIXED {
            let text = format!("the backref revision is {}, expected {BACKREF_REV_MIXED}", view.backref_rev());
            self.sink.report(Code::BlockHeader, place, text);
        }
        self.check_order(edge, view, state, place);
        self.quota_block(edge.bytenr);
        let books = first && tree.kind != TreeKind::Log;
        if view.is_leaf() {
            if books {
                self.record_data_refs(tree, edge.bytenr, view, full);
            }
        } else {
            self.list_children(tree, edge, view, full, books, children);
        }
        true
    }

    pub(crate) fn compare_record(
        &mut self,
        tree: &TreeRoot,
        edge: &BlockPtr,
        view: &NodeView<'_>,
        level: u8,
        generation: u64,
    ) {
        let place = Place::block(tree.id, edge.bytenr);
        if level != view.level() {
            let text = format!("the extent item has level {level}, the block level {}", view.level());
            self.sink.report(Code::ExtentInfo, place, text);
        }
        if generation != view.generation().0 {
            let text = format!("the extent item has generation {generation}, the block {}", view.generation());
            self.sink.report(Code::ExtentInfo, place, text);
        }
    }

    fn check_order(&mut self, edge: &BlockPtr, view: &NodeView<'_>, state: &mut WalkState, place: Place) {
        let Some(last) = state.last_key.get_mut(usize::from(edge.level)) else { return };
        let Some(first) = view.key(0) else { return };
        if last.is_some_and(|last| last >= first) {
            let text = format!(
                "the first key {first} is not above the last key of the block before it, {}",
                last.unwrap_or_default()
            );
            self.sink.report(Code::KeyOrder, place, text);
        }
        if let Some(key) = edge.key.filter(|&key| key != first) {
            let text = format!("the first key is {first}, the pointer to the block has {key}");
            self.sink.report(Code::BlockHeader, place, text);
        }
        *last = view.key(view.nritems().saturating_sub(1));
    }

    fn list_children(
        &mut self,
        tree: &TreeRoot,
        edge: &BlockPtr,
        view: &NodeView<'_>,
        full: bool,
        books: bool,
        children: &mut Vec<BlockPtr>,
    ) {
        let Some(level) = edge.level.checked_sub(1) else { return };
        let drop = tree.drop.filter(|(_, drop_level)| edge.on_drop_path && edge.level >= *drop_level);
        let first_slot = drop.map_or(0, |(key, _)| match view.search(&key) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        });
        for slot in first_slot..view.nritems() {
            let (Some(key), Some((bytenr, generation))) = (view.key(slot), view.child(slot)) else { break };
            let (kind, part) = match full {
                true => (KeyType::SHARED_BLOCK_REF, edge.bytenr),
                false => (KeyType::TREE_BLOCK_REF, view.owner().0),
            };
            if books {
                self.refs.add(block_fact(bytenr.0, kind, part), -1, (tree.id.0, edge.bytenr, slot));
            }
            children.push(BlockPtr {
                bytenr: bytenr.0,
                generation: Some(generation),
                key: Some(key),
                level,
                on_drop_path: drop.is_some_and(|(_, drop_level)| slot == first_slot && edge.level > drop_level),
            });
        }
    }

    /// Records the references of a leaf's file extents.
    fn record_data_refs(&mut self, tree: &TreeRoot, bytenr: u64, view: &NodeView<'_>, full: bool) {
        if tree.kind == TreeKind::Plain && tree.id != RootId::ROOT_TREE {
            return;
        }
        for slot in 0..view.nritems() {
            let (Some(key), Some(data)) = (view.key(slot), view.item(slot)) else { break };
            if key.item_type != KeyType::EXTENT_DATA || !matches!(u8_at(data, 20), Some(1 | 2)) {
                continue;
            }
            let (Some(disk_bytenr), Some(len), Some(offset)) = (u64_at(data, 21), u64_at(data, 29), u64_at(data, 37))
            else {
                continue;
            };
            if disk_bytenr == 0 {
                continue;
            }
            let at = (tree.id.0, bytenr, slot);
            let fact = match full {
                true => block_fact(disk_bytenr, KeyType::SHARED_DATA_REF, bytenr),
                false => Fact {
                    subject: disk_bytenr,
                    kind: KeyType::EXTENT_DATA_REF.0.into(),
                    parts: [view.owner().0, key.objectid, key.offset.wrapping_sub(offset)],
                },
            };
            self.refs.add(fact, -1, at);
            self.refs.add(length_fact(disk_bytenr, len), -1, at);
        }
    }
}

/// Makes the fact of a reference to an extent. `part` identifies the reference: the id of a tree, or the address of the
/// block that refers to the extent.
pub(crate) fn block_fact(bytenr: u64, kind: KeyType, part: u64) -> Fact {
    Fact { subject: bytenr, kind: kind.0.into(), parts: [part, 0, 0] }
}

/// Makes the fact of a data extent's length, which is recorded with each reference.
pub(crate) fn length_fact(bytenr: u64, len_bytes: u64) -> Fact {
    Fact { subject: bytenr, kind: LENGTH, parts: [len_bytes, 0, 0] }
}

/// The kind of a [`length_fact`].
pub(crate) const LENGTH: u64 = 1;

/// Whether the full backref bit is set.
pub(crate) fn is_full(flags: u64) -> bool {
    ExtentFlags::from_bits_retain(flags).contains(ExtentFlags::FULL_BACKREF)
}
