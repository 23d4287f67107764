//! Detects other writers, and devices that were removed or replaced: compares the primary superblocks with the last
//! superblocks that this process read or wrote. (`device/src/file.rs` detects image files that became shorter.)
//!
//! No lock prevents the kernel from attaching a loop device to an open image file and writing to it (`mount -o
//! loop`). Two writers destroy a filesystem. So each commit checks at its start, and again before it writes a
//! superblock; data and nodes are written only if the last check is younger than [`RECENT`]. A gap remains: if
//! another writer writes a superblock within [`RECENT`] after a check, or during a write, only the next check detects
//! it, and by then blocks of the other writer may be overwritten. Another writer that has not written a superblock
//! yet is not detected.
//!
//! Invariants:
//! - O1. A valid primary superblock that this process neither read at open nor wrote is from another writer. Such a
//!   superblock is never overwritten.
//! - O2. Three cases count as device failures, not as another writer: the superblock cannot be read; it is an invalid
//!   superblock of this filesystem; it is the superblock that the last write replaced. The device's statistics count
//!   each of the three cases, and the next write of the superblock repairs the device's copy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::check_superblock;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use crate::Volumes;
use crate::set::{Member, Stat};

/// The expected content of a device's primary superblock.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// The bytes read at open or written last, or `None` if the bytes are unknown.
    last: Option<Vec<u8>>,
    /// The bytes that the last write replaced.
    before: Option<Vec<u8>>,
}

impl Primary {
    /// Reads the device's current primary superblock. If the read fails, the content is unknown.
    pub(crate) fn read(backend: &dyn ubtrfs_device::Device) -> Self {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        Self { last: backend.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).ok().map(|()| raw), before: None }
    }

    /// Notes that a write of the superblock begins. The content is unknown until the write succeeds.
    pub(crate) fn begin_write(&mut self) {
        self.before = self.last.take();
    }

    /// Notes that the superblock `raw` was written.
    pub(crate) fn wrote(&mut self, raw: &[u8]) {
        self.last = Some(raw.to_vec());
    }
}

/// The time of the last check.
#[derive(Debug)]
pub(crate) struct LastCheck {
    opened: Instant,
    /// Microseconds from `opened` to the last check; 0 before the first check.
    micros: AtomicU64,
}

impl Default for LastCheck {
    fn default() -> Self {
        Self { opened: Instant::now(), micros: AtomicU64::new(0) }
    }
}

impl LastCheck {
    fn micros_since_open(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn is_recent(&self) -> bool {
        let last = self.micros.load(Ordering::Relaxed);
        last > 0 && self.micros_since_open().saturating_sub(last) < RECENT.as_micros() as u64
    }
}

impl Volumes {
    /// Fails if another writer has written a superblock (O1), or if an image file was removed, replaced or truncated.
    pub fn check_superblocks_are_ours(&self) -> Result<()> {
        let now = self.last_look.micros_since_open().max(1);
        self.members().iter().try_for_each(|member| check(member))?;
        self.last_look.micros.store(now, Ordering::Relaxed);
        Ok(())
    }

    /// Whether [`Volumes::check_superblocks_are_ours`] succeeded a moment ago (`RECENT`).
    pub fn are_superblocks_checked_recently(&self) -> bool {
        self.last_look.is_recent()
    }

    /// Fails if an image file was removed, replaced or truncated since it was opened. Writes to a removed image are
    /// lost when the image is closed.
    pub fn check_devices_in_place(&self) -> Result<()> {
        self.members().iter().filter_map(|member| member.backend.as_deref()).try_for_each(check_in_place)
    }
}

fn check_in_place(backend: &dyn ubtrfs_device::Device) -> Result<()> {
    backend.check_in_place().map_err(|source| {
        let device = backend.describe();
        tracing::error!("{device}: {source}. Nothing more is written.");
        Error::io("check", device, 0, backend.len_bytes(), source)
    })
}

fn check(member: &Member) -> Result<()> {
    let Some(backend) = &member.backend else { return Ok(()) };
    check_in_place(backend.as_ref())?;
    let primary = member.primary.lock();
    let Some(ours) = primary.last.as_deref() else { return Ok(()) };
    let mut found = vec![0; SUPERBLOCK_SIZE];
    for _ in 0..ATTEMPTS {
        if backend.read_at(SUPERBLOCK_OFFSETS[0], &mut found).is_err() {
            // A failed read is a device failure (O2).
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
        "{device}: ANOTHER PROGRAM OR THE KERNEL HAS WRITTEN TO THIS FILESYSTEM: its superblock has {found}, but ubtrfs last wrote {ours}. ubtrfs stops writing."
    );
    let source = std::io::Error::other(format!(
        "it was changed by something else: its superblock has {found}, not {ours}; unmount it everywhere, look for a loop \
         device over it with `losetup -j`, and run `ubtrfs check`"
    ));
    Err(Error::io("check", device, SUPERBLOCK_OFFSETS[0], SUPERBLOCK_SIZE as u64, source))
}

/// Whether `found` is an invalid superblock of the filesystem of `ours` (O2). Other writers leave valid superblocks.
fn is_damaged_copy(found: &[u8], ours: &[u8]) -> bool {
    let (Ok(found_sb), Ok(ours_sb)) = (Superblock::decode(found), Superblock::decode(ours)) else { return false };
    found_sb.magic == ours_sb.magic && found_sb.fsid == ours_sb.fsid && check_superblock(&found_sb, found).is_err()
}

/// A check that is older than this duration is repeated before anything is written.
const RECENT: Duration = Duration::from_millis(20);
/// Number of reads that must all differ from the expected superblock before the difference counts, because a single
/// read may return wrong bytes.
const ATTEMPTS: usize = 3;
