//! Damages an image in one of many ways, mostly with valid checksums, and undoes the damage.
//!
//! Damaged images test the checkers, which must find all damage that `btrfs check` finds. The image must use crc32c
//! and must not be open elsewhere.
//!
//! I1. Damage is written to every copy of a block, unless the kind of damage is defined for one copy.
//! I2. [`Damage::undo`] restores the image's bytes, so that one image can be damaged many times.

use std::fmt;

use anyhow::{Context, Result};
use ubtrfs_format::item::ChunkItem;
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, NodeView};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use ubtrfs_format::{CsumType, Key, KeyType};

use crate::{Image, RawBlock, Rng};

macro_rules! ways {
    ($($way:ident: $doc:literal,)*) => {
        /// A way to damage an image.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Corruption { $(#[doc = $doc] $way),* }

        impl Corruption {
            /// All kinds of damage.
            pub const ALL: &'static [Self] = &[$(Self::$way),*];
        }
    };
}

ways! {
    BitFlip: "A random bit of a block; the checksum is recomputed.",
    BitFlipBadCsum: "A random bit of a block; the checksum does not match.",
    OneCopyBad: "A random bit of one copy of a block; the checksum does not match.",
    DataFlip: "A byte of file data.",
    ExtentRefs: "The number of references in an extent item.",
    ExtentInlineRef: "The tree, inode, offset or count of an inline reference.",
    ExtentRemoved: "An extent item is missing.",
    ExtentFlags: "The full backref flag, or the flag that marks an extent as a tree block.",
    ExtentGeneration: "The generation of an extent item; it can exceed the superblock's.",
    ExtentLength: "The length of a data extent.",
    ExtentAdded: "An extent item that nothing refers to.",
    CsumRemoved: "A checksum item is missing.",
    CsumShortened: "A checksum item lacks its last four bytes.",
    CsumWrong: "A checksum of data.",
    DirectorySize: "The size of a directory.",
    LinkCount: "The link count of an inode.",
    NoLinks: "The link count of an inode is 0.",
    InodeBytes: "The byte count of an inode.",
    InodeSize: "The size of a file.",
    InodeMode: "A file becomes a directory, or a directory becomes a file.",
    InodeFlags: "The flags of an inode: NODATASUM, or unknown flags.",
    InodeRemoved: "An inode item is missing.",
    DirIndexRemoved: "A directory index is missing.",
    DirItemRemoved: "A directory item is missing.",
    InodeRefRemoved: "An inode reference is missing.",
    NameHash: "The hash in the key of a directory item.",
    NameChanged: "A letter of a name, in one of the items that contain the name.",
    NameTwice: "A directory item contains its name twice.",
    ItemUnknown: "An item of an unknown type in a subvolume tree.",
    FileTypeWrong: "The file type in a directory entry.",
    LocationWrong: "The inode that a directory entry leads to.",
    FileExtentLonger: "A file extent is longer, so that it overlaps the next extent.",
    FileExtentMoved: "The extent's address in a file extent item, or the offset in the extent.",
    FileExtentRemoved: "A file extent is missing.",
    OrphanRemoved: "An orphan item is missing.",
    BlockGroupUsed: "The used bytes of a block group.",
    BlockGroupFlags: "The type of a block group.",
    BlockGroupRemoved: "A block group item is missing.",
    DevExtentRemoved: "A device extent is missing.",
    DevExtentMoved: "A device extent names another chunk.",
    DevItemUsed: "The used bytes of a device.",
    DevItemForeign: "The UUID or the filesystem of a device item.",
    DevItemField: "Some bytes of a device item.",
    ChunkStripe: "The device offset of a chunk's stripe.",
    ChunkFlags: "The type of a chunk.",
    FreeSpaceRemoved: "A free space entry is missing.",
    FreeSpaceShifted: "A free space entry is too short or too long.",
    FreeSpaceBit: "A bit of a free space bitmap, or the number of entries.",
    FreeSpaceAdded: "Free space past the last block group, where the next block group will be made.",
    LogCsumRemoved: "A checksum item of a log is missing.",
    LogExtentMoved: "The extent's address in a file extent item of a log.",
    OwnerWrong: "The owner in a block's header.",
    GenerationWrong: "The generation in a block's header.",
    LevelWrong: "The level in a block's header.",
    KeysSwapped: "Two keys of a leaf changed places.",
    PointersSwapped: "Two pointers of a node changed places.",
    PointerGeneration: "The generation in a pointer.",
    PointerCrossed: "A pointer leads to its neighbour's block.",
    PointerKey: "The key in a pointer.",
    ItemSize: "The size of an item's data.",
    RootRefRemoved: "A ROOT_REF is missing.",
    RootBackrefRemoved: "A ROOT_BACKREF is missing.",
    RootRefChanged: "The directory or index in a ROOT_REF.",
    RootItemBlock: "The block in a root item.",
    RootItemLevel: "The level in a root item.",
    BlockInlineRef: "The tree or parent in a reference to a tree block.",
    FileExtentRam: "The decompressed length of a file extent.",
    FileExtentKind: "The compression or kind of a file extent.",
    XattrHash: "The hash in the key of an extended attribute.",
    QgroupNumbers: "The bytes that a quota group counts.",
    QgroupLimitRemoved: "The limits of a quota group are missing.",
    UuidRemoved: "A subvolume is missing in the UUID tree.",
    SuperMirror: "A number in one copy of the superblock; the checksum does not match.",
    SuperUsed: "The superblock's used bytes.",
    SuperGeneration: "The superblock's generation.",
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The changes made, and the bytes to undo them.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Describes the changes.
    pub text: String,
    before: Vec<(u64, Vec<u8>)>,
}

