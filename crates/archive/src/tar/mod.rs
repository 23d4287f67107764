//! tar archives: ustar, GNU and pax, read and written as streams.
//!
//! Paths and links of members are returned as the archive has them. `import` confines the paths to its target
//! directory, and `export` chooses the names that it writes.
//!
//! A header block, 512 bytes:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 100 | name |
//! | 100 | 8 | mode |
//! | 108 | 8 | uid |
//! | 116 | 8 | gid |
//! | 124 | 12 | size |
//! | 136 | 12 | mtime |
//! | 148 | 8 | checksum: sum of all bytes, with this field as spaces |
//! | 156 | 1 | type |
//! | 157 | 100 | link name |
//! | 257 | 8 | "ustar\0" "00" or GNU's "ustar  \0" |
//! | 265 | 64 | user and group names |
//! | 329 | 16 | device major, minor |
//! | 345 | 155 | prefix of the name (ustar), or times and sparse map (GNU) |

pub(crate) mod acl;
pub(crate) mod compressor;
mod header;
mod in_place;
pub(crate) mod input;
pub(crate) mod read;
mod stream;
pub(crate) mod write;

use ubtrfs_format::item::Timespec;

/// Length of a header; data and headers are padded to multiples of this length.
pub(crate) const BLOCK: usize = 512;

/// The type of an archive member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberKind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Dir,
    Fifo,
}

/// A member of an archive, without its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArchiveMember {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: MemberKind,
    /// Target of a symbolic link, or path of the member that a hard link links to.
    pub(crate) link: Vec<u8>,
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Timespec,
    pub(crate) atime: Option<Timespec>,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Size of the file.
    pub(crate) size: u64,
    /// The ranges of the file that have data, as offset and length; `None` if the file has no
    /// holes.
    pub(crate) sparse: Option<Vec<(u64, u64)>>,
    /// Extended attributes: names with their namespace, and values.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl ArchiveMember {
    /// Returns the ranges of the file that have data, as offset and length.
    pub(crate) fn data_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let whole = self.sparse.is_none().then_some((0, self.size));
        whole.into_iter().chain(self.sparse.iter().flatten().copied())
    }

    /// Length of the member's data, without holes.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_ranges().map(|(_, len)| len).sum()
    }

    /// The approximate memory that the member takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let xattrs: usize = self.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let sparse = self.sparse.as_ref().map_or(0, |ranges| size_of_val(ranges.as_slice()));
        size_of::<Self>() + self.path.len() + self.link.len() + xattrs + sparse
    }
}

/// The number of bytes from `len` to the next multiple of [`BLOCK`].
pub(crate) fn padding(len: u64) -> usize {
    // The result is less than a block, so it fits into a `usize`.
    (len.wrapping_neg() % BLOCK as u64) as usize
}
