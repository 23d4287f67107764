//! Root items, which locate each tree's root node, and the names of subvolumes.

use bitflags::bitflags;
use uuid::Uuid;

use super::inode::{InodeItem, Timespec, name_len};
use crate::codec::{Field, Reader};
use crate::disk_struct;
use crate::error::FormatError;
use crate::ids::{Generation, Logical};
use crate::key::Key;

bitflags! {
    /// Flags of a root item.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RootFlags: u64 {
        /// Read-only subvolume.
        const RDONLY = 1 << 0;
        /// The subvolume is being deleted.
        const DEAD = 1 << 48;
    }
}

disk_struct! {
    /// `ROOT_ITEM`, key `(root id ROOT_ITEM 0 or the transaction of the snapshot)`, 439 bytes.
    ///
    /// Filesystems from before Linux 3.6 hold the first 239 bytes only; [`RootItem::decode_any`] reads both.
    RootItem {
        /// The tree's own inode (mostly unused).
        inode: InodeItem,
        /// Transaction of the last change.
        generation: Generation,
        /// Inode number of the root directory: 256 for subvolumes, else 0.
        root_dirid: u64,
        /// Address of the root node.
        bytenr: Logical,
        /// Unused.
        byte_limit: u64,
        /// Total size of the tree's nodes in bytes. Linux computes the size of its global reserve from this field.
        bytes_used: u64,
        /// Transaction of the last snapshot of this subvolume, or of its own creation as a snapshot.
        last_snapshot: Generation,
        /// Bits of [`RootFlags`].
        flags: u64,
        /// Reference count: 1, or 0 while the subvolume is being deleted.
        refs: u32,
        /// Progress of a deletion.
        drop_progress: Key,
        /// Level of the node that `drop_progress` refers to.
        drop_level: u8,
        /// Level of the root node.
        level: u8,
        /// Equal to `generation` if the fields after this one are valid.
        generation_v2: Generation,
        /// The subvolume's UUID.
        uuid: Uuid,
        /// UUID of the snapshot's source.
        parent_uuid: Uuid,
        /// UUID of the subvolume that was sent.
        received_uuid: Uuid,
        /// Transaction of the last change to the content of the subvolume.
        ctransid: Generation,
        /// Transaction of creation.
        otransid: Generation,
        /// Transaction of the sent subvolume, on the sender's side.
        stransid: Generation,
        /// Transaction of receiving.
        rtransid: Generation,
        /// Time of the last change.
        ctime: Timespec,
        /// Time of creation.
        otime: Timespec,
        /// Time of sending.
        stime: Timespec,
        /// Time of receiving.
        rtime: Timespec,
        /// Reserved.
        reserved: [u64; 8],
    }
}

impl RootItem {
    /// Size of the old layout in bytes; it ends before `generation_v2`.
    pub const SIZE_V1: usize = 239;

    /// Reads either layout. Fields are zero if the old layout lacks them or a mismatch of `generation_v2` makes them
    /// invalid.
    pub fn decode_any(data: &[u8]) -> Result<Self, FormatError> {
        if data.len() >= Self::SIZE {
            let mut item = Self::decode(data)?;
            if item.generation != item.generation_v2 {
                item.clear_v2();
            }
            return Ok(item);
        }
        if data.len() < Self::SIZE_V1 {
            return Err(FormatError::Short { what: "RootItem", need: Self::SIZE_V1, have: data.len() });
        }
        let mut padded = data.get(..Self::SIZE_V1).unwrap_or_default().to_vec();
        padded.resize(Self::SIZE, 0);
        Self::decode(&padded)
    }

    fn clear_v2(&mut self) {
        self.generation_v2 = self.generation;
        for uuid in [&mut self.uuid, &mut self.parent_uuid, &mut self.received_uuid] {
            *uuid = Uuid::nil();
        }
        for transid in [&mut self.ctransid, &mut self.otransid, &mut self.stransid, &mut self.rtransid] {
            *transid = Generation(0);
        }
        for time in [&mut self.ctime, &mut self.otime, &mut self.stime, &mut self.rtime] {
            *time = Timespec::default();
        }
    }
}

/// `ROOT_REF`, key `(parent root ROOT_REF child root)`, and `ROOT_BACKREF`, key `(child ROOT_BACKREF parent)`:
/// dirid u64, sequence u64, name_len u16, name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootRef {
    /// Directory that holds the name.
    pub dirid: u64,
    /// Index of the name in that directory.
    pub sequence: u64,
    /// The name.
    pub name: Vec<u8>,
}

impl RootRef {
    /// Reads an item.
    pub fn decode(data: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new("RootRef", data);
        let dirid = u64::read(&mut reader)?;
        let sequence = u64::read(&mut reader)?;
        let name_len = u16::read(&mut reader)?;
        Ok(Self { dirid, sequence, name: reader.bytes(usize::from(name_len))?.to_vec() })
    }

    /// Encodes the item as its bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.name.len().saturating_add(18));
        self.dirid.write(&mut out);
        self.sequence.write(&mut out);
        name_len(&self.name).write(&mut out);
        out.extend_from_slice(&self.name);
        out
    }
}
