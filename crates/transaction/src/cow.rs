//! Copy on write: what happens to addresses and references when a batch changes a tree.
//!
//! References are derived here, from what `apply` reports, and nowhere else. For a block that tree R leaves:
//!
//! | users of the block | its children | the block |
//! |---|---|---|
//! | only R, by its id | keep their references | loses R's |
//! | only R, full backref | lose the one of the block's address, gain R's | loses R's |
//! | several, R owns it, no full backref | gain one of the block's address (R's own move to the copy) | loses R's; full backref is set |
//! | several otherwise | gain R's | loses R's |
//!
//! Invariants:
//! - I1. A node of the running transaction belongs to one tree alone.
//! - I2. What an apply makes becomes visible in one step, [`Tree::publish`].
//! - I3. A node that was written keeps its content: what changes it again in its transaction makes a copy at another
//!   address, and its own address is not used again before the commit. So a large batch's nodes can be written when they
//!   are made ([`crate::node_stream`]), and an address never has two contents of one generation on the devices.
//!
//! Source of the rules: the btrfs design notes on mixed back references, and what the kernel leaves on disk.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ubtrfs_format::item::ExtentFlags;
use ubtrfs_format::node::{HEADER_FLAG_RELOC, NodeHeader};
use ubtrfs_format::{Corrupt, Error, FormatError, Generation, Ino, Key, KeyType, Logical, Result, RootId};
use ubtrfs_space::{DelayedRefs, Extent, ExtentKind, RefKey, SpaceKind};
use ubtrfs_tree::{ApplyStats, Changes, Node, NodeSink, NodeSource, RootPtr};

use crate::engine::Engine;
use crate::extent_tree;
use crate::leaf_reader::LeafReader;
use crate::node_stream::NodeStream;
use crate::operation::regular_extent;
use crate::tree_view::Tree;

