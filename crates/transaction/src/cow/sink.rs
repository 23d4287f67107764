//! Copy on write: how addresses and references change when a batch changes a tree.
//!
//! The reference changes of a batch are derived here, from the reports of `apply`, and nowhere else. The table is for a
//! block that tree R stops using. A reference that tree R holds names the id of R; a reference that the block holds
//! names the address of the block (a full backref):
//!
//! | users of the block | its children | the block |
//! |---|---|---|
//! | only R, by its id | keep their references | loses the reference held by R |
//! | only R, full backref | lose the reference held by the block, gain one held by R | loses the reference held by R |
//! | several, R owns it, no full backref | gain a reference held by the block (the one held by R moves to the copy) | loses the reference held by R; full backref is set |
//! | several otherwise | gain a reference held by R | loses the reference held by R |
//!
//! A block of the running transaction belongs to one tree alone until a snapshot of the tree is taken. From the
//! snapshot until the end of the commit, blocks of this transaction may have several users too, and the tree's
//! `last_snapshot` is this transaction. So a block other than the tree's root is *private* only if it is newer than the
//! tree's last snapshot; for blocks that are not private, the references show how many users they have.
//!
//! Invariants:
//! - I1. A node is changed at its address only while it is private and was never written.
//! - I2. The nodes of an apply become visible in one step, [`Tree::publish`].
//! - I3. A written node keeps its content: its next change in the same transaction makes a copy at another address, and
//!   the address of the written node is not reused before the commit. So the nodes of a large batch can be written as
//!   they are made ([`crate::nodes::stream`]), and an address never has two contents of one generation on the devices.
//!
//! Source of the rules: the btrfs design notes on mixed back references, and the on-disk state that the kernel leaves.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentFlags, Timespec};
use ubtrfs_format::node::{HEADER_FLAG_RELOC, NodeHeader};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::{DelayedRefs, Extent, RefKey, SpaceKind};
use ubtrfs_tree::{ApplyStats, Changes, Node, NodeSink, NodeSource, PartSink, RootPtr};

use crate::cow::child_refs::{ChildRefs, UserChange, kind_of};
use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::extents::extent_tree;
use crate::nodes::leaf_reader::LeafReader;
use crate::nodes::stream::NodeStream;
use crate::nodes::threads::nr_threads;
use crate::qgroup::state::QuotaMode;

impl Engine {
    /// Applies a batch to a tree and publishes the result. The caller holds the commit lock.
    pub(crate) fn apply_batch(
        &self,
        tree: &Tree,
        batch: &dyn Changes,
        refs: &mut DelayedRefs,
        transid: Generation,
    ) -> Result<ApplyStats> {
        let progress = ApplyProgress::new(batch.len());
        let (new_refs, stats) = self.apply_tree(tree, batch, refs, transid, &progress, nr_threads())?;
        new_refs.append_to(refs);
        Ok(stats)
    }

