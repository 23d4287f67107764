//! [`Closure`]: the blocks that change when extents move. The changing blocks are the moving tree blocks, the leaves
//! that refer to moving data extents, and all ancestors of such blocks and leaves, in every tree that shares them.
//!
//! The parents of a block follow from its references: `SharedBlock(parent)` names a parent; for `TreeBlock(root)`, a
//! descent from that root towards the block's first key finds the parent, or the block is the root itself.
//!
//! Invariants:
//! - I1. All parents of a member are members too, up to the roots of the trees. An extent that cannot be added leaves
//!   the closure unchanged.
//! - I2. A parent is one level above its child, so a crafted extent tree cannot make the climb endless.
//! - I3. No member belongs to a subvolume of which a part was dropped, because blocks of a partly dropped subvolume
//!   hold pointers without references.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::{Extent, RefKey};
use ubtrfs_tree::{Cursor, Node, NodePtr, NodeSource, RootPtr};

use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::handle::trans_handle::regular_extent;
use crate::relocation::extent_record::{ExtentRecord, corrupt, record_at};

/// A block that is copied.
pub(crate) struct ClosureBlock {
    pub(crate) node: Arc<Node>,
    pub(crate) record: ExtentRecord,
    /// The blocks that point to this block.
    pub(crate) parents: Vec<Logical>,
    /// The trees whose root is this block.
    pub(crate) roots: Vec<Arc<Tree>>,
}

/// A data extent, and the place of its copy.
pub(crate) struct MovedData {
    pub(crate) record: ExtentRecord,
    pub(crate) to: Extent,
}

/// The blocks that a step copies, by level and address.
pub(crate) struct Closure<'e> {
    engine: &'e Engine,
    extent_root: RootPtr,
    pub(crate) members: BTreeMap<(u8, Logical), ClosureBlock>,
    pub(crate) data: BTreeMap<Logical, MovedData>,
    /// The last parent found in each tree, by the level of the child. Neighbouring blocks often have the same parent.
    near: HashMap<(RootId, u8), Arc<Node>>,
}

impl<'e> Closure<'e> {
    /// Makes an empty closure. The extent tree must record all references of the blocks that are added.
    pub(crate) fn new(engine: &'e Engine) -> Result<Self> {
        let extent_root = engine.own_tree(RootId::EXTENT_TREE)?.root_ptr();
        Ok(Self { engine, extent_root, members: BTreeMap::new(), data: BTreeMap::new(), near: HashMap::new() })
    }

    /// The current record of an extent; `None` if the extent was freed.
    pub(crate) fn record(&self, bytenr: Logical) -> Result<Option<ExtentRecord>> {
        record_at(&*self.engine.store, &self.extent_root, bytenr, self.engine.geometry.nodesize)
    }

    /// Adds a tree block of a subvolume.
    pub(crate) fn add_block(&mut self, record: ExtentRecord) -> Result<()> {
        self.climb(vec![record])
    }

    /// Adds a data extent that was copied to `to`, and the leaves that refer to the extent, with their ancestors.
    pub(crate) fn add_data(&mut self, record: ExtentRecord, to: Extent) -> Result<()> {
        let mut leaves = Vec::new();
        for (reference, _) in &record.refs {
            match *reference {
                RefKey::SharedData(leaf) => leaves.push(leaf),
                RefKey::Data { root, ino, offset } => self.find_leaves(&record, root, ino, offset, &mut leaves)?,
                RefKey::TreeBlock(_) | RefKey::SharedBlock(_) => {
                    return Err(corrupt(record.extent.bytenr, "ref type", 0, "expected references to data"));
                }
            }
        }
        leaves.sort_unstable();
        leaves.dedup();
        let leaves: Result<Vec<_>> = leaves.into_iter().map(|leaf| self.record_of_block(leaf, 0)).collect();
        self.climb(leaves?)?;
        self.data.insert(record.extent.bytenr, MovedData { record, to });
        Ok(())
    }

    /// Adds to `leaves` those leaves of subvolume `root` that hold the file extent items of the data reference by
    /// `root`, `ino` and `offset`.
    fn find_leaves(
        &self,
        record: &ExtentRecord,
        root: RootId,
        ino: Ino,
        offset: u64,
        leaves: &mut Vec<Logical>,
    ) -> Result<()> {
        let bytenr = record.extent.bytenr;
        let tree = self.subvolume(root, bytenr)?;
        // The file offset of the extent's first byte may be negative.
        let first = i128::from(offset.cast_signed());
        let end = first.saturating_add(record.extent.len_bytes.max(UNPACKED_MAX).into());
        let [first, end] = [first, end].map(|at| u64::try_from(at).unwrap_or(0));
        let end = Key::new(ino.0, KeyType::EXTENT_DATA, end);
        let mut cursor = Cursor::new(&*self.engine.store, tree.root_ptr());
        let mut key = cursor.seek_ge(&Key::new(ino.0, KeyType::EXTENT_DATA, first))?;
        while let Some(found) = key.filter(|key| *key < end) {
            let extent = regular_extent(cursor.data().unwrap_or_default());
            let refers = extent.is_some_and(|extent| {
                extent.disk_bytenr == bytenr && found.offset.wrapping_sub(extent.offset) == offset
            });
            if let Some((leaf, _)) = cursor.place().filter(|_| refers)
                && leaves.last() != Some(&leaf.bytenr())
            {
                leaves.push(leaf.bytenr());
            }
            key = cursor.next()?;
        }
        Ok(())
    }

