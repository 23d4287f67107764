//! [`RootsOf`]: the set of subvolumes that reach an extent.
//!
//! ```text
//! data extent --(root, inode, offset)--> leaves of that tree with such items --+
//!             --(leaf's address)---------> that leaf -------------------------+--> tree block
//! tree block  --(root)--> the root itself, or the node of that tree that points to the block --> tree block ...
//!             --(parent's address)--> the parent --> tree block ...
//! ```
//!
//! A snapshot copies one node and implicitly shares everything below it. Every subvolume that reaches a block's parent
//! also reaches the block, so a single reference may stand for many subvolumes. The set of each block is cached, so the
//! extents of a leaf, and the leaves below a node, share the cost of one climb. Blocks with the same users as their
//! parent share the parent's set.
//!
//! Invariants:
//! - I1. Each step of a climb goes up one level, even if crafted references claim otherwise, and each block is climbed
//!   from only once. So even with crafted references, a climb ends, and its time stays proportional to the size of the
//!   extent tree.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::node::LEVEL_MAX;
use ubtrfs_format::{Corrupt, FormatError, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::{Extent, RefKey};
use ubtrfs_tree::{Cursor, Node};

use super::refs::{ExtentRefs, extent_refs};
use super::view::{SubvolumeRoot, TreesView};
use crate::handle::trans_handle::regular_extent;

/// Ids of subvolumes, ascending.
pub(crate) type RootSet = Arc<[RootId]>;

/// Finds the subvolumes that reach extents, in one view of the trees.
pub(crate) struct RootsOf<'v> {
    view: TreesView<'v>,
    cache: RootsCache,
    none: RootSet,
}

/// The sets of subvolumes found so far, by tree block, in one version of the trees.
#[derive(Debug)]
pub(crate) struct RootsCache {
    blocks: HashMap<Logical, RootSet>,
    /// Number of ids in sets that no other block shares.
    nr_ids: usize,
    blocks_max: usize,
    ids_max: usize,
}

impl Default for RootsCache {
    fn default() -> Self {
        Self { blocks: HashMap::new(), nr_ids: 0, blocks_max: BLOCKS_MAX, ids_max: IDS_MAX }
    }
}

impl RootsCache {
    /// A cache that takes about `max_bytes`.
    pub(crate) fn with_max_bytes(max_bytes: u64) -> Self {
        let half = usize::try_from(max_bytes / 2).unwrap_or(usize::MAX);
        let (blocks_max, ids_max) = (half / BLOCK_BYTES, half / ID_BYTES);
        Self { blocks_max: blocks_max.min(BLOCKS_MAX), ids_max: ids_max.min(IDS_MAX), ..Self::default() }
    }
}

/// File extent items of one leaf that refer to an extent.
#[derive(Clone, Debug)]
pub(crate) struct LeafUse {
    /// The leaf.
    pub(crate) leaf: Arc<Node>,
    /// The slots of the items.
    pub(crate) slots: Vec<usize>,
}

impl<'v> RootsOf<'v> {
    /// Makes a search whose cache of sets is empty.
    pub(crate) fn new(view: TreesView<'v>) -> Self {
        Self::with_cache(view, RootsCache::default())
    }

    /// Makes a search that begins with the sets of an earlier search in the same version of the trees.
    pub(crate) fn with_cache(view: TreesView<'v>, cache: RootsCache) -> Self {
        Self { view, cache, none: Arc::new([]) }
    }

    /// Returns the sets found so far.
    pub(crate) fn into_cache(self) -> RootsCache {
        self.cache
    }

