//! Detects another writer: compares the primary superblocks with the last ones that this process read or wrote.
//!
//! No lock prevents the kernel from attaching a loop device to an open image file and writing to it (`mount -o loop`).
//! Two writers destroy a filesystem. So each commit checks at its start, and again before it writes a superblock.
//!
//! Invariants:
//! - O1. A valid primary superblock that this process neither read at open nor wrote is from another writer. It is
//!   never overwritten.
//! - O2. Three cases are device failures, not another writer: the superblock cannot be read; it belongs to this
//!   filesystem and is invalid; it is the one from before the last write. They are counted, and the next superblock
//!   write repairs them.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::check_superblock;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use crate::Volumes;
use crate::set::{Member, Stat};

/// The expected content of a device's primary superblock.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// The bytes read at open or written last; `None` if unknown.
    last: Option<Vec<u8>>,
    /// The bytes before the last write.
    before: Option<Vec<u8>>,
}

impl Primary {
    /// Reads the device's current primary superblock. A failed read leaves it unknown.
    pub(crate) fn read(backend: &dyn ubtrfs_device::Device) -> Self {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        Self { last: backend.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).ok().map(|()| raw), before: None }
    }

    /// Notes the start of a write. If the write fails, the content stays unknown.
    pub(crate) fn begin_write(&mut self) {
        self.before = self.last.take();
    }

    /// Notes a successful write.
    pub(crate) fn wrote(&mut self, raw: &[u8]) {
        self.last = Some(raw.to_vec());
    }
}

impl Volumes {
    /// Fails if another writer has changed a primary superblock (O1).
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
            "{}: the last superblock written is damaged or lost; the next commit writes it again",
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
        "{device}: ANOTHER PROGRAM OR THE KERNEL WRITES TO THIS FILESYSTEM: its superblock has {found}, ubtrfs wrote \
         {ours} last. ubtrfs writes nothing more."
    );
    Err(Error::Refused {
        what: format!("{device} was changed by something else: its superblock has {found}, not {ours}"),
        hint: "unmount it everywhere, look for a loop device over it with `losetup -j`, and run `ubtrfs check`",
    })
}

/// Whether `found` is an invalid superblock of the filesystem of `ours` (O2). Another writer leaves valid ones.
fn is_damaged_copy(found: &[u8], ours: &[u8]) -> bool {
    let (Ok(found_sb), Ok(ours_sb)) = (Superblock::decode(found), Superblock::decode(ours)) else { return false };
    found_sb.magic == ours_sb.magic && found_sb.fsid == ours_sb.fsid && check_superblock(&found_sb, found).is_err()
}

/// Number of reads, because a single transfer may go wrong.
const ATTEMPTS: usize = 3;