impl Damage {
    /// The changed places in the image: offset and length.
    pub fn places(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.before.iter().map(|(offset, bytes)| (*offset, bytes.len()))
    }

    /// Restores the image's bytes.
    pub fn undo(self, image: &Image) -> Result<()> {
        self.before.into_iter().rev().try_for_each(|(offset, bytes)| image.write_at(offset, &bytes))
    }
}

/// The blocks of an image, for damaging one at a time.
#[derive(Debug)]
pub struct Corruptor<'i> {
    image: &'i Image,
    blocks: Vec<(RawBlock, Vec<u8>)>,
    chunks: Vec<(u64, ChunkItem)>,
}

/// A block and its content, and the slot and the key of one of its items.
type ItemPlace<'c> = (&'c RawBlock, &'c [u8], usize, Key);

impl<'i> Corruptor<'i> {
    /// Reads the blocks of an image.
    pub fn new(image: &'i Image) -> Result<Self> {
        let nodesize = image.read_at(SUPERBLOCK_OFFSETS[0] + 148, 4)?;
        let nodesize = u32::from_le_bytes(nodesize.as_slice().try_into()?) as usize;
        let mut blocks = Vec::new();
        for block in RawBlock::live(image)? {
            let raw = image.read_at(block.copies[0], nodesize)?;
            blocks.push((block, raw));
        }
        let mut this = Self { image, blocks, chunks: Vec::new() };
        let mut chunks = Vec::new();
        for (_, raw, slot, key) in this.items(KeyType::CHUNK_ITEM, |_| true) {
            chunks.push((key.offset, ChunkItem::decode(item(raw, slot)?)?));
        }
        this.chunks = chunks;
        Ok(this)
    }