    /// The view that is searched.
    pub(crate) fn view(&self) -> &TreesView<'v> {
        &self.view
    }

    /// The subvolumes that reach an extent; none if the extent does not exist.
    pub(crate) fn of_extent(&mut self, extent: Extent, is_tree: bool) -> Result<RootSet> {
        if is_tree {
            return self.of_block(extent.bytenr);
        }
        let refs = extent_refs(self.view.source(), self.view.extent_root(), extent.bytenr, extent.len_bytes, false)?;
        match refs {
            Some(refs) => self.of_refs(&refs),
            None => Ok(Arc::clone(&self.none)),
        }
    }

    /// The subvolumes that reach a data extent; none if the extent does not exist. The caller knows that all of them
    /// are in `limit`, so the search ends early if it has found all of `limit`.
    pub(crate) fn of_data_among(&mut self, extent: Extent, limit: &[RootId]) -> Result<RootSet> {
        let refs = extent_refs(self.view.source(), self.view.extent_root(), extent.bytenr, extent.len_bytes, false)?;
        match refs {
            Some(refs) => self.of_data_refs(&refs, limit.len()),
            None => Ok(Arc::clone(&self.none)),
        }
    }

    /// The subvolumes that reach the extent with these references.
    pub(crate) fn of_refs(&mut self, extent: &ExtentRefs) -> Result<RootSet> {
        match extent.level {
            Some(level) => self.of_block_refs(extent, level),
            None => self.of_data_refs(extent, usize::MAX),
        }
    }

    /// Whether several subvolumes reach the data extent with these references.
    pub(crate) fn have_several(&mut self, extent: &ExtentRefs) -> Result<bool> {
        Ok(self.of_data_refs(extent, 2)?.len() > 1)
    }

    /// The subvolumes that reach a tree block; none if the block does not exist.
    pub(crate) fn of_block(&mut self, bytenr: Logical) -> Result<RootSet> {
        if let Some(known) = self.cache.blocks.get(&bytenr) {
            return Ok(Arc::clone(known));
        }
        let (source, root) = (self.view.source(), *self.view.extent_root());
        match extent_refs(source, &root, bytenr, self.view.nodesize(), true)? {
            Some(ExtentRefs { level: Some(level), ref refs, .. }) if level > LEVEL_MAX || refs.is_empty() => {
                Err(wrong(bytenr, "level", level.into(), "expected at most 7, and a reference").into())
            }
            Some(refs) => self.of_refs(&refs),
            None => Ok(Arc::clone(&self.none)),
        }
    }

    /// The subvolumes that reach a leaf in which items of `subvolume` were found.
    pub(crate) fn of_leaf_in(&mut self, subvolume: &SubvolumeRoot, leaf: &Node) -> Result<RootSet> {
        if let Some(known) = self.cache.blocks.get(&leaf.bytenr()) {
            return Ok(Arc::clone(known));
        }
        if subvolume.is_private(leaf) {
            let all = BTreeSet::from([subvolume.ptr.tree]);
            return Ok(self.remember(leaf.bytenr(), FoundRoots { all, last: None, enough: 1 }));
        }
        self.of_block(leaf.bytenr())
    }

    fn of_block_refs(&mut self, extent: &ExtentRefs, level: u8) -> Result<RootSet> {
        let bytenr = extent.bytenr;
        if let Some(known) = self.cache.blocks.get(&bytenr) {
            return Ok(Arc::clone(known));
        }
        let mut found = FoundRoots { all: BTreeSet::new(), last: None, enough: usize::MAX };
        let mut node = None;
        for (reference, _) in &extent.refs {
            match *reference {
                RefKey::TreeBlock(id) => {
                    let Some(subvolume) = self.view.subvolume(id)? else { continue };
                    if subvolume.ptr.bytenr == bytenr {
                        found.all.insert(id);
                        continue;
                    }
                    let node = match &node {
                        Some(node) => Arc::clone(node),
                        None => {
                            let read = self.view.block(bytenr, extent.generation, level, id)?;
                            Arc::clone(node.insert(read))
                        }
                    };
                    if extent.refs.len() == 1 && subvolume.is_private(&node) {
                        found.all.insert(id);
                        continue;
                    }
                    let Some(first_key) = node.first_key() else { continue };
                    if let Some(parent) = self.view.parent_in(&subvolume, bytenr, &first_key, level)? {
                        found.add(self.of_parent(parent.bytenr(), level)?);
                    }
                }
                // In Linux's relocation trees, the backref of the root block names the address of the block itself. A
                // relocation tree belongs to no subvolume.
                RefKey::SharedBlock(parent) if parent == bytenr => {}
                RefKey::SharedBlock(parent) => found.add(self.of_parent(parent, level)?),
                RefKey::Data { .. } | RefKey::SharedData(_) => {
                    let expected = "expected references to a tree block";
                    return Err(wrong(bytenr, "reference type", reference.key_type().0.into(), expected).into());
                }
            }
        }
        Ok(self.remember(bytenr, found))
    }

    /// The subvolumes that reach a block's parent, which lies one level above the block (I1).
    fn of_parent(&mut self, parent: Logical, child_level: u8) -> Result<RootSet> {
        if let Some(known) = self.cache.blocks.get(&parent) {
            return Ok(Arc::clone(known));
        }
        let level = child_level.saturating_add(1);
        let (source, root) = (self.view.source(), *self.view.extent_root());
        let refs = extent_refs(source, &root, parent, self.view.nodesize(), true)?;
        match refs.filter(|refs| refs.level == Some(level) && level <= LEVEL_MAX) {
            Some(refs) => self.of_block_refs(&refs, level),
            None => Err(wrong(parent, "level", level.into(), "expected a parent one level above its child").into()),
        }
    }

    /// The subvolumes that reach a data extent. The search ends when it has found at least `enough` subvolumes.
    fn of_data_refs(&mut self, extent: &ExtentRefs, enough: usize) -> Result<RootSet> {
        let shared: HashSet<Logical> = shared_leaves(extent);
        let mut found = FoundRoots { all: BTreeSet::new(), last: None, enough };
        let mut leaves = extent.refs.iter().filter_map(|(reference, _)| match *reference {
            RefKey::SharedData(leaf) => Some(leaf),
            _ => None,
        });
        // First search only a few leaves: a single one of all leaves that are referenced by address, and the first leaf
        // of each reference by (subvolume, inode, offset). These leaves often lead to enough subvolumes, and then the
        // remaining leaves need not be searched.
        if let Some(leaf) = leaves.next() {
            found.add(self.of_shared_leaf(leaf)?);
        }
        let mut scans = Vec::new();
        for (reference, count) in &extent.refs {
            let (root, ino, offset) = match *reference {
                RefKey::Data { root, ino, offset } => (root, ino, offset),
                RefKey::SharedData(_) => continue,
                RefKey::TreeBlock(_) | RefKey::SharedBlock(_) => {
                    let expected = "expected references to data";
                    return Err(wrong(extent.bytenr, "reference type", reference.key_type().0.into(), expected).into());
                }
            };
            let Some(subvolume) = self.view.subvolume(root)? else { continue };
            if subvolume.last_snapshot.0 == 0 {
                // The subvolume is neither a snapshot nor the source of a snapshot, so no block of the subvolume has
                // other users.
                found.all.insert(root);
                continue;
            }
            let mut scan = LeafUses::new(&self.view, &subvolume, extent, (ino, offset), *count, &shared)?;
            if let Some(leaf) = scan.next_leaf()? {
                found.add(self.of_leaf_in(&subvolume, &leaf.leaf)?);
                scans.push((subvolume, scan));
            }
        }
        for leaf in leaves {
            if found.is_complete() {
                break;
            }
            found.add(self.of_shared_leaf(leaf)?);
        }
        for (subvolume, mut scan) in scans {
            while !found.is_complete()
                && let Some(leaf) = scan.next_leaf()?
            {
                found.add(self.of_leaf_in(&subvolume, &leaf.leaf)?);
            }
        }
        Ok(found.into_set())
    }

    fn of_shared_leaf(&mut self, leaf: Logical) -> Result<RootSet> {
        if let Some(known) = self.cache.blocks.get(&leaf) {
            return Ok(Arc::clone(known));
        }
        let (source, root) = (self.view.source(), *self.view.extent_root());
        let refs = extent_refs(source, &root, leaf, self.view.nodesize(), true)?;
        match refs.filter(|refs| refs.level == Some(0)) {
            Some(refs) => self.of_block_refs(&refs, 0),
            None => Err(wrong(leaf, "level", 0, "expected a leaf that data refers to").into()),
        }
    }

    fn remember(&mut self, bytenr: Logical, found: FoundRoots) -> RootSet {
        let set = found.into_set();
        let cache = &mut self.cache;
        if cache.blocks.len() >= cache.blocks_max || cache.nr_ids >= cache.ids_max {
            (cache.blocks, cache.nr_ids) = Default::default();
        }
        if Arc::strong_count(&set) == 1 {
            cache.nr_ids = cache.nr_ids.saturating_add(set.len());
        }
        cache.blocks.insert(bytenr, Arc::clone(&set));
        set
    }
}