    /// Applies a batch to a tree, in at most `max_parts` parts, and publishes the result. Does not change the delayed
    /// refs `refs`: returns the changes that the caller must make to them.
    pub(crate) fn apply_tree(
        &self,
        tree: &Tree,
        batch: &dyn Changes,
        refs: &DelayedRefs,
        transid: Generation,
        progress: &ApplyProgress,
        max_parts: usize,
    ) -> Result<(NewRefs, ApplyStats)> {
        let old_root = tree.root_ptr();
        if batch.is_empty() {
            tree.publish(old_root, || ());
            return Ok(Default::default());
        }
        let job = ApplyJob::new(self, tree, refs, transid, progress, batch.len())?;
        let made = if tree.id().is_fs_tree() && batch.len() >= STREAM_MIN {
            NodeStream::with(self.node_writer(), |stream| {
                let sink = || CowSink::new(job, Some(stream));
                let parts = (0..job.nr_parts(max_parts)).map(|_| sink()).collect();
                LeafReader::with(&self.store, |source| make_nodes(source, sink(), parts, &old_root, batch))
            })
        } else {
            make_nodes(tree.source(), CowSink::new(job, None), Vec::new(), &old_root, batch)
        };
        let (new_root, stats, made) = made.map_err(|error| error.in_tree(tree.id()))?;
        let UnpublishedNodes { refs: new_refs, emitted, freed, left, retired, nr_made, nr_left } = made;
        self.stats.applied(tree.id(), &stats);
        tree.publish(new_root, || {
            // Drop the nodes at freed addresses before the new nodes are added, because a new node may have a freed
            // address.
            freed.into_iter().for_each(|bytenr| self.store.drop_dirty(bytenr));
            emitted.into_values().for_each(|node| self.store.put_dirty(node));
        });
        // Remove the replaced nodes from memory. Readers that still descend the old tree read the replaced nodes from
        // the devices again.
        left.into_iter().for_each(|bytenr| self.store.forget(bytenr));
        self.commit_state.retire(retired);
        let nodesize = u64::from(self.geometry.nodesize);
        let mut state = tree.root.lock();
        if new_root != old_root || nr_made != nr_left {
            self.trees.note_changed(tree.id());
        }
        let is_subvolume = tree.id().is_subvolume();
        if let Some(item) = &mut state.item {
            if is_subvolume && new_root != old_root {
                item.ctransid = transid;
                item.ctime = Timespec::now();
            }
            let bytes_used = item.bytes_used.checked_add(nr_made.saturating_mul(nodesize)).ok_or_else(|| {
                let (value, expected) = (item.bytes_used, "expected the size of the tree");
                let cause = FormatError::Value { what: "RootItem", field: "bytes_used", value, expected };
                Error::from(cause).in_tree(tree.id())
            })?;
            item.bytes_used = bytes_used.saturating_sub(nr_left.saturating_mul(nodesize));
        }
        Ok((new_refs, stats))
    }
}

/// Counts the changes that all applies of one flush have made so far, and reports the count to `Engine::admission`,
/// which slows writers during a flush.
#[derive(Debug)]
pub(crate) struct ApplyProgress {
    nr_changed: AtomicUsize,
    nr_changes: usize,
}

impl ApplyProgress {
    /// Starts with `nr_changes` changes to apply.
    pub(crate) fn new(nr_changes: usize) -> Self {
        Self { nr_changed: AtomicUsize::new(0), nr_changes }
    }

    fn add(&self, engine: &Engine, nr_changed: usize) {
        let done = self.nr_changed.fetch_add(nr_changed, Ordering::Relaxed).saturating_add(nr_changed);
        engine.admission.flush_applied(done, self.nr_changes);
    }
}

/// The result of an apply, or of a part of it, before it is published.
#[derive(Default)]
struct UnpublishedNodes {
    refs: NewRefs,
    /// Nodes that are not written yet.
    emitted: HashMap<Logical, Arc<Node>>,
    /// Addresses of blocks of this transaction that no tree uses any more; nodes at these addresses that were never
    /// written are dropped from memory.
    freed: Vec<Logical>,
    /// Addresses of replaced nodes that no tree uses once this transaction is committed.
    left: Vec<Logical>,
    /// Blocks of this transaction that no tree uses any more, and whose addresses stay taken until the commit (I3).
    retired: Vec<Extent>,
    /// Number of blocks that the tree gained.
    nr_made: u64,
    /// Number of blocks that the tree lost.
    nr_left: u64,
}

/// Changes that an apply makes to the delayed refs. The delayed refs from before the apply stay unchanged until the
/// apply is over, because all parts read them.
#[derive(Default)]
pub(crate) struct NewRefs {
    added: DelayedRefs,
    /// Extents whose earlier delayed refs are removed before `added` is appended, because the extent tree never
    /// recorded these extents.
    forgotten: HashSet<Logical>,
}