    /// Damages the image in the given way. Returns `None` if the image contains nothing that can be damaged in this
    /// way.
    pub fn apply(&self, way: Corruption, rng: &mut Rng) -> Result<Option<Damage>> {
        use Corruption as C;
        let random = |rng: &mut Rng| 1 + rng.below(1 << 20);
        match way {
            C::BitFlip | C::BitFlipBadCsum | C::OneCopyBad => self.flip(way, rng),
            C::DataFlip => self.flip_data(rng),
            C::ExtentRefs => self.number(rng, KeyType::EXTENT_ITEM, any, 0, 8, |rng, _| rng.below(9) + 2),
            C::ExtentInlineRef => {
                let at = 25 + 8 * rng.below(3) as usize;
                self.number(
                    rng,
                    KeyType::EXTENT_ITEM,
                    |data| data.len() >= 53,
                    at,
                    2,
                    |rng, old| old ^ (1 + rng.below(0xfffe)),
                )
            }
            C::ExtentRemoved => {
                let kind = *rng.pick(&[KeyType::EXTENT_ITEM, KeyType::METADATA_ITEM]);
                self.remove(rng, kind, any)
            }
            C::ExtentFlags => {
                let kind = *rng.pick(&[KeyType::EXTENT_ITEM, KeyType::METADATA_ITEM]);
                self.number(rng, kind, any, 16, 8, |rng, old| old ^ *rng.pick(&[0x100, 0x3]))
            }
            C::ExtentGeneration => {
                let kind = *rng.pick(&[KeyType::EXTENT_ITEM, KeyType::METADATA_ITEM]);
                self.number(rng, kind, any, 8, 8, |rng, old| match rng.one_in(3) {
                    true => old + (1 << 20),
                    false => old.saturating_sub(1 + rng.below(old.max(1))),
                })
            }
            C::ExtentLength => self.key_offset(rng, KeyType::EXTENT_ITEM, |rng, old| {
                if rng.one_in(2) { old + 4096 } else { old.saturating_sub(4096).max(4096) }
            }),
            C::ExtentAdded => self.key_objectid_copy(rng),
            C::CsumRemoved => self.remove(rng, KeyType::EXTENT_CSUM, any),
            C::CsumShortened => self.resize(
                rng,
                KeyType::EXTENT_CSUM,
                |data| data.len() > 4,
                |_, data| {
                    data.truncate(data.len() - 4);
                },
            ),
            C::CsumWrong => {
                self.number(rng, KeyType::EXTENT_CSUM, any, 0, 4, |rng, old| old ^ (1 + rng.below(u32::MAX.into())))
            }
            C::DirectorySize => self.inode(rng, is_dir, 16, 8, |rng, old| old.wrapping_add(1 + rng.below(50))),
            C::LinkCount => self.inode(rng, is_regular, 40, 4, |rng, old| old + 1 + rng.below(3)),
            C::NoLinks => self.inode(rng, is_regular, 40, 4, |_, _| 0),
            C::InodeBytes => self.inode(rng, is_regular, 24, 8, |rng, old| old.wrapping_add(4096 * (1 + rng.below(9)))),
            C::InodeSize => self.inode(rng, is_regular, 16, 8, |rng, old| old.wrapping_add(random(rng))),
            C::InodeMode => self.inode(rng, any, 52, 4, |_, old| old ^ 0o140_000),
            C::InodeFlags => self.inode(rng, is_regular, 64, 8, |rng, old| old ^ *rng.pick(&[1, 1 << 20])),
            C::InodeRemoved => self.remove(rng, KeyType::INODE_ITEM, any),
            C::DirIndexRemoved => self.remove(rng, KeyType::DIR_INDEX, any),
            C::DirItemRemoved => self.remove(rng, KeyType::DIR_ITEM, any),
            C::InodeRefRemoved => self.remove(rng, KeyType::INODE_REF, any),
            C::NameHash => self.key_offset(rng, KeyType::DIR_ITEM, |_, old| old + 1),
            C::NameChanged => {
                let (kind, at) =
                    *rng.pick(&[(KeyType::DIR_INDEX, 30), (KeyType::DIR_ITEM, 30), (KeyType::INODE_REF, 10)]);
                self.number(rng, kind, |data| data.len() > at, at, 1, |_, old| if old == 120 { 121 } else { 120 })
            }
            C::NameTwice => {
                self.resize(rng, KeyType::DIR_ITEM, |data| data.len() < 200, |_, data| data.extend(data.clone()))
            }
            C::ItemUnknown => self.rewrite("an item of type 8 added", |owner, items| {
                let is_files = owner == 5 || (256..1 << 48).contains(&owner);
                let at = items.iter().position(|(key, _)| is_files && key.item_type == KeyType::INODE_ITEM);
                at.map(|at| items.insert(at + 1, (Key { item_type: KeyType(8), ..items[at].0 }, Vec::new()))).is_some()
            }),
            C::FreeSpaceAdded => {
                let end = self.chunk_end();
                self.rewrite("free space behind the last block group added", |owner, items| {
                    let is_last = owner == 10 && items.last().is_some_and(|(key, _)| key.objectid < end);
                    if is_last {
                        items.push((Key::new(end, KeyType::FREE_SPACE_INFO, 1 << 20), vec![0; 8]));
                    }
                    is_last
                })
            }
            C::LogCsumRemoved => self.rewrite("a checksum item of a log removed", |owner, items| {
                let at = items.iter().position(|(key, _)| owner == TREE_LOG && key.item_type == KeyType::EXTENT_CSUM);
                at.map(|at| items.remove(at)).is_some()
            }),
            C::LogExtentMoved => {
                let to = rng.below(1 << 16) << 12;
                self.rewrite("a file extent of a log moved", |owner, items| {
                    let extent = items.iter_mut().find(|(key, data)| {
                        owner == TREE_LOG && key.item_type == KeyType::EXTENT_DATA && is_on_disk(data)
                    });
                    extent.map(|(_, data)| change_number(&mut data[21..29], |old| old ^ to ^ 4096)).is_some()
                })
            }
            C::FileTypeWrong => {
                let kind = *rng.pick(&[KeyType::DIR_INDEX, KeyType::DIR_ITEM]);
                self.number(rng, kind, any, 29, 1, |_, old| if old == 1 { 2 } else { 1 })
            }
            C::LocationWrong => {
                let kind = *rng.pick(&[KeyType::DIR_INDEX, KeyType::DIR_ITEM]);
                self.number(rng, kind, any, 0, 8, |rng, old| old + 1 + rng.below(1 << 30))
            }
            C::FileExtentLonger => {
                self.number(rng, KeyType::EXTENT_DATA, is_on_disk, 45, 8, |rng, old| old + 4096 * (1 + rng.below(4)))
            }
            C::FileExtentMoved => {
                let at = *rng.pick(&[21, 37]);
                self.number(rng, KeyType::EXTENT_DATA, is_on_disk, at, 8, |rng, old| old + 4096 * (1 + rng.below(4)))
            }
            C::FileExtentRemoved => self.remove(rng, KeyType::EXTENT_DATA, any),
            C::OrphanRemoved => self.remove(rng, KeyType::ORPHAN_ITEM, any),
            C::BlockGroupUsed => self.number(rng, KeyType::BLOCK_GROUP_ITEM, any, 0, 8, |rng, old| {
                old.saturating_sub(4096 * (1 + rng.below(4))).max(4096) ^ if old < 8192 { 4096 } else { 0 }
            }),
            C::BlockGroupFlags => {
                self.number(rng, KeyType::BLOCK_GROUP_ITEM, any, 16, 8, |rng, old| old ^ *rng.pick(&[5, 32]))
            }
            C::BlockGroupRemoved => self.remove(rng, KeyType::BLOCK_GROUP_ITEM, any),
            C::DevExtentRemoved => self.remove(rng, KeyType::DEV_EXTENT, any),
            C::DevExtentMoved => self.number(rng, KeyType::DEV_EXTENT, any, 16, 8, |_, old| old + (1 << 20)),
            C::DevItemUsed => self.number(rng, KeyType::DEV_ITEM, any, 16, 8, |_, old| old - 4096),
            C::DevItemForeign => {
                let at = *rng.pick(&[66, 74, 82, 90]);
                self.number(rng, KeyType::DEV_ITEM, any, at, 8, |rng, old| old ^ (1 + rng.below(1 << 60)))
            }
            C::DevItemField => {
                let at = rng.index(97);
                self.number(rng, KeyType::DEV_ITEM, any, at, 2, |rng, old| old ^ (1 + rng.below(0xffff)))
            }
            C::ChunkStripe => self.number(rng, KeyType::CHUNK_ITEM, not_system, 56, 8, |_, old| old + (1 << 16)),
            C::ChunkFlags => self.number(rng, KeyType::CHUNK_ITEM, not_system, 24, 8, |_, old| old ^ 5),
            C::FreeSpaceRemoved => self.remove(rng, KeyType::FREE_SPACE_EXTENT, any),
            C::FreeSpaceShifted => self
                .key_offset(rng, KeyType::FREE_SPACE_EXTENT, |_, old| if old > 4096 { old - 4096 } else { old + 4096 }),
            C::FreeSpaceBit => {
                let kind = *rng.pick(&[KeyType::FREE_SPACE_INFO, KeyType::FREE_SPACE_BITMAP]);
                self.number(rng, kind, any, 0, 1, |rng, old| old ^ (1 << rng.below(3)))
            }
            C::OwnerWrong => self.header(rng, any_block, 88, |rng, old| old ^ *rng.pick(&[1, 2, 256, 0x300])),
            C::GenerationWrong => self.header(rng, any_block, 80, |_, old| old.saturating_sub(1)),
            C::LevelWrong => self.header(rng, any_block, 93, |_, old| old ^ 1 << 56),
            C::KeysSwapped => self.swap(rng, 0, ITEM_HEAD_SIZE, Key::SIZE),
            C::PointersSwapped => self.swap(rng, 1, KEY_PTR_SIZE, KEY_PTR_SIZE),
            C::PointerGeneration => self.pointer(rng, 25, |rng, old| old.saturating_sub(1 + rng.below(3)), None),
            C::PointerCrossed => self.pointer(rng, 17, |_, old| old, Some(())),
            C::PointerKey => self.pointer(rng, 9, |rng, old| old.wrapping_add(1 + rng.below(2)), None),
            C::ItemSize => self.item_size(rng),
            C::RootRefRemoved => self.remove(rng, KeyType::ROOT_REF, any),
            C::RootBackrefRemoved => self.remove(rng, KeyType::ROOT_BACKREF, any),
            C::RootRefChanged => {
                let (kind, at) = (*rng.pick(&[KeyType::ROOT_REF, KeyType::ROOT_BACKREF]), *rng.pick(&[0, 8]));
                self.number(rng, kind, any, at, 8, |rng, old| old + 1 + rng.below(9))
            }
            C::RootItemBlock => {
                self.number(rng, KeyType::ROOT_ITEM, any, 176, 8, |rng, old| old + (1 << 14) * (1 + rng.below(9)))
            }
            C::RootItemLevel => self.number(rng, KeyType::ROOT_ITEM, any, 238, 1, |_, old| old + 1),
            C::BlockInlineRef => {
                self.number(rng, KeyType::METADATA_ITEM, any, 25, 8, |rng, old| old ^ (1 << rng.below(16)))
            }
            C::FileExtentRam => self.number(rng, KeyType::EXTENT_DATA, any, 8, 8, |rng, old| {
                if rng.one_in(2) { old.saturating_sub(4096) } else { old + 1 + rng.below(5000) }
            }),
            C::FileExtentKind => {
                let at = *rng.pick(&[16, 20]);
                self.number(rng, KeyType::EXTENT_DATA, any, at, 1, |rng, old| old ^ (1 + rng.below(2)))
            }
            C::XattrHash => self.key_offset(rng, KeyType::XATTR_ITEM, |_, old| old + 1),
            C::QgroupNumbers => {
                let at = *rng.pick(&[8, 24]);
                self.number(rng, KeyType::QGROUP_INFO, any, at, 8, |rng, old| old + 4096 * (1 + rng.below(9)))
            }
            C::QgroupLimitRemoved => self.remove(rng, KeyType::QGROUP_LIMIT, any),
            C::UuidRemoved => self.remove(rng, KeyType::UUID_KEY_SUBVOL, any),
            C::SuperMirror => {
                // Pick any copy, including the primary. A small image has two copies.
                let offset = *rng.pick(&SUPERBLOCK_OFFSETS[..2]);
                self.superblock(rng, &[offset], 200, |rng, old| old ^ (1 + rng.below(1 << 40)), false)
            }
            C::SuperUsed => {
                self.superblock(rng, &SUPERBLOCK_OFFSETS, 120, |rng, old| old + 4096 * (1 + rng.below(9)), true)
            }
            C::SuperGeneration => self.superblock(rng, &SUPERBLOCK_OFFSETS, 72, |_, old| old - 1, true),
        }
    }

