//! Scrub: reads everything that a device has of the filesystem, compares it with its checksums, and repairs what is bad
//! from other copies.
//!
//! ```text
//! Windows::next --> extents and csums of the window --> read_stripe --> bad? --> scrub_range --> still described? --> told
//!   (several threads, in the order on the device)                       (suspect)  (S1 of volumes)     (V2)
//! ```
//!
//! Invariants:
//! - V1. A tree block is checked only if a durable commit has written it.
//! - V2. Content counts as bad only if the extent tree and the csum tree describe it before the first read and still
//!   after the second read: an extent that was freed in between may have been overwritten.
//! - V3. Everything below [`ScrubCounts::last_physical`] has been checked and counted, and nothing at or above it has
//!   been counted. So an interrupted scrub can continue at this offset, and the counts of both parts add up.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Error, Helper, Result, start_helper};
use ubtrfs_format::item::{ChunkItem, ExtentFlags, ExtentItem};
use ubtrfs_format::node::verify_block;
use ubtrfs_format::{DevId, FormatError, Generation, Key, KeyType, Logical, Physical, RootId};
use ubtrfs_tree::Cursor;
use ubtrfs_volumes::{BadUnit, DeviceStripe, StripePart, Verify};

use crate::delayed::sector_csums::SectorCsums;
use crate::engine::Engine;
use crate::extents::csum_tree::verify_sector;
use crate::job::Job;

/// The counts of a scrub of a device, with btrfs's names (`struct btrfs_scrub_progress`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubCounts {
    /// Pieces of data extents, each in one element of a stripe.
    pub data_extents_scrubbed: u64,
    /// Tree blocks.
    pub tree_extents_scrubbed: u64,
    /// Bytes of data.
    pub data_bytes_scrubbed: u64,
    /// Bytes of tree blocks.
    pub tree_bytes_scrubbed: u64,
    /// Sectors that could not be read.
    pub read_errors: u64,
    /// Sectors of data that contradict their checksums.
    pub csum_errors: u64,
    /// Sectors of tree blocks with a wrong checksum, address or generation, as Linux counts them.
    pub verify_errors: u64,
    /// Sectors without checksums.
    pub no_csum: u64,
    /// Superblocks that are bad or old.
    pub super_errors: u64,
    /// Errors without a good copy.
    pub uncorrectable_errors: u64,
    /// Errors with a good copy elsewhere. If repairs were allowed, they were repaired from it.
    pub corrected_errors: u64,
    /// Up to this offset of the device, everything has been checked (V3).
    pub last_physical: u64,
}

/// A request to scrub a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubRequest {
    /// The device.
    pub devid: DevId,
    /// The offset on the device where the scrub begins.
    pub start: u64,
    /// Whether bad copies are repaired.
    pub repair: bool,
}

/// Bad content that a scrub found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    /// The device.
    pub devid: DevId,
    /// The first bad byte on the device.
    pub physical: Physical,
    /// The logical address of this byte.
    pub bytenr: Logical,
    /// Consecutive bad bytes.
    pub len_bytes: u64,
    /// Whether the bytes belong to a tree block.
    pub is_tree: bool,
    /// The contradiction; `None` if the device could not read the bytes.
    pub cause: Option<FormatError>,
    /// Whether another copy is good.
    pub has_good_copy: bool,
}

