//! Makes the items of each initial tree, in key order.
//!
//! Invariants:
//! - I1. Items depend only on the options, the chunks and the addresses of the tree blocks, so they can be made again
//!   in each round of `blocks`.

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{
    BlockGroupItem, DevExtent, DirItem, ExtentFlags, ExtentItem, FileType, FreeSpaceInfo, InlineRef, InodeItem,
    InodeRef, RootItem, Timespec, TreeBlockInfo,
};
use ubtrfs_format::{DevId, Generation, Key, KeyType, RootId, objectid};
use uuid::Uuid;

use crate::blocks::{BlockRef, RootBlock};
use crate::layout::{NewChunk, NewMember};
use crate::{GENERATION, MkfsOptions};

/// The items of a tree.
pub(crate) type Items = BTreeMap<Key, Vec<u8>>;

/// The input from which items are made.
pub(crate) struct ItemInput<'a> {
    pub(crate) options: &'a MkfsOptions,
    pub(crate) chunks: &'a [NewChunk],
    pub(crate) members: &'a [NewMember],
    pub(crate) roots: &'a BTreeMap<RootId, RootBlock>,
    /// All tree blocks, by address.
    pub(crate) blocks: &'a BTreeMap<u64, BlockRef>,
}

impl ItemInput<'_> {
    /// Makes the items of a tree.
    pub(crate) fn items(&self, tree: RootId) -> Items {
        match tree {
            RootId::ROOT_TREE => self.root_tree(),
            RootId::EXTENT_TREE => self.extent_tree(),
            RootId::CHUNK_TREE => self.chunk_tree(),
            RootId::DEV_TREE => self.dev_tree(),
            RootId::FS_TREE => self.root_directory(self.options.root_owner),
            RootId::DATA_RELOC_TREE => self.root_directory((0, 0)),
            RootId::UUID_TREE => self.uuid_tree(),
            RootId::FREE_SPACE_TREE => self.free_space_tree(),
            RootId::BLOCK_GROUP_TREE => self.block_group_items(),
            _ => Items::new(),
        }
    }

    /// Returns the bytes of tree blocks in a chunk.
    fn used_of(&self, chunk: &NewChunk) -> u64 {
        self.blocks.range(chunk.start..chunk.end()).count() as u64 * u64::from(self.options.nodesize)
    }

    /// Returns the ranges of a chunk without tree blocks.
    fn free_of(&self, chunk: &NewChunk) -> Vec<Range<u64>> {
        let mut free = Vec::new();
        let mut at = chunk.start;
        for &block in self.blocks.range(chunk.start..chunk.end()).map(|(block, _)| block) {
            if at < block {
                free.push(at..block);
            }
            at = block + u64::from(self.options.nodesize);
        }
        if at < chunk.end() {
            free.push(at..chunk.end());
        }
        free
    }

    fn directory_inode(&self) -> InodeItem {
        let now = self.options.now;
        InodeItem {
            nbytes: self.options.nodesize.into(),
            mode: 0o40755,
            atime: now,
            ctime: now,
            mtime: now,
            otime: now,
            ..empty_inode()
        }
    }

    fn root_tree(&self) -> Items {
        let mut items = Items::new();
        let top = RootId::FS_TREE.0;
        let dir = RootId::ROOT_TREE_DIR.0;
        for (&tree, root) in self.roots {
            // These two trees have no root item, because the superblock points to them.
            if tree == RootId::ROOT_TREE || tree == RootId::CHUNK_TREE {
                continue;
            }
            items.insert(Key::new(tree.0, KeyType::ROOT_ITEM, 0), self.root_item(tree, root).encode());
        }
        let name = b"default";
        items.insert(Key::new(top, KeyType::INODE_REF, dir), inode_ref(name));
        items.insert(Key::new(dir, KeyType::INODE_ITEM, 0), self.directory_inode().encode());
        items.insert(Key::new(dir, KeyType::INODE_REF, dir), inode_ref(b".."));
        let entry = DirItem {
            location: Key::new(top, KeyType::ROOT_ITEM, u64::MAX),
            transid: Generation(0),
            file_type: FileType::Directory as u8,
            name: name.to_vec(),
            data: Vec::new(),
        };
        let mut data = Vec::new();
        entry.encode_into(&mut data);
        items.insert(Key::new(dir, KeyType::DIR_ITEM, name_hash(name)), data);
        items
    }

    fn root_item(&self, tree: RootId, root: &RootBlock) -> RootItem {
        let is_top = tree == RootId::FS_TREE;
        let now = if is_top { self.options.now } else { Timespec::default() };
        RootItem {
            inode: InodeItem { size: 3, nbytes: self.options.nodesize.into(), mode: 0o40755, ..empty_inode() },
            generation: GENERATION,
            root_dirid: if tree.is_fs_tree() { objectid::FIRST_FREE } else { 0 },
            bytenr: root.bytenr,
            byte_limit: 0,
            bytes_used: self.options.nodesize.into(),
            last_snapshot: Generation(0),
            flags: 0,
            refs: 1,
            drop_progress: Key::MIN,
            drop_level: 0,
            level: root.level,
            generation_v2: GENERATION,
            uuid: if is_top { self.options.subvol_uuid } else { Uuid::nil() },
            parent_uuid: Uuid::nil(),
            received_uuid: Uuid::nil(),
            ctransid: Generation(0),
            otransid: Generation(0),
            stransid: Generation(0),
            rtransid: Generation(0),
            ctime: now,
            otime: now,
            stime: Timespec::default(),
            rtime: Timespec::default(),
            reserved: [0; 8],
        }
    }

    fn extent_tree(&self) -> Items {
        let mut items = if self.options.has_block_group_tree() { Items::new() } else { self.block_group_items() };
        for (&bytenr, block) in self.blocks {
            let info = TreeBlockInfo { key: block.first_key, level: block.level };
            let (item_type, offset, tree_block) = match self.options.is_skinny() {
                true => (KeyType::METADATA_ITEM, block.level.into(), None),
                false => (KeyType::EXTENT_ITEM, self.options.nodesize.into(), Some(info)),
            };
            let item = ExtentItem {
                refs: 1,
                generation: GENERATION,
                flags: ExtentFlags::TREE_BLOCK,
                tree_block,
                inline_refs: vec![InlineRef::TreeBlock(block.tree)],
            };
            items.insert(Key::new(bytenr, item_type, offset), item.encode());
        }
        items
    }

    fn block_group_items(&self) -> Items {
        let item = |chunk: &NewChunk| {
            let item = BlockGroupItem {
                used: self.used_of(chunk),
                chunk_objectid: objectid::FIRST_CHUNK_TREE,
                flags: chunk.item.flags.bits(),
            };
            (Key::new(chunk.start, KeyType::BLOCK_GROUP_ITEM, chunk.item.length), item.encode())
        };
        self.chunks.iter().map(item).collect()
    }

    fn chunk_tree(&self) -> Items {
        let chunk_item = |chunk: &NewChunk| {
            (Key::new(objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, chunk.start), chunk.item.encode())
        };
        let mut items: Items = self.chunks.iter().map(chunk_item).collect();
        for member in self.members {
            let dev_item = crate::dev_item(self.options, member, device_bytes_used(self.chunks, member.devid));
            items.insert(Key::new(objectid::DEV_ITEMS, KeyType::DEV_ITEM, member.devid.0), dev_item.encode());
        }
        items
    }

    fn dev_tree(&self) -> Items {
        let mut items = Items::new();
        for chunk in self.chunks {
            for stripe in &chunk.item.stripes {
                let item = DevExtent {
                    chunk_tree: RootId::CHUNK_TREE.0,
                    chunk_objectid: objectid::FIRST_CHUNK_TREE,
                    chunk_offset: chunk.start,
                    length: chunk.item.device_extent_len(),
                    chunk_tree_uuid: self.options.chunk_tree_uuid,
                };
                items.insert(Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0), item.encode());
            }
        }
        items
    }

    /// Makes an empty root directory, inode 256.
    fn root_directory(&self, (uid, gid): (u32, u32)) -> Items {
        let dir = objectid::FIRST_FREE;
        let inode = InodeItem { uid, gid, ..self.directory_inode() };
        Items::from([
            (Key::new(dir, KeyType::INODE_ITEM, 0), inode.encode()),
            (Key::new(dir, KeyType::INODE_REF, dir), inode_ref(b"..")),
        ])
    }

    fn uuid_tree(&self) -> Items {
        let (high, low) = halves(self.options.subvol_uuid);
        let key = Key::new(high, KeyType::UUID_KEY_SUBVOL, low);
        Items::from([(key, RootId::FS_TREE.0.to_le_bytes().to_vec())])
    }

    fn free_space_tree(&self) -> Items {
        let mut items = Items::new();
        for chunk in self.chunks {
            let free = self.free_of(chunk);
            let info = FreeSpaceInfo { extent_count: free.len() as u32, flags: 0 };
            items.insert(Key::new(chunk.start, KeyType::FREE_SPACE_INFO, chunk.item.length), info.encode());
            items.extend(
                free.into_iter().map(|range| {
                    (Key::new(range.start, KeyType::FREE_SPACE_EXTENT, range.end - range.start), Vec::new())
                }),
            );
        }
        items
    }
}

