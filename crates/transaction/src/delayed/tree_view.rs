//! [`Tree`]: a tree as readers see it, merged from active delayed items, frozen delayed items, and nodes.
//!
//! Locks: a lookup in nodes holds the view lock shared throughout. A publish replaces the nodes and the root of a tree
//! under the exclusive view lock, so no reader sees half of a new tree. Readers take and release the shard locks of the
//! active items before they take the view lock (I2 of [`crate::delayed::delayed_item`]).

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{RootFlags, RootItem};
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use ubtrfs_tree::{Cursor, Item, LeafPlace, Node, NodePtr, NodeSource, RootPtr, Value};

use crate::delayed::delayed_item::{DelayedItems, FrozenItems};
use crate::delayed::item_map::DelayedChange;
use crate::lock_rank::{self, Rank, RankedRwLock};
use crate::nodes::leaf_ahead::{AtVersion, SharedView};
use crate::nodes::leaf_hint::TreeVersion;
use crate::nodes::store::NodeStore;

/// One tree: a subvolume, or one of the filesystem's own trees.
#[derive(Debug)]
pub struct Tree {
    id: RootId,
    store: Arc<NodeStore>,
    pub(crate) active: DelayedItems,
    view: Arc<RankedRwLock<TreeView>>,
    /// Whether the tree is in the engine's list of trees with active items.
    pub(crate) listed: AtomicBool,
    /// The root item, for trees that have one, and the offset of its key. The root state changes only under the commit
    /// lock.
    pub(crate) root: Mutex<RootState>,
}

/// The root of the tree, and the items that are being merged into it.
#[derive(Debug)]
pub(crate) struct TreeView {
    root: RootPtr,
    frozen: Option<Arc<FrozenItems>>,
    /// See [`Tree::seal`].
    sealed: bool,
    /// The version of the nodes, which changes whenever nodes of the tree change (I1 of [`crate::nodes::leaf_hint`]).
    version: TreeVersion,
}

impl AtVersion for TreeView {
    fn version(&self) -> TreeVersion {
        self.version
    }
}

/// An item that a merge found: in a delayed change, or in a slot of a node.
enum MergedItem<'i> {
    Delayed(&'i Value),
    Node(&'i Arc<Node>, usize),
}

/// Merges the active and the frozen changes up to the key `last`. If both lists have a change of a key, only the active
/// change counts, because it is newer.
struct Newest<'c> {
    active: &'c [(Key, DelayedChange)],
    frozen: &'c [(Key, DelayedChange)],
    last: Key,
}

/// A walk through the items of the tree's nodes up to a last key.
struct LeafWalk {
    place: LeafPlace,
    slot: usize,
    /// The key in the slot; `None` past the last item.
    key: Option<Key>,
    /// The last key to visit in this leaf.
    last_here: Key,
    last: Key,
}

/// A walk backwards through the items of the tree's nodes. It begins in the leaf of a key, which often has a hint, and
/// searches from the root only when it leaves that leaf.
struct BackwardWalk<'s> {
    leaf: Arc<Node>,
    /// The slot of the item in `leaf`; `None` once the walk has left the leaf.
    slot: Option<usize>,
    cursor: Cursor<'s>,
    /// The key of the item; `None` before the first item.
    key: Option<Key>,
}

/// The result of a step backwards.
enum Backwards {
    Found(Key, ItemRef),
    /// The step found only deleted items, all of them above `end`: the search continues downwards from `end`.
    Deleted {
        end: Key,
    },
    Nothing,
}

/// The tree's root item.
#[derive(Clone, Debug)]
pub(crate) struct RootState {
    pub(crate) key_offset: u64,
    pub(crate) item: Option<RootItem>,
    /// Blocks of this generation or older may be shared with a snapshot.
    pub(crate) last_snapshot: Generation,
}

impl RootState {
    pub(crate) fn new(key_offset: u64, item: RootItem) -> Self {
        Self { key_offset, last_snapshot: item.last_snapshot, item: Some(item) }
    }

    /// State of the root tree and the chunk tree, whose roots are in the superblock.
    pub(crate) fn in_superblock() -> Self {
        Self { key_offset: 0, last_snapshot: Generation(0), item: None }
    }
}

