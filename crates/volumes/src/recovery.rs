//! Rewrites bad copies of a superblock from the newest good one.
//!
//! Invariants:
//! - I1. The source copy is never written, so a valid superblock always exists.
//! - I2. The source is the superblock that [`find`](crate::superblock::find) selects. The source is never a copy of
//!   an older filesystem, and there is no source if the copies belong to different filesystems.

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, Superblock};

use crate::superblock::{Unusable, find, fits, read_mirror, write_copy};

/// The copies of a device's superblock.
#[derive(Clone, Debug)]
pub struct SuperCopies {
    newest: Superblock,
    /// All copies that fit on the device; the first one is at 64 KiB.
    pub copies: Vec<SuperCopy>,
}

/// A copy of a superblock.
#[derive(Clone, Debug)]
pub struct SuperCopy {
    /// Offset on the device.
    pub offset: u64,
    /// The problem of a bad copy; `None` for a good copy.
    pub problem: Option<String>,
}

impl SuperCopies {
    /// Examines all copies. Fails if no copy is good.
    pub fn examine(device: &dyn Device) -> Result<Self> {
        let newest = find(device, false)?.superblock;
        let end = newest.dev_item.total_bytes.min(device.len_bytes());
        let copies = SUPERBLOCK_OFFSETS.iter().enumerate().filter(|(_, offset)| fits(**offset, end));
        let examine = |(mirror, offset): (usize, &u64)| SuperCopy {
            offset: *offset,
            problem: problem_of(read_mirror(device, mirror), &newest),
        };
        let copies = copies.map(examine).collect();
        Ok(Self { newest, copies })
    }

    /// The bad copies.
    pub fn bad(&self) -> impl Iterator<Item = &SuperCopy> {
        self.copies.iter().filter(|copy| copy.problem.is_some())
    }

    /// Rewrites the bad copies durably (I1).
    pub fn recover(&self, device: &dyn Device) -> Result<()> {
        if self.copies.iter().all(|copy| copy.problem.is_some()) {
            return Err(Error::Refused {
                what: format!("no superblock of {} inside of its size is good", device.describe()),
                hint: "the filesystem cannot be recovered this way; restore it from a backup",
            });
        }
        for copy in self.bad() {
            write_copy(device, &self.newest, copy.offset)?;
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
