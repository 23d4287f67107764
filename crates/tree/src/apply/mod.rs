//! Applies sorted batches of changes to a tree.
//!
//! A batch is applied in one walk from left to right. A touched node is taken apart: its items (or child pointers) join
//! the *run* of their level, the changes are merged in, and the run is cut into new nodes. The pointers to new nodes
//! join the run of the next level. At a child that the batch does not reach, the runs of the lower levels end, and only
//! the child's pointer is passed on:
//!
//! ```text
//! level 1   [ a  b  c  d  e  f ]        the batch reaches b, c and f
//! level 0     a [b c]  d e [f]          a, d, e stay; b and c form one run, f another
//! ```
//!
//! Invariants:
//! - I1. A node is taken apart after its parent and before its children. Taking a node apart means that
//!   `NodeSink::leave` is called for the node, or that its address is kept for reuse.
//! - I2. A node is taken apart only if the batch changes an item below it, to merge it into an underfull neighbour,
//!   because it would be a root with a single child, or because it would become the root: other trees may share it, but
//!   the sink, like Linux, takes roots for unshared.
//! - I3. Pointers join a level's run in key order. The runs of lower levels end before the pointer to an untouched
//!   child is passed on.
//! - I4. When a node that was made in this transaction and not yet written is taken apart, a new node of the same run
//!   takes the old node's address, or that address is freed at the end of the run.
//! - I5. Only a root leaf may be empty.
//!
//! Modules: this module walks the tree, `parts` walks it in several threads, `leaf_run` packs items into leaves, and
//! `child_run` packs pointers into internal nodes.

mod changes;
mod child_run;
mod leaf_run;
mod parts;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, LEVEL_MAX, item_len_max};
use ubtrfs_format::{FormatError, Key, Logical, RootId};

pub use self::changes::{Batch, Changes, Value};
use self::child_run::{ChildRef, ChildRun};
use self::leaf_run::LeafRun;
pub use self::parts::PartSink;
use crate::node::{Node, NodePtr, RootPtr};
use crate::storage::{NodeSink, NodeSource, read};

/// Statistics of one or more calls of [`apply`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyStats {
    /// Batches applied.
    pub batches: u64,
    /// Leaves written.
    pub leaves_written: u64,
    /// Nodes written, including leaves.
    pub nodes_written: u64,
    /// Items inserted or replaced.
    pub items_put: u64,
    /// Existing items deleted.
    pub items_deleted: u64,
    /// Bytes used by items in the written leaves, including heads.
    pub leaf_bytes_used: u64,
}

impl std::ops::AddAssign for ApplyStats {
    fn add_assign(&mut self, other: Self) {
        self.batches = self.batches.saturating_add(other.batches);
        self.leaves_written = self.leaves_written.saturating_add(other.leaves_written);
        self.nodes_written = self.nodes_written.saturating_add(other.nodes_written);
        self.items_put = self.items_put.saturating_add(other.items_put);
        self.items_deleted = self.items_deleted.saturating_add(other.items_deleted);
        self.leaf_bytes_used = self.leaf_bytes_used.saturating_add(other.leaf_bytes_used);
    }
}

/// Applies a batch to a tree and returns the new root, or the old root if nothing changes.
///
/// # Errors
///
/// Errors of the source and the sink. `FormatError::Value` if the batch is out of order, if an item is larger than a
/// leaf, or if the tree would need a level above 7. The batch is checked before anything changes. After any other error
/// the calls to the sink are not undone, and the transaction must be aborted.
pub fn apply(
    source: &dyn NodeSource,
    sink: &mut dyn NodeSink,
    root: &RootPtr,
    batch: &dyn Changes,
) -> Result<(RootPtr, ApplyStats)> {
    apply_in_parts(source, sink, &mut [], root, batch)
}

