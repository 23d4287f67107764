//! Directory entries and extended attributes, which share one layout.

use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::Generation;
use crate::key::Key;

/// Longest name of a directory entry or attribute, in bytes.
pub const NAME_LEN_MAX: usize = 255;

/// Whether a directory entry may have this name: 1 to 255 bytes, no slash or zero byte, not `.` or `..`.
pub fn is_entry_name(name: &[u8]) -> bool {
    let has_good_bytes = !name.iter().any(|byte| matches!(byte, b'/' | 0));
    (1..=NAME_LEN_MAX).contains(&name.len()) && has_good_bytes && !matches!(name, b"." | b"..")
}

/// The type byte of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FileType {
    /// Regular file.
    Regular = 1,
    /// Directory or subvolume.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// FIFO.
    Fifo = 5,
    /// Socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
    /// Extended attribute.
    Xattr = 8,
}

impl FileType {
    /// The type that a byte on disk stands for, or `None` if the byte is unknown.
    pub fn from_disk(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Regular,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            8 => Self::Xattr,
            _ => return None,
        })
    }

    /// The type for the type bits of `st_mode`.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o100_000 => Self::Regular,
            0o040_000 => Self::Directory,
            0o020_000 => Self::CharDevice,
            0o060_000 => Self::BlockDevice,
            0o010_000 => Self::Fifo,
            0o140_000 => Self::Socket,
            0o120_000 => Self::Symlink,
            _ => return None,
        })
    }
}

disk_struct! {
    /// The header of a [`DirItem`], 30 bytes; the name follows.
    DirItemHeader {
        /// Key of the item that the entry refers to.
        location: Key,
        /// Transaction that wrote the entry.
        transid: Generation,
        /// Bytes of data.
        data_len: u16,
        /// Bytes of the name.
        name_len: u16,
        /// Type byte, [`FileType`].
        file_type: u8,
    }
}

/// One entry of a `DIR_ITEM` (key `(dir DIR_ITEM hash(name))`), `DIR_INDEX` (key `(dir DIR_INDEX index)`) or
/// `XATTR_ITEM` (key `(ino XATTR_ITEM hash(name))`). Names with colliding hashes share an item.
///
/// On disk: a [`DirItemHeader`], the name, the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirItem {
    /// `(ino INODE_ITEM 0)`, or `(root id ROOT_ITEM u64::MAX or 0)` for a subvolume; zero for an attribute.
    pub location: Key,
    /// Transaction that wrote the entry.
    pub transid: Generation,
    /// Type byte, [`FileType`].
    pub file_type: u8,
    /// The name.
    pub name: Vec<u8>,
    /// The attribute's value; empty for a directory entry.
    pub data: Vec<u8>,
}

/// A [`DirItem`] borrowed from the bytes of its item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItemView<'i> {
    /// Key of the item that the entry refers to, as in [`DirItem`].
    pub location: Key,
    /// Transaction that wrote the entry.
    pub transid: Generation,
    /// Type byte, [`FileType`].
    pub file_type: u8,
    /// The name.
    pub name: &'i [u8],
    /// The attribute's value; empty for a directory entry.
    pub data: &'i [u8],
}

impl<'i> DirItemView<'i> {
    /// Iterates over the entries of an item. Iteration ends after an error.
    pub fn all(item: &'i [u8]) -> impl Iterator<Item = Result<Self, FormatError>> {
        let mut reader = Reader::new("DirItem", item);
        let mut failed = false;
        std::iter::from_fn(move || {
            let entry = (!failed && !reader.is_empty()).then(|| Self::read(&mut reader))?;
            failed = entry.is_err();
            Some(entry)
        })
    }

    fn read(reader: &mut Reader<'i>) -> Result<Self, FormatError> {
        let header = DirItemHeader::read(reader)?;
        let name = reader.bytes(usize::from(header.name_len))?;
        let data = reader.bytes(usize::from(header.data_len))?;
        let DirItemHeader { location, transid, file_type, .. } = header;
        Ok(Self { location, transid, file_type, name, data })
    }

    /// Copies name and data.
    pub fn to_owned(self) -> DirItem {
        let Self { location, transid, file_type, name, data } = self;
        DirItem { location, transid, file_type, name: name.to_vec(), data: data.to_vec() }
    }
}

impl DirItem {
    /// Size of the part before the name, in bytes.
    pub const HEADER_SIZE: usize = DirItemHeader::SIZE;

    /// Reads all entries of an item.
    pub fn decode_all(data: &[u8]) -> Result<Vec<Self>, FormatError> {
        DirItemView::all(data).map(|entry| entry.map(DirItemView::to_owned)).collect()
    }

    /// Appends this entry to an item's bytes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        Self::append(out, (self.location, self.file_type), self.transid, &self.name, &self.data);
    }

    /// Appends an entry to an item's bytes. `transid` is the transaction that writes the entry.
    pub fn append(out: &mut Vec<u8>, (location, file_type): (Key, u8), transid: Generation, name: &[u8], data: &[u8]) {
        let (data_len, name_len) = (super::inode::name_len(data), super::inode::name_len(name));
        let header = DirItemHeader { location, transid, data_len, name_len, file_type };
        out.extend_from_slice(&header.encode_array());
        out.extend_from_slice(name);
        out.extend_from_slice(data);
    }
}