impl Engine {
    /// Applies a batch to a tree and shows the result to readers. The caller holds the commit lock.
    pub(crate) fn apply_batch(
        &self,
        tree: &Tree,
        batch: &dyn Changes,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<ApplyStats> {
        let old_root = tree.root_ptr();
        if batch.is_empty() {
            tree.publish(old_root, || ());
            return Ok(ApplyStats::default());
        }
        let made = if tree.id().is_fs_tree() && batch.len() >= STREAM_MIN {
            NodeStream::with(self, |stream| {
                let mut sink = CowSink::new(self, tree, refs, transid, old_root, batch.len(), Some(stream))?;
                LeafReader::with(&self.store, |source| make_nodes(source, &mut sink, &old_root, batch))
            })
        } else {
            let mut sink = CowSink::new(self, tree, refs, transid, old_root, batch.len(), None)?;
            make_nodes(tree.source(), &mut sink, &old_root, batch)
        };
        let Made { new_root, stats, emitted, freed, left, retired, nr_made, nr_left } =
            made.map_err(|error| error.in_tree(tree.id()))?;
        self.stats.applied(tree.id(), &stats);
        tree.publish(new_root, || {
            // In this order: an address that was freed may have been given to a new node.
            freed.into_iter().for_each(|bytenr| self.store.drop_dirty(bytenr));
            emitted.into_values().for_each(|node| self.store.put_dirty(node));
        });
        // Readers that are still on their way down the old tree read them again.
        left.into_iter().for_each(|bytenr| self.store.forget(bytenr));
        self.retired.lock().extend(retired);
        let nodesize = u64::from(self.geometry.nodesize);
        let mut state = tree.root.lock();
        state.changed |= new_root != old_root || nr_made != nr_left;
        if let Some(item) = &mut state.item {
            item.bytes_used = (item.bytes_used + nr_made * nodesize).saturating_sub(nr_left * nodesize);
        }
        Ok(stats)
    }
}

/// What an apply made, to be shown to readers.
struct Made {
    new_root: RootPtr,
    stats: ApplyStats,
    /// Nodes that are not written yet.
    emitted: HashMap<Logical, Arc<Node>>,
    /// Addresses of nodes of this transaction that are not used any more.
    freed: Vec<Logical>,
    /// Nodes of earlier transactions that nobody uses any more once this one is committed.
    left: Vec<Logical>,
    /// Blocks of this transaction that were written, and that no tree uses any more.
    retired: Vec<Extent>,
    /// Blocks that the tree gained and lost.
    nr_made: u64,
    nr_left: u64,
}

fn make_nodes(
    source: &dyn NodeSource,
    sink: &mut CowSink<'_>,
    old_root: &RootPtr,
    batch: &dyn Changes,
) -> Result<Made> {
    let (new_root, stats) = ubtrfs_tree::apply(source, sink, old_root, batch)?;
    sink.release_unused();
    // Too few for a piece of their own: they are written with the other trees' nodes.
    for node in std::mem::take(&mut sink.gathered) {
        sink.emitted.insert(node.bytenr(), node);
    }
    Ok(Made {
        new_root,
        stats,
        emitted: std::mem::take(&mut sink.emitted),
        freed: std::mem::take(&mut sink.freed),
        left: std::mem::take(&mut sink.left),
        retired: std::mem::take(&mut sink.retired),
        nr_made: sink.nr_made,
        nr_left: sink.nr_left,
    })
}

struct CowSink<'a> {
    engine: &'a Engine,
    refs: &'a mut DelayedRefs,
    transid: Generation,
    owner: RootId,
    root_bytenr: Logical,
    last_snapshot: Generation,
    kind: SpaceKind,
    extent_root: Option<RootPtr>,
    allocated: HashSet<Logical>,
    emitted: HashMap<Logical, Arc<Node>>,
    freed: Vec<Logical>,
    left: Vec<Logical>,
    retired: Vec<Extent>,
    stream: Option<&'a NodeStream<'a>>,
    /// With a stream: nodes that are going to be its next piece.
    gathered: Vec<Arc<Node>>,
    piece_len: usize,
    /// Items changed so far, of so many changes.
    nr_changed: usize,
    batch_len: usize,
    nr_made: u64,
    nr_left: u64,
}

impl<'a> CowSink<'a> {
    fn new(
        engine: &'a Engine,
        tree: &Tree,
        refs: &'a mut DelayedRefs,
        transid: Generation,
        root: RootPtr,
        batch_len: usize,
        stream: Option<&'a NodeStream<'a>>,
    ) -> Result<Self> {
        let owner = tree.id();
        let last_snapshot = tree.root.lock().last_snapshot;
        // Only subvolumes share blocks; the other trees need no look at the extent tree (which may be changing).
        let extent_root =
            if owner.is_fs_tree() { Some(engine.own_tree(RootId::EXTENT_TREE)?.root_ptr()) } else { None };
        Ok(Self {
            engine,
            refs,
            transid,
            owner,
            root_bytenr: root.bytenr,
            last_snapshot,
            kind: if owner == RootId::CHUNK_TREE { SpaceKind::System } else { SpaceKind::Metadata },
            extent_root,
            allocated: HashSet::new(),
            emitted: HashMap::new(),
            freed: Vec::new(),
            left: Vec::new(),
            retired: Vec::new(),
            stream,
            gathered: Vec::new(),
            piece_len: NodeStream::nodes_a_piece(engine),
            nr_changed: 0,
            batch_len,
            nr_made: 0,
            nr_left: 0,
        })
    }

    fn extent_at(&self, bytenr: Logical) -> Extent {
        Extent::new(bytenr, u64::from(self.engine.geometry.nodesize))
    }

    fn add_ref(&mut self, node: &Node, reference: RefKey, delta: i64) {
        let kind = ExtentKind::Tree { level: node.level(), first_key: node.first_key().unwrap_or_default() };
        self.refs.add(self.extent_at(node.bytenr()), kind, reference, delta, self.transid);
    }