/// Applies a batch like [`apply`], on at most as many threads as there are `parts`. Each part covers a key range of the
/// tree, and its sink gets the calls for the nodes and items of the range, in the order that [`NodeSink`] promises.
/// `sink` gets the calls for the root, before and after all parts. If the batch is not divided, `sink` gets all calls.
pub fn apply_in_parts(
    source: &dyn NodeSource,
    sink: &mut dyn NodeSink,
    parts: &mut [PartSink<'_>],
    root: &RootPtr,
    batch: &dyn Changes,
) -> Result<(RootPtr, ApplyStats)> {
    check_batch(batch, source.nodesize()).map_err(|cause| Error::from(cause).in_tree(root.tree))?;
    let mut applier = Applier::new(source, sink, batch, root.tree, root.bytenr);
    applier.stats.batches = 1;
    let root_node = read(source, &root.node_ptr())?;
    let Some(first) = applier.first_effect(&root_node, 0..batch.len())? else { return Ok((*root, applier.stats)) };
    let touched = TouchedNode { node: root_node, changes: first..batch.len() };
    if parts.len() > 1 && !touched.node.is_leaf() {
        applier.walk_parts(touched, parts)?;
    } else {
        applier.walk(touched, root.node_ptr())?;
    }
    let new_root = applier.finish(root)?;
    Ok((new_root, applier.stats))
}

fn check_batch(batch: &dyn Changes, nodesize: usize) -> Result<(), FormatError> {
    let max_len = item_len_max(nodesize);
    let mut last: Option<Key> = None;
    for index in 0..batch.len() {
        let key = batch.key(index);
        if last.is_some_and(|last| last >= key) {
            let (value, expected) = (index as u64, "expected strictly ascending keys");
            return Err(FormatError::Value { what: "batch", field: "index", value, expected });
        }
        last = Some(key);
        if let Some(value) = batch.value(index).filter(|value| value.len() > max_len) {
            let (value, expected) = (value.len() as u64, "expected an item that fits into a leaf");
            return Err(FormatError::Value { what: "batch", field: "item size", value, expected });
        }
    }
    Ok(())
}

/// A node and the changes below it. The first of these changes alters an item; it is not the deletion of an absent key.
struct TouchedNode {
    node: Arc<Node>,
    changes: Range<usize>,
}

struct Applier<'a> {
    source: &'a dyn NodeSource,
    sink: &'a mut dyn NodeSink,
    batch: &'a dyn Changes,
    tree: RootId,
    nodesize: usize,
    /// The run of level 0.
    leaves: LeafRun,
    /// The runs of levels 1, 2...
    internals: Vec<ChildRun>,
    /// By level: fresh nodes that were taken apart. New nodes of the level's run reuse the addresses of these nodes.
    reusable: [VecDeque<Arc<Node>>; NR_LEVELS],
    /// By level, as a hint for allocation: the address of the last new node, or at first the address of the first node
    /// taken apart.
    hints: [Option<Logical>; NR_LEVELS],
    /// The last new address of any level, initially the root's.
    last_address: Logical,
    /// The walk does not make nodes of this level or above.
    top: u8,
    stats: ApplyStats,
}

impl<'a> Applier<'a> {
    fn new(
        source: &'a dyn NodeSource,
        sink: &'a mut dyn NodeSink,
        batch: &'a dyn Changes,
        tree: RootId,
        last_address: Logical,
    ) -> Self {
        Self {
            source,
            sink,
            batch,
            tree,
            nodesize: source.nodesize(),
            leaves: LeafRun::default(),
            internals: Vec::new(),
            reusable: Default::default(),
            hints: Default::default(),
            last_address,
            top: u8::MAX,
            stats: ApplyStats::default(),
        }
    }
}