impl NewRefs {
    fn net(&self, before: &DelayedRefs, bytenr: Logical) -> Option<(i64, ExtentFlags)> {
        let before = before.net(bytenr).filter(|_| !self.forgotten.contains(&bytenr));
        match (before, self.added.net(bytenr)) {
            (Some((delta, flags)), Some((more, others))) => Some((delta.saturating_add(more), flags | others)),
            (before, added) => before.or(added),
        }
    }

    fn forget(&mut self, before: &DelayedRefs, bytenr: Logical) {
        self.added.forget(bytenr);
        if before.get(bytenr).is_some() {
            self.forgotten.insert(bytenr);
        }
    }

    pub(crate) fn append_to(self, refs: &mut DelayedRefs) {
        for bytenr in self.forgotten {
            refs.forget(bytenr);
        }
        refs.append(self.added);
    }
}

impl UnpublishedNodes {
    /// Adds the result of another part.
    #[allow(clippy::arithmetic_side_effects, reason = "numbers of blocks of one apply")]
    fn join(&mut self, other: Self) {
        self.refs.added.append(other.refs.added);
        self.refs.forgotten.extend(other.refs.forgotten);
        self.emitted.extend(other.emitted);
        self.freed.extend(other.freed);
        self.left.extend(other.left);
        self.retired.extend(other.retired);
        self.nr_made += other.nr_made;
        self.nr_left += other.nr_left;
    }
}

fn make_nodes<'a>(
    source: &dyn NodeSource,
    mut sink: CowSink<'a>,
    mut parts: Vec<CowSink<'a>>,
    old_root: &RootPtr,
    batch: &dyn Changes,
) -> Result<(RootPtr, ApplyStats, UnpublishedNodes)> {
    let mut sinks: Vec<PartSink<'_>> = parts.iter_mut().map(|part| part as PartSink<'_>).collect();
    let (new_root, stats) = ubtrfs_tree::apply_in_parts(source, &mut sink, &mut sinks, old_root, batch)?;
    let mut made = sink.finish();
    parts.into_iter().for_each(|part| made.join(part.finish()));
    Ok((new_root, stats, made))
}

/// State that all parts of an apply share.
#[derive(Clone, Copy)]
struct ApplyJob<'a> {
    engine: &'a Engine,
    /// The delayed refs before the apply.
    refs: &'a DelayedRefs,
    transid: Generation,
    owner: RootId,
    root_bytenr: Logical,
    last_snapshot: Generation,
    kind: SpaceKind,
    quotas: QuotaMode,
    extent_root: Option<RootPtr>,
    progress: &'a ApplyProgress,
    batch_len: usize,
    /// Whether space may be allocated before it is needed.
    ample_room: bool,
}

impl<'a> ApplyJob<'a> {
    fn new(
        engine: &'a Engine,
        tree: &Tree,
        refs: &'a DelayedRefs,
        transid: Generation,
        progress: &'a ApplyProgress,
        batch_len: usize,
    ) -> Result<Self> {
        let owner = tree.id();
        // Only subvolumes share blocks. Trees that are not subvolumes need no lookup in the extent tree, which may be
        // changing.
        let extent_root =
            if owner.is_fs_tree() { Some(engine.own_tree(RootId::EXTENT_TREE)?.root_ptr()) } else { None };
        Ok(Self {
            engine,
            refs,
            transid,
            owner,
            root_bytenr: tree.root_ptr().bytenr,
            last_snapshot: tree.root.lock().last_snapshot,
            kind: if owner == RootId::CHUNK_TREE { SpaceKind::System } else { SpaceKind::Metadata },
            quotas: engine.quotas.mode(),
            extent_root,
            progress,
            batch_len,
            ample_room: batch_len >= STREAM_MIN && engine.has_ample_room_for_metadata(),
        })
    }

