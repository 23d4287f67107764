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
//! - O3. With several devices, an earlier superblock of this process means that the device lost writes. The device is
//!   kicked, if the filesystem survives without it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{Generation, check_superblock};

use crate::Volumes;
use crate::member::{Member, Stat};

/// The expected content of a device's primary superblock.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// The bytes read at open or written last, or `None` if the bytes are unknown.
    last: Option<Vec<u8>>,
    /// The bytes that the last write replaced.
    before: Option<Vec<u8>>,
    /// Checksums of the last superblocks that were read or written, the latest last (O3).
    own: VecDeque<[u8; 32]>,
}

impl Primary {
    /// Reads the device's current primary superblock. If the read fails, the content is unknown.
    pub(crate) fn read(backend: &dyn ubtrfs_device::Device) -> Self {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        let last = backend.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).ok().map(|()| raw);
        let own = last.iter().filter_map(|raw| raw.first_chunk().copied()).collect();
        Self { last, before: None, own }
    }

    /// Notes that a write of the superblock begins. The content is unknown until the write succeeds.
    pub(crate) fn begin_write(&mut self) {
        self.before = self.last.take();
    }

    /// Notes that the superblock `raw` was written.
    pub(crate) fn wrote(&mut self, raw: &[u8]) {
        self.last = Some(raw.to_vec());
        self.own.extend(raw.first_chunk());
        if self.own.len() > OWN_MAX {
            self.own.pop_front();
        }
    }

    /// The generation of the superblock, if it is known and valid.
    pub(crate) fn generation(&self) -> Option<Generation> {
        generation_of(self.last.as_deref()?)
    }

    /// The generation of the superblock, or of the one before if the last write failed.
    pub(crate) fn newest_generation(&self) -> Option<Generation> {
        self.generation().or_else(|| generation_of(self.before.as_deref()?))
    }

    /// Whether this process read or wrote this superblock (O3).
    fn knows(&self, raw: &[u8]) -> bool {
        raw.first_chunk().is_some_and(|csum| self.own.contains(csum))
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
    /// Fails if another writer has written a superblock (O1), or if an image file was removed, replaced or truncated. If
    /// the filesystem survives without that image, its member is kicked instead.
    pub fn check_superblocks_are_ours(&self) -> Result<()> {
        let now = self.last_look.micros_since_open().max(1);
        self.check_devices_in_place()?;
        let members = self.members();
        for member in &members {
            match check(member, members.len() > 1)? {
                Look::Ours => {}
                Look::LostWrites { error, lost_one } => match self.kick(member, error) {
                    // The next commit writes the superblock again.
                    Err(error) if lost_one => tracing::warn!("{error}; no other device can take its place"),
                    kicked => kicked?,
                },
            }
        }
        self.last_look.micros.store(now, Ordering::Relaxed);
        Ok(())
    }

    /// Whether [`Volumes::check_superblocks_are_ours`] succeeded a moment ago (`RECENT`).
    pub fn are_superblocks_checked_recently(&self) -> bool {
        self.last_look.is_recent()
    }

    /// Fails if an image file was removed, replaced or truncated since it was opened, and the filesystem does not survive
    /// without it. Writes to a removed image are lost when the image is closed.
    pub fn check_devices_in_place(&self) -> Result<()> {
        for member in self.members() {
            let Some(backend) = member.backend() else { continue };
            let Err(source) = backend.check_in_place() else { continue };
            let device = backend.describe();
            let text = source.to_string();
            member.count(Stat::Write);
            self.kick(&member, Error::io("check", device.clone(), 0, backend.len_bytes(), source))
                .inspect_err(|_| tracing::error!("{device}: {text}. Nothing more is written."))?;
        }
        Ok(())
    }
}

/// The generation of a valid primary superblock.
fn generation_of(raw: &[u8]) -> Option<Generation> {
    let superblock = Superblock::decode(raw).ok()?;
    let is_valid = superblock.bytenr == SUPERBLOCK_OFFSETS[0] && check_superblock(&superblock, raw).is_ok();
    is_valid.then_some(superblock.generation)
}

/// The result of reading the primary superblock of a device.
enum Look {
    /// The last superblock of this process, or one that a failure explains (O2).
    Ours,
    /// An earlier superblock of this process (O3); the one before the last if `lost_one`.
    LostWrites { error: Error, lost_one: bool },
}

/// Compares the primary superblock of a device with the last one that this process read or wrote.
fn check(member: &Member, has_others: bool) -> Result<Look> {
    let Some(backend) = member.backend() else { return Ok(Look::Ours) };
    let primary = member.primary.lock();
    let Some(ours) = primary.last.as_deref() else { return Ok(Look::Ours) };
    let mut found = vec![0; SUPERBLOCK_SIZE];
    for _ in 0..ATTEMPTS {
        if backend.read_at(SUPERBLOCK_OFFSETS[0], &mut found).is_err() {
            // A failed read is a device failure (O2).
            member.count(Stat::Read);
            return Ok(Look::Ours);
        }
        if found == ours {
            return Ok(Look::Ours);
        }
    }
    let lost_one = primary.before.as_ref() == Some(&found);
    if has_others && primary.knows(&found) {
        member.count(Stat::Corruption);
        let source = std::io::Error::other("it lost writes: its superblock is an earlier one");
        let error = Error::io("check", backend.describe(), SUPERBLOCK_OFFSETS[0], SUPERBLOCK_SIZE as u64, source);
        return Ok(Look::LostWrites { error, lost_one });
    }
    if lost_one || is_damaged_copy(&found, ours) {
        tracing::warn!(
            "{}: the last superblock written is damaged or lost; the next commit writes it again",
            backend.describe()
        );
        member.count(Stat::Corruption);
        return Ok(Look::Ours);
    }
    let generation = |raw: &[u8]| match Superblock::decode(raw) {
        Ok(superblock) => format!("generation {}", superblock.generation),
        Err(_) => "no superblock".to_owned(),
    };
    let (found, ours) = (generation(&found), generation(ours));
    let found = if found == ours { format!("other content of {found}") } else { found };
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

/// Number of superblocks that are remembered for each device (O3).
const OWN_MAX: usize = 64;

/// A check that is older than this duration is repeated before anything is written.
const RECENT: Duration = Duration::from_millis(20);
/// Number of reads that must all differ from the expected superblock before the difference counts, because a single
/// read may return wrong bytes.
const ATTEMPTS: usize = 3;
