//! [`Member`]: a device of the filesystem, its device item, its state and its error counters.
//!
//! ```text
//!  Stale, Late ---------------------------------> InSync --- a flush, a superblock or an unverifiable write
//!    ^    its content was brought up to date:        |        fails: Volumes::kick
//!    |    Volumes::set_in_sync                       v
//!  open: an older superblock, or a record          Kicked     Missing: not given at open
//! ```
//!
//! A member whose superblock is exactly one generation behind, without a record that says more, is *late*: power failed
//! between the superblocks of a commit, for which it was flushed. A member that missed a commit that promised something is
//! at least two behind (C4 of `commit_super`), or has a record. One case cannot be told from a late member: it was kicked
//! by the flush of the newest commit, and power failed before the next one. It lacks content of a commit that promised
//! nothing.
//!
//! Invariants:
//! - M1. A kicked member is never used again while the filesystem is open: neither read, nor written, nor flushed.
//! - M2. A copy on a stale member is neither trusted nor counted as a copy, unless the chunk has no redundancy: a commit
//!   succeeds only if every chunk survives the loss of the members that missed it, so a stale member missed no write to
//!   such a chunk. A copy on a late member counts, and is read if no member in sync has a good one.
//! - M3. From the first commit on, a member that is behind, missing or kicked has a record in the device tree
//!   ([`DeviceRecord`]). So if bringing it up to date is interrupted, the next open goes on, although a late member has new
//!   superblocks.
//! - M4. A record is certain up to the last commit of this program: each commit confirms it. A member whose superblock is
//!   newer than the record allows, but not newer than the confirmation, was written apart. A newer one may have been written
//!   by Linux, together with the others.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_device::Device;
use ubtrfs_format::item::{DevItem, DevStatsItem, DeviceRecord};
use ubtrfs_format::{DevId, Generation, Logical};

use crate::ownership::Primary;
use crate::twin::Twin;

/// Indexes of the error counters in a `DevStatsItem`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stat {
    Write = 0,
    Read = 1,
    Flush = 2,
    Corruption = 3,
    Generation = 4,
}

/// The state of a device of the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// The device has everything that was committed.
    InSync,
    /// The device gets superblocks, and has everything up to this generation for sure. It is read only where no other copy
    /// is good.
    Late(Generation),
    /// The device has everything up to this generation, but missed later commits.
    Stale(Generation),
    /// The device was not given.
    Missing,
    /// The device failed while the filesystem was open, and is not used any more.
    Kicked,
}

impl MemberState {
    /// Whether the device has everything that was promised, and gets superblocks (C5 of `commit_super`).
    pub fn is_complete(self) -> bool {
        matches!(self, Self::InSync | Self::Late(_))
    }

    /// Whether the device can be read and written.
    pub fn is_usable(self) -> bool {
        !matches!(self, Self::Missing | Self::Kicked)
    }

    /// The generation up to which the device has everything, if it is late or stale.
    pub fn behind_at(self) -> Option<Generation> {
        match self {
            Self::Late(generation) | Self::Stale(generation) => Some(generation),
            Self::InSync | Self::Missing | Self::Kicked => None,
        }
    }
}

/// A device of the set.
#[derive(Debug)]
pub(crate) struct Member {
    devid: DevId,
    /// The current device item. At open it is the superblock's item; after that it is the chunk tree's item, which
    /// commits change (I2 of `set`).
    pub(crate) item: RwLock<DevItem>,
    /// Whether the item is from the chunk tree.
    is_known: AtomicBool,
    /// The device, or `None` if it is missing.
    device: Option<Arc<dyn Device>>,
    is_kicked: AtomicBool,
    /// Whether the device is behind.
    is_stale: AtomicBool,
    /// Whether it is late, if it is behind.
    is_late: AtomicBool,
    /// If it is behind, the generation that it has.
    since: AtomicU64,
    /// The root of the root tree in the superblock that was found, and its generation.
    pub(crate) found_root: (Logical, Generation),
    /// The primary superblock as last read or written (see `ownership`).
    pub(crate) primary: Mutex<Primary>,
    /// Logical ranges whose copies on this device could not be written.
    failed: Mutex<Vec<Range<u64>>>,
    has_failed: AtomicBool,
    /// Bytes that are being read from the device.
    pub(crate) busy_bytes: AtomicU64,
    stats: [AtomicU64; 5],
    stats_changed: AtomicBool,
    /// The device that gets all writes too, and whether there is one.
    twin: RwLock<Option<Arc<Twin>>>,
    has_twin: AtomicBool,
    /// Whether it is a device of a seed (see `seed`).
    is_seed: bool,
    /// Whether the device has taken the place of another one, and no commit that says so has ended yet.
    is_promoted: AtomicBool,
    /// What the [`DeviceRecord`] that the last commit stored says.
    record: Mutex<Marks>,
}

