//! Inode items and the names that refer to inodes.

use std::time::SystemTime;

use bitflags::bitflags;

use crate::clock::fixed_clock;
use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::Generation;

disk_struct! {
    /// Seconds and nanoseconds since 1970.
    #[derive(Copy, Default, PartialOrd, Ord, Hash)]
    Timespec {
        /// Seconds.
        sec: i64,
        /// Nanoseconds, below 1,000,000,000.
        nsec: u32,
    }
}

disk_struct! {
    /// `INODE_ITEM`, key `(ino INODE_ITEM 0)`, 160 bytes.
    InodeItem {
        /// Transaction that created the inode.
        generation: Generation,
        /// Transaction that last changed the inode.
        transid: Generation,
        /// File size in bytes; for a directory, twice the sum of its entries' name lengths.
        size: u64,
        /// Bytes allocated, as `st_blocks * 512`; inline data counts with its length.
        nbytes: u64,
        /// Used by inodes of the free space cache (v1); 0 in other inodes.
        block_group: u64,
        /// Hard links.
        nlink: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// `st_mode`.
        mode: u32,
        /// `st_rdev` in the kernel's 64-bit encoding (`major << 20 | minor`).
        rdev: u64,
        /// Bits of [`InodeFlags`]; unknown bits are kept.
        flags: u64,
        /// Change counter, as NFS needs it.
        sequence: u64,
        /// Reserved.
        reserved: [u64; 4],
        /// Last access.
        atime: Timespec,
        /// Last change of attributes.
        ctime: Timespec,
        /// Last change of content.
        mtime: Timespec,
        /// Creation.
        otime: Timespec,
    }
}

impl Timespec {
    /// The time that [`fix_clock`](crate::clock::fix_clock) set, or that of the system clock.
    pub fn now() -> Self {
        fixed_clock().unwrap_or_else(|| SystemTime::now().into())
    }
}

impl From<SystemTime> for Timespec {
    /// Converts a time to its form on disk. A time that needs more than 64 bits of seconds becomes the nearest time
    /// that fits.
    fn from(time: SystemTime) -> Self {
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => Self { sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nsec: after.subsec_nanos() },
            Err(error) => {
                let before = error.duration();
                let whole = i64::try_from(before.as_secs()).map_or(i64::MIN, i64::saturating_neg);
                // A time before 1970 is stored as the preceding whole second, with nanoseconds that count forward from
                // that second.
                match NANOS_PER_SEC.checked_sub(before.subsec_nanos()).filter(|nsec| *nsec < NANOS_PER_SEC) {
                    None => Self { sec: whole, nsec: 0 },
                    Some(nsec) => Self { sec: whole.saturating_sub(1), nsec },
                }
            }
        }
    }
}

const NANOS_PER_SEC: u32 = 1_000_000_000;

impl InodeItem {
    /// The flags, unknown bits included.
    pub fn flags(&self) -> InodeFlags {
        InodeFlags::from_bits_retain(self.flags)
    }
}

bitflags! {
    /// Flags of an inode.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InodeFlags: u64 {
        /// No data checksums.
        const NODATASUM = 1 << 0;
        /// Data is overwritten in place.
        const NODATACOW = 1 << 1;
        /// Read-only.
        const READONLY = 1 << 2;
        /// Never compress.
        const NOCOMPRESS = 1 << 3;
        /// Has preallocated extents.
        const PREALLOC = 1 << 4;
        /// Writes are synchronous.
        const SYNC = 1 << 5;
        /// Cannot be changed.
        const IMMUTABLE = 1 << 6;
        /// Can only be appended to.
        const APPEND = 1 << 7;
        /// Not dumped.
        const NODUMP = 1 << 8;
        /// Access times are not updated.
        const NOATIME = 1 << 9;
        /// Directory changes are synchronous.
        const DIRSYNC = 1 << 10;
        /// Compress.
        const COMPRESS = 1 << 11;
        /// Only in the inode of a root item: the fields `flags` and `byte_limit` of the root item are initialized.
        const ROOT_ITEM_INIT = 1 << 31;
        /// fs-verity is enabled. Programs that do not know this flag may only read the file.
        const RO_VERITY = 1 << 32;
    }
}

disk_struct! {
    /// The header of an [`InodeRef`], 10 bytes; the name follows.
    InodeRefHeader {
        /// Sequence number of the name in its directory.
        index: u64,
        /// Bytes of the name.
        name_len: u16,
    }
}

/// One name in an `INODE_REF` item, key `(ino INODE_REF parent-ino)`: an [`InodeRefHeader`], then the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeRef {
    /// Sequence number of the name in its directory (the offset of its `DIR_INDEX`).
    pub index: u64,
    /// The name.
    pub name: Vec<u8>,
}

impl InodeRef {
    /// Reads all names of an item.
    pub fn decode_all(data: &[u8]) -> Result<Vec<Self>, FormatError> {
        let mut reader = Reader::new("InodeRef", data);
        let mut refs = Vec::new();
        while !reader.is_empty() {
            let (index, name) = Self::read(&mut reader)?;
            refs.push(Self { index, name: name.to_vec() });
        }
        Ok(refs)
    }

    /// The index of this name in an item, or `None` if the item does not hold the name.
    pub fn find_index(data: &[u8], name: &[u8]) -> Result<Option<u64>, FormatError> {
        let mut reader = Reader::new("InodeRef", data);
        while !reader.is_empty() {
            let (index, found) = Self::read(&mut reader)?;
            if found == name {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    fn read<'i>(reader: &mut Reader<'i>) -> Result<(u64, &'i [u8]), FormatError> {
        let InodeRefHeader { index, name_len } = InodeRefHeader::read(reader)?;
        Ok((index, reader.bytes(usize::from(name_len))?))
    }

    /// Appends this name to an item's bytes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        Self::append(out, self.index, &self.name);
    }

    /// Appends a name with its index to an item's bytes.
    pub fn append(out: &mut Vec<u8>, index: u64, name: &[u8]) {
        out.extend_from_slice(&InodeRefHeader { index, name_len: name_len(name) }.encode_array());
        out.extend_from_slice(name);
    }
}

/// One name in an `INODE_EXTREF` item, key `(ino INODE_EXTREF hash(parent, name))`: parent u64, index u64,
/// name_len u16, name. Used when the `INODE_REF` item for that parent is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeExtref {
    /// Inode number of the directory.
    pub parent: u64,
    /// Sequence number of the name in its directory.
    pub index: u64,
    /// The name.
    pub name: Vec<u8>,
}

impl InodeExtref {
    /// Reads all names of an item.
    pub fn decode_all(data: &[u8]) -> Result<Vec<Self>, FormatError> {
        let mut reader = Reader::new("InodeExtref", data);
        let mut refs = Vec::new();
        while !reader.is_empty() {
            let parent = u64::read(&mut reader)?;
            let index = u64::read(&mut reader)?;
            let name_len = u16::read(&mut reader)?;
            refs.push(Self { parent, index, name: reader.bytes(usize::from(name_len))?.to_vec() });
        }
        Ok(refs)
    }

    /// Appends this name to an item's bytes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        self.parent.write(out);
        self.index.write(out);
        name_len(&self.name).write(out);
        out.extend_from_slice(&self.name);
    }
}

/// The length field of a name. Callers check that names have at most 255 bytes.
pub(super) fn name_len(name: &[u8]) -> u16 {
    u16::try_from(name.len()).unwrap_or(u16::MAX)
}
