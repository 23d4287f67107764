//! Reads tree blocks of a filesystem that may be damaged, from any readable copy, and reports damage.
//!
//! Invariants:
//! - I1. If any copy of a block has the right address and checksum, that copy is shown; otherwise, the first copy that
//!   can be read is shown.
//! - I2. A walk ends on any input: it visits each address at most once, and levels only descend.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use anyhow::Context;
use ubtrfs_device::Device;
use ubtrfs_format::check::{CheckContext, ExpectedBlock, check_node};
use ubtrfs_format::item::{ChunkItem, DevItem};
use ubtrfs_format::node::{NodeView, verify_csum};
use ubtrfs_format::print::PrintOptions;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_volumes::{DeviceSetOptions, Volumes};

/// The tree blocks of one filesystem.
pub(super) struct Blocks {
    volumes: Volumes,
    nodesize: usize,
    /// The check of a block about which nothing is known.
    check: CheckContext,
}

/// A block as found on disk, and its damage.
pub(super) struct InspectedBlock {
    pub(super) raw: Vec<u8>,
    pub(super) damage: Option<String>,
}

/// A reference to a block.
#[derive(Clone, Copy)]
pub(super) struct Pointer {
    pub(super) bytenr: Logical,
    pub(super) tree: Option<RootId>,
    pub(super) generation: Option<Generation>,
    pub(super) level: Option<u8>,
    pub(super) first_key: Option<Key>,
}

impl Pointer {
    /// Makes a reference to the block at `bytenr`, about which nothing else is known.
    pub(super) fn bare(bytenr: Logical) -> Self {
        Self { bytenr, tree: None, generation: None, level: None, first_key: None }
    }
}

/// The order of a walk: level by level, or each block followed by all below it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    BreadthFirst,
    DepthFirst,
}

impl Blocks {
    /// Opens the filesystem on these devices, and reads as much of the chunk tree as possible.
    pub(super) fn open(devices: Vec<Arc<dyn Device>>) -> anyhow::Result<Self> {
        let volumes = Volumes::open(devices, DeviceSetOptions { read_only: true, ..DeviceSetOptions::default() })?;
        let nodesize = usize::try_from(volumes.superblock().nodesize).context("the node size is checked")?;
        let check = CheckContext::new(volumes.superblock()).with_seeds(&volumes.seed_fsids()).for_reading_only(true);
        let blocks = Self { volumes, nodesize, check };
        blocks.load_chunks();
        Ok(blocks)
    }

    /// Loads the chunks, and warns of bad items. Damaged blocks of the chunk tree are reported when that tree is shown.
    /// Blocks in chunks that are unknown because of damage in the chunk tree are reported as well.
    fn load_chunks(&self) {
        // The chunk tree lies in system chunks, which the superblock lists. So the chunk tree can be read before the
        // other chunks are known. The other chunks are added afterwards.
        for (key, data) in &self.chunk_items() {
            let added = match key.item_type {
                KeyType::DEV_ITEM => {
                    DevItem::decode(data).map_err(Into::into).and_then(|item| self.volumes.set_dev_item(&item))
                }
                KeyType::CHUNK_ITEM => ChunkItem::decode(data)
                    .map_err(Into::into)
                    .and_then(|chunk| self.volumes.add_chunk(Logical(key.offset), chunk)),
                _ => Ok(()),
            };
            if let Err(error) = added {
                crate::common::warn(&format!("chunk tree: {key}: {error}"));
            }
        }
    }

    /// The items of the chunk tree.
    pub(super) fn chunk_items(&self) -> Vec<(Key, Vec<u8>)> {
        let mut found: Vec<(Key, Vec<u8>)> = Vec::new();
        self.each_item(self.chunk_root(), &mut |key, data| found.push((key, data.to_vec())));
        found
    }

    /// Calls `visit` for each item of a tree, in the order of the keys. Returns the damage of its blocks.
    pub(super) fn each_item(&self, root: Pointer, visit: &mut dyn FnMut(Key, &[u8])) -> Vec<String> {
        let mut damage = Vec::new();
        let walked: Result<(), std::convert::Infallible> = self.walk(root, Order::DepthFirst, &mut |_, block| {
            damage.extend(block.damage.clone());
            let Ok(view) = NodeView::new(&block.raw) else { return Ok(()) };
            for slot in 0..if view.is_leaf() { view.nritems() } else { 0 } {
                let (Some(key), Some(data)) = (view.key(slot), view.item(slot)) else { break };
                visit(key, data);
            }
            Ok(())
        });
        let Ok(()) = walked;
        damage
    }

    /// The paths of the devices that are there, by device id.
    pub(super) fn device_paths(&self) -> HashMap<u64, String> {
        self.volumes.devices().into_iter().filter_map(|device| Some((device.devid.0, device.path?))).collect()
    }