/// The leaves that the references of a data extent name by address.
pub(crate) fn shared_leaves(extent: &ExtentRefs) -> HashSet<Logical> {
    let leaf = |reference: &RefKey| match reference {
        RefKey::SharedData(leaf) => Some(*leaf),
        _ => None,
    };
    extent.refs.iter().filter_map(|(reference, _)| leaf(reference)).collect()
}

/// The subvolumes found so far that reach an extent.
struct FoundRoots {
    all: BTreeSet<RootId>,
    last: Option<RootSet>,
    /// The number of subvolumes at which the search ends.
    enough: usize,
}

impl FoundRoots {
    fn add(&mut self, set: RootSet) {
        self.all.extend(set.iter());
        self.last = Some(set);
    }

    fn is_complete(&self) -> bool {
        self.all.len() >= self.enough
    }

    /// Returns the subvolumes found. Usually, the set of the last block searched contains all of them; then that set is
    /// returned without a copy.
    fn into_set(self) -> RootSet {
        match self.last {
            Some(set) if set.len() == self.all.len() => set,
            _ => self.all.into_iter().collect(),
        }
    }
}

/// Iterates over the leaves of a subvolume with the file extent items that a data reference `(inode, offset)` counts.
/// The count of the reference is the number of these items. Leaves that other subvolumes own, or that the extent's
/// references name by address (`shared`), have references of their own, and are left out.
pub(crate) struct LeafUses<'v, 's> {
    cursor: Cursor<'v>,
    end: Key,
    bytenr: Logical,
    offset: u64,
    owner: RootId,
    shared: &'s HashSet<Logical>,
    /// Number of items that were not found yet.
    nr_left: u64,
}