/// An item's bytes: from a delayed item or from a node.
#[derive(Clone, Debug)]
pub enum ItemRef {
    /// A delayed item, which is only in memory.
    Delayed(Value),
    /// An item in a node.
    Node(Item),
}

impl Deref for ItemRef {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Delayed(value) => value,
            Self::Node(item) => item,
        }
    }
}

impl Tree {
    pub(crate) fn new(root: RootPtr, store: Arc<NodeStore>, state: RootState) -> Self {
        let version = store.hints.new_version();
        Self {
            id: root.tree,
            store,
            active: DelayedItems::new(),
            view: Arc::new(RankedRwLock::new(
                Rank::View,
                (root.tree.0, 0),
                TreeView { root, frozen: None, sealed: false, version },
            )),
            listed: AtomicBool::new(false),
            root: Mutex::new(state),
        }
    }

    /// The tree's id.
    pub fn id(&self) -> RootId {
        self.id
    }

    /// The current root of the tree.
    pub(crate) fn root_ptr(&self) -> RootPtr {
        self.view.read().root
    }

    /// Returns the value of `key`, or `None`.
    ///
    /// # Errors
    ///
    /// Fails if a node is corrupt or cannot be read, and with [`Error::ReadOnly`] if the subvolume was deleted.
    pub fn get(&self, key: &Key) -> Result<Option<ItemRef>> {
        if let Some(change) = self.active.get(key) {
            return Ok(change.map(ItemRef::Delayed));
        }
        let view = self.view.read();
        if let Some(change) = view.frozen.as_ref().and_then(|frozen| frozen.get(key)) {
            return Ok(change.map(ItemRef::Delayed));
        }
        let leaf = self.leaf_of(&view, key)?.leaf;
        Ok(leaf.search(key).ok().map(|slot| ItemRef::Node(Item::new(leaf, slot))))
    }

    /// The first item in `start..=end`.
    ///
    /// # Errors
    ///
    /// As for [`Tree::get`].
    pub fn first_ge(&self, start: &Key, end: &Key) -> Result<Option<(Key, ItemRef)>> {
        Ok(self.range(start, end, 1)?.into_iter().next())
    }

    /// Up to `limit` items in `start..=end`, in ascending order of their keys.
    ///
    /// The call is cheap if both keys have the same objectid.
    ///
    /// # Errors
    ///
    /// As for [`Tree::get`].
    pub fn range(&self, start: &Key, end: &Key, limit: usize) -> Result<Vec<(Key, ItemRef)>> {
        let mut found = Vec::new();
        self.merge(start, end, limit, |key, item| {
            let item = match item {
                MergedItem::Delayed(value) => ItemRef::Delayed(value.clone()),
                MergedItem::Node(leaf, slot) => ItemRef::Node(Item::new(Arc::clone(leaf), slot)),
            };
            found.push((key, item));
        })?;
        Ok(found)
    }

    /// Passes up to `limit` items in `start..=end` to `visit`, in ascending order of their keys. Returns the number of
    /// items passed. `visit` must not read any tree, because this tree's view is locked during the call.
    ///
    /// # Errors
    ///
    /// As for [`Tree::get`].
    #[allow(clippy::arithmetic_side_effects, reason = "a number of items that is at most `limit`")]
    pub fn visit(&self, start: &Key, end: &Key, limit: usize, mut visit: impl FnMut(&Key, &[u8])) -> Result<usize> {
        let mut count = 0;
        self.merge(start, end, limit, |key, item| {
            count += 1;
            match item {
                MergedItem::Delayed(value) => visit(&key, value),
                MergedItem::Node(leaf, slot) => visit(&key, leaf.item(slot)),
            }
        })?;
        Ok(count)
    }