    /// References and flags of a block that this tree is about to leave.
    fn sharing(&self, node: &Node) -> Result<(u64, ExtentFlags)> {
        let is_reloc = node.view().flags() & HEADER_FLAG_RELOC != 0;
        let may_be_shared = node.bytenr() != self.root_bytenr && (node.generation() <= self.last_snapshot || is_reloc);
        let (Some(extent_root), true) = (&self.extent_root, may_be_shared) else {
            return Ok((1, ExtentFlags::empty()));
        };
        let nodesize = u64::from(self.engine.geometry.nodesize);
        let store = &*self.engine.store;
        let info = extent_tree::lookup_extent(store, extent_root, node.bytenr(), nodesize, true)?;
        let (mut refs, mut flags) = info.map_or((0, ExtentFlags::empty()), |info| (info.refs, info.flags));
        if let Some((delta, set_flags)) = self.refs.net(node.bytenr()) {
            refs = refs.saturating_add_signed(delta);
            flags |= set_flags;
        }
        if refs == 0 {
            return Err(no_references(node.bytenr()).into());
        }
        Ok((refs, flags))
    }

    /// Adds `delta` to a reference of every child of a block: `reference` makes it for a child block and for a file
    /// extent.
    fn add_child_refs(&mut self, node: &Node, parent: Option<Logical>, delta: i64) {
        let nodesize = u64::from(self.engine.geometry.nodesize);
        for slot in 0..node.nritems() {
            if !node.is_leaf() {
                let (child, _) = node.child(slot);
                let reference = parent.map_or(RefKey::TreeBlock(self.owner), RefKey::SharedBlock);
                let kind = ExtentKind::Tree { level: node.level() - 1, first_key: node.key(slot) };
                self.refs.add(Extent::new(child, nodesize), kind, reference, delta, self.transid);
                continue;
            }
            let key = node.key(slot);
            if key.item_type == KeyType::EXTENT_DATA {
                self.add_data_ref(&key, node.item(slot), parent, delta);
            }
        }
    }

    fn add_data_ref(&mut self, key: &Key, item: &[u8], parent: Option<Logical>, delta: i64) {
        let Some(extent) = regular_extent(item) else { return };
        let keyed =
            RefKey::Data { root: self.owner, ino: Ino(key.objectid), offset: key.offset.wrapping_sub(extent.offset) };
        let reference = parent.map_or(keyed, RefKey::SharedData);
        let on_disk = Extent::new(extent.disk_bytenr, extent.disk_num_bytes);
        self.refs.add(on_disk, ExtentKind::Data, reference, delta, self.transid);
    }

    /// Leaves a block that this transaction made: nothing on the devices refers to it. Answers whether its address is
    /// nobody's now.
    fn drop_fresh(&mut self, node: &Node) -> bool {
        let bytenr = node.bytenr();
        self.nr_left += 1;
        self.freed.push(bytenr);
        let added_now = self.refs.get(bytenr).is_some_and(|head| head.net() > 0);
        if added_now {
            // Its extent item was never made.
            self.refs.forget(bytenr);
        } else {
            self.add_ref(node, RefKey::TreeBlock(self.owner), -1);
        }
        added_now
    }

    fn release_unused(&mut self) {
        for bytenr in std::mem::take(&mut self.allocated) {
            self.engine.space.release(self.extent_at(bytenr));
        }
    }
}

