//! Whether the primary superblocks are still those that this filesystem read or wrote last.
//!
//! No lock keeps the kernel from attaching a loop device to an image file that a process has open, and `mount -o loop` from
//! writing to it. Two writers destroy a filesystem, so each commit looks first, and again before it writes a superblock.
//!
//! - O1. A primary superblock that is neither what was read when the device was opened nor what was written last belongs to
//!   somebody else: it is never overwritten.
//! - O2. A superblock that cannot be read proves nothing: devices fail, and the other copies carry on. Nor does one of this
//!   filesystem whose checksum is wrong, or the one that was there before the last write: the device damaged or lost what was
//!   written, and the next superblock mends it.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::check_superblock;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use crate::Volumes;
use crate::set::{Member, Stat};

/// What the primary superblock of a device may hold.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// What was read at open or written last; `None` where that is not known.
    last: Option<Vec<u8>>,
    /// What was there before.
    before: Option<Vec<u8>>,
}

impl Primary {
    /// What the device holds now, as far as it can be read.
    pub(crate) fn read(backend: &dyn ubtrfs_device::Device) -> Self {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        Self { last: backend.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).ok().map(|()| raw), before: None }
    }

    /// A write begins. What it leaves is not known if it fails.
    pub(crate) fn begin_write(&mut self) {
        self.before = self.last.take();
    }

    /// The write ended.
    pub(crate) fn wrote(&mut self, raw: &[u8]) {
        self.last = Some(raw.to_vec());
    }
}

impl Volumes {
    /// Fails where something else has written a superblock since this filesystem did (O1).
    pub fn check_superblocks_are_ours(&self) -> Result<()> {
        self.members().iter().try_for_each(|member| check(member))
    }
}

fn check(member: &Member) -> Result<()> {
    let Some(backend) = &member.backend else { return Ok(()) };
    let primary = member.primary.lock();
    let Some(ours) = primary.last.as_deref() else { return Ok(()) };
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
    if primary.before.as_ref() == Some(&found) || is_damaged_copy(&found, ours) {
        tracing::warn!(
            "{}: the superblock that was written last is damaged or lost; it is written anew",
            backend.describe()
        );
        member.count(Stat::Corruption);
        return Ok(());
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

/// Whether a superblock is of the filesystem of `ours` and not valid (O2). Another writer leaves valid ones.
fn is_damaged_copy(found: &[u8], ours: &[u8]) -> bool {
    let (Ok(found_sb), Ok(ours_sb)) = (Superblock::decode(found), Superblock::decode(ours)) else { return false };
    found_sb.magic == ours_sb.magic && found_sb.fsid == ours_sb.fsid && check_superblock(&found_sb, found).is_err()
}

/// A transfer may go wrong once.
const ATTEMPTS: usize = 3;