    fn child_refs(&self) -> ChildRefs {
        let (nodesize, quotas) = (self.engine.geometry.nodesize, self.quotas);
        ChildRefs { owner: self.owner, nodesize, transid: self.transid, quotas }
    }

    /// The number of parts into which the batch is cut, each with at least [`PART_MIN`] changes; 0 if the batch is not
    /// cut.
    fn nr_parts(&self, max: usize) -> usize {
        if self.ample_room && max > 1 { max.min(self.batch_len / PART_MIN) } else { 0 }
    }
}

/// Collects the nodes of one walk through a tree, or through a part of it.
struct CowSink<'a> {
    job: ApplyJob<'a>,
    made: UnpublishedNodes,
    allocated: HashSet<Logical>,
    /// Space for the next nodes. Nodes from this space are neighbours, regardless of the allocations of other parts.
    pool: Range<u64>,
    stream: Option<&'a NodeStream<'a>>,
    /// Nodes for the next piece of the stream.
    gathered: Vec<Arc<Node>>,
    piece_len: usize,
    /// Items changed since the last report of progress.
    nr_unreported: usize,
}

impl<'a> CowSink<'a> {
    fn new(job: ApplyJob<'a>, stream: Option<&'a NodeStream<'a>>) -> Self {
        Self {
            job,
            made: UnpublishedNodes::default(),
            allocated: HashSet::new(),
            pool: 0..0,
            stream,
            gathered: Vec::new(),
            piece_len: NodeStream::nodes_per_piece(job.engine.options.memory_bytes, job.engine.geometry.nodesize),
            nr_unreported: 0,
        }
    }

    fn extent_at(&self, bytenr: Logical) -> Extent {
        self.job.child_refs().extent_at(bytenr)
    }

    fn add_ref(&mut self, node: &Node, reference: RefKey, delta: i64, users: UserChange) {
        self.job.child_refs().add_node(&mut self.made.refs.added, node, reference, delta, users);
    }

    /// Adds `delta` to the block's reference to each of its children. The children keep their users, because a copy of
    /// the block also refers to the children.
    fn add_child_refs(&mut self, node: &Node, parent: Option<Logical>, delta: i64) {
        self.job.child_refs().add_children(&mut self.made.refs.added, node, parent, delta, UserChange::Same);
    }

    /// Whether no other tree can use a block of this tree.
    fn is_private(&self, node: &Node) -> bool {
        let is_reloc = node.view().flags() & HEADER_FLAG_RELOC != 0;
        node.bytenr() == self.job.root_bytenr || (node.generation() > self.job.last_snapshot && !is_reloc)
    }

    /// The number of references and the flags of a block that this tree stops using.
    fn sharing(&self, node: &Node) -> Result<(u64, ExtentFlags)> {
        let (Some(extent_root), false) = (&self.job.extent_root, self.is_private(node)) else {
            return Ok((1, ExtentFlags::empty()));
        };
        let nodesize = u64::from(self.job.engine.geometry.nodesize);
        let store = &*self.job.engine.store;
        let info = extent_tree::lookup_extent(store, extent_root, node.bytenr(), nodesize, true)?;
        let (mut refs, mut flags) = info.map_or((0, ExtentFlags::empty()), |info| (info.refs, info.flags));
        if let Some((delta, set_flags)) = self.made.refs.net(self.job.refs, node.bytenr()) {
            refs = refs.saturating_add_signed(delta);
            flags |= set_flags;
        }
        if refs == 0 {
            return Err(no_references(node.bytenr()).into());
        }
        Ok((refs, flags))
    }

