//! [`TreesView`]: the extent tree and the subvolume trees of one moment, all of whose nodes are immutable.
//!
//! A view shows either the last commit or a moment inside a commit. A view that outlives its step of the commit keeps
//! the nodes that are only in memory ([`PinnedNodes`]), because a later step may give the address of an unwritten node
//! new content.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::RootItem;
use ubtrfs_format::node::HEADER_FLAG_RELOC;
use ubtrfs_format::{Generation, Key, KeyType, Logical, RootId};
use ubtrfs_tree::{Cursor, Node, NodePtr, NodeSource, RootPtr};

use crate::delayed::loaded_trees::missing_tree;
use crate::engine::Engine;
use crate::nodes::store::NodeStore;

/// A subvolume's tree in a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SubvolumeRoot {
    /// The root of the tree.
    pub(crate) ptr: RootPtr,
    /// Blocks of this generation or older may be shared with a snapshot.
    pub(crate) last_snapshot: Generation,
    /// If the tree is deleted and partly dropped: the key of the first pointer that still exists, and the level of the
    /// node that holds the pointer.
    pub(crate) dropped_before: Option<(Key, u8)>,
}

/// The trees of one moment.
pub(crate) struct TreesView<'v> {
    source: &'v dyn NodeSource,
    extent_root: RootPtr,
    roots: RootSource<'v>,
    known: RefCell<HashMap<RootId, Option<SubvolumeRoot>>>,
}

/// The way in which a view finds the roots of subvolumes.
enum RootSource<'v> {
    /// Roots are read from their root items in this root tree.
    Items(RootPtr),
    /// Trees in memory are searched before the root tree, because they may be newer.
    Running(&'v Engine),
    /// Only the map of known roots is searched.
    #[cfg(test)]
    Fixed,
}

impl SubvolumeRoot {
    fn new(ptr: RootPtr, last_snapshot: Generation, item: Option<&RootItem>) -> Self {
        let dropped = item.filter(|item| item.refs == 0 && item.drop_progress != Key::MIN);
        Self { ptr, last_snapshot, dropped_before: dropped.map(|item| (item.drop_progress, item.drop_level)) }
    }

    /// Whether no other tree can reach this block of the subvolume. A block that Linux's relocation moved is new, but
    /// has the same users as the block that it replaced.
    pub(crate) fn is_private(&self, node: &Node) -> bool {
        node.owner() == self.ptr.tree
            && node.generation() > self.last_snapshot
            && node.view().flags() & HEADER_FLAG_RELOC == 0
    }

    /// The slot of the child that a key belongs to, unless that child was dropped already.
    fn child_slot(&self, node: &Node, key: &Key) -> Option<usize> {
        let slot = node.child_slot(key);
        match self.dropped_before {
            Some((dropped, level)) if node.level() >= level && slot < node.child_slot(&dropped) => None,
            _ => Some(slot),
        }
    }
}

impl<'v> TreesView<'v> {
    /// The trees of the last commit.
    pub(crate) fn committed(engine: &'v Engine) -> Result<Self> {
        let root_tree = committed_root_tree(engine);
        let source: &NodeStore = &engine.store;
        let (ptr, _) =
            find_root(source, &root_tree, RootId::EXTENT_TREE)?.ok_or_else(|| missing_tree(RootId::EXTENT_TREE))?;
        Ok(Self { source, extent_root: ptr, roots: RootSource::Items(root_tree), known: RefCell::default() })
    }

    /// The current trees. The caller holds the commit lock, and changes no tree while it uses the view.
    pub(crate) fn running(engine: &'v Engine) -> Result<Self> {
        let extent_root = engine.own_tree(RootId::EXTENT_TREE)?.root_ptr();
        Ok(Self { source: &*engine.store, extent_root, roots: RootSource::Running(engine), known: RefCell::default() })
    }