/// The generations of a [`DeviceRecord`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Marks {
    complete_to: Option<Generation>,
    written_to: Option<Generation>,
    confirmed_at: Option<Generation>,
}

impl Member {
    /// A device that was given, with the root and the generation of its superblock, and the newest generation.
    pub(crate) fn given(
        item: DevItem,
        device: Arc<dyn Device>,
        found_root: (Logical, Generation),
        newest: Generation,
    ) -> Self {
        let primary = Primary::read(device.as_ref());
        Self::new(item, Some(device), primary, found_root, newest)
    }

    /// A device that was not given.
    pub(crate) fn missing(item: DevItem) -> Self {
        Self::new(item, None, Primary::default(), (Logical(0), Generation(0)), Generation(0))
    }

    fn new(
        item: DevItem,
        device: Option<Arc<dyn Device>>,
        primary: Primary,
        found_root: (Logical, Generation),
        newest: Generation,
    ) -> Self {
        Self {
            devid: item.devid,
            is_known: AtomicBool::new(device.is_none()),
            item: RwLock::new(item),
            device,
            is_kicked: AtomicBool::new(false),
            is_stale: AtomicBool::new(found_root.1 < newest),
            is_late: AtomicBool::new(found_root.1.0.saturating_add(1) == newest.0),
            since: AtomicU64::new(found_root.1.0),
            found_root,
            primary: Mutex::new(primary),
            failed: Mutex::default(),
            has_failed: AtomicBool::new(false),
            busy_bytes: AtomicU64::new(0),
            stats: Default::default(),
            // The first commit stores the record of a member that is behind (M3).
            stats_changed: AtomicBool::new(found_root.1 < newest),
            twin: RwLock::default(),
            has_twin: AtomicBool::new(false),
            is_seed: false,
            is_promoted: AtomicBool::new(false),
            record: Mutex::default(),
        }
    }

    pub(crate) fn devid(&self) -> DevId {
        self.devid
    }

    pub(crate) fn set_known(&self) {
        self.is_known.store(true, Ordering::Release);
    }

