//! Extent items, which record the references to a tree block or a data extent.

use bitflags::bitflags;

use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::{Generation, Ino, Logical, RootId};
use crate::key::{Key, KeyType};

bitflags! {
    /// Flags of an extent item.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExtentFlags: u64 {
        /// A data extent.
        const DATA = 1 << 0;
        /// A tree block.
        const TREE_BLOCK = 1 << 1;
        /// References to the block's children name the block's address, not the block's owner.
        const FULL_BACKREF = 1 << 8;
    }
}

disk_struct! {
    /// First key and level of a tree block; follows the header of a tree block's non-skinny `EXTENT_ITEM`.
    #[derive(Copy)]
    TreeBlockInfo {
        /// First key in the block.
        key: Key,
        /// Its level.
        level: u8,
    }
}

disk_struct! {
    /// `EXTENT_DATA_REF`: a file's references to a data extent.
    #[derive(Copy, Hash, PartialOrd, Ord)]
    ExtentDataRef {
        /// The subvolume.
        root: RootId,
        /// The inode.
        objectid: Ino,
        /// File offset minus the offset into the extent.
        offset: u64,
        /// Number of file extent items that refer to the extent.
        count: u32,
    }
}

/// A reference, either inline in an extent item or stored as a keyed item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InlineRef {
    /// `TREE_BLOCK_REF`: a tree block used by this tree.
    TreeBlock(RootId),
    /// `SHARED_BLOCK_REF`: a tree block used by the node at this address.
    SharedBlock(Logical),
    /// `EXTENT_DATA_REF`.
    ExtentData(ExtentDataRef),
    /// `SHARED_DATA_REF`: a data extent used by `count` items of the leaf at this address.
    SharedData {
        /// The leaf.
        parent: Logical,
        /// Number of file extent items that refer to the extent.
        count: u32,
    },
    /// `EXTENT_OWNER_REF`: the tree that allocated the extent (simple quotas). Not counted as a reference.
    Owner(RootId),
}

impl InlineRef {
    /// The reference's type.
    pub fn key_type(&self) -> KeyType {
        match self {
            Self::TreeBlock(_) => KeyType::TREE_BLOCK_REF,
            Self::SharedBlock(_) => KeyType::SHARED_BLOCK_REF,
            Self::ExtentData(_) => KeyType::EXTENT_DATA_REF,
            Self::SharedData { .. } => KeyType::SHARED_DATA_REF,
            Self::Owner(_) => KeyType::EXTENT_OWNER_REF,
        }
    }

    /// The number of references that this item represents.
    pub fn count(&self) -> u32 {
        match self {
            Self::TreeBlock(_) | Self::SharedBlock(_) => 1,
            Self::ExtentData(data) => data.count,
            Self::SharedData { count, .. } => *count,
            Self::Owner(_) => 0,
        }
    }

    /// The key offset of this reference as a keyed item: tree, parent, or hash of a data reference.
    pub fn key_offset(&self) -> u64 {
        match self {
            Self::TreeBlock(root) | Self::Owner(root) => root.0,
            Self::SharedBlock(parent) | Self::SharedData { parent, .. } => parent.0,
            Self::ExtentData(data) => crate::hash::extent_data_ref_hash(data.root, data.objectid, data.offset),
        }
    }

    /// Reads an inline reference: a type byte, then the body.
    pub fn read_inline(reader: &mut Reader<'_>) -> Result<Self, FormatError> {
        let item_type = KeyType(u8::read(reader)?);
        Ok(match item_type {
            KeyType::TREE_BLOCK_REF => Self::TreeBlock(RootId::read(reader)?),
            KeyType::SHARED_BLOCK_REF => Self::SharedBlock(Logical::read(reader)?),
            KeyType::EXTENT_DATA_REF => Self::ExtentData(ExtentDataRef::read(reader)?),
            KeyType::SHARED_DATA_REF => {
                let parent = Logical::read(reader)?;
                Self::SharedData { parent, count: u32::read(reader)? }
            }
            KeyType::EXTENT_OWNER_REF => Self::Owner(RootId::read(reader)?),
            KeyType(other) => {
                return Err(FormatError::Value {
                    what: "ExtentItem",
                    field: "inline ref type",
                    value: other.into(),
                    expected: "expected 172, 176, 178, 182 or 184",
                });
            }
        })
    }