impl Applier<'_> {
    /// The first of these changes that has an effect below this node. A delete has an effect only if the item exists.
    fn first_effect(&self, node: &Arc<Node>, mut changes: Range<usize>) -> Result<Option<usize>> {
        if node.is_leaf() {
            let has_effect = |&at: &usize| self.batch.value(at).is_some() || node.search(&self.batch.key(at)).is_ok();
            return Ok(changes.find(has_effect));
        }
        while !changes.is_empty() {
            if self.batch.value(changes.start).is_some() {
                return Ok(Some(changes.start));
            }
            let slot = node.child_slot(&self.batch.key(changes.start));
            let end = changes_below(node, slot, self.batch, &changes);
            let child = read(self.source, &node.child_ptr(slot, self.tree))?;
            if let Some(first) = self.first_effect(&child, changes.start..end)? {
                return Ok(Some(first));
            }
            changes.start = end;
        }
        Ok(None)
    }

    fn walk(&mut self, touched: TouchedNode, ptr: NodePtr) -> Result<()> {
        if touched.node.is_leaf() { self.walk_leaf(touched, ptr) } else { self.walk_internal(touched) }
    }

    fn walk_internal(&mut self, touched: TouchedNode) -> Result<()> {
        let TouchedNode { node, changes } = touched;
        self.dissolve(&node)?;
        self.run_below(node.level()).add_old_children(node.nritems());
        let children = self.reached_children(&node, changes);
        self.walk_children(&node, 0..node.nritems(), &children, true)
    }

    /// Walks the children in these slots; `children` lists the children that changes reach. `first_has_effect` says
    /// that the first change is known to have an effect.
    fn walk_children(
        &mut self,
        node: &Arc<Node>,
        slots: Range<usize>,
        children: &[(usize, Range<usize>)],
        first_has_effect: bool,
    ) -> Result<()> {
        let mut slot = slots.start;
        for (at, (reached, below)) in children.iter().cloned().enumerate() {
            if node.level() == 1 {
                self.read_ahead(node, children, at);
            }
            let ptr = node.child_ptr(reached, self.tree);
            let child = read(self.source, &ptr)?;
            let known = first_has_effect && at == 0;
            let first = if known { Some(below.start) } else { self.first_effect(&child, below.clone())? };
            let Some(first) = first else { continue };
            self.pass_children(node, slot..reached)?;
            self.walk(TouchedNode { node: child, changes: first..below.end }, ptr)?;
            slot = reached.saturating_add(1);
        }
        self.pass_children(node, slot..slots.end)
    }

    /// The slots of the children that changes reach, each with its changes.
    fn reached_children(&self, node: &Node, mut changes: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut children = Vec::new();
        while !changes.is_empty() {
            let slot = node.child_slot(&self.batch.key(changes.start));
            let end = changes_below(node, slot, self.batch, &changes);
            children.push((slot, changes.start..end));
            changes.start = end;
        }
        children
    }

    /// Announces the next leaves to the source in groups, one group ahead, so that the source reads while the walk
    /// merges.
    fn read_ahead(&self, node: &Node, children: &[(usize, Range<usize>)], at: usize) {
        if !at.is_multiple_of(READ_AHEAD) {
            return;
        }
        let from = if at == 0 { 0 } else { at.saturating_add(READ_AHEAD).min(children.len()) };
        let coming = &children[from..at.saturating_add(2 * READ_AHEAD).min(children.len())];
        if coming.len() > 1 {
            let ptrs: Vec<NodePtr> = coming.iter().map(|(slot, _)| node.child_ptr(*slot, self.tree)).collect();
            self.source.will_read(&ptrs);
        }
    }

    fn walk_leaf(&mut self, touched: TouchedNode, ptr: NodePtr) -> Result<()> {
        let TouchedNode { node: leaf, changes } = touched;
        if let Some(last) = leaf.nritems().checked_sub(1)
            && self.batch.key(changes.start) > leaf.key(last)
        {
            let need = ITEM_HEAD_SIZE.saturating_add(self.batch.value(changes.start).map_or(0, <[u8]>::len));
            // The items of a damaged leaf may overlap, and then the leaf counts as full.
            let free = self.nodesize.saturating_sub(HEADER_SIZE).saturating_sub(leaf.used_bytes());
            // All changes come after the leaf's last item. If the first of them does not fit into the leaf, the leaf
            // stays unchanged and a new leaf follows it, unless an underfull leaf before it absorbs its items.
            if need > free && !self.pull_leaf(&leaf)? {
                self.end_leaves()?;
                let key = leaf.key(0);
                self.run_above(0).push(ChildRef { key, ..ChildRef::untouched(&ptr) });
            } else if need <= free {
                self.dissolve(&leaf)?;
                self.copy_items(&leaf, 0..leaf.nritems())?;
            }
            return self.merge(None, changes);
        }
        self.dissolve(&leaf)?;
        self.merge(Some(&leaf), changes)
    }

    /// Merges a leaf's items and these changes into the run.
    fn merge(&mut self, leaf: Option<&Arc<Node>>, changes: Range<usize>) -> Result<()> {
        let batch = self.batch;
        let mut slot = 0;
        for at in changes {
            let key = batch.key(at);
            let mut old = None;
            if let Some(leaf) = leaf {
                let found = gallop(leaf, slot, &key);
                let (Ok(at) | Err(at)) = found;
                self.copy_items(leaf, slot..at)?;
                slot = at;
                if found.is_ok() {
                    old = Some(leaf.item(at));
                    slot = slot.saturating_add(1);
                }
            }
            match batch.value(at) {
                Some(value) => {
                    self.sink.item_changed(&key, old, Some(value))?;
                    self.put_item(&key, value, old.is_none())?;
                    self.stats.items_put = self.stats.items_put.saturating_add(1);
                }
                None if old.is_some() => {
                    self.sink.item_changed(&key, old, None)?;
                    self.stats.items_deleted = self.stats.items_deleted.saturating_add(1);
                }
                None => {}
            }
        }
        match leaf {
            Some(leaf) => self.copy_items(leaf, slot..leaf.nritems()),
            None => Ok(()),
        }
    }

    /// Passes on the pointers of children that the batch does not reach. First ends the runs of the levels below
    /// `node`; an underfull run absorbs the first children that fit.
    fn pass_children(&mut self, node: &Arc<Node>, mut slots: Range<usize>) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        let child_level = node.level().saturating_sub(1);
        for level in 0..child_level {
            self.end_run(level)?;
        }
        while !slots.is_empty() && self.is_underfull(child_level) {
            let child = read(self.source, &node.child_ptr(slots.start, self.tree))?;
            if !self.pull(&child)? {
                break;
            }
            slots.start = slots.start.saturating_add(1);
        }
        if slots.is_empty() {
            return Ok(());
        }
        self.end_run(child_level)?;
        let tree = self.tree;
        let run = self.run_above(child_level);
        for slot in slots {
            run.push(ChildRef::untouched(&node.child_ptr(slot, tree)));
        }
        self.cut_children(node.level())
    }

    /// Adds a whole neighbour to the run of its level, if the run's last node has room for it.
    fn pull(&mut self, node: &Arc<Node>) -> Result<bool> {
        if node.is_leaf() { self.pull_leaf(node) } else { self.pull_children(node) }
    }

    /// Ends the run of a level by writing its last nodes. The run may be empty.
    fn end_run(&mut self, level: u8) -> Result<()> {
        if level == 0 { self.end_leaves() } else { self.end_children(level) }
    }

    fn is_underfull(&self, level: u8) -> bool {
        match level {
            0 => self.leaves.is_underfull(self.nodesize),
            _ => self
                .internals
                .get(usize::from(level).saturating_sub(1))
                .is_some_and(|run| run.is_underfull(self.nodesize)),
        }
    }

    /// The run of pointers to nodes of this level.
    fn run_above(&mut self, level: u8) -> &mut ChildRun {
        let index = usize::from(level);
        while self.internals.len() <= index {
            self.internals.push(ChildRun::default());
        }
        &mut self.internals[index]
    }

    /// The run of pointers to nodes one level below `level`. `level` is at least 1.
    fn run_below(&mut self, level: u8) -> &mut ChildRun {
        self.run_above(level.saturating_sub(1))
    }

    /// Reads the left neighbour of a run: the node of the last pointer in the run above, unless this walk made that
    /// node.
    fn left_neighbour(&mut self, level: u8) -> Result<Option<Arc<Node>>> {
        let tree = self.tree;
        match self.run_above(level).last_untouched() {
            Some(child) => Ok(Some(read(self.source, &child.node_ptr(tree, level))?)),
            None => Ok(None),
        }
    }

    /// Takes a node apart: tells the sink that the tree stops using the node or, for a fresh node, keeps its address
    /// for reuse.
    fn dissolve(&mut self, node: &Arc<Node>) -> Result<()> {
        let level = usize::from(node.level());
        self.hints[level].get_or_insert(node.bytenr());
        if self.sink.is_fresh(node) {
            self.reusable[level].push_back(Arc::clone(node));
            return Ok(());
        }
        self.sink.leave(node)
    }

    /// Returns an address for a new node: a reusable address of this run, or a new address from the sink if none is
    /// left.
    fn new_address(&mut self, level: u8) -> Result<Logical> {
        let index = usize::from(level);
        let Some(hint) = self.hints.get_mut(index) else {
            let expected = "expected a tree of at most 8 levels";
            let cause = FormatError::Value { what: "tree", field: "level", value: level.into(), expected };
            return Err(Error::from(cause).in_tree(self.tree));
        };
        let bytenr = match self.reusable[index].pop_front() {
            Some(node) => node.bytenr(),
            None => self.sink.allocate(level, Some(hint.unwrap_or(self.last_address)))?,
        };
        *hint = Some(bytenr);
        self.last_address = bytenr;
        Ok(bytenr)
    }

    /// Frees the reusable addresses that a run did not need (I4).
    fn free_reusable(&mut self, level: u8) -> Result<()> {
        while let Some(node) = self.reusable[usize::from(level)].pop_front() {
            self.sink.free_fresh(&node)?;
        }
        Ok(())
    }

    /// Passes a new node to the sink and returns its pointer.
    fn emit(&mut self, raw: Vec<u8>) -> Result<ChildRef> {
        let node = Arc::new(Node::new(raw.into_boxed_slice())?);
        self.stats.nodes_written = self.stats.nodes_written.saturating_add(1);
        let key = node.first_key().unwrap_or(Key::MIN);
        let child = ChildRef { key, bytenr: node.bytenr(), generation: node.generation(), built: true };
        self.sink.emit(node);
        Ok(child)
    }

    /// Ends all runs from the bottom up, until a single pointer is left, which is the root.
    fn finish(&mut self, old: &RootPtr) -> Result<RootPtr> {
        self.end_leaves()?;
        for level in 1..=LEVEL_MAX + 1 {
            let nothing_above = self.internals.iter().skip(usize::from(level)).all(ChildRun::is_empty);
            let run = self.run_below(level);
            if nothing_above && run.len() <= 1 {
                let only = run.take_only();
                for upper in level..=LEVEL_MAX {
                    self.free_reusable(upper)?;
                }
                let level = level.saturating_sub(1);
                return match only {
                    Some(ChildRef { bytenr, generation, built: true, .. }) => {
                        Ok(RootPtr { tree: self.tree, bytenr, generation, level })
                    }
                    Some(child) => {
                        self.take_apart(&child, level)?;
                        self.finish(old)
                    }
                    None => self.empty_root(old),
                };
            }
            self.end_children(level)?;
        }
        let expected = "expected a tree of at most 8 levels";
        let cause = FormatError::Value { what: "tree", field: "level", value: u64::from(LEVEL_MAX) + 1, expected };
        Err(Error::from(cause).in_tree(self.tree))
    }

    /// Takes a node apart whose pointer is the only one left. The node is not the root before the walk (I2).
    fn take_apart(&mut self, only: &ChildRef, level: u8) -> Result<()> {
        let node = read(self.source, &only.node_ptr(self.tree, level))?;
        self.dissolve(&node)?;
        if node.is_leaf() {
            return self.copy_items(&node, 0..node.nritems());
        }
        let tree = self.tree;
        let run = self.run_below(level);
        run.add_old_children(node.nritems());
        (0..node.nritems()).for_each(|slot| run.push(ChildRef::untouched(&node.child_ptr(slot, tree))));
        Ok(())
    }
}