    pub(super) fn superblock(&self) -> &Superblock {
        self.volumes.superblock()
    }

    pub(super) fn root_tree(&self) -> Pointer {
        let superblock = self.superblock();
        Pointer {
            bytenr: superblock.root,
            tree: Some(RootId::ROOT_TREE),
            generation: Some(superblock.generation),
            level: Some(superblock.root_level),
            first_key: None,
        }
    }

    pub(super) fn chunk_root(&self) -> Pointer {
        let superblock = self.superblock();
        Pointer {
            bytenr: superblock.chunk_root,
            tree: Some(RootId::CHUNK_TREE),
            generation: Some(superblock.chunk_root_generation),
            level: Some(superblock.chunk_root_level),
            first_key: None,
        }
    }

    /// Returns the log root tree, if there is a log to replay.
    pub(super) fn log_root(&self) -> Option<Pointer> {
        let superblock = self.superblock();
        (superblock.log_root != Logical(0)).then_some(Pointer {
            bytenr: superblock.log_root,
            tree: Some(RootId::TREE_LOG),
            generation: None,
            level: Some(superblock.log_root_level),
            first_key: None,
        })
    }

    pub(super) fn print_options(&self) -> PrintOptions {
        PrintOptions::new(self.superblock())
    }

    /// Reads a block (I1); fails only if no copy can be read at all.
    pub(super) fn read(&self, pointer: &Pointer) -> ubtrfs_error::Result<InspectedBlock> {
        let mut raw = vec![0; self.nodesize];
        let csum_type = self.superblock().csum_type().unwrap_or_default();
        let verify = |_: usize, piece: &[u8]| {
            let bytenr = NodeView::new(piece)?.bytenr();
            if bytenr != pointer.bytenr {
                return Err(FormatError::Value {
                    what: "tree block header",
                    field: "bytenr",
                    value: bytenr.0,
                    expected: "expected its own address",
                });
            }
            verify_csum(piece, csum_type)
        };
        let damage = match self.volumes.read(pointer.bytenr, &mut raw, self.nodesize, &verify) {
            Ok(()) => self.check(&raw, pointer),
            Err(error) => {
                let readable = |copy| self.volumes.read_copy(pointer.bytenr, &mut raw, copy).is_ok();
                if !(0..self.volumes.num_copies(pointer.bytenr)).any(readable) {
                    return Err(error);
                }
                Some(error.to_string())
            }
        };
        Ok(InspectedBlock { raw, damage })
    }

    fn check(&self, raw: &[u8], pointer: &Pointer) -> Option<String> {
        let expected = ExpectedBlock {
            bytenr: Some(pointer.bytenr),
            level: pointer.level,
            tree: pointer.tree,
            generation: pointer.generation,
            first_key: pointer.first_key,
        };
        check_node(raw, &self.check.expecting(expected)).err().map(|corrupt| corrupt.to_string())
    }

    /// Visits a block and everything below it. A block that cannot be read is visited as an empty block, with its
    /// damage.
    pub(super) fn walk<E>(
        &self,
        root: Pointer,
        order: Order,
        visit: &mut dyn FnMut(&Pointer, &InspectedBlock) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut visited = HashSet::from([root.bytenr]);
        let mut queue = VecDeque::from([root]);
        while let Some(pointer) = queue.pop_front() {
            let block = match self.read(&pointer) {
                Ok(block) => block,
                Err(error) => {
                    InspectedBlock { raw: Vec::new(), damage: Some(format!("block {}: {error}", pointer.bytenr)) }
                }
            };
            visit(&pointer, &block)?;
            let mut children = children_of(&block.raw, &pointer);
            children.retain(|child| visited.insert(child.bytenr));
            match order {
                Order::BreadthFirst => queue.extend(children),
                Order::DepthFirst => children.into_iter().rev().for_each(|child| queue.push_front(child)),
            }
        }
        Ok(())
    }
}

/// The children of an internal node, one level down; none if the node is on the wrong level.
fn children_of(raw: &[u8], pointer: &Pointer) -> Vec<Pointer> {
    let Ok(view) = NodeView::new(raw) else { return Vec::new() };
    let level = view.level();
    if pointer.level.is_some_and(|expected| expected != level) || level > ubtrfs_format::node::LEVEL_MAX {
        return Vec::new();
    }
    let Some(below) = level.checked_sub(1) else { return Vec::new() };
    let mut children = Vec::new();
    for slot in 0..view.nritems() {
        let (Some((bytenr, generation)), Some(key)) = (view.child(slot), view.key(slot)) else { break };
        children.push(Pointer {
            bytenr,
            tree: pointer.tree,
            generation: Some(generation),
            level: Some(below),
            first_key: Some(key),
        });
    }
    children
}