    /// Appends the reference in its inline form.
    pub fn write_inline(&self, out: &mut Vec<u8>) {
        self.key_type().0.write(out);
        if let Self::TreeBlock(_) | Self::SharedBlock(_) | Self::Owner(_) = self {
            self.key_offset().write(out);
            return;
        }
        if let Self::SharedData { parent, .. } = self {
            parent.write(out);
        }
        out.extend_from_slice(&self.encode_keyed());
    }

    /// Reads a reference from the key and bytes of a keyed item.
    pub fn decode_keyed(key: &Key, data: &[u8]) -> Result<Self, FormatError> {
        Ok(match key.item_type {
            KeyType::TREE_BLOCK_REF => Self::TreeBlock(RootId(key.offset)),
            KeyType::SHARED_BLOCK_REF => Self::SharedBlock(Logical(key.offset)),
            KeyType::EXTENT_DATA_REF => Self::ExtentData(ExtentDataRef::decode(data)?),
            KeyType::SHARED_DATA_REF => Self::SharedData {
                parent: Logical(key.offset),
                count: u32::read(&mut Reader::new("SharedDataRef", data))?,
            },
            KeyType::EXTENT_OWNER_REF => Self::Owner(RootId(key.offset)),
            KeyType(other) => {
                return Err(FormatError::Value {
                    what: "extent ref item",
                    field: "type",
                    value: other.into(),
                    expected: "expected 172, 176, 178, 182 or 184",
                });
            }
        })
    }

    /// Encodes the reference as the bytes of a keyed item.
    pub fn encode_keyed(&self) -> Vec<u8> {
        match self {
            Self::TreeBlock(_) | Self::SharedBlock(_) => Vec::new(),
            Self::ExtentData(data) => data.encode(),
            Self::SharedData { count, .. } => count.to_le_bytes().to_vec(),
            Self::Owner(root) => root.0.to_le_bytes().to_vec(),
        }
    }
}

/// `EXTENT_ITEM`, key `(bytenr EXTENT_ITEM length)`, or `METADATA_ITEM`, key `(bytenr METADATA_ITEM level)`.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | refs |
/// | 8 | 8 | generation |
/// | 16 | 8 | flags |
/// | 24 | 18 | [`TreeBlockInfo`], in an `EXTENT_ITEM` with the `TREE_BLOCK` flag only |
/// | 24 or 42 | | inline references |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentItem {
    /// Number of references to the extent, inline and keyed references together.
    pub refs: u64,
    /// Transaction that allocated the extent.
    pub generation: Generation,
    /// Flags.
    pub flags: ExtentFlags,
    /// Present in an `EXTENT_ITEM` of a tree block.
    pub tree_block: Option<TreeBlockInfo>,
    /// Inline references in disk order: in ascending order of type; within a type, in descending order of address, tree
    /// id or hash.
    pub inline_refs: Vec<InlineRef>,
}

impl ExtentItem {
    /// Size of the part before the inline references in bytes, for a data extent or a skinny tree block.
    pub const HEADER_SIZE: usize = 24;

    /// Reads an item of type `EXTENT_ITEM` or `METADATA_ITEM`.
    pub fn decode(item_type: KeyType, data: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new("ExtentItem", data);
        let refs = u64::read(&mut reader)?;
        let generation = Generation::read(&mut reader)?;
        let flags = ExtentFlags::from_bits_retain(u64::read(&mut reader)?);
        let has_info = item_type == KeyType::EXTENT_ITEM && flags.contains(ExtentFlags::TREE_BLOCK);
        let tree_block = if has_info { Some(TreeBlockInfo::read(&mut reader)?) } else { None };
        let mut inline_refs = Vec::new();
        while !reader.is_empty() {
            inline_refs.push(InlineRef::read_inline(&mut reader)?);
        }
        Ok(Self { refs, generation, flags, tree_block, inline_refs })
    }

    /// Encodes the item as its bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::HEADER_SIZE + 40);
        self.refs.write(&mut out);
        self.generation.write(&mut out);
        self.flags.bits().write(&mut out);
        if let Some(info) = &self.tree_block {
            info.write(&mut out);
        }
        self.inline_refs.iter().for_each(|inline| inline.write_inline(&mut out));
        out
    }
}
