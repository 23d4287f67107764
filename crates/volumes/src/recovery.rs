//! Bad copies of a superblock, written anew from the newest good one.
//!
//! Invariants:
//! - I1. The copy that the others are made of is never written, so at any moment a valid superblock exists.
//! - I2. Only what [`find`](crate::superblock::find) takes for the device's own superblock is a source: never the copy of an older
//!   filesystem, and none where copies disagree about the filesystem.

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, Superblock};

use crate::superblock::{Unusable, find, fits, read_mirror};

/// The copies of a device's superblock.
#[derive(Clone, Debug)]
pub struct SuperCopies {
    newest: Superblock,
    /// Each that the device has room for, the first one at 64 KiB.
    pub copies: Vec<SuperCopy>,
}

/// One copy.
#[derive(Clone, Debug)]
pub struct SuperCopy {
    /// Where it lies on the device.
    pub offset: u64,
    /// What is wrong with it.
    pub problem: Option<String>,
}

impl SuperCopies {
    /// Looks at all copies. Fails where none is good.
    pub fn examine(device: &dyn Device) -> Result<Self> {
        let newest = find(device)?.superblock;
        let end = newest.dev_item.total_bytes.min(device.len_bytes());
        let copies = SUPERBLOCK_OFFSETS.iter().enumerate().filter(|(_, offset)| fits(**offset, end));
        let examine = |(mirror, offset): (usize, &u64)| SuperCopy {
            offset: *offset,
            problem: problem_of(read_mirror(device, mirror), &newest),
        };
        let copies = copies.map(examine).collect();
        Ok(Self { newest, copies })
    }

    /// Copies that are to be written.
    pub fn bad(&self) -> impl Iterator<Item = &SuperCopy> {
        self.copies.iter().filter(|copy| copy.problem.is_some())
    }

    /// Writes the bad copies anew, durably (I1).
    pub fn recover(&self, device: &dyn Device) -> Result<()> {
        for copy in self.bad() {
            let raw = Superblock { bytenr: copy.offset, ..self.newest.clone() }.encode_with_csum();
            device
                .write_at(copy.offset, &raw)
                .map_err(|source| Error::io("write", device.describe(), copy.offset, raw.len() as u64, source))?;
        }
        device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))
    }
}

fn problem_of(copy: Result<Superblock, Unusable>, newest: &Superblock) -> Option<String> {
    match copy {
        Err(Unusable::Io(error)) => Some(format!("cannot be read: {error}")),
        Err(Unusable::NotBtrfs) => Some("is no superblock of btrfs".to_owned()),
        Err(Unusable::Invalid { cause, .. }) => Some(cause.to_string()),
        Ok(copy) if copy.fsid != newest.fsid => Some(format!("is of another filesystem, {}", copy.fsid)),
        Ok(copy) if copy.generation != newest.generation => {
            Some(format!("is of generation {}, the newest is of {}", copy.generation, newest.generation))
        }
        Ok(_) => None,
    }
}