impl NodeSink for CowSink<'_> {
    fn is_fresh(&self, node: &Node) -> bool {
        // I3: a stream would write other content to the address of a node that readers still see.
        node.generation() == self.transid && self.stream.is_none() && self.engine.store.is_dirty(node.bytenr())
    }

    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader {
        NodeHeader {
            fsid: self.engine.superblock.read().node_fsid(),
            chunk_tree_uuid: self.engine.chunk_tree_uuid,
            bytenr,
            generation: self.transid,
            owner: self.owner,
            level,
            flags: 0,
        }
    }

    fn allocate(&mut self, _level: u8, near: Option<Logical>) -> Result<Logical> {
        if self.stream.is_some_and(NodeStream::has_failed) {
            return Err(Error::ReadOnly { reason: "tree blocks could not be written".to_owned() });
        }
        let nodesize = u64::from(self.engine.geometry.nodesize);
        let extent = self.engine.allocate_or_make_chunk(self.kind, nodesize, nodesize, near)?.ok_or(Error::NoSpace)?;
        self.allocated.insert(extent.bytenr);
        Ok(extent.bytenr)
    }

    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()> {
        self.emitted.remove(&node.bytenr());
        if self.drop_fresh(node) {
            self.engine.space.release(self.extent_at(node.bytenr()));
        }
        Ok(())
    }

    fn leave(&mut self, node: &Arc<Node>) -> Result<()> {
        if node.generation() == self.transid {
            if self.drop_fresh(node) {
                self.retired.push(self.extent_at(node.bytenr()));
            }
            self.left.push(node.bytenr());
            return Ok(());
        }
        let (refs, flags) = self.sharing(node)?;
        self.nr_left += 1;
        let full_backref = flags.contains(ExtentFlags::FULL_BACKREF);
        if refs > 1 {
            if node.owner() == self.owner && !full_backref {
                self.add_child_refs(node, Some(node.bytenr()), 1);
                let kind = ExtentKind::Tree { level: node.level(), first_key: node.first_key().unwrap_or_default() };
                let extent = self.extent_at(node.bytenr());
                self.refs.set_flags(extent, kind, ExtentFlags::FULL_BACKREF, self.transid);
            } else {
                self.add_child_refs(node, None, 1);
            }
        } else if full_backref {
            self.add_child_refs(node, None, 1);
            self.add_child_refs(node, Some(node.bytenr()), -1);
        }
        self.add_ref(node, RefKey::TreeBlock(self.owner), -1);
        if refs == 1 {
            self.engine.store.retire(node.bytenr());
            self.left.push(node.bytenr());
        }
        Ok(())
    }

    fn item_changed(&mut self, key: &Key, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<()> {
        self.nr_changed += 1;
        if self.stream.is_some() && self.nr_changed.is_multiple_of(PROGRESS_STEP) {
            self.engine.throttle.applied(self.nr_changed, self.batch_len);
        }
        if key.item_type != KeyType::EXTENT_DATA || !self.owner.is_fs_tree() {
            return Ok(());
        }
        if let Some(old) = old {
            self.add_data_ref(key, old, None, -1);
        }
        if let Some(new) = new {
            self.add_data_ref(key, new, None, 1);
        }
        Ok(())
    }

    fn emit(&mut self, node: Arc<Node>) {
        if self.allocated.remove(&node.bytenr()) {
            self.nr_made += 1;
            self.add_ref(&node, RefKey::TreeBlock(self.owner), 1);
        }
        let Some(stream) = self.stream else {
            self.emitted.insert(node.bytenr(), node);
            return;
        };
        self.gathered.push(node);
        if self.gathered.len() >= self.piece_len {
            let piece = std::mem::take(&mut self.gathered);
            self.engine.store.streams(piece.len());
            stream.push(piece);
        }
    }
}

fn no_references(bytenr: Logical) -> Corrupt {
    Corrupt::new(FormatError::Value {
        what: "ExtentItem",
        field: "refs",
        value: 0,
        expected: "expected a reference for a block that a tree uses",
    })
    .in_tree(RootId::EXTENT_TREE)
    .at(bytenr)
}

/// Changes of a batch from which on its nodes are written as they are made: fewer touch no more leaves than can be held
/// in memory.
const STREAM_MIN: usize = 256;
/// Changes between two reports of progress.
const PROGRESS_STEP: usize = 1024;