    /// The end of the last chunk.
    pub fn chunk_end(&self) -> u64 {
        self.chunks.iter().map(|(start, chunk)| start + chunk.length).max().unwrap_or_default()
    }

    /// Calls `change` with the owner and the items of one leaf after another, until `change` has changed a leaf. Writes
    /// that leaf.
    pub fn rewrite(
        &self,
        text: &str,
        mut change: impl FnMut(u64, &mut Vec<(Key, Vec<u8>)>) -> bool,
    ) -> Result<Option<Damage>> {
        for (block, raw) in self.blocks.iter().filter(|(block, _)| block.level == 0) {
            let mut items = take_apart(raw)?;
            if !change(block.owner, &mut items) {
                continue;
            }
            let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
            if used + HEADER_SIZE > raw.len() {
                return Ok(None);
            }
            return self.write(block, build_leaf(raw, &items), true, format!("block {}: {text}", block.bytenr));
        }
        Ok(None)
    }

    /// Returns the items of type `kind` for whose data `matches` returns true.
    fn items(&self, kind: KeyType, matches: impl Fn(&[u8]) -> bool) -> Vec<ItemPlace<'_>> {
        let mut found = Vec::new();
        for (block, raw) in self.blocks.iter().filter(|(block, _)| block.level == 0) {
            let Ok(view) = NodeView::new(raw) else { continue };
            for slot in 0..view.nritems() {
                let (Some(key), Some(data)) = (view.key(slot), view.item(slot)) else { break };
                if key.item_type == kind && matches(data) {
                    found.push((block, raw.as_slice(), slot, key));
                }
            }
        }
        found
    }

    /// Picks at random one item of type `kind` for whose data `matches` returns true.
    fn pick(&self, rng: &mut Rng, kind: KeyType, matches: impl Fn(&[u8]) -> bool) -> Option<ItemPlace<'_>> {
        let found = self.items(kind, matches);
        (!found.is_empty()).then(|| found[rng.index(found.len())])
    }

    /// Changes a number inside an item.
    fn number(
        &self,
        rng: &mut Rng,
        kind: KeyType,
        matches: impl Fn(&[u8]) -> bool,
        at: usize,
        size: usize,
        change: impl Fn(&mut Rng, u64) -> u64,
    ) -> Result<Option<Damage>> {
        let fits = |data: &[u8]| data.len() >= at + size && matches(data);
        let Some((block, raw, slot, key)) = self.pick(rng, kind, fits) else { return Ok(None) };
        let view = NodeView::new(raw)?;
        let place = view.item_range(slot).context("the item was found")?.start + at;
        let mut raw = raw.to_vec();
        let (old, new) = change_number(&mut raw[place..place + size], |old| change(rng, old));
        self.write(block, raw, true, format!("{key} of tree {}: the number at {at} was {old}, is {new}", block.owner))
    }

    fn inode(
        &self,
        rng: &mut Rng,
        matches: impl Fn(&[u8]) -> bool,
        at: usize,
        size: usize,
        change: impl Fn(&mut Rng, u64) -> u64,
    ) -> Result<Option<Damage>> {
        self.number(rng, KeyType::INODE_ITEM, matches, at, size, change)
    }

    /// Removes an item: rebuilds its leaf without the item.
    fn remove(&self, rng: &mut Rng, kind: KeyType, matches: impl Fn(&[u8]) -> bool) -> Result<Option<Damage>> {
        let Some((block, raw, slot, key)) = self.pick(rng, kind, matches) else { return Ok(None) };
        let mut items = take_apart(raw)?;
        if items.len() < 2 {
            return Ok(None);
        }
        items.remove(slot);
        self.write(block, build_leaf(raw, &items), true, format!("{key} of tree {} removed", block.owner))
    }

    /// Changes the data of an item, and possibly its length.
    fn resize(
        &self,
        rng: &mut Rng,
        kind: KeyType,
        matches: impl Fn(&[u8]) -> bool,
        change: impl Fn(&mut Rng, &mut Vec<u8>),
    ) -> Result<Option<Damage>> {
        let Some((block, raw, slot, key)) = self.pick(rng, kind, matches) else { return Ok(None) };
        let mut items = take_apart(raw)?;
        change(rng, &mut items[slot].1);
        let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
        if used + HEADER_SIZE > raw.len() {
            return Ok(None);
        }
        self.write(block, build_leaf(raw, &items), true, format!("{key} of tree {} resized", block.owner))
    }

    fn key_offset(
        &self,
        rng: &mut Rng,
        kind: KeyType,
        change: impl Fn(&mut Rng, u64) -> u64,
    ) -> Result<Option<Damage>> {
        let Some((block, raw, slot, key)) = self.pick(rng, kind, any) else { return Ok(None) };
        let mut items = take_apart(raw)?;
        items[slot].0.offset = change(rng, key.offset);
        let text = format!("{key} of tree {} became {}", block.owner, items[slot].0);
        self.write(block, build_leaf(raw, &items), true, text)
    }

    /// Copies an extent item to the address directly after its extent, where the copy may overlap another extent.
    fn key_objectid_copy(&self, rng: &mut Rng) -> Result<Option<Damage>> {
        let Some((block, raw, slot, key)) = self.pick(rng, KeyType::EXTENT_ITEM, any) else { return Ok(None) };
        let mut items = take_apart(raw)?;
        let mut copy = items[slot].clone();
        copy.0.objectid += key.offset;
        let clash = items.get(slot + 1).is_some_and(|next| next.0 <= copy.0);
        let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
        if clash || used + copy.1.len() + ITEM_HEAD_SIZE + HEADER_SIZE > raw.len() {
            return Ok(None);
        }
        let text = format!("{} added to tree {}", copy.0, block.owner);
        items.insert(slot + 1, copy);
        self.write(block, build_leaf(raw, &items), true, text)
    }

    fn header(
        &self,
        rng: &mut Rng,
        matches: impl Fn(&RawBlock) -> bool,
        at: usize,
        change: impl Fn(&mut Rng, u64) -> u64,
    ) -> Result<Option<Damage>> {
        let fitting: Vec<_> = self.blocks.iter().filter(|(block, _)| matches(block)).collect();
        let (block, raw) = rng.pick(&fitting);
        let mut raw = raw.clone();
        let (old, new) = change_number(&mut raw[at..at + 8], |old| change(rng, old));
        let text = format!("block {} of tree {}: header at {at} was {old}, is {new}", block.bytenr, block.owner);
        self.write(block, raw, true, text)
    }

    /// Swaps the first `len` bytes of two adjacent item heads (in a leaf) or key pointers (in a node above).
    fn swap(&self, rng: &mut Rng, level: u8, step: usize, len: usize) -> Result<Option<Damage>> {
        let fits = |block: &RawBlock| block.level.min(1) == level && block.nritems > 1;
        let fitting: Vec<_> = self.blocks.iter().filter(|(block, _)| fits(block)).collect();
        if fitting.is_empty() {
            return Ok(None);
        }
        let (block, raw) = rng.pick(&fitting);
        let slot = rng.index(block.nritems as usize - 1);
        let (a, b) = (HEADER_SIZE + slot * step, HEADER_SIZE + (slot + 1) * step);
        let mut raw = raw.clone();
        let first = raw[a..a + len].to_vec();
        raw.copy_within(b..b + len, a);
        raw[b..b + len].copy_from_slice(&first);
        self.write(
            block,
            raw,
            true,
            format!("block {} of tree {}: slots {slot} and next swapped", block.bytenr, block.owner),
        )
    }

    /// Changes a number in a key pointer. If `cross` is set, overwrites the pointer's block address and generation with
    /// those of the next pointer instead.
    fn pointer(
        &self,
        rng: &mut Rng,
        at: usize,
        change: impl Fn(&mut Rng, u64) -> u64,
        cross: Option<()>,
    ) -> Result<Option<Damage>> {
        let fitting: Vec<_> = self.blocks.iter().filter(|(block, _)| block.level > 0 && block.nritems > 1).collect();
        if fitting.is_empty() {
            return Ok(None);
        }
        let (block, raw) = rng.pick(&fitting);
        let slot = rng.index(block.nritems as usize - 1);
        let place = HEADER_SIZE + slot * KEY_PTR_SIZE + at;
        let mut raw = raw.clone();
        if cross.is_some() {
            raw.copy_within(place + KEY_PTR_SIZE..place + KEY_PTR_SIZE + 16, place);
        } else {
            change_number(&mut raw[place..place + 8], |old| change(rng, old));
        }
        self.write(block, raw, true, format!("block {} of tree {}: pointer {slot} changed", block.bytenr, block.owner))
    }

    fn item_size(&self, rng: &mut Rng) -> Result<Option<Damage>> {
        let leaves: Vec<_> = self.blocks.iter().filter(|(block, _)| block.level == 0 && block.nritems > 0).collect();
        let (block, raw) = rng.pick(&leaves);
        let slot = rng.index(block.nritems as usize);
        let place = HEADER_SIZE + slot * ITEM_HEAD_SIZE + 17 + 4 * rng.index(2);
        let mut raw = raw.clone();
        change_number(&mut raw[place..place + 4], |old| old + 1 + rng.below(40));
        self.write(block, raw, true, format!("block {} of tree {}: head {slot} changed", block.bytenr, block.owner))
    }

    fn flip(&self, way: Corruption, rng: &mut Rng) -> Result<Option<Damage>> {
        let (block, raw) = rng.pick(&self.blocks);
        let mut raw = raw.clone();
        // Pick a place in the used part of the block: heads, pointers or data.
        let view = NodeView::new(&raw)?;
        let head = if block.level == 0 { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
        let heads_end = HEADER_SIZE + view.nritems() * head;
        let data =
            view.item_range(view.nritems().saturating_sub(1)).filter(|_| block.level == 0).map(|range| range.start);
        let in_data = data.filter(|start| *start < raw.len() && rng.one_in(2));
        let at = match in_data {
            Some(start) => start + rng.index(raw.len() - start),
            None => 32 + rng.index(heads_end - 32),
        };
        let bit = 1 << rng.below(8);
        raw[at] ^= bit;
        let text = format!("block {} of tree {}: bit {bit} at {at} flipped", block.bytenr, block.owner);
        match way {
            Corruption::BitFlip => self.write(block, raw, true, text),
            Corruption::BitFlipBadCsum => self.write(block, raw, false, text),
            _ => {
                let copy = rng.index(block.copies.len());
                let one = RawBlock { copies: vec![block.copies[copy]], ..block.clone() };
                self.write(&one, raw, false, format!("{text} in copy {copy}"))
            }
        }
    }

    fn flip_data(&self, rng: &mut Rng) -> Result<Option<Damage>> {
        let Some((_, raw, slot, key)) = self.pick(rng, KeyType::EXTENT_CSUM, any) else { return Ok(None) };
        let sectors = item(raw, slot)?.len() as u64 / 4;
        let logical = key.offset + rng.below(sectors) * 4096 + rng.below(4096);
        let Some((start, chunk)) =
            self.chunks.iter().find(|(start, chunk)| (*start..start + chunk.length).contains(&logical))
        else {
            return Ok(None);
        };
        let stripe = rng.pick(&chunk.stripes);
        let offset = stripe.offset.0 + (logical - start);
        let before = self.image.read_at(offset, 1)?;
        self.image.write_at(offset, &[before[0] ^ 0x40])?;
        Ok(Some(Damage { text: format!("data at {logical} changed"), before: vec![(offset, before)] }))
    }

    fn superblock(
        &self,
        rng: &mut Rng,
        offsets: &[u64],
        at: usize,
        change: impl Fn(&mut Rng, u64) -> u64,
        right_csum: bool,
    ) -> Result<Option<Damage>> {
        let len_bytes = std::fs::metadata(self.image.path())?.len();
        let mut before = Vec::new();
        let mut again = rng.clone();
        for &offset in offsets.iter().filter(|offset| **offset + SUPERBLOCK_SIZE as u64 <= len_bytes) {
            let old = self.image.read_at(offset, SUPERBLOCK_SIZE)?;
            let mut raw = old.clone();
            *rng = again.clone();
            change_number(&mut raw[at..at + 8], |old| change(rng, old));
            if right_csum {
                let csum = CsumType::Crc32c.compute(&raw[32..]);
                raw[..32].copy_from_slice(&csum);
            }
            self.image.write_at(offset, &raw)?;
            before.push((offset, old));
        }
        again.next_u64();
        Ok((!before.is_empty()).then(|| Damage { text: format!("superblock: number at {at} changed"), before }))
    }

    /// Writes a block's new content to its copies (I1).
    fn write(&self, block: &RawBlock, mut raw: Vec<u8>, right_csum: bool, text: String) -> Result<Option<Damage>> {
        if right_csum {
            let csum = CsumType::Crc32c.compute(&raw[32..]);
            raw[..32].copy_from_slice(&csum);
        }
        let mut before = Vec::new();
        for &offset in &block.copies {
            before.push((offset, self.image.read_at(offset, raw.len())?));
            self.image.write_at(offset, &raw)?;
        }
        if before.iter().all(|(_, old)| *old == raw) {
            return Ok(None);
        }
        Ok(Some(Damage { text, before }))
    }
}