/// The end of the changes that belong to this child: those before the next child's key.
#[allow(
    clippy::arithmetic_side_effects,
    reason = "slots of a node, and positions in a batch, both far below the limits of usize"
)]
fn changes_below(node: &Node, slot: usize, batch: &dyn Changes, changes: &Range<usize>) -> usize {
    if slot + 1 == node.nritems() {
        return changes.end;
    }
    let end = node.key(slot + 1);
    // Search with doubling steps, because usually only few changes of a long batch belong to one child.
    let mut step = 1;
    while step < changes.len() && batch.key(changes.start + step) < end {
        step *= 2;
    }
    let (mut low, mut high) = (changes.start + step / 2, changes.end.min(changes.start + step + 1));
    while low < high {
        let mid = low.midpoint(high);
        if batch.key(mid) < end {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    low
}

/// Searches a leaf like [`Node::search`], but only from the slot `from` on. The search is fast if the key is near that
/// slot.
#[allow(clippy::arithmetic_side_effects, reason = "slots of a node; steps double up to their number")]
fn gallop(leaf: &Node, from: usize, key: &Key) -> Result<usize, usize> {
    let (mut low, mut high, mut step) = (from, leaf.nritems(), 1);
    while low + step <= high {
        match leaf.key(low + step - 1).cmp(key) {
            std::cmp::Ordering::Less => {
                low += step;
                step *= 2;
            }
            std::cmp::Ordering::Equal => return Ok(low + step - 1),
            std::cmp::Ordering::Greater => {
                high = low + step - 1;
                break;
            }
        }
    }
    while low < high {
        let mid = low.midpoint(high);
        match leaf.key(mid).cmp(key) {
            std::cmp::Ordering::Equal => return Ok(mid),
            std::cmp::Ordering::Less => low = mid + 1,
            std::cmp::Ordering::Greater => high = mid,
        }
    }
    Err(low)
}

/// Number of leaves announced together.
const READ_AHEAD: usize = 16;
const NR_LEVELS: usize = LEVEL_MAX as usize + 1;
