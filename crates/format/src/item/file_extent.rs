//! File extent items, which locate a file's bytes.

use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::{Generation, Logical};

/// How an extent is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Compression {
    /// The extent is not compressed.
    #[default]
    None = 0,
    /// zlib stream.
    Zlib = 1,
    /// btrfs's LZO framing.
    Lzo = 2,
    /// zstd frame.
    Zstd = 3,
}

impl Compression {
    /// The byte on disk.
    pub fn to_disk(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Zlib => 1,
            Self::Lzo => 2,
            Self::Zstd => 3,
        }
    }

    /// The name, as options, properties and the output of btrfs-progs have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Lzo => "lzo",
            Self::Zstd => "zstd",
        }
    }

    /// The algorithm that a byte on disk stands for, or `None` if the byte is unknown.
    pub fn from_disk(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::None,
            1 => Self::Zlib,
            2 => Self::Lzo,
            3 => Self::Zstd,
            _ => return None,
        })
    }
}

disk_struct! {
    /// The fields of a regular or preallocated extent that follow the header, 32 bytes.
    #[derive(Copy)]
    RegularExtent {
        /// Start of the extent on disk; 0 for a hole.
        disk_bytenr: Logical,
        /// Length of the extent on disk (compressed length), 0 for a hole.
        disk_num_bytes: u64,
        /// Offset of this file range in the (decompressed) extent.
        offset: u64,
        /// Length of this file range.
        num_bytes: u64,
    }
}

/// The part of a file extent that follows its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileExtentBody {
    /// Data inside the leaf (compressed if the header says so).
    Inline(Vec<u8>),
    /// Data on disk, or a hole.
    Regular(RegularExtent),
    /// Allocated but not written: reads as zeros.
    Prealloc(RegularExtent),
}

/// `EXTENT_DATA`, key `(ino EXTENT_DATA file-offset)`.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | generation |
/// | 8 | 8 | ram_bytes |
/// | 16 | 1 | compression |
/// | 17 | 1 | encryption |
/// | 18 | 2 | other encoding |
/// | 20 | 1 | type: 0 inline, 1 regular, 2 prealloc |
/// | 21 | | inline data, or [`RegularExtent`] |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Transaction that allocated the extent.
    pub generation: Generation,
    /// Length of the whole decompressed extent.
    pub ram_bytes: u64,
    /// Compression of the data.
    pub compression: Compression,
    /// Always 0 so far.
    pub encryption: u8,
    /// Always 0 so far.
    pub other_encoding: u16,
    /// The data itself, or its place.
    pub body: FileExtentBody,
}

impl FileExtent {
    /// Size of the part before inline data, in bytes.
    pub const HEADER_SIZE: usize = 21;
    /// Size of the item of a regular or preallocated extent, in bytes.
    pub const REGULAR_SIZE: usize = Self::HEADER_SIZE + RegularExtent::SIZE;

    /// Reads an item.
    pub fn decode(data: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new("FileExtent", data);
        let generation = Generation::read(&mut reader)?;
        let ram_bytes = u64::read(&mut reader)?;
        let compression = u8::read(&mut reader)?;
        let compression = Compression::from_disk(compression).ok_or(FormatError::Value {
            what: "FileExtent",
            field: "compression",
            value: compression.into(),
            expected: "expected 0 to 3",
        })?;
        let encryption = u8::read(&mut reader)?;
        let other_encoding = u16::read(&mut reader)?;
        let body = match u8::read(&mut reader)? {
            0 => FileExtentBody::Inline(reader.rest().to_vec()),
            1 => FileExtentBody::Regular(RegularExtent::read(&mut reader)?),
            2 => FileExtentBody::Prealloc(RegularExtent::read(&mut reader)?),
            other => {
                return Err(FormatError::Value {
                    what: "FileExtent",
                    field: "type",
                    value: other.into(),
                    expected: "expected 0 to 2",
                });
            }
        };
        Ok(Self { generation, ram_bytes, compression, encryption, other_encoding, body })
    }

    /// Encodes the item as its bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::REGULAR_SIZE);
        self.generation.write(&mut out);
        self.ram_bytes.write(&mut out);
        self.compression.to_disk().write(&mut out);
        self.encryption.write(&mut out);
        self.other_encoding.write(&mut out);
        match &self.body {
            FileExtentBody::Inline(data) => {
                0u8.write(&mut out);
                out.extend_from_slice(data);
            }
            FileExtentBody::Regular(extent) => {
                1u8.write(&mut out);
                extent.write(&mut out);
            }
            FileExtentBody::Prealloc(extent) => {
                2u8.write(&mut out);
                extent.write(&mut out);
            }
        }
        out
    }

    /// Number of bytes of the file that this item covers.
    pub fn num_bytes(&self) -> u64 {
        match &self.body {
            FileExtentBody::Inline(_) => self.ram_bytes,
            FileExtentBody::Regular(extent) | FileExtentBody::Prealloc(extent) => extent.num_bytes,
        }
    }

    /// The extent on disk that this item refers to; `None` for inline data and holes.
    pub fn disk_extent(&self) -> Option<RegularExtent> {
        match &self.body {
            FileExtentBody::Regular(extent) | FileExtentBody::Prealloc(extent) if extent.disk_bytenr.0 != 0 => {
                Some(*extent)
            }
            _ => None,
        }
    }
}
