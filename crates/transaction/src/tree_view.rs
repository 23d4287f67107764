//! [`Tree`]: a tree as the rest of the engine sees it, merged from active delayed items, frozen ones and its nodes.
//!
//! Locks: the view lock is held shared for the whole of a lookup in nodes, so that a publish (which replaces nodes and
//! root under the exclusive lock) never shows a reader half of a new tree. Shard locks of the active items are taken
//! and released before the view lock (I2 of [`crate::delayed_item`]).

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_format::item::RootItem;
use ubtrfs_format::{Generation, Key, KeyType, Result, RootId, objectid};
use ubtrfs_tree::{Cursor, Item, NodeSource, RootPtr, Value};

use crate::delayed_item::{DelayedItems, FrozenItems};
use crate::item_map::Change;
use crate::node_store::NodeStore;

/// One tree: a subvolume, or one of the filesystem's own trees.
#[derive(Debug)]
pub struct Tree {
    id: RootId,
    store: Arc<NodeStore>,
    pub(crate) active: DelayedItems,
    view: RwLock<View>,
    /// Whether the tree is in the engine's list of trees with active items.
    pub(crate) listed: AtomicBool,
    /// Its root item, for trees that have one; the key's offset beside it. Changed under the commit lock only.
    pub(crate) root: Mutex<RootState>,
}

/// Where the tree starts, and the items being merged into it.
#[derive(Debug)]
struct View {
    root: RootPtr,
    frozen: Option<Arc<FrozenItems>>,
}

/// The tree's root item and what of it was changed since it was last written to the root tree.
#[derive(Clone, Debug)]
pub(crate) struct RootState {
    pub(crate) key_offset: u64,
    pub(crate) item: Option<RootItem>,
    /// Blocks of this generation or older may be shared with a snapshot.
    pub(crate) last_snapshot: Generation,
    pub(crate) changed: bool,
}