    /// Whether the chunk tree has an item of the device.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Acquire)
    }

    /// The device, unless it is missing or was kicked (M1).
    pub(crate) fn backend(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref().filter(|_| !self.is_kicked.load(Ordering::Acquire))
    }

    /// The device that gets all writes too.
    pub(crate) fn twin(&self) -> Option<Arc<Twin>> {
        if !self.has_twin.load(Ordering::Acquire) {
            return None;
        }
        self.twin.read().clone()
    }

    pub(crate) fn set_twin(&self, twin: Option<Arc<Twin>>) {
        let mut current = self.twin.write();
        self.has_twin.store(twin.is_some(), Ordering::Release);
        *current = twin;
    }

    /// Makes it a device of a seed (see `seed`).
    pub(crate) fn into_seed(self) -> Self {
        Self { is_seed: true, ..self }
    }

    pub(crate) fn is_seed(&self) -> bool {
        self.is_seed
    }

    pub(crate) fn is_promoted(&self) -> bool {
        self.is_promoted.load(Ordering::Acquire)
    }

    pub(crate) fn set_promoted(&self, is_promoted: bool) {
        self.is_promoted.store(is_promoted, Ordering::Release);
    }

    /// Whether a write to this member reaches a device.
    pub(crate) fn takes_writes(&self) -> bool {
        self.backend().is_some() || self.has_twin.load(Ordering::Acquire)
    }

    /// The device, also after it was kicked: for its name and its size.
    pub(crate) fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    pub(crate) fn state(&self) -> MemberState {
        let since = Generation(self.since.load(Ordering::Acquire));
        match &self.device {
            None => MemberState::Missing,
            Some(_) if self.is_kicked.load(Ordering::Acquire) => MemberState::Kicked,
            Some(_) if !self.is_stale.load(Ordering::Acquire) => MemberState::InSync,
            Some(_) if self.is_late.load(Ordering::Acquire) => MemberState::Late(since),
            Some(_) => MemberState::Stale(since),
        }
    }

    pub(crate) fn is_late(&self) -> bool {
        matches!(self.state(), MemberState::Late(_))
    }

    pub(crate) fn is_in_sync(&self) -> bool {
        self.state() == MemberState::InSync
    }

    /// See [`MemberState::is_complete`].
    pub(crate) fn is_complete(&self) -> bool {
        self.state().is_complete()
    }

    /// Whether a copy on this member counts, in a chunk with or without redundancy (M2).
    pub(crate) fn is_trusted(&self, has_redundancy: bool) -> bool {
        match self.state() {
            MemberState::InSync | MemberState::Late(_) => true,
            MemberState::Stale(_) => !has_redundancy,
            MemberState::Missing | MemberState::Kicked => false,
        }
    }

    /// How little a copy of a logical range on this member is trusted: 0 if it has everything, 1 if it is late, 2 if it is
    /// not trusted (M2).
    pub(crate) fn distrust(&self, has_redundancy: bool, range: &Range<u64>) -> u8 {
        if !self.is_trusted(has_redundancy) || self.lacks(range) {
            return 2;
        }
        u8::from(has_redundancy && !self.is_in_sync())
    }

    pub(crate) fn set_kicked(&self) {
        if self.is_in_sync() {
            // The member has all content of the last superblock on it.
            let complete_to = self.primary.lock().newest_generation().unwrap_or(self.found_root.1);
            self.since.store(complete_to.0, Ordering::Release);
        }
        self.is_kicked.store(true, Ordering::Release);
    }

    pub(crate) fn set_in_sync(&self) {
        self.is_stale.store(false, Ordering::Release);
        // The next commit ends the record (M3).
        self.stats_changed.store(true, Ordering::Release);
    }

    /// Notes that the copy of a logical range could not be written. Returns false if there are too many such ranges.
    pub(crate) fn note_failed(&self, range: Range<u64>) -> bool {
        let mut failed = self.failed.lock();
        self.has_failed.store(true, Ordering::Release);
        match failed.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            Some(last) if last.start <= range.start && range.end <= last.end => {}
            _ => failed.push(range),
        }
        failed.len() <= FAILED_MAX
    }

    /// Whether the copy of a part of this logical range could not be written.
    pub(crate) fn lacks(&self, range: &Range<u64>) -> bool {
        self.has_failed.load(Ordering::Acquire)
            && self.failed.lock().iter().any(|failed| failed.start < range.end && range.start < failed.end)
    }

    /// The logical ranges whose copies could not be written.
    pub(crate) fn failed(&self) -> Vec<Range<u64>> {
        if !self.has_failed.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.failed.lock().clone()
    }

    /// Forgets ranges of [`Member::failed`] that have been written again.
    pub(crate) fn forget_failed(&self, written: &[Range<u64>]) {
        let mut failed = self.failed.lock();
        failed.retain(|range| !written.iter().any(|done| done.start <= range.start && range.end <= done.end));
        self.has_failed.store(!failed.is_empty(), Ordering::Release);
    }

    pub(crate) fn count(&self, stat: Stat) {
        self.stats[stat as usize].fetch_add(1, Ordering::Relaxed);
        self.stats_changed.store(true, Ordering::Release);
    }

    pub(crate) fn stats_item(&self) -> DevStatsItem {
        DevStatsItem { values: std::array::from_fn(|n| self.stats[n].load(Ordering::Relaxed)) }
    }

    pub(crate) fn have_stats_changed(&self) -> bool {
        self.stats_changed.load(Ordering::Acquire)
    }

    /// The record that the running commit stores, if it changed since it was last taken. `committed` is the generation of
    /// the commit before. The record of a member that gets no superblocks changes in each commit (M4).
    pub(crate) fn take_changed_record(&self, committed: Generation) -> Option<DeviceRecord> {
        let mut record = self.record.lock();
        let since = Some(Generation(self.since.load(Ordering::Acquire)));
        let (complete_to, written_to) = match self.state() {
            MemberState::InSync => (None, None),
            // A seed device misses nothing, because nothing is written to it.
            _ if self.is_seed => (None, None),
            MemberState::Late(_) => (record.complete_to.or(since), None),
            MemberState::Stale(_) => (record.complete_to.or(since), record.written_to.or(Some(self.found_root.1))),
            MemberState::Kicked => (record.complete_to.or(since), record.written_to.or(Some(committed))),
            MemberState::Missing => (record.complete_to.or(Some(committed)), record.written_to.or(Some(committed))),
        };
        let confirmed_at = written_to.map(|_| Generation(committed.0.saturating_add(1)));
        let now = Marks { complete_to, written_to, confirmed_at };
        let has_changed = self.stats_changed.swap(false, Ordering::AcqRel) || *record != now;
        *record = now;
        has_changed.then(|| DeviceRecord { stats: self.stats_item(), complete_to, written_to, confirmed_at })
    }

    /// Adds the counts of a record to the counters, and takes its generations (M3): a member that got superblocks is late,
    /// and one that got none is stale, also if another program has written to it since then. `newest` is the generation of
    /// the newest superblock. Returns whether the record proves that the member was written apart (M4).
    pub(crate) fn add_record(&self, record: &DeviceRecord, newest: Generation) -> bool {
        let (found, has_device) = (self.found_root.1, self.device.is_some());
        for (counter, value) in self.stats.iter().zip(record.stats.values) {
            counter.fetch_add(value, Ordering::Relaxed);
        }
        if self.is_seed {
            // A record of an earlier version says that a missing seed device misses changes.
            return false;
        }
        let was_stale = matches!(self.state(), MemberState::Stale(_));
        if let Some(complete_to) = record.complete_to
            && has_device
        {
            self.since.fetch_min(complete_to.0, Ordering::AcqRel);
            let is_late = self.is_complete() && record.written_to.is_none();
            self.is_late.store(is_late, Ordering::Release);
            self.is_stale.store(true, Ordering::Release);
        }
        let mut marks =
            Marks { complete_to: record.complete_to, written_to: record.written_to, confirmed_at: record.confirmed_at };
        let mut is_apart = false;
        if let Some(written_to) = record.written_to {
            // A record without this generation was stored by the next commit at the earliest.
            let confirmed_at = record.confirmed_at.unwrap_or(Generation(written_to.0.saturating_add(1)));
            is_apart = was_stale && found > written_to && found <= confirmed_at;
            if confirmed_at < newest {
                // Another program has committed since then, and the member may have its superblocks.
                marks.written_to = has_device.then_some(found.max(written_to));
            }
        }
        *self.record.lock() = marks;
        is_apart
    }

    /// Sets the counters to 0, and returns the counters before.
    pub(crate) fn reset_stats(&self) -> DevStatsItem {
        let values = std::array::from_fn(|n| self.stats[n].swap(0, Ordering::Relaxed));
        self.stats_changed.store(true, Ordering::Release);
        DevStatsItem { values }
    }

    pub(crate) fn describe(&self) -> String {
        match &self.device {
            Some(device) => device.describe(),
            None => format!("missing device {}", self.devid()),
        }
    }
}

/// Number of ranges with failed writes from which on a device counts as broken.
const FAILED_MAX: usize = 256;