/// A scrub of a device, as other threads see it.
#[derive(Debug, Default)]
pub struct DeviceScrub {
    state: Mutex<ScrubState>,
    /// Bytes per second; 0 means no limit.
    limit: AtomicU64,
    /// When the next read may begin.
    next_read: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct ScrubState {
    counts: ScrubCounts,
    /// Offsets on the device of windows that are being checked.
    in_work: BTreeSet<u64>,
    /// Counts of checked windows that lie behind a window in `in_work`, by their offsets.
    waiting: BTreeMap<u64, ScrubCounts>,
    /// Everything below this offset has been checked or is in `in_work`.
    taken: u64,
}

impl ScrubState {
    /// Adds the counts of a checked window, as soon as all windows before it have been checked (V3).
    fn finish(&mut self, begin: u64, counts: ScrubCounts) {
        self.in_work.remove(&begin);
        self.waiting.insert(begin, counts);
        while let Some(first) = self.waiting.first_entry()
            && self.in_work.first().is_none_or(|in_work| first.key() < in_work)
        {
            self.counts = self.counts.plus(&first.remove());
        }
    }
}

impl ScrubCounts {
    /// The sums of all counts. `last_physical` stays.
    #[must_use]
    fn plus(self, other: &Self) -> Self {
        Self {
            data_extents_scrubbed: self.data_extents_scrubbed.saturating_add(other.data_extents_scrubbed),
            tree_extents_scrubbed: self.tree_extents_scrubbed.saturating_add(other.tree_extents_scrubbed),
            data_bytes_scrubbed: self.data_bytes_scrubbed.saturating_add(other.data_bytes_scrubbed),
            tree_bytes_scrubbed: self.tree_bytes_scrubbed.saturating_add(other.tree_bytes_scrubbed),
            read_errors: self.read_errors.saturating_add(other.read_errors),
            csum_errors: self.csum_errors.saturating_add(other.csum_errors),
            verify_errors: self.verify_errors.saturating_add(other.verify_errors),
            no_csum: self.no_csum.saturating_add(other.no_csum),
            super_errors: self.super_errors.saturating_add(other.super_errors),
            uncorrectable_errors: self.uncorrectable_errors.saturating_add(other.uncorrectable_errors),
            corrected_errors: self.corrected_errors.saturating_add(other.corrected_errors),
            last_physical: self.last_physical,
        }
    }
}

impl DeviceScrub {
    /// Makes a scrub that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything below this offset of the device has been checked, or is being checked.
    pub(crate) fn taken(&self) -> u64 {
        self.state.lock().taken
    }

    /// The counts so far.
    pub fn counts(&self) -> ScrubCounts {
        let state = self.state.lock();
        let last_physical = state.in_work.first().copied().unwrap_or(state.taken);
        ScrubCounts { last_physical, ..state.counts }
    }

    /// Sets the highest rate in bytes per second; 0 means no limit.
    pub fn set_limit(&self, bytes_per_sec: u64) {
        self.limit.store(bytes_per_sec, Ordering::Relaxed);
        *self.next_read.lock() = None;
    }

    /// The highest rate in bytes per second; 0 means no limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Waits until `bytes` may be read, or the job is cancelled.
    fn pace(&self, bytes: u64, job: &Job) {
        loop {
            let limit = self.limit.load(Ordering::Relaxed);
            let now = Instant::now();
            {
                let mut next = self.next_read.lock();
                let start = next.filter(|start| limit > 0 && *start > now);
                let Some(start) = start else {
                    let nanos = u128::from(bytes).saturating_mul(1_000_000_000).checked_div(limit.into()).unwrap_or(0);
                    let after = now.checked_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
                    *next = after;
                    return;
                };
                drop(next);
                thread::sleep(start.saturating_duration_since(now).min(PAUSE));
            }
            if job.check().is_err() {
                return;
            }
        }
    }
}

/// The windows of a device that are left, in ascending order.
struct Windows {
    stripes: VecDeque<DeviceStripe>,
    /// Where the next window begins in the first stripe.
    offset: u64,
    /// Stripes that begin here or behind are not in `stripes` yet.
    unseen: u64,
    /// Nothing below this offset of the device is checked.
    start: u64,
}

impl Windows {
    /// Takes the next window: a stripe, and offsets in it.
    fn next(&mut self, engine: &Engine, devid: DevId) -> Option<(DeviceStripe, Range<u64>)> {
        loop {
            let Some(stripe) = self.stripes.front().copied() else {
                let more = engine.volumes.stripes_on(devid, self.unseen..u64::MAX);
                let last = more.last()?;
                self.unseen = last.physical.0.saturating_add(1);
                let start = self.start;
                let is_left = move |stripe: &DeviceStripe| stripe.physical.0.saturating_add(stripe.len_bytes) > start;
                self.stripes = more.into_iter().filter(is_left).collect();
                self.offset = 0;
                continue;
            };
            let skipped = self.start.saturating_sub(stripe.physical.0);
            let from = self.offset.max(skipped.saturating_sub(skipped % ChunkItem::STRIPE_LEN));
            let window = from..from.saturating_add(WINDOW_BYTES).min(stripe.len_bytes);
            if window.start >= window.end {
                self.stripes.pop_front();
                self.offset = 0;
                continue;
            }
            self.offset = window.end;
            return Some((stripe, window));
        }
    }
}

/// An extent, or the part of one in a [`StripePart`].
#[derive(Clone, Debug)]
struct ScrubPiece {
    /// Offset from the start of the stripe.
    offset: u64,
    logical: Range<u64>,
    kind: PieceKind,
}

#[derive(Clone, Debug)]
enum PieceKind {
    /// A tree block; `logical` may be a part of it.
    Block { bytenr: Logical, generation: Generation },
    /// Data, with the checksums of its sectors.
    Data(SectorCsums),
    /// Allocated bytes that no tree describes yet (P1 of [`super::replace`]).
    Undescribed,
}

impl ScrubPiece {
    fn len_bytes(&self) -> u64 {
        self.logical.end.saturating_sub(self.logical.start)
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len_bytes())
    }
}