    /// A view of the extent tree and the subvolumes `roots`, whose nodes come from `source`.
    #[cfg(test)]
    pub(crate) fn fixed(
        source: &'v dyn NodeSource,
        extent_root: RootPtr,
        roots: impl IntoIterator<Item = SubvolumeRoot>,
    ) -> Self {
        let known = roots.into_iter().map(|root| (root.ptr.tree, Some(root))).collect();
        Self { source, extent_root, roots: RootSource::Fixed, known: RefCell::new(known) }
    }

    /// Makes the view read its nodes from `source`.
    #[cfg(test)]
    pub(crate) fn with_source(self, source: &'v dyn NodeSource) -> Self {
        Self { source, ..self }
    }

    /// The source of the view's nodes.
    pub(crate) fn source(&self) -> &'v dyn NodeSource {
        self.source
    }

    /// The root of the extent tree.
    pub(crate) fn extent_root(&self) -> &RootPtr {
        &self.extent_root
    }

    /// Bytes of a tree block.
    pub(crate) fn nodesize(&self) -> u64 {
        self.source.nodesize() as u64
    }

    /// The root of a subvolume; `None` if the subvolume does not exist.
    pub(crate) fn subvolume(&self, id: RootId) -> Result<Option<SubvolumeRoot>> {
        if !id.is_subvolume() {
            return Ok(None);
        }
        if let Some(known) = self.known.borrow().get(&id) {
            return Ok(*known);
        }
        let found = match &self.roots {
            RootSource::Items(root_tree) => find_root(self.source, root_tree, id)?
                .map(|(ptr, item)| SubvolumeRoot::new(ptr, item.last_snapshot, Some(&item))),
            RootSource::Running(engine) => match engine.trees.get(id) {
                Some(tree) => {
                    let state = tree.root.lock();
                    Some(SubvolumeRoot::new(tree.root_ptr(), state.last_snapshot, state.item.as_ref()))
                }
                None => engine.root_item(id)?.map(|item| {
                    let ptr = RootPtr { tree: id, bytenr: item.bytenr, generation: item.generation, level: item.level };
                    SubvolumeRoot::new(ptr, item.last_snapshot, Some(&item))
                }),
            },
            #[cfg(test)]
            RootSource::Fixed => None,
        };
        self.known.borrow_mut().insert(id, found);
        Ok(found)
    }

    /// Reads the tree block at this address. Level and generation come from the extent tree.
    pub(crate) fn block(&self, bytenr: Logical, generation: Generation, level: u8, tree: RootId) -> Result<Arc<Node>> {
        read(self.source, &NodePtr { tree, bytenr, generation, level, first_key: None })
    }

    /// The node that points to the block at `child`, in the tree of a subvolume. `first_key` and `level` belong to the
    /// block. `None` if no node of the subvolume points to the block.
    pub(crate) fn parent_in(
        &self,
        subvolume: &SubvolumeRoot,
        child: Logical,
        first_key: &Key,
        level: u8,
    ) -> Result<Option<Arc<Node>>> {
        if subvolume.ptr.level <= level {
            return Ok(None);
        }
        let mut node = read(self.source, &subvolume.ptr.node_ptr())?;
        // The loop ends: levels descend by one with each step, because every child is checked to be one level below its
        // parent.
        loop {
            let Some(slot) = subvolume.child_slot(&node, first_key) else { return Ok(None) };
            if node.level() == level.saturating_add(1) {
                return Ok((node.child(slot).0 == child).then_some(node));
            }
            node = read(self.source, &node.child_ptr(slot, subvolume.ptr.tree))?;
        }
    }

    /// A cursor at the subvolume's first item whose key is at least `key` and that is not dropped yet.
    pub(crate) fn cursor_at(&self, subvolume: &SubvolumeRoot, key: &Key) -> Result<Cursor<'v>> {
        let mut cursor = Cursor::new(self.source, subvolume.ptr);
        let start = subvolume.dropped_before.map_or(*key, |(dropped, _)| dropped.max(*key));
        cursor.seek_ge(&start)?;
        Ok(cursor)
    }
}