/// Sums the bytes of a device's extents.
pub(crate) fn device_bytes_used(chunks: &[NewChunk], devid: DevId) -> u64 {
    let on_device = |chunk: &NewChunk| {
        let nr_stripes = chunk.item.stripes.iter().filter(|stripe| stripe.devid == devid).count() as u64;
        chunk.item.device_extent_len() * nr_stripes
    };
    chunks.iter().map(on_device).sum()
}

/// Splits a UUID into objectid and offset of its key in the UUID tree.
fn halves(uuid: Uuid) -> (u64, u64) {
    let bytes = u128::from_le_bytes(uuid.into_bytes());
    (bytes as u64, (bytes >> 64) as u64)
}

fn inode_ref(name: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    InodeRef { index: 0, name: name.to_vec() }.encode_into(&mut data);
    data
}

fn empty_inode() -> InodeItem {
    let zero = Timespec::default();
    InodeItem {
        generation: GENERATION,
        transid: Generation(0),
        size: 0,
        nbytes: 0,
        block_group: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        mode: 0,
        rdev: 0,
        flags: 0,
        sequence: 0,
        reserved: [0; 4],
        atime: zero,
        ctime: zero,
        mtime: zero,
        otime: zero,
    }
}

/// Lists the trees of a new filesystem, in the order of their blocks.
pub(crate) fn trees_of(options: &MkfsOptions) -> Vec<RootId> {
    let mut trees = vec![
        RootId::CHUNK_TREE,
        RootId::ROOT_TREE,
        RootId::EXTENT_TREE,
        RootId::DEV_TREE,
        RootId::FS_TREE,
        RootId::CSUM_TREE,
        RootId::UUID_TREE,
        RootId::DATA_RELOC_TREE,
    ];
    if options.has_free_space_tree() {
        trees.push(RootId::FREE_SPACE_TREE);
    }
    if options.has_block_group_tree() {
        trees.push(RootId::BLOCK_GROUP_TREE);
    }
    trees
}

/// Whether a tree's blocks lie in the system chunk.
pub(crate) fn is_system(tree: RootId) -> bool {
    tree == RootId::CHUNK_TREE
}