    /// Drops a block of this transaction that no other tree uses and nothing on the devices refers to. Returns whether
    /// no delayed ref records the block's address any more.
    #[allow(clippy::arithmetic_side_effects, reason = "a number of blocks of one apply")]
    fn drop_fresh(&mut self, node: &Node) -> bool {
        let bytenr = node.bytenr();
        self.made.nr_left += 1;
        self.made.freed.push(bytenr);
        let added_now = self.made.refs.net(self.job.refs, bytenr).is_some_and(|(delta, _)| delta > 0);
        if added_now {
            // The node's extent item was never made, so no delayed ref is needed.
            self.made.refs.forget(self.job.refs, bytenr);
        } else {
            self.add_ref(node, RefKey::TreeBlock(self.job.owner), -1, UserChange::Change);
        }
        added_now
    }

    /// Releases unused space, and returns the result.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "the pool is not empty in that arm, so its end is above its start"
    )]
    fn finish(mut self) -> UnpublishedNodes {
        for &bytenr in &self.allocated {
            self.job.engine.space.release(self.extent_at(bytenr));
        }
        if !self.pool.is_empty() {
            self.job.engine.space.release(Extent::new(Logical(self.pool.start), self.pool.end - self.pool.start));
        }
        // The gathered nodes are too few for a piece of the stream, so they are written with the other trees' nodes.
        self.made.emitted.extend(self.gathered.into_iter().map(|node| (node.bytenr(), node)));
        self.made
    }

    /// Allocates space for [`POOL_NODES`] neighbouring nodes if the nodes are streamed, room is ample and a free piece
    /// is large enough; otherwise for fewer nodes.
    fn fill_pool(&mut self, near: Option<Logical>) -> Result<()> {
        let nodesize = u64::from(self.job.engine.geometry.nodesize);
        let want = if self.stream.is_some() && self.job.ample_room { POOL_NODES * nodesize } else { nodesize };
        let extent = match self.job.engine.space.allocate(self.job.kind, want, nodesize, near) {
            Some(extent) => extent,
            None => self
                .job
                .engine
                .allocate_or_make_chunk(self.job.kind, nodesize, nodesize, near)?
                .ok_or(Error::NoSpace)?,
        };
        self.pool = extent.bytenr.0..extent.end();
        Ok(())
    }
}

