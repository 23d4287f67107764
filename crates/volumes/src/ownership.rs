//! Whether the primary superblocks are still those that this filesystem read or wrote last.
//!
//! No lock keeps the kernel from attaching a loop device to an image file that a process has open, and `mount -o loop` from
//! writing to it. Two writers destroy a filesystem, so each commit looks first, and again before it writes a superblock.
//!
//! - O1. A primary superblock that is neither what was read when the device was opened nor what was written last belongs to
//!   somebody else: it is never overwritten.
//! - O2. A superblock that cannot be read proves nothing: devices fail, and the other copies carry on.

use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{Error, Result};

use crate::Volumes;
use crate::set::{Member, Stat};

impl Volumes {
    /// Fails where something else has written a superblock since this filesystem did (O1).
    pub fn check_superblocks_are_ours(&self) -> Result<()> {
        self.members().iter().try_for_each(|member| check(member))
    }
}

fn check(member: &Member) -> Result<()> {
    let Some(backend) = &member.backend else { return Ok(()) };
    let ours = member.primary.lock();
    let Some(ours) = ours.as_deref() else { return Ok(()) };
    let mut found = vec![0; SUPERBLOCK_SIZE];
    for _ in 0..ATTEMPTS {
        if backend.read_at(SUPERBLOCK_OFFSETS[0], &mut found).is_err() {
            // O2
            member.count(Stat::Read);
            return Ok(());
        }
        if found == ours {
            return Ok(());
        }
    }
    let generation = |raw: &[u8]| match Superblock::decode(raw) {
        Ok(superblock) => format!("generation {}", superblock.generation),
        Err(_) => "no superblock".to_owned(),
    };
    let (found, ours) = (generation(&found), generation(ours));
    let device = backend.describe();
    tracing::error!(
        "{device}: SOMETHING ELSE WRITES TO THIS FILESYSTEM: its superblock is {found}, and {ours} was written last. \
         Nothing more is written."
    );
    Err(Error::Refused {
        what: format!("{device} was changed by something else: its superblock is {found}, and {ours} was written last"),
        hint: "unmount it everywhere, look whether a loop device is attached to it (losetup -j), and run `ubtrfs check`",
    })
}

/// What the device holds, as far as it can be read.
pub(crate) fn read_primary(backend: &dyn ubtrfs_device::Device) -> Option<Vec<u8>> {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    backend.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).ok().map(|()| raw)
}

/// A transfer may go wrong once.
const ATTEMPTS: usize = 3;