impl<'v, 's> LeafUses<'v, 's> {
    pub(crate) fn new(
        view: &TreesView<'v>,
        subvolume: &SubvolumeRoot,
        extent: &ExtentRefs,
        (ino, offset): (Ino, u64),
        count: u64,
        shared: &'s HashSet<Logical>,
    ) -> Result<Self> {
        // `offset` is the item's file offset minus its offset into the extent. `offset` wraps if the file offset is the
        // smaller of the two, which is possible after a clone.
        let start = if offset > i64::MAX.cast_unsigned() { 0 } else { offset };
        let end = Key::new(ino.0, KeyType::EXTENT_DATA, offset.wrapping_add(extent.len_bytes.max(MAX_EXTENT_BYTES)));
        let cursor = view.cursor_at(subvolume, &Key::new(ino.0, KeyType::EXTENT_DATA, start))?;
        let (bytenr, owner) = (extent.bytenr, subvolume.ptr.tree);
        Ok(Self { cursor, end, bytenr, offset, owner, shared, nr_left: count })
    }

    /// Returns the next leaf that has items of the reference.
    pub(crate) fn next_leaf(&mut self) -> Result<Option<LeafUse>> {
        let mut current: Option<LeafUse> = None;
        let mut key = self.cursor.key();
        while let Some(at) = key.filter(|key| *key <= self.end && self.nr_left > 0) {
            let Some((leaf, slot)) = self.cursor.place() else { break };
            if current.as_ref().is_some_and(|current| current.leaf.bytenr() != leaf.bytenr()) {
                break;
            }
            let is_use = at.item_type == KeyType::EXTENT_DATA
                && leaf.owner() == self.owner
                && regular_extent(leaf.item(slot)).is_some_and(|item| {
                    item.disk_bytenr == self.bytenr && at.offset.wrapping_sub(item.offset) == self.offset
                });
            if is_use && !self.shared.contains(&leaf.bytenr()) {
                self.nr_left = self.nr_left.saturating_sub(1);
                current.get_or_insert_with(|| LeafUse { leaf: Arc::clone(leaf), slots: Vec::new() }).slots.push(slot);
            }
            key = self.cursor.next()?;
        }
        Ok(current)
    }
}

fn wrong(bytenr: Logical, field: &'static str, value: u64, expected: &'static str) -> Corrupt {
    Corrupt::new(FormatError::Value { what: "extent item", field, value, expected })
        .in_tree(RootId::EXTENT_TREE)
        .at(bytenr)
}

/// Maximum length of an extent before compression.
const MAX_EXTENT_BYTES: u64 = 128 << 20;
/// Maximum number of blocks whose sets are cached.
const BLOCKS_MAX: usize = 1 << 20;
/// Estimated bytes of a cached block without the ids of its set.
const BLOCK_BYTES: usize = 64;
const ID_BYTES: usize = size_of::<RootId>();
/// Maximum number of ids in all cached sets; they take 32 MiB.
const IDS_MAX: usize = 4 << 20;
