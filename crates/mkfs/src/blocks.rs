//! Packs items into tree blocks: determines the number of leaves of each tree, and the addresses and the content of all
//! blocks.
//!
//! The extent tree describes its own blocks, and the free space tree describes the space between the blocks. So the
//! number of blocks is found by iteration: items are made for an assumed number of blocks until each tree needs exactly
//! the assumed number.
//!
//! Invariants:
//! - I1. A tree has a single leaf, or several leaves below one node. Initial trees are never higher.
//! - I2. No block overlaps a superblock mirror.

use std::collections::BTreeMap;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::codec::Field;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::node::{ITEM_HEAD_SIZE, LeafBuilder, NodeBuilder, NodeHeader, finish_block};
use ubtrfs_format::{DevId, Key, KeyType, Logical, Physical, RootId, objectid};

use crate::layout::{NewChunk, NewMember};
use crate::trees::{self, ItemInput, Items};
use crate::{GENERATION, MkfsOptions};

/// Address and level of a tree's root block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RootBlock {
    pub(crate) bytenr: Logical,
    pub(crate) level: u8,
}

/// The properties of a block that the extent tree records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRef {
    pub(crate) tree: RootId,
    pub(crate) level: u8,
    pub(crate) first_key: Key,
}

/// A tree block, ready to be written.
pub(crate) struct NewBlock {
    pub(crate) bytenr: u64,
    pub(crate) raw: Vec<u8>,
}

/// The tree blocks and chunks of the new filesystem.
pub(crate) struct NewFilesystem {
    pub(crate) blocks: Vec<NewBlock>,
    chunks: Vec<NewChunk>,
    roots: BTreeMap<RootId, RootBlock>,
    nodesize: u64,
}

/// Maximum number of rounds of the iteration. The number of blocks never falls, and few rounds are needed.
const NR_ROUNDS_MAX: usize = 16;

impl NewFilesystem {
    pub(crate) fn build(options: &MkfsOptions, chunks: &[NewChunk], members: &[NewMember]) -> Result<Self> {
        let trees = trees::trees_of(options);
        let mut plan = Plan {
            options,
            chunks,
            members,
            nr_leaves: trees.iter().map(|&tree| (tree, 1)).collect(),
            first_keys: BTreeMap::new(),
            trees,
        };
        for _ in 0..NR_ROUNDS_MAX {
            if let Some(fs) = plan.try_build()? {
                return Ok(fs);
            }
        }
        Err(no_room())
    }

    /// Returns the places of all copies of a block.
    pub(crate) fn copies_of(&self, bytenr: u64) -> Vec<(DevId, Physical)> {
        let chunk = self.chunks.iter().find(|chunk| (chunk.start..chunk.end()).contains(&bytenr));
        chunk.map(|chunk| chunk.copies_of(bytenr)).unwrap_or_default()
    }

    pub(crate) fn root(&self, tree: RootId) -> RootBlock {
        self.roots.get(&tree).copied().unwrap_or(RootBlock { bytenr: Logical(0), level: 0 })
    }

    pub(crate) fn has_tree(&self, tree: RootId) -> bool {
        self.roots.contains_key(&tree)
    }

    pub(crate) fn bytes_used(&self) -> u64 {
        self.blocks.len() as u64 * self.nodesize
    }

    /// Sums the bytes of the device's extents.
    pub(crate) fn device_bytes_used(&self, devid: DevId) -> u64 {
        trees::device_bytes_used(&self.chunks, devid)
    }

    /// Encodes keys and items of the system chunks for the superblock.
    pub(crate) fn sys_chunk_array(&self) -> Vec<u8> {
        let mut array = Vec::new();
        for chunk in self.chunks.iter().filter(|chunk| chunk.item.flags.contains(BlockGroupFlags::SYSTEM)) {
            Key::new(objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, chunk.start).write(&mut array);
            array.extend_from_slice(&chunk.item.encode());
        }
        array
    }
}

fn no_room() -> Error {
    Error::Refused {
        what: "the first metadata chunk has no room for the initial trees".to_owned(),
        hint: "give a larger device or smaller nodes",
    }
}

struct Plan<'a> {
    options: &'a MkfsOptions,
    chunks: &'a [NewChunk],
    members: &'a [NewMember],
    trees: Vec<RootId>,
    /// The assumed number of leaves of each tree.
    nr_leaves: BTreeMap<RootId, usize>,
    /// The first keys of each tree's leaves in the previous round. They are needed for non-skinny extent items, which
    /// contain the first key of their tree block.
    first_keys: BTreeMap<RootId, Vec<Key>>,
}