/// The owner of blocks of log trees.
const TREE_LOG: u64 = (-6i64).cast_unsigned();

fn any(_: &[u8]) -> bool {
    true
}

fn any_block(_: &RawBlock) -> bool {
    true
}

fn mode(data: &[u8]) -> u32 {
    data.get(52..56).and_then(|raw| raw.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn is_dir(data: &[u8]) -> bool {
    mode(data) & 0o170_000 == 0o040_000
}

fn is_regular(data: &[u8]) -> bool {
    mode(data) & 0o170_000 == 0o100_000
}

/// Whether a file extent has an extent on disk.
fn is_on_disk(data: &[u8]) -> bool {
    data.len() >= 53 && data[20] > 0 && data[21..29] != [0; 8]
}

/// Whether a chunk is not a system chunk. System chunks are left alone, because the superblock holds a copy of them
/// that must match.
fn not_system(data: &[u8]) -> bool {
    data.get(24).is_some_and(|flags| flags & 2 == 0)
}

fn item(raw: &[u8], slot: usize) -> Result<&[u8]> {
    NodeView::new(raw)?.item(slot).context("the item was found")
}

/// Changes a little-endian number in place. Returns the old and the new value.
fn change_number(raw: &mut [u8], change: impl FnOnce(u64) -> u64) -> (u64, u64) {
    let mut bytes = [0; 8];
    bytes[..raw.len()].copy_from_slice(raw);
    let old = u64::from_le_bytes(bytes);
    let new = change(old);
    raw.copy_from_slice(&new.to_le_bytes()[..raw.len()]);
    (old, new)
}

pub(crate) fn take_apart(raw: &[u8]) -> Result<Vec<(Key, Vec<u8>)>> {
    let view = NodeView::new(raw)?;
    let items = (0..view.nritems()).map(|slot| Some((view.key(slot)?, view.item(slot)?.to_vec())));
    items.collect::<Option<_>>().context("a whole leaf")
}

/// Builds a leaf from items, with the header of `raw`.
pub(crate) fn build_leaf(raw: &[u8], items: &[(Key, Vec<u8>)]) -> Vec<u8> {
    let mut out = vec![0; raw.len()];
    out[..HEADER_SIZE].copy_from_slice(&raw[..HEADER_SIZE]);
    out[96..100].copy_from_slice(&(items.len() as u32).to_le_bytes());
    let mut end = raw.len();
    for (slot, (key, data)) in items.iter().enumerate() {
        end -= data.len();
        out[end..end + data.len()].copy_from_slice(data);
        let head = HEADER_SIZE + slot * ITEM_HEAD_SIZE;
        out[head..head + Key::SIZE].copy_from_slice(&key.encode());
        out[head + 17..head + 21].copy_from_slice(&((end - HEADER_SIZE) as u32).to_le_bytes());
        out[head + 21..head + 25].copy_from_slice(&(data.len() as u32).to_le_bytes());
    }
    out
}