impl NodeSink for CowSink<'_> {
    fn is_fresh(&self, node: &Node) -> bool {
        // With a stream, no node counts as fresh (I3). Otherwise the stream would write other content to the address of
        // a node that readers still see.
        node.generation() == self.job.transid
            && self.is_private(node)
            && self.stream.is_none()
            && self.job.engine.store.is_dirty(node.bytenr())
    }

    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader {
        NodeHeader {
            fsid: self.job.engine.commit_state.superblock().node_fsid(),
            chunk_tree_uuid: self.job.engine.chunk_tree_uuid,
            bytenr,
            generation: self.job.transid,
            owner: self.job.owner,
            level,
            flags: 0,
        }
    }

    #[allow(
        clippy::arithmetic_side_effects,
        reason = "the pool is not empty, and consists of whole blocks of allocated space"
    )]
    fn allocate(&mut self, _level: u8, near: Option<Logical>) -> Result<Logical> {
        if self.stream.is_some_and(NodeStream::has_failed) {
            return Err(Error::ReadOnly { reason: "tree blocks could not be written".to_owned() });
        }
        if self.pool.is_empty() {
            self.fill_pool(near)?;
        }
        let bytenr = Logical(self.pool.start);
        debug_assert!(
            !self.job.engine.store.is_dirty(bytenr) || self.made.freed.contains(&bytenr),
            "I3: {bytenr} has a node that is not written, and that this apply did not free"
        );
        self.pool.start += u64::from(self.job.engine.geometry.nodesize);
        self.allocated.insert(bytenr);
        Ok(bytenr)
    }

    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()> {
        assert_eq!(node.generation(), self.job.transid, "I3: the node at {} was committed", node.bytenr());
        assert!(self.stream.is_none(), "I3: the node at {} may be written", node.bytenr());
        debug_assert!(self.is_private(node), "I1: other trees may use the node at {}", node.bytenr());
        self.made.emitted.remove(&node.bytenr());
        if self.drop_fresh(node) {
            self.job.engine.space.release(self.extent_at(node.bytenr()));
        }
        Ok(())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a number of blocks of one apply")]
    fn leave(&mut self, node: &Arc<Node>) -> Result<()> {
        let (refs, flags) = self.sharing(node)?;
        let full_backref = flags.contains(ExtentFlags::FULL_BACKREF);
        if refs > 1 {
            if node.owner() == self.job.owner && !full_backref {
                self.add_child_refs(node, Some(node.bytenr()), 1);
                let extent = self.extent_at(node.bytenr());
                self.made.refs.added.set_flags(extent, kind_of(node), ExtentFlags::FULL_BACKREF, self.job.transid);
            } else {
                self.add_child_refs(node, None, 1);
            }
        } else if full_backref {
            self.add_child_refs(node, None, 1);
            self.add_child_refs(node, Some(node.bytenr()), -1);
        }
        if refs == 1 {
            self.made.left.push(node.bytenr());
            if node.generation() == self.job.transid {
                if self.drop_fresh(node) {
                    self.made.retired.push(self.extent_at(node.bytenr()));
                }
                return Ok(());
            }
            self.job.engine.store.retire(node.bytenr());
        }
        self.made.nr_left += 1;
        let users = if self.is_private(node) { UserChange::Private } else { UserChange::Change };
        self.add_ref(node, RefKey::TreeBlock(self.job.owner), -1, users);
        Ok(())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a number of items of one apply")]
    fn item_changed(&mut self, key: &Key, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<()> {
        self.nr_unreported += 1;
        if self.stream.is_some() && self.nr_unreported == PROGRESS_STEP {
            self.nr_unreported = 0;
            self.job.progress.add(self.job.engine, PROGRESS_STEP);
        }
        if key.item_type != KeyType::EXTENT_DATA || !self.job.owner.is_fs_tree() {
            return Ok(());
        }
        let (child_refs, refs) = (self.job.child_refs(), &mut self.made.refs.added);
        if let Some(old) = old {
            child_refs.add_data(refs, key, old, (None, -1), UserChange::Change);
        }
        if let Some(new) = new {
            child_refs.add_data(refs, key, new, (None, 1), UserChange::Change);
        }
        Ok(())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a number of blocks of one apply")]
    fn emit(&mut self, node: Arc<Node>) {
        assert_eq!(node.generation(), self.job.transid, "I1: a node of an earlier transaction changes in place");
        if self.allocated.remove(&node.bytenr()) {
            self.made.nr_made += 1;
            self.add_ref(&node, RefKey::TreeBlock(self.job.owner), 1, UserChange::Change);
        }
        let Some(stream) = self.stream else {
            self.made.emitted.insert(node.bytenr(), node);
            return;
        };
        self.gathered.push(node);
        if self.gathered.len() >= self.piece_len {
            let piece = std::mem::take(&mut self.gathered);
            self.job.engine.store.streams(piece.len());
            stream.push(piece);
        }
    }
}

pub(crate) fn no_references(bytenr: Logical) -> Corrupt {
    Corrupt::new(FormatError::Value {
        what: "ExtentItem",
        field: "refs",
        value: 0,
        expected: "expected a reference for a block that a tree uses",
    })
    .in_tree(RootId::EXTENT_TREE)
    .at(bytenr)
}

/// A batch of a subvolume tree with at least this many changes writes its nodes while it is being applied. Smaller
/// batches touch no more leaves than memory can hold.
const STREAM_MIN: usize = 256;
/// Minimum number of changes in each part of a batch: each part is applied by a thread of its own.
pub(crate) const PART_MIN: usize = 2048;
/// Number of nodes for which space is allocated at once, if many nodes are made.
const POOL_NODES: u64 = 64;
/// Number of changes between two reports of progress.
const PROGRESS_STEP: usize = 1024;