    /// Calls `found` for up to `limit` items of `start..=end`, merged from active items, frozen items and nodes.
    fn merge(
        &self,
        start: &Key,
        end: &Key,
        mut limit: usize,
        mut found: impl FnMut(Key, MergedItem<'_>),
    ) -> Result<()> {
        let mut from = *start;
        let mut window = limit.saturating_add(WINDOW_MARGIN);
        while limit > 0 && from <= *end {
            match self.merge_window(&from, end, window, &mut limit, &mut found)? {
                Some(next) => from = next,
                None => break,
            }
            // Too many of the fetched changes were deletions: fetch more changes.
            window = window.saturating_mul(4).min(window.max(WINDOW_MAX));
        }
        Ok(())
    }

    /// Merges the first part of `start..=end`. The part ends at change number `window` of the active items or of the frozen
    /// items, whichever comes first. Returns the key to continue from; `None` if the part reaches `end`.
    #[allow(clippy::arithmetic_side_effects, reason = "`limit` is above 0 in the loop")]
    fn merge_window(
        &self,
        start: &Key,
        end: &Key,
        window: usize,
        limit: &mut usize,
        found: &mut impl FnMut(Key, MergedItem<'_>),
    ) -> Result<Option<Key>> {
        let active = self.active.range(start, end, window);
        let view = self.view.read();
        let frozen = view.frozen.as_ref().map_or_else(Vec::new, |frozen| frozen.range(start, end, window));
        // If a source filled its window, its changes past the last fetched change are unknown.
        let mut horizon = *end;
        for changes in [&active, &frozen] {
            if let (true, Some((last, _))) = (changes.len() >= window, changes.last()) {
                horizon = horizon.min(*last);
            }
        }
        let mut changes = Newest { active: &active, frozen: &frozen, last: horizon };
        let mut change = changes.next();
        let mut walk = LeafWalk::start(self, &view, start, horizon)?;
        while *limit > 0 {
            match (change, walk.key) {
                (None, None) => break,
                (Some((key, newest)), in_tree) if in_tree.is_none_or(|in_tree| *key <= in_tree) => {
                    if let Some(value) = newest {
                        found(*key, MergedItem::Delayed(value));
                        *limit -= 1;
                    }
                    if in_tree == Some(*key) {
                        walk.step(self, &view)?;
                    }
                    change = changes.next();
                }
                (_, Some(key)) => {
                    found(key, MergedItem::Node(&walk.place.leaf, walk.slot));
                    *limit -= 1;
                    walk.step(self, &view)?;
                }
                (Some(_), None) => unreachable!("a change comes before nothing"),
            }
        }
        Ok(horizon.successor().filter(|next| next <= end && horizon < *end))
    }

    /// The leaf that the key belongs to.
    fn leaf_of(&self, view: &TreeView, key: &Key) -> Result<LeafPlace> {
        self.check_not_sealed(view)?;
        let NodeStore { hints, ahead, .. } = &*self.store;
        if let Some(place) = hints.find(view.version, key) {
            return Ok(place);
        }
        let place = ubtrfs_tree::find_leaf(&*self.store, &view.root, key, &mut |parent, slot| {
            for slots in hints.step(parent, slot, ahead.reach_max()).into_iter().filter(|slots| !slots.is_empty()) {
                let others = slots.filter(|other| *other != slot);
                let ptrs: Vec<NodePtr> = others.map(|other| parent.child_ptr(other, self.id)).collect();
                let shared: SharedView = Arc::clone(&self.view) as _;
                ahead.announce(&self.store, &shared, view.version, &ptrs);
            }
        })?;
        hints.note(view.version, key, &place);
        Ok(place)
    }

    /// The last item in `start..=end`.
    ///
    /// # Errors
    ///
    /// As for [`Tree::get`].
    pub fn last_le(&self, end: &Key, start: &Key) -> Result<Option<(Key, ItemRef)>> {
        let mut end = *end;
        // Begin with one change, because the last item is usually not deleted.
        let mut window = 1;
        while *start <= end {
            match self.last_in_window(&end, start, window)? {
                Backwards::Found(key, item) => return Ok(Some((key, item))),
                Backwards::Nothing => return Ok(None),
                Backwards::Deleted { end: rest } => end = rest,
            }
            window = window.saturating_mul(8).min(WINDOW_MAX);
        }
        Ok(None)
    }

    /// Finds the last item of `start..=end` among the last `window` changes of each source.
    fn last_in_window(&self, end: &Key, start: &Key, window: usize) -> Result<Backwards> {
        // Read the active items before the view is locked (I2 of delayed_item).
        let active = self.active.backwards(end, start, window);
        let view = self.view.read();
        self.check_not_sealed(&view)?;
        let frozen = view.frozen.as_ref().map_or_else(Vec::new, |frozen| frozen.backwards(end, start, window));
        // Keys below the last change that a source returned are unknown, unless the source has no further changes.
        let mut horizon = *start;
        for changes in [&active, &frozen] {
            if let Some((key, change)) = changes.last()
                && (change.is_some() || changes.len() >= window)
            {
                horizon = horizon.max(*key);
            }
        }
        let mut walk = BackwardWalk::start(self, &view, end)?;
        let (mut active, mut frozen) = (active.into_iter().peekable(), frozen.into_iter().peekable());
        note_step();
        loop {
            let keys = [active.peek().map(|(key, _)| *key), frozen.peek().map(|(key, _)| *key), walk.key];
            let Some(last) = keys.into_iter().flatten().max().filter(|last| *last >= horizon) else { break };
            let newer = active.next_if(|(key, _)| *key == last);
            let older = frozen.next_if(|(key, _)| *key == last);
            let item = match newer.or(older) {
                Some((_, change)) => change.map(ItemRef::Delayed),
                None => walk.item().map(ItemRef::Node),
            };
            if let Some(item) = item {
                return Ok(Backwards::Found(last, item));
            }
            if walk.key == Some(last) {
                walk.step_back(&last)?;
            }
        }
        Ok(match horizon.predecessor().filter(|_| horizon > *start) {
            Some(end) => Backwards::Deleted { end },
            None => Backwards::Nothing,
        })
    }

    /// The highest objectid in use among the objectids that inodes and subvolumes can have.
    ///
    /// # Errors
    ///
    /// As for [`Tree::get`].
    pub fn highest_objectid(&self) -> Result<Option<u64>> {
        let end = Key::new(objectid::LAST_FREE, KeyType(u8::MAX), u64::MAX);
        let start = Key::new(objectid::FIRST_FREE, KeyType(0), 0);
        Ok(self.last_le(&end, &start)?.map(|(key, _)| key.objectid))
    }

    /// Moves the active items to the frozen items. The caller holds the commit lock and the gate exclusively.
    pub(crate) fn freeze(&self) {
        lock_rank::check_held(Rank::ClosedGate, "I2 of delayed_item: items are frozen while no operation runs");
        let mut view = self.view.write();
        assert!(view.frozen.is_none(), "I2 of delayed_item: frozen items of tree {} are not in the tree yet", self.id);
        view.frozen = Some(Arc::new(self.active.freeze()));
        self.listed.store(false, Ordering::Release);
    }

    /// Moves the active rows to the frozen items. The tree stays in the list of trees with delayed items, because the
    /// next commit has to write its root. Returns the number of bytes of memory that the names frozen with the rows
    /// occupy. The caller holds the commit lock and the gate exclusively.
    pub(crate) fn freeze_rows(&self) -> isize {
        lock_rank::check_held(Rank::ClosedGate, "I2 of delayed_item: items are frozen while no operation runs");
        let mut view = self.view.write();
        assert!(view.frozen.is_none(), "I2 of delayed_item: frozen items of tree {} are not in the tree yet", self.id);
        let (frozen, names_bytes) = self.active.freeze_rows();
        view.frozen = Some(Arc::new(frozen));
        names_bytes
    }

    /// Publishes the result of an apply to readers; `install` puts the new nodes in place.
    pub(crate) fn publish(&self, root: RootPtr, install: impl FnOnce()) {
        let mut view = self.view.write();
        install();
        view.root = root;
        view.frozen = None;
        view.version = self.store.hints.new_version();
    }

    /// Publishes the copies of moved nodes. Readers see the same items as before, in other blocks. Frozen items stay
    /// unchanged.
    pub(crate) fn publish_moved(&self, root: RootPtr) {
        let mut view = self.view.write();
        view.root = root;
        view.version = self.store.hints.new_version();
    }

    /// Seals the tree of a deleted subvolume before it is dropped. After the seal, reads of the tree's nodes fail,
    /// because their blocks are reused, and changes put into the tree are discarded.
    pub(crate) fn seal(&self) {
        let mut view = self.view.write();
        view.sealed = true;
        // The new version cancels announced readahead.
        view.version = self.store.hints.new_version();
    }

    /// Whether the nodes and the root item in memory hold the whole tree: nothing is delayed. Returns false if another
    /// thread uses the tree. Changes need the commit lock or a delayed item, so the answer stays true while the caller
    /// holds the commit lock and nobody else has the tree. The root item may still have to be written.
    pub fn is_settled(&self) -> bool {
        !self.listed.load(Ordering::Acquire)
            && self.active.is_unused()
            && self.view.try_read().is_some_and(|view| view.frozen.is_none() && !view.sealed)
            && self.root.try_lock().is_some()
    }

    /// Ends announced readahead of a tree that leaves memory: the nodes of the tree may change later without a new
    /// version here. Returns false if readahead is reading a node of the tree.
    pub(crate) fn end_readahead(&self) -> bool {
        let Some(mut view) = self.view.try_write() else { return false };
        view.version = self.store.hints.new_version();
        true
    }

    /// The generation of the tree's root node, which changes with every change of the tree that is applied.
    pub fn root_generation(&self) -> Generation {
        self.view.read().root.generation
    }

    /// Whether the root item says that the subvolume is read-only.
    pub fn is_marked_read_only(&self) -> bool {
        let flags = self.root.lock().item.as_ref().map_or(0, |item| item.flags);
        RootFlags::from_bits_retain(flags).contains(RootFlags::RDONLY)
    }

    /// Whether the tree was sealed.
    pub(crate) fn is_sealed(&self) -> bool {
        self.view.read().sealed
    }

    fn check_not_sealed(&self, view: &TreeView) -> Result<()> {
        if view.sealed {
            return Err(Error::ReadOnly { reason: format!("subvolume {} was deleted", self.id) });
        }
        Ok(())
    }

    /// Runs `read` on the current nodes of the tree, without delayed items. Nothing is published during the call.
    pub(crate) fn with_root<T>(&self, read: impl FnOnce(&dyn NodeSource, &RootPtr) -> T) -> T {
        let view = self.view.read();
        read(&*self.store, &view.root)
    }

    /// The frozen items; empty if no apply runs.
    pub(crate) fn frozen(&self) -> Arc<FrozenItems> {
        self.view.read().frozen.clone().unwrap_or_default()
    }

    /// A source of this tree's nodes.
    pub(crate) fn source(&self) -> &dyn NodeSource {
        &*self.store
    }

    /// A source of this tree's nodes that reads announced leaves ahead, into the node cache. After the next change of
    /// the tree's nodes, it ignores announcements.
    pub(crate) fn source_ahead(&self) -> SourceAhead<'_> {
        SourceAhead { tree: self, version: self.view.read().version }
    }
}

/// See [`Tree::source_ahead`].
pub(crate) struct SourceAhead<'t> {
    tree: &'t Tree,
    version: TreeVersion,
}