/// The trees of a moment inside a commit, kept while the commit continues.
#[derive(Debug)]
pub(crate) struct FixedTrees {
    nodes: PinnedNodes,
    extent_root: RootPtr,
    /// The root tree of the last commit, for subvolumes that are not in memory, and therefore did not change.
    root_tree: RootPtr,
    known: HashMap<RootId, Option<SubvolumeRoot>>,
}

impl FixedTrees {
    /// Keeps the current trees. The caller holds the commit lock.
    pub(crate) fn of(engine: &Engine) -> Result<Self> {
        let nodes = PinnedNodes::new(&engine.store);
        let extent_root = engine.own_tree(RootId::EXTENT_TREE)?.root_ptr();
        let subvolumes = engine.trees.all().into_iter().filter(|tree| tree.id().is_subvolume());
        let known = subvolumes.map(|tree| {
            let state = tree.root.lock();
            let root = SubvolumeRoot::new(tree.root_ptr(), state.last_snapshot, state.item.as_ref());
            (tree.id(), Some(root))
        });
        Ok(Self { nodes, extent_root, root_tree: committed_root_tree(engine), known: known.collect() })
    }

    /// Returns a view of the kept trees.
    pub(crate) fn view(&self) -> TreesView<'_> {
        TreesView {
            source: &self.nodes,
            extent_root: self.extent_root,
            roots: RootSource::Items(self.root_tree),
            known: RefCell::new(self.known.clone()),
        }
    }
}

fn committed_root_tree(engine: &Engine) -> RootPtr {
    let superblock = engine.commit_state.superblock();
    RootPtr {
        tree: RootId::ROOT_TREE,
        bytenr: superblock.root,
        generation: superblock.generation,
        level: superblock.root_level,
    }
}

/// A node source: the unwritten nodes of one moment, and the store for all other nodes.
#[derive(Debug)]
pub(crate) struct PinnedNodes {
    store: Arc<NodeStore>,
    nodes: HashMap<Logical, Arc<Node>>,
}

impl PinnedNodes {
    /// Keeps all nodes that are not written yet. The caller holds the commit lock.
    pub(crate) fn new(store: &Arc<NodeStore>) -> Self {
        let nodes = store.dirty_nodes().into_iter().map(|node| (node.bytenr(), node)).collect();
        Self { store: Arc::clone(store), nodes }
    }
}

impl NodeSource for PinnedNodes {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        match self.nodes.get(&ptr.bytenr) {
            Some(node) if node.generation() == ptr.generation => node.verify(ptr).map(|()| Arc::clone(node)),
            _ => self.store.read_node(ptr),
        }
    }

    fn nodesize(&self) -> usize {
        self.store.nodesize()
    }
}

fn read(source: &dyn NodeSource, ptr: &NodePtr) -> Result<Arc<Node>> {
    let node = source.read_node(ptr)?;
    node.verify(ptr)?;
    Ok(node)
}

/// Finds the root of a tree by its item in a root tree.
fn find_root(source: &dyn NodeSource, root_tree: &RootPtr, id: RootId) -> Result<Option<(RootPtr, RootItem)>> {
    let mut cursor = Cursor::new(source, *root_tree);
    let found = cursor.seek_le(&Key::new(id.0, KeyType::ROOT_ITEM, u64::MAX))?;
    if found.is_none_or(|key| key.objectid != id.0 || key.item_type != KeyType::ROOT_ITEM) {
        return Ok(None);
    }
    let item = RootItem::decode_any(cursor.data().unwrap_or_default())
        .map_err(|cause| Error::from(cause).in_tree(RootId::ROOT_TREE))?;
    Ok(Some((RootPtr { tree: id, bytenr: item.bytenr, generation: item.generation, level: item.level }, item)))
}