impl Plan<'_> {
    /// Runs a round. Returns `None` if a tree needs another number of leaves, or leaves with other first keys, than
    /// assumed. The next round then assumes what this round has found.
    fn try_build(&mut self) -> Result<Option<NewFilesystem>> {
        let addresses = self.allocate()?;
        let mut roots = BTreeMap::new();
        let mut refs = BTreeMap::new();
        for &tree in &self.trees {
            let blocks = &addresses[&tree];
            let keys = self.first_keys.get(&tree);
            for (index, &bytenr) in blocks.iter().enumerate() {
                let is_node = index == self.nr_leaves[&tree];
                let key_of = if is_node { 0 } else { index };
                let first_key = keys.and_then(|keys| keys.get(key_of)).copied().unwrap_or(Key::MIN);
                refs.insert(bytenr, BlockRef { tree, level: is_node.into(), first_key });
            }
            let level = u8::from(blocks.len() > 1);
            roots.insert(tree, RootBlock { bytenr: Logical(blocks[blocks.len() - 1]), level });
        }
        let facts = ItemInput {
            options: self.options,
            chunks: self.chunks,
            members: self.members,
            roots: &roots,
            blocks: &refs,
        };
        let leaves: BTreeMap<RootId, Vec<Items>> =
            self.trees.iter().map(|&tree| (tree, self.split(facts.items(tree)))).collect();
        let first_key = |leaf: &Items| leaf.keys().next().copied().unwrap_or(Key::MIN);
        let first_keys: BTreeMap<RootId, Vec<Key>> =
            leaves.iter().map(|(&tree, leaves)| (tree, leaves.iter().map(first_key).collect())).collect();
        let nr_leaves: BTreeMap<RootId, usize> = leaves.iter().map(|(&tree, leaves)| (tree, leaves.len())).collect();
        if nr_leaves != self.nr_leaves || first_keys != self.first_keys {
            (self.nr_leaves, self.first_keys) = (nr_leaves, first_keys);
            return Ok(None);
        }
        let blocks = self.trees.iter().flat_map(|tree| self.encode(*tree, &leaves[tree], &addresses[tree])).collect();
        let nodesize = self.options.nodesize.into();
        Ok(Some(NewFilesystem { blocks, chunks: self.chunks.to_vec(), roots, nodesize }))
    }

    /// Allocates addresses for the assumed blocks: for each tree its leaves, then the node above several leaves.
    fn allocate(&self) -> Result<BTreeMap<RootId, Vec<u64>>> {
        let mut system = self.free_blocks(BlockGroupFlags::SYSTEM)?;
        let mut metadata = self.free_blocks(BlockGroupFlags::METADATA)?;
        let mut addresses = BTreeMap::new();
        for &tree in &self.trees {
            let nr_leaves = self.nr_leaves[&tree];
            let nr_blocks = if nr_leaves > 1 { nr_leaves + 1 } else { 1 };
            let free = if trees::is_system(tree) { &mut system } else { &mut metadata };
            let blocks: Vec<u64> = free.take(nr_blocks).collect();
            if blocks.len() < nr_blocks {
                return Err(no_room());
            }
            addresses.insert(tree, blocks);
        }
        Ok(addresses)
    }

    /// Returns addresses of blocks in the first chunk of this type, except blocks that overlap a superblock mirror
    /// (I2).
    fn free_blocks(&self, flag: BlockGroupFlags) -> Result<impl Iterator<Item = u64>> {
        let chunk = self.chunks.iter().find(|chunk| chunk.item.flags.contains(flag)).ok_or_else(no_room)?;
        let reserved = ubtrfs_volumes::reserved_ranges(Logical(chunk.start), &chunk.item, self.options.sectorsize)?;
        let nodesize = u64::from(self.options.nodesize);
        let starts = (chunk.start..=chunk.end() - nodesize).step_by(self.options.nodesize as usize);
        let is_free = move |start: &u64| {
            reserved.iter().all(|reserved| reserved.end <= *start || *start + nodesize <= reserved.start)
        };
        Ok(starts.filter(is_free))
    }

    /// Splits items into leaves, filling each leaf before the next.
    fn split(&self, items: Items) -> Vec<Items> {
        let capacity = LeafBuilder::capacity(self.options.nodesize as usize);
        let mut leaves = vec![Items::new()];
        let mut used = 0;
        for (key, data) in items {
            let size = ITEM_HEAD_SIZE + data.len();
            if used + size > capacity {
                leaves.push(Items::new());
                used = 0;
            }
            used += size;
            leaves.last_mut().expect("a leaf was pushed before").insert(key, data);
        }
        leaves
    }

    fn encode(&self, tree: RootId, leaves: &[Items], addresses: &[u64]) -> Vec<NewBlock> {
        let nodesize = self.options.nodesize as usize;
        let finish = |bytenr: u64, mut raw: Vec<u8>| {
            finish_block(&mut raw, self.options.csum_type);
            NewBlock { bytenr, raw }
        };
        let mut node = NodeBuilder::new(nodesize);
        let mut blocks = Vec::new();
        for (leaf, &bytenr) in leaves.iter().zip(addresses) {
            let mut builder = LeafBuilder::new(nodesize);
            for (key, data) in leaf {
                let fits = builder.push(key, data);
                assert!(fits, "I1: split() respects the capacity of a leaf");
            }
            let first_key = leaf.keys().next().copied().unwrap_or(Key::MIN);
            let fits = node.push(&first_key, Logical(bytenr), GENERATION);
            assert!(fits, "I1: initial trees have few leaves");
            blocks.push(finish(bytenr, builder.finish(&self.header(tree, bytenr, 0))));
        }
        if let [_, .., root] = *addresses {
            blocks.push(finish(root, node.finish(&self.header(tree, root, 1))));
        }
        blocks
    }

    fn header(&self, tree: RootId, bytenr: u64, level: u8) -> NodeHeader {
        NodeHeader {
            fsid: self.options.fsid,
            chunk_tree_uuid: self.options.chunk_tree_uuid,
            bytenr: Logical(bytenr),
            generation: GENERATION,
            owner: tree,
            level,
            flags: 0,
        }
    }
}