/// What happens to bad content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrubMode {
    Check,
    Repair,
    /// Everything is copied to the twin of the device (see [`super::replace`]). If `avoids_source` is set, the device
    /// itself is read only where no other copy is good.
    Twin {
        avoids_source: bool,
    },
}

/// A scrub of a device, shared by its threads.
struct ScrubWork<'w> {
    request: &'w ScrubRequest,
    mode: ScrubMode,
    scrub: &'w DeviceScrub,
    job: &'w Job,
    found: &'w (dyn Fn(ScrubFinding) + Sync),
}

/// A window that is being checked, and its counts.
struct Window<'w> {
    work: &'w ScrubWork<'w>,
    stripe: DeviceStripe,
    counts: RefCell<ScrubCounts>,
}

impl Window<'_> {
    fn count(&self, change: impl FnOnce(&mut ScrubCounts)) {
        change(&mut self.counts.borrow_mut());
    }
}

impl Engine {
    /// The bytes of a device that chunks use from an offset on. A scrub that begins at this offset reads these bytes.
    pub fn scrub_bytes(&self, devid: DevId, start: u64) -> u64 {
        let stripes = self.volumes.stripes_on(devid, 0..u64::MAX);
        let left = |stripe: &DeviceStripe| {
            stripe.physical.0.saturating_add(stripe.len_bytes).saturating_sub(stripe.physical.0.max(start))
        };
        stripes.iter().map(left).fold(0, u64::saturating_add)
    }

    /// Scrubs a device. The counts are in `scrub` at all times; `found` gets each finding once. `job` gets the bytes of
    /// [`Engine::scrub_bytes`], and cancels the scrub. Chunks with parity are not checked.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`]; the first failure of a tree; or an error if the device is missing or fails. Bad content is no
    /// error.
    pub fn scrub_device(
        &self,
        request: &ScrubRequest,
        scrub: &DeviceScrub,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        // Nothing is written to a seed.
        let may_repair = self.read_only().is_none() && !self.volumes.is_seed(request.devid);
        let mode = if request.repair && may_repair { ScrubMode::Repair } else { ScrubMode::Check };
        let work = ScrubWork { request, mode, scrub, job, found };
        scrub.state.lock().taken = request.start;
        // A commit during the scrub writes superblocks, so they are checked first.
        self.scrub_superblocks(&work)?;
        self.go_through(&work)
    }

    /// Copies everything on a device to its twin, and finds bad content as a scrub does.
    pub(super) fn copy_to_twin(
        &self,
        devid: DevId,
        avoids_source: bool,
        scrub: &DeviceScrub,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        let request = ScrubRequest { devid, start: 0, repair: false };
        let mode = ScrubMode::Twin { avoids_source };
        self.go_through(&ScrubWork { request: &request, mode, scrub, job, found })
    }