    /// Adds blocks and all their ancestors (I1).
    fn climb(&mut self, records: Vec<ExtentRecord>) -> Result<()> {
        let mut added = Vec::new();
        let result = self.climb_from(records, &mut added);
        if result.is_err() {
            added.iter().for_each(|member| drop(self.members.remove(member)));
        }
        result
    }

    fn climb_from(&mut self, mut records: Vec<ExtentRecord>, added: &mut Vec<(u8, Logical)>) -> Result<()> {
        while let Some(record) = records.pop() {
            let bytenr = record.extent.bytenr;
            let Some(level) = record.level else {
                return Err(corrupt(bytenr, "flags", record.flags.bits(), "expected a tree block"));
            };
            if self.members.contains_key(&(level, bytenr)) {
                continue;
            }
            let node = self.read_block(&record, level)?;
            debug_assert_eq!(node.level(), level, "I2: the block at {bytenr} has another level than its record");
            let (mut parents, mut roots) = (Vec::new(), Vec::new());
            for (reference, _) in &record.refs {
                match *reference {
                    RefKey::SharedBlock(parent) => parents.push(parent),
                    RefKey::TreeBlock(root) => {
                        let tree = self.subvolume(root, bytenr)?;
                        if tree.root_ptr().bytenr == bytenr {
                            roots.push(tree);
                        } else {
                            parents.push(self.parent_in(&tree, &node)?);
                        }
                    }
                    RefKey::Data { .. } | RefKey::SharedData(_) => {
                        return Err(corrupt(bytenr, "ref type", 0, "expected references to a tree block"));
                    }
                }
            }
            parents.sort_unstable();
            parents.dedup();
            for &parent in &parents {
                // I2: level 7 has no parents, because no record has level 8.
                let above = level.saturating_add(1);
                if !self.members.contains_key(&(above, parent)) {
                    records.push(self.record_of_block(parent, above)?);
                }
            }
            self.members.insert((level, bytenr), ClosureBlock { node, record, parents, roots });
            added.push((level, bytenr));
        }
        Ok(())
    }

    fn record_of_block(&self, bytenr: Logical, level: u8) -> Result<ExtentRecord> {
        let record = self.record(bytenr)?.filter(|record| record.level == Some(level));
        record.ok_or_else(|| corrupt(bytenr, "level", level.into(), "expected a tree block of this level"))
    }

    fn read_block(&self, record: &ExtentRecord, level: u8) -> Result<Arc<Node>> {
        // If no reference names a tree, the block may belong to any subvolume.
        let tree = record.refs.iter().find_map(|(reference, _)| match reference {
            RefKey::TreeBlock(root) => Some(*root),
            _ => None,
        });
        self.engine.store.read_node(&NodePtr {
            tree: tree.unwrap_or(RootId::TREE_RELOC),
            bytenr: record.extent.bytenr,
            generation: record.generation,
            level,
            first_key: None,
        })
    }

    /// The address of the block that points to `node` in this tree.
    fn parent_in(&mut self, tree: &Tree, node: &Node) -> Result<Logical> {
        let place = (tree.id(), node.level());
        let missing = || {
            let expected = "expected the block in the tree that its reference names";
            corrupt(node.bytenr(), "reference to", tree.id().0, expected)
        };
        let key = node.first_key().ok_or_else(missing)?;
        let points = |parent: &Node| {
            parent.search(&key).is_ok_and(|slot| parent.child(slot) == (node.bytenr(), node.generation()))
        };
        if let Some(parent) = self.near.get(&place).filter(|parent| points(parent)) {
            return Ok(parent.bytenr());
        }
        let mut at = self.engine.store.read_node(&tree.root_ptr().node_ptr())?;
        while at.level() > node.level().saturating_add(1) {
            at = self.engine.store.read_node(&at.child_ptr(at.child_slot(&key), tree.id()))?;
        }
        if at.level() != node.level().saturating_add(1) || !points(&at) {
            return Err(missing());
        }
        let bytenr = at.bytenr();
        self.near.insert(place, at);
        Ok(bytenr)
    }

    /// The tree that a reference names. Fails if the tree's blocks cannot be copied (I3).
    fn subvolume(&self, root: RootId, bytenr: Logical) -> Result<Arc<Tree>> {
        if root == RootId::TREE_RELOC {
            return Err(Error::Refused {
                what: format!("the extent at {bytenr} belongs to a relocation tree of an interrupted balance of Linux"),
                hint: "mount the filesystem with Linux once, which removes the tree",
            });
        }
        let tree = self.engine.tree(root)?.filter(|tree| tree.id().is_fs_tree());
        let tree = tree.ok_or_else(|| corrupt(bytenr, "reference to", root.0, "expected the id of a subvolume"))?;
        let half_dropped = |tree: &Tree| {
            let state = tree.root.lock();
            state.item.as_ref().is_some_and(|item| item.refs == 0 && item.drop_progress != Key::MIN)
        };
        if half_dropped(&tree) {
            return Err(Error::Refused {
                what: format!("the extent at {bytenr} belongs to the deleted subvolume {root}, which is being dropped"),
                hint: "balance again when the deletion is complete",
            });
        }
        Ok(tree)
    }
}

/// Maximum length of the data of a compressed extent, before compression.
const UNPACKED_MAX: u64 = 128 << 10;
