//! The `btrfs.compression` property: an attribute that sets the compression of a file, or of the new files of a
//! directory.

use ubtrfs_format::Ino;
use ubtrfs_format::item::{Compression, InodeFlags};
use ubtrfs_transaction::Tree;

use crate::error::{Error, Result};
use crate::inode::state::{CompressionProperty, InodeState};
use crate::inode::xattr;

/// The attribute's name.
pub(crate) const COMPRESSION: &[u8] = b"btrfs.compression";

/// A valid value of the property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PropertyValue {
    /// The empty value: removes the property and its flags.
    Reset,
    /// The value `no` or `none`: never compress.
    Never,
    /// Compress with this method.
    Method(Compression),
}

impl PropertyValue {
    pub(crate) fn parse(value: &[u8]) -> Result<Self> {
        Ok(match value {
            b"" => Self::Reset,
            b"no" | b"none" => Self::Never,
            _ if value.starts_with(b"zlib") => Self::Method(Compression::Zlib),
            _ if value.starts_with(b"lzo") => Self::Method(Compression::Lzo),
            _ if value.starts_with(b"zstd") => Self::Method(Compression::Zstd),
            _ => return Err(Error::InvalidArgument("expected zlib, lzo, zstd, no or none")),
        })
    }

    /// Sets the inode's flags for compression, and its method.
    pub(crate) fn apply(self, state: &mut InodeState) {
        let mut flags = state.item.flags();
        flags.remove(InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS);
        state.compression = CompressionProperty::Unset;
        match self {
            Self::Reset => {}
            Self::Never => flags.insert(InodeFlags::NOCOMPRESS),
            Self::Method(method) => {
                flags.insert(InodeFlags::COMPRESS);
                state.compression = CompressionProperty::Method(method);
            }
        }
        state.item.flags = flags.bits();
    }
}

/// Reads the method of an inode's property. Only inodes with the flag `COMPRESS` can have the property.
pub(crate) fn load_compression(tree: &Tree, ino: Ino, flags: InodeFlags) -> Result<CompressionProperty> {
    if !flags.contains(InodeFlags::COMPRESS) {
        return Ok(CompressionProperty::Unset);
    }
    let value = xattr::read(tree, ino, COMPRESSION)?;
    Ok(match value.as_deref().map(PropertyValue::parse) {
        Some(Ok(PropertyValue::Method(method))) => CompressionProperty::Method(method),
        // A newer program may have set a value that this program does not know. Then the inode's flag alone decides.
        _ => CompressionProperty::Unset,
    })
}