impl NodeSource for SourceAhead<'_> {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        self.tree.store.read_node(ptr)
    }

    fn will_read(&self, ptrs: &[NodePtr]) {
        let view: SharedView = Arc::clone(&self.tree.view) as _;
        self.tree.store.ahead.announce(&self.tree.store, &view, self.version, ptrs);
    }

    fn nodesize(&self) -> usize {
        self.tree.store.nodesize()
    }
}

/// Number of changes fetched beyond the wanted number, because some changes are deletions.
const WINDOW_MARGIN: usize = 24;
/// Maximum number of changes fetched at once, unless more items are wanted.
const WINDOW_MAX: usize = 512;

#[cfg(debug_assertions)]
thread_local! {
    static NR_STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Number of windows that this thread merged backwards since the last call, for tests. Each window costs a descent into
/// a tree.
#[cfg(debug_assertions)]
pub fn take_nr_steps() -> u64 {
    NR_STEPS.take()
}

/// Counts one window that was merged backwards.
fn note_step() {
    #[cfg(debug_assertions)]
    NR_STEPS.set(NR_STEPS.get().saturating_add(1));
}

impl<'c> Iterator for Newest<'c> {
    type Item = &'c (Key, DelayedChange);

    fn next(&mut self) -> Option<Self::Item> {
        let older = self.frozen.split_first().filter(|((key, _), _)| *key <= self.last);
        let newer = self.active.split_first().filter(|((key, _), _)| *key <= self.last);
        let (change, rest) = match (newer, older) {
            (Some((newer, rest)), Some((older, others))) if newer.0 >= older.0 => {
                self.frozen = others;
                if newer.0 > older.0 {
                    return Some(older);
                }
                (newer, rest)
            }
            (Some(newer), _) => newer,
            (None, older) => {
                let (change, rest) = older?;
                self.frozen = rest;
                return Some(change);
            }
        };
        self.active = rest;
        Some(change)
    }
}

impl LeafWalk {
    /// Begins at the first item that is not below `start`.
    fn start(tree: &Tree, view: &TreeView, start: &Key, last: Key) -> Result<Self> {
        let mut walk = Self::enter(tree.leaf_of(view, start)?, start, last);
        walk.find_item(tree, view)?;
        Ok(walk)
    }

    fn enter(place: LeafPlace, key: &Key, last: Key) -> Self {
        let slot = place.leaf.search(key).unwrap_or_else(|slot| slot);
        // Keys that a crafted leaf holds beyond its range are ignored.
        let last_here = place.high.and_then(|high| high.predecessor()).map_or(last, |highest| highest.min(last));
        Self { place, slot, key: None, last_here, last }
    }

    /// Moves to the next item.
    #[allow(clippy::arithmetic_side_effects, reason = "a slot of a leaf")]
    fn step(&mut self, tree: &Tree, view: &TreeView) -> Result<()> {
        self.slot += 1;
        self.find_item(tree, view)
    }

    /// Moves to the next leaf while the slot is past the last item of the current leaf. Each leaf begins above the
    /// previous leaf, even for crafted nodes: [`LeafPlace::high`] is above the key by which the leaf was found.
    fn find_item(&mut self, tree: &Tree, view: &TreeView) -> Result<()> {
        loop {
            let key = (self.slot < self.place.leaf.nritems()).then(|| self.place.leaf.key(self.slot));
            self.key = key.filter(|key| *key <= self.last_here);
            if self.key.is_some() {
                return Ok(());
            }
            let Some(next) = self.place.high.filter(|high| *high <= self.last) else { return Ok(()) };
            *self = Self::enter(tree.leaf_of(view, &next)?, &next, self.last);
        }
    }
}

impl<'s> BackwardWalk<'s> {
    /// Begins at the last item that is not above `end`.
    fn start(tree: &'s Tree, view: &TreeView, end: &Key) -> Result<Self> {
        let leaf = tree.leaf_of(view, end)?.leaf;
        let slot = leaf.search(end).map_or_else(|slot| slot.checked_sub(1), Some);
        let mut cursor = Cursor::new(&*tree.store, view.root);
        let key = match slot {
            Some(slot) => Some(leaf.key(slot)),
            None => cursor.seek_le(end)?,
        };
        Ok(Self { leaf, slot, cursor, key })
    }

    /// The current item.
    fn item(&self) -> Option<Item> {
        match self.slot {
            Some(slot) => Some(Item::new(Arc::clone(&self.leaf), slot)),
            None => self.cursor.item(),
        }
    }

    /// Moves to the item before `key`, the key of the current item. Skips keys that a crafted leaf holds beyond its
    /// range.
    fn step_back(&mut self, key: &Key) -> Result<()> {
        let before = match self.slot.take() {
            Some(slot) => {
                self.slot = slot.checked_sub(1);
                self.slot.map(|slot| self.leaf.key(slot))
            }
            None => self.cursor.prev()?.filter(|before| before < key),
        };
        self.key = match (before, key.predecessor()) {
            (Some(before), _) => Some(before),
            (None, Some(below)) => self.cursor.seek_le(&below)?.filter(|before| before < key),
            (None, None) => None,
        };
        Ok(())
    }
}