    /// Goes through the windows of a device with several threads.
    fn go_through(&self, work: &ScrubWork<'_>) -> Result<()> {
        let request = work.request;
        let windows = Mutex::new(Windows { stripes: VecDeque::new(), offset: 0, unseen: 0, start: request.start });
        let has_failed = AtomicBool::new(false);
        let run = || {
            let mut buf = AlignedBuf::with_capacity(BUF_BYTES);
            let result = loop {
                if has_failed.load(Ordering::Acquire) {
                    break Ok(());
                }
                match self.scrub_next(work, &windows, &mut buf) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            if result.is_err() {
                has_failed.store(true, Ordering::Release);
            }
            result
        };
        thread::scope(|scope| {
            let helpers: Vec<_> = (1..NR_THREADS).map(|_| start_helper(scope, run)).collect();
            let own = run();
            helpers.into_iter().map(Helper::join).fold(own, |first, result| first.and(result))
        })
    }

    /// Checks the next window. Returns false if no window is left.
    fn scrub_next(&self, work: &ScrubWork<'_>, windows: &Mutex<Windows>, buf: &mut AlignedBuf) -> Result<bool> {
        work.job.check()?;
        let devid = work.request.devid;
        match work.mode {
            ScrubMode::Check | ScrubMode::Repair => self.volumes.check_usable(devid),
            ScrubMode::Twin { .. } => self.volumes.check_twin(devid),
        }?;
        let mut windows = windows.lock();
        let Some((stripe, window)) = windows.next(self, devid) else { return Ok(false) };
        let begin = stripe.physical.0.saturating_add(window.start);
        let end = stripe.physical.0.saturating_add(window.end);
        {
            let mut state = work.scrub.state.lock();
            state.in_work.insert(begin);
            state.taken = state.taken.max(end);
        }
        drop(windows);
        // A window that fails stays in work, so that a later scrub continues there (V3). A cancelled scrub finishes its
        // windows: otherwise, what was repaired in them would never be counted.
        let checked = Window { work, stripe, counts: RefCell::default() };
        self.scrub_window(&checked, window, buf)?;
        work.scrub.state.lock().finish(begin, checked.counts.into_inner());
        work.job.advance(end.saturating_sub(begin));
        Ok(true)
    }

    /// Counts bad superblocks. A commit writes them again, because the device's counters changed.
    fn scrub_superblocks(&self, work: &ScrubWork<'_>) -> Result<()> {
        let bad = self.volumes.nr_bad_superblocks(work.request.devid, self.committed_generation());
        if bad == 0 {
            return Ok(());
        }
        let found = ScrubCounts { super_errors: bad, ..ScrubCounts::default() };
        {
            let mut state = work.scrub.state.lock();
            state.counts = state.counts.plus(&found);
        }
        tracing::warn!("scrub: {bad} superblocks of device {} are bad", work.request.devid);
        if work.request.repair && self.read_only().is_none() {
            self.commit()?;
        }
        Ok(())
    }

    fn scrub_window(&self, window: &Window<'_>, offsets: Range<u64>, buf: &mut AlignedBuf) -> Result<()> {
        let Some(parts) = self.volumes.stripe_parts(&window.stripe, offsets) else { return Ok(()) };
        let mut pieces = self.pieces_of(&parts)?;
        let is_copied = matches!(window.work.mode, ScrubMode::Twin { .. });
        if is_copied {
            self.add_undescribed(window.stripe.chunk, &parts, &mut pieces);
        }
        // Gaps are read, but not copied: one may hold a superblock.
        let gap_bytes = if is_copied { 0 } else { GAP_BYTES };
        let mut rest = pieces.as_slice();
        while let Some(first) = rest.first() {
            // Pieces that lie near each other are read together.
            let (mut count, mut end) = (0usize, first.end());
            for piece in rest {
                if piece.offset > end.saturating_add(gap_bytes) {
                    break;
                }
                end = end.max(piece.end());
                count = count.saturating_add(1);
            }
            let (together, behind) = rest.split_at(count);
            rest = behind;
            let start = first.offset;
            buf.resize(usize::try_from(end.saturating_sub(start)).unwrap_or_default());
            window.work.scrub.pace(buf.len() as u64, window.work.job);
            let is_read = match window.work.mode {
                ScrubMode::Check | ScrubMode::Repair => self.volumes.read_stripe(&window.stripe, start, buf).is_ok(),
                ScrubMode::Twin { avoids_source } => {
                    !avoids_source && self.volumes.copy_to_twin(&window.stripe, start, buf).is_ok()
                }
            };
            let content = is_read.then_some(&buf[..]);
            for piece in together {
                let here = usize::try_from(piece.offset.saturating_sub(start)).unwrap_or(usize::MAX);
                let len_bytes = usize::try_from(piece.len_bytes()).unwrap_or(usize::MAX);
                let content = content.and_then(|all| all.get(here..)?.get(..len_bytes));
                match &piece.kind {
                    PieceKind::Block { bytenr, generation } => {
                        self.scrub_block(window, piece, (*bytenr, *generation), content)?;
                    }
                    PieceKind::Data(csums) => self.scrub_data(window, piece, csums, content)?,
                    PieceKind::Undescribed if content.is_some() => {}
                    PieceKind::Undescribed => {
                        let unit = usize::try_from(self.geometry.sectorsize).unwrap_or(usize::MAX);
                        // No tree describes this content yet, so only its readers will notice if no copy can be read.
                        let _unknown = self.read_again(window, piece.logical.clone(), unit, None)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The extents of some parts of a stripe, in the order of the parts.
    fn pieces_of(&self, parts: &[StripePart]) -> Result<Vec<ScrubPiece>> {
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(Vec::new()) };
        let extents = self.extents_in(first.logical.start..last.logical.end)?;
        let committed = self.committed_generation();
        let mut pieces = Vec::new();
        let mut begin = 0;
        for part in parts {
            while extents.get(begin).is_some_and(|extent| extent.range.end <= part.logical.start) {
                begin = usize::saturating_add(begin, 1);
            }
            let here = extents[begin..].iter().take_while(|extent| extent.range.start < part.logical.end);
            for extent in here.filter(|extent| extent.range.end > part.logical.start) {
                let logical = extent.range.start.max(part.logical.start)..extent.range.end.min(part.logical.end);
                let offset = part.offset.saturating_add(logical.start.saturating_sub(part.logical.start));
                let kind = match extent.is_tree {
                    // V1
                    true if extent.generation > committed => continue,
                    true => PieceKind::Block { bytenr: Logical(extent.range.start), generation: extent.generation },
                    false => {
                        let len_bytes = logical.end.saturating_sub(logical.start);
                        PieceKind::Data(self.csums_of(Logical(logical.start), len_bytes)?)
                    }
                };
                pieces.push(ScrubPiece { offset, logical, kind });
            }
        }
        Ok(pieces)
    }

    /// Adds the allocated parts of a chunk that no piece covers, and keeps the order. Such a part may hold data whose
    /// items are not in a tree yet.
    fn add_undescribed(&self, chunk: Logical, parts: &[StripePart], pieces: &mut Vec<ScrubPiece>) {
        let reserved = self.volumes.reserved_ranges(chunk);
        let mut added = Vec::new();
        for part in parts {
            let is_inside = |range: &Range<u64>| range.start < part.logical.end && part.logical.start < range.end;
            let mut known: Vec<Range<u64>> =
                pieces.iter().map(|piece| piece.logical.clone()).filter(is_inside).collect();
            known.extend(reserved.iter().filter(|range| is_inside(range)).cloned());
            known.sort_by_key(|range| range.start);
            for taken in self.space.taken_ranges(part.logical.clone()) {
                let mut at = taken.start;
                let end = Range { start: taken.end, end: u64::MAX };
                for range in known.iter().filter(|range| range.end > taken.start).chain([&end]) {
                    let until = range.start.min(taken.end);
                    if at < until {
                        let offset = part.offset.saturating_add(at.saturating_sub(part.logical.start));
                        added.push(ScrubPiece { offset, logical: at..until, kind: PieceKind::Undescribed });
                    }
                    at = at.max(range.end);
                    if at >= taken.end {
                        break;
                    }
                }
            }
        }
        pieces.append(&mut added);
        pieces.sort_by_key(|piece| piece.offset);
    }

    /// The extents in a range of addresses, in ascending order.
    fn extents_in(&self, range: Range<u64>) -> Result<Vec<FoundExtent>> {
        let nodesize = u64::from(self.geometry.nodesize);
        let tree = self.own_tree(RootId::EXTENT_TREE)?;
        tree.with_root(|source, root| {
            let mut cursor = Cursor::new(source, *root);
            // An extent that begins before the range may reach into it. Its references may lie between.
            let before = Key::new(range.start, KeyType(0), 0);
            let mut key = match cursor.seek_le(&before)? {
                Some(found) if found.objectid < range.start => {
                    cursor.seek_ge(&Key::new(found.objectid, KeyType::EXTENT_ITEM, 0))?
                }
                _ => cursor.seek_ge(&before)?,
            };
            let mut extents: Vec<FoundExtent> = Vec::new();
            while let Some(found) = key.filter(|key| key.objectid < range.end) {
                let len_bytes = match found.item_type {
                    KeyType::EXTENT_ITEM => found.offset,
                    KeyType::METADATA_ITEM => nodesize,
                    _ => 0,
                };
                let end = found.objectid.saturating_add(len_bytes);
                if len_bytes > 0 && end > range.start {
                    let item = ExtentItem::decode(found.item_type, cursor.data().unwrap_or_default())
                        .map_err(|cause| Error::from(cause).in_tree(root.tree).at(Logical(found.objectid)))?;
                    extents.push(FoundExtent {
                        range: found.objectid..end,
                        is_tree: !item.flags.contains(ExtentFlags::DATA),
                        generation: item.generation,
                    });
                }
                key = cursor.next()?;
            }
            Ok(extents)
        })
    }

    /// Checks a tree block, given the content of `piece` that was read, if it could be read.
    fn scrub_block(
        &self,
        window: &Window<'_>,
        piece: &ScrubPiece,
        (bytenr, generation): (Logical, Generation),
        content: Option<&[u8]>,
    ) -> Result<()> {
        let csum_type = self.geometry.csum_type;
        let nodesize = u64::from(self.geometry.nodesize);
        let is_first_part = piece.logical.start == bytenr.0;
        window.count(|counts| {
            counts.tree_bytes_scrubbed = counts.tree_bytes_scrubbed.saturating_add(piece.len_bytes());
            counts.tree_extents_scrubbed = counts.tree_extents_scrubbed.saturating_add(is_first_part.into());
        });
        let verify = |_: usize, raw: &[u8]| verify_block(raw, csum_type, bytenr, generation);
        if piece.len_bytes() == nodesize && content.is_some_and(|raw| verify(0, raw).is_ok()) {
            return Ok(());
        }
        let range = bytenr.0..bytenr.0.saturating_add(nodesize);
        let unit = usize::try_from(nodesize).unwrap_or(usize::MAX);
        for bad in self.read_again(window, range, unit, Some(&verify))? {
            // V2
            if self.extent_generation(bytenr, nodesize, true)? == Some(generation) {
                let physical = window.stripe.physical.advance(piece.offset);
                self.note(window, (physical, bytenr, nodesize), true, &[bad]);
            }
        }
        Ok(())
    }

    /// Checks data, given the content of `piece` that was read, if it could be read.
    fn scrub_data(
        &self,
        window: &Window<'_>,
        piece: &ScrubPiece,
        csums: &SectorCsums,
        content: Option<&[u8]>,
    ) -> Result<()> {
        let (csum_type, sectorsize) = (self.geometry.csum_type, u64::from(self.geometry.sectorsize));
        let unit = usize::try_from(sectorsize).unwrap_or(usize::MAX);
        let without = (0..csums.len()).filter(|&index| csums.get(index).is_none()).count() as u64;
        window.count(|counts| {
            counts.data_bytes_scrubbed = counts.data_bytes_scrubbed.saturating_add(piece.len_bytes());
            // As Linux does, by elements of stripes.
            let element = |offset: u64| offset.checked_div(ChunkItem::STRIPE_LEN).unwrap_or(0);
            let elements =
                element(piece.end().saturating_sub(1)).saturating_sub(element(piece.offset)).saturating_add(1);
            counts.data_extents_scrubbed = counts.data_extents_scrubbed.saturating_add(elements);
            counts.no_csum = counts.no_csum.saturating_add(without);
        });
        let is_suspect = |index: usize| {
            let sector = content.and_then(|all| all.get(index.saturating_mul(unit)..)?.get(..unit));
            let (Some(sector), stored) = (sector, csums.get(index)) else { return true };
            stored.is_some_and(|stored| verify_sector(csum_type, Some(stored), sector).is_err())
        };
        let mut index = 0;
        while index < csums.len() {
            if !is_suspect(index) {
                index = index.saturating_add(1);
                continue;
            }
            // Consecutive suspect sectors are read again together; sectors with and without checksums are read apart.
            let first = index;
            let is_verified = csums.get(first).is_some();
            let is_alike = |&at: &usize| csums.get(at).is_some() == is_verified && is_suspect(at);
            index = (first..csums.len()).take_while(is_alike).last().unwrap_or(first).saturating_add(1);
            let address = |at: usize| piece.logical.start.saturating_add((at as u64).saturating_mul(sectorsize));
            let verify =
                |at: usize, sector: &[u8]| verify_sector(csum_type, csums.get(first.saturating_add(at)), sector);
            let verify = is_verified.then_some(&verify as &Verify<'_>);
            let mut bad = Vec::new();
            for unit in self.read_again(window, address(first)..address(index), unit, verify)? {
                let sector = first.saturating_add(unit.index);
                // V2
                if self.csums_of(Logical(address(sector)), sectorsize)?.get(0) == csums.get(sector) {
                    bad.push(unit);
                }
            }
            let is_next =
                |a: &BadUnit, b: &BadUnit| a.index.saturating_add(1) == b.index && a.has_good_copy == b.has_good_copy;
            for run in bad.chunk_by(is_next) {
                let Some(start) = run.first().map(|unit| first.saturating_add(unit.index)) else { continue };
                let from_piece = (start as u64).saturating_mul(sectorsize);
                let physical = window.stripe.physical.advance(piece.offset.saturating_add(from_piece));
                let len_bytes = (run.len() as u64).saturating_mul(sectorsize);
                self.note(window, (physical, Logical(address(start)), len_bytes), false, run);
            }
        }
        Ok(())
    }

    /// Reads suspect content again, and repairs or copies it. Returns what is bad.
    fn read_again(
        &self,
        window: &Window<'_>,
        range: Range<u64>,
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
    ) -> Result<Vec<BadUnit>> {
        let mut bad = Vec::new();
        let (stripe, tell) = (&window.stripe, &mut |unit| bad.push(unit));
        match window.work.mode {
            ScrubMode::Check => self.volumes.scrub_range(stripe, range, unit_bytes, verify, false, tell),
            ScrubMode::Repair => self.volumes.scrub_range(stripe, range, unit_bytes, verify, true, tell),
            ScrubMode::Twin { avoids_source } => {
                self.volumes.fill_twin(stripe, range, unit_bytes, verify, avoids_source, tell)
            }
        }?;
        Ok(bad)
    }

    /// Counts and tells consecutive bad units.
    fn note(
        &self,
        window: &Window<'_>,
        (physical, bytenr, len_bytes): (Physical, Logical, u64),
        is_tree: bool,
        bad: &[BadUnit],
    ) {
        let Some(first) = bad.first() else { return };
        let nr_units = (bad.len() as u64).max(1);
        let nr_sectors = len_bytes.checked_div(u64::from(self.geometry.sectorsize)).unwrap_or(0);
        let nr_sectors = nr_sectors.checked_div(nr_units).unwrap_or(0);
        window.count(|counts| {
            for unit in bad {
                let kind = match &unit.cause {
                    None => &mut counts.read_errors,
                    Some(_) if is_tree => &mut counts.verify_errors,
                    Some(_) => &mut counts.csum_errors,
                };
                *kind = kind.saturating_add(nr_sectors);
                let result = match unit.has_good_copy {
                    true => &mut counts.corrected_errors,
                    false => &mut counts.uncorrectable_errors,
                };
                *result = result.saturating_add(nr_sectors);
            }
        });
        if matches!(window.work.mode, ScrubMode::Twin { .. }) && first.has_good_copy {
            // The new device has the good content, and the old device leaves.
            return;
        }
        for cause in bad.iter().filter_map(|unit| unit.cause.as_ref()) {
            self.volumes.count_scrubbed(window.work.request.devid, cause);
        }
        (window.work.found)(ScrubFinding {
            devid: window.work.request.devid,
            physical,
            bytenr,
            len_bytes,
            is_tree,
            cause: first.cause.clone(),
            has_good_copy: first.has_good_copy,
        });
    }
}

/// An item of the extent tree.
#[derive(Clone, Debug)]
struct FoundExtent {
    range: Range<u64>,
    is_tree: bool,
    generation: Generation,
}

/// Bytes of a stripe that a thread checks at once.
const WINDOW_BYTES: u64 = 2 << 20;
/// The longest read is a whole window.
const BUF_BYTES: usize = 2 << 20;
/// Pieces with a shorter gap between them are read together.
const GAP_BYTES: u64 = 64 << 10;
/// Threads for each device: while one compares, the others read.
const NR_THREADS: usize = 3;
/// Longest time in which a scrub with a limit does not see that it is cancelled.
const PAUSE: Duration = Duration::from_millis(100);