/// An item's bytes: from a delayed item or from a node.
#[derive(Clone, Debug)]
pub enum ItemRef {
    /// Not in the tree yet.
    Delayed(Value),
    /// In a node.
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
        Self {
            id: root.tree,
            store,
            active: DelayedItems::new(),
            view: RwLock::new(View { root, frozen: None }),
            listed: AtomicBool::new(false),
            root: Mutex::new(state),
        }
    }

    /// The tree's id.
    pub fn id(&self) -> RootId {
        self.id
    }

    /// Where the tree starts now.
    pub(crate) fn root_ptr(&self) -> RootPtr {
        self.view.read().root
    }

    /// The value of `key`, or `None`.
    pub fn get(&self, key: &Key) -> Result<Option<ItemRef>> {
        if let Some(change) = self.active.get(key) {
            return Ok(change.map(ItemRef::Delayed));
        }
        let view = self.view.read();
        if let Some(change) = view.frozen.as_ref().and_then(|frozen| frozen.get(key)) {
            return Ok(change.map(ItemRef::Delayed));
        }
        Ok(ubtrfs_tree::get(&*self.store, &view.root, key)?.map(ItemRef::Node))
    }

    /// The first item in `start..=end`.
    pub fn first_ge(&self, start: &Key, end: &Key) -> Result<Option<(Key, ItemRef)>> {
        Ok(self.range(start, end, 1)?.into_iter().next())
    }

    /// Up to `limit` items in `start..=end`, in ascending order of their keys.
    ///
    /// Cheap where both keys have one objectid.
    pub fn range(&self, start: &Key, end: &Key, limit: usize) -> Result<Vec<(Key, ItemRef)>> {
        let mut found = Vec::new();
        let mut from = *start;
        while found.len() < limit {
            let step = self.range_step(&from, end, limit - found.len(), &mut found)?;
            match step {
                Some(next) => from = next,
                None => break,
            }
        }
        found.truncate(limit);
        Ok(found)
    }

    /// Merges one window of the three sources; returns where the next window starts.
    fn range_step(&self, start: &Key, end: &Key, limit: usize, found: &mut Vec<(Key, ItemRef)>) -> Result<Option<Key>> {
        if start > end {
            return Ok(None);
        }
        let window = limit.saturating_add(8);
        let active = self.active.range(start, end, window);
        let view = self.view.read();
        let frozen = view.frozen.as_ref().map_or_else(Vec::new, |frozen| frozen.range(start, end, window));
        // Past the last key of a source that filled its window, later keys of that source are unknown.
        let mut horizon = *end;
        for changes in [&active, &frozen] {
            if let (true, Some((last, _))) = (changes.len() >= window, changes.last()) {
                horizon = horizon.min(*last);
            }
        }
        let mut changes: BTreeMap<Key, Change> = frozen.into_iter().collect();
        changes.extend(active);
        let mut changes = changes.into_iter().peekable();
        let mut cursor = Cursor::new(&*self.store, view.root);
        let mut node_key = cursor.seek_ge(start)?;
        let mut taken = 0;
        loop {
            let change_key = changes.peek().map(|(key, _)| *key).filter(|key| *key <= horizon);
            let tree_key = node_key.filter(|key| *key <= horizon);
            let next = match (change_key, tree_key) {
                (None, None) => break,
                (Some(change), Some(tree)) => change.min(tree),
                (Some(key), None) | (None, Some(key)) => key,
            };
            if taken == limit {
                return Ok(Some(next));
            }
            let change = if change_key == Some(next) { changes.next().map(|(_, change)| change) } else { None };
            let item = match change {
                Some(change) => change.map(ItemRef::Delayed),
                None => cursor.item().map(ItemRef::Node),
            };
            if tree_key == Some(next) {
                node_key = cursor.next()?;
            }
            if let Some(item) = item {
                found.push((next, item));
                taken += 1;
            }
        }
        Ok(horizon.successor().filter(|next| next <= end && horizon < *end))
    }

    /// The last item in `start..=end`.
    pub fn last_le(&self, end: &Key, start: &Key) -> Result<Option<(Key, ItemRef)>> {
        let mut end = *end;
        loop {
            if *start > end {
                return Ok(None);
            }
            // Active before view: I2 of delayed_item.
            let active = self.active.last_le(&end, start);
            let view = self.view.read();
            let frozen = view.frozen.as_ref().and_then(|frozen| frozen.last_le(&end, start));
            let mut cursor = Cursor::new(&*self.store, view.root);
            let in_tree = cursor.seek_le(&end)?.filter(|key| key >= start);
            let keys = [active.as_ref().map(|(key, _)| *key), frozen.as_ref().map(|(key, _)| *key), in_tree];
            let Some(last) = keys.into_iter().flatten().max() else { return Ok(None) };
            let change = [active, frozen].into_iter().flatten().find(|(key, _)| *key == last);
            let item = match change {
                Some((_, change)) => change.map(ItemRef::Delayed),
                None => cursor.item().map(ItemRef::Node),
            };
            if let Some(item) = item {
                return Ok(Some((last, item)));
            }
            let Some(before) = last.predecessor() else { return Ok(None) };
            end = before;
        }
    }

    /// The highest objectid in use that an inode or subvolume can have, or 256 where there is none.
    pub fn highest_objectid(&self) -> Result<u64> {
        let end = Key::new(objectid::LAST_FREE, KeyType(u8::MAX), u64::MAX);
        let start = Key::new(objectid::FIRST_FREE, KeyType(0), 0);
        Ok(self.last_le(&end, &start)?.map_or(objectid::FIRST_FREE, |(key, _)| key.objectid))
    }

    /// Moves the active items to the frozen ones. The caller holds the commit lock and the gate exclusively.
    pub(crate) fn freeze(&self) {
        let mut view = self.view.write();
        debug_assert!(view.frozen.is_none(), "one apply at a time");
        view.frozen = Some(Arc::new(self.active.freeze()));
        self.listed.store(false, Ordering::Release);
    }

    /// Moves the active rows to the frozen ones, and leaves the tree in the engine's list, because the next commit has to
    /// write its root. Answers the memory of names that had to go with them. The caller holds the commit lock and the gate
    /// exclusively.
    pub(crate) fn freeze_rows(&self) -> isize {
        let mut view = self.view.write();
        debug_assert!(view.frozen.is_none(), "one apply at a time");
        let (frozen, names_bytes) = self.active.freeze_rows();
        view.frozen = Some(Arc::new(frozen));
        names_bytes
    }

    /// Shows the result of an apply to readers: `install` puts the new nodes in place.
    pub(crate) fn publish(&self, root: RootPtr, install: impl FnOnce()) {
        let mut view = self.view.write();
        install();
        view.root = root;
        view.frozen = None;
    }

    /// Runs `read` on the tree's nodes as they stand; delayed items are not seen. No publish happens meanwhile.
    pub(crate) fn with_root<T>(&self, read: impl FnOnce(&dyn NodeSource, &RootPtr) -> T) -> T {
        let view = self.view.read();
        read(&*self.store, &view.root)
    }

    /// The frozen items, none if there is no apply.
    pub(crate) fn frozen(&self) -> Arc<FrozenItems> {
        self.view.read().frozen.clone().unwrap_or_default()
    }

    /// A source of this tree's nodes.
    pub(crate) fn source(&self) -> &dyn NodeSource {
        &*self.store
    }
}
