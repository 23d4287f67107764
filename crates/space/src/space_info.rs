//! The space info of a kind: its block groups, allocation, and the sums of reservations.
//!
//! Allocation tries, in this order: the hint; the cursor (next fit, so consecutive allocations are adjacent) and the
//! next long runs after it; the tightest run with room for further allocations; the longest run. Full block groups are
//! skipped, because `by_run` lists only groups with free space, each by its longest free run.
//!
//! Invariants:
//! - I1. `totals` is the sum of the groups' contributions ([`contribution`]). Groups change only in
//!   [`SpaceState::update`], which keeps `totals`, `by_run` and `empty` correct. No other function visits all groups,
//!   except to list them for users.
//! - I2. `may_use` is the sum of all live reservations; `global_reserved <= global_size`.
//! - I3. A new reservation never raises `may_use + global_reserved` above [`SpaceState::reservable`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ubtrfs_error::Result;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Generation, Logical};

use crate::block_group::{BlockGroup, BlockGroupState, corrupt};
use crate::range_set::len_of;
use crate::{Extent, Shortage, SpaceKind};

/// The sums of a kind of space. `total = used + reserved + pinned + readonly + free`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceInfo {
    /// Length of all block groups.
    pub total: u64,
    /// Bytes of extents in the extent tree.
    pub used: u64,
    /// Bytes freed by a transaction that is not committed yet.
    pub pinned: u64,
    /// Allocated bytes that are not in the extent tree yet.
    pub reserved: u64,
    /// Free bytes that cannot be allocated: in read-only block groups, and superblock mirrors.
    pub readonly: u64,
    /// Bytes that can be allocated.
    pub free: u64,
    /// Number of contiguous ranges that make up the free bytes.
    pub nr_free_ranges: u64,
    /// Bytes held by reservations, not allocated yet.
    pub may_use: u64,
    /// Bytes held by the global reserve.
    pub global_reserved: u64,
    /// Wanted size of the global reserve.
    pub global_size: u64,
    /// Logical bytes that new chunks of this kind could add.
    pub unallocated: u64,
}

/// The requirements for an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub(crate) want: u64,
    pub(crate) min: u64,
    /// Start and length of the extent must be multiples of `align`.
    pub(crate) align: u64,
}

#[derive(Debug, Default)]
pub(crate) struct SpaceState {
    groups: BTreeMap<u64, BlockGroupState>,
    /// `(longest free run, start)` of the writable groups with free space.
    by_run: BTreeSet<(u64, u64)>,
    /// End of the last allocation that was not made at its hint.
    cursor: u64,
    totals: SpaceInfo,
    /// Whether reservations may exceed the free space, because new chunks can add more.
    overcommits: bool,
    dirty: BTreeSet<u64>,
    /// Starts of the groups in which nothing is used, allocated or pinned.
    empty: BTreeSet<u64>,
    pinned: BTreeMap<Generation, Vec<PinnedRange>>,
}

/// A pinned extent in the block group at `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PinnedRange {
    group: u64,
    extent: Extent,
}

/// Runs of at least this length are preferred, so that the next allocations are adjacent.
const CLUSTER_BYTES: u64 = 1 << 20;
/// Maximum number of runs after the cursor that are tried, and of groups that are compared if no run has room for all
/// wanted bytes.
const RUNS_SCANNED: usize = 16;

impl SpaceState {
    pub(crate) fn new(overcommits: bool) -> Self {
        Self { overcommits, ..Self::default() }
    }

    pub(crate) fn insert_group(&mut self, group: BlockGroupState) -> Option<()> {
        let start = group.item.start.0;
        let before = self.groups.range(..group.end()).next_back();
        if before.is_some_and(|(_, before)| before.end() > start) {
            return None;
        }
        self.totals = sum(self.totals, contribution(&group));
        self.by_run.extend(run_entry(&group));
        self.empty.extend(group.is_empty().then_some(start));
        self.groups.insert(start, group);
        self.dirty.insert(start);
        self.refill_global();
        Some(())
    }

    pub(crate) fn remove_group(&mut self, start: u64) -> Option<BlockGroup> {
        let group = self.groups.remove(&start)?;
        self.totals = difference(self.totals, contribution(&group));
        if let Some(entry) = run_entry(&group) {
            self.by_run.remove(&entry);
        }
        self.dirty.remove(&start);
        self.empty.remove(&start);
        for ranges in self.pinned.values_mut() {
            ranges.retain(|pinned| pinned.group != start);
        }
        Some(group.item)
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = &BlockGroupState> {
        self.groups.values()
    }

    /// The groups in which nothing is used, allocated or pinned.
    pub(crate) fn empty_groups(&self) -> impl Iterator<Item = &BlockGroupState> {
        self.empty.iter().filter_map(|start| self.groups.get(start))
    }

    /// Type and profile of the last group of this type.
    pub(crate) fn last_flags(&self, wanted: BlockGroupFlags) -> Option<BlockGroupFlags> {
        // Only in mixed filesystems can groups have other types.
        self.groups.values().rev().map(|group| group.item.flags).find(|flags| flags.contains(wanted))
    }

    /// Groups of these types besides the one at `start`.
    pub(crate) fn others(&self, start: u64, types: BlockGroupFlags) -> impl Iterator<Item = &BlockGroupState> {
        let is_other = move |group: &&BlockGroupState| {
            group.item.start.0 != start && group.item.flags & BlockGroupFlags::TYPES == types
        };
        self.groups.values().filter(is_other)
    }

    pub(crate) fn nr_groups(&self) -> usize {
        self.groups.len()
    }

    pub(crate) fn group(&self, start: u64) -> Option<&BlockGroupState> {
        self.groups.get(&start)
    }

    pub(crate) fn set_read_only(&mut self, start: u64, read_only: bool) {
        self.update(start, |group| group.read_only = read_only || group.is_on_seed);
        self.refill_global();
    }

    /// Makes a block group read-only for ever.
    pub(crate) fn set_on_seed(&mut self, start: u64) {
        self.update(start, |group| (group.is_on_seed, group.read_only) = (true, true));
    }

    /// Makes a block group read-only, unless reservations need its free space.
    pub(crate) fn try_set_read_only(&mut self, start: u64) -> bool {
        let Some(group) = self.groups.get(&start) else { return false };
        let left = self.totals.free.saturating_sub(contribution(group).free);
        // If reservations of this kind may exceed the free space, they do not depend on the free space of one block
        // group. The caller checks that enough space remains for admitted changes of metadata, because this type does
        // not know how much space those changes need.
        let is_allowed = group.read_only || self.overcommits || left >= self.totals.may_use;
        if is_allowed {
            self.set_read_only(start, true);
        }
        is_allowed
    }

    pub(crate) fn set_profile(&mut self, start: u64, flags: BlockGroupFlags) {
        let types = BlockGroupFlags::TYPES;
        self.update(start, |group| group.item.flags = (group.item.flags & types) | flags.difference(types));
        self.dirty.insert(start);
    }

    /// Takes the starts of the dirty groups, and where the on-disk free space of each changed.
    pub(crate) fn take_dirty(&mut self) -> Vec<(u64, Vec<Range<u64>>)> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        dirty.filter_map(|start| Some((start, self.groups.get_mut(&start)?.take_changed()))).collect()
    }

    pub(crate) fn allocate(&mut self, fit: Fit, hint: Option<u64>) -> Option<Extent> {
        if let Some(range) = hint.and_then(|hint| self.fit_at(hint, fit)) {
            return Some(self.take(range));
        }
        let range =
            self.fit_at(self.cursor, fit).or_else(|| self.fit_after_cursor(fit)).or_else(|| self.fit_any(fit))?;
        self.cursor = range.end;
        Some(self.take(range))
    }

    pub(crate) fn allocate_exact(&mut self, extent: Extent) -> bool {
        let Some(group) = self.group_of(extent).and_then(|start| self.groups.get(&start)) else { return false };
        let run = group.free().ranges().containing(extent.bytenr.0);
        if run.is_none_or(|run| run.end < extent.end()) {
            return false;
        }
        self.take(extent.bytenr.0..extent.end());
        true
    }

    pub(crate) fn release(&mut self, extent: Extent) {
        let start = self.group_of(extent).expect("I1: an allocated extent lies in a block group");
        self.update(start, |group| group.release(extent.bytenr.0..extent.end()));
        self.refill_global();
    }

    /// Releases an extent and reserves its bytes again.
    pub(crate) fn release_to_reservation(&mut self, extent: Extent) {
        self.totals.may_use = self.totals.may_use.saturating_add(extent.len_bytes);
        self.release(extent);
    }

    /// Notes that the items of `first` and of the adjacent extents in `behind` were inserted, up to the end of the
    /// block group. Returns how many extents of `behind` were adjacent.
    pub(crate) fn extents_added(&mut self, first: Extent, behind: &[Extent]) -> Result<usize> {
        let start = self.group_of(first).ok_or_else(|| outside(first))?;
        let group_end = self.groups[&start].end();
        let mut run = first;
        let is_next = |next: &&Extent| {
            let follows = next.bytenr.0 == run.end() && next.end() <= group_end;
            if follows {
                run = run.joined(**next);
            }
            follows
        };
        let nr_counted = behind.iter().take_while(is_next).count();
        self.dirty.insert(start);
        self.update(start, |group| group.extent_added(run)).unwrap_or(Ok(()))?;
        Ok(nr_counted)
    }

    pub(crate) fn extent_removed(&mut self, extent: Extent, generation: Generation) -> Result<()> {
        let start = self.group_of(extent).ok_or_else(|| outside(extent))?;
        self.update(start, |group| group.extent_removed(extent)).unwrap_or(Ok(()))?;
        self.dirty.insert(start);
        self.pinned.entry(generation).or_default().push(PinnedRange { group: start, extent });
        Ok(())
    }

    /// Takes the extents pinned up to a generation, coalesced within each group.
    pub(crate) fn take_pinned(&mut self, upto: Generation) -> Vec<Extent> {
        let later = self.pinned.split_off(&Generation(upto.0.saturating_add(1)));
        let mut ranges: Vec<PinnedRange> = std::mem::replace(&mut self.pinned, later).into_values().flatten().collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joins = next.group == last.group && next.extent.bytenr.0 == last.extent.end();
            if joins {
                last.extent = last.extent.joined(next.extent);
            }
            joins
        });
        ranges.into_iter().map(|pinned| pinned.extent).collect()
    }

    pub(crate) fn finish_unpin(&mut self, extent: Extent) {
        if let Some(start) = self.group_of(extent) {
            self.update(start, |group| group.unpin(extent.bytenr.0..extent.end()));
        }
        self.refill_global();
    }

    pub(crate) fn info(&self) -> SpaceInfo {
        self.totals
    }

    /// Reserves `bytes`, or returns the shortage.
    pub(crate) fn reserve(&mut self, kind: SpaceKind, bytes: u64) -> Result<(), Shortage> {
        let available = self.unreserved();
        let Some(missing_bytes) = bytes.checked_sub(available).filter(|&missing| missing > 0) else {
            self.add_may_use(bytes);
            return Ok(());
        };
        Err(Shortage {
            kind,
            want_bytes: bytes,
            missing_bytes,
            pinned_bytes: self.totals.pinned,
            may_use_bytes: self.totals.may_use,
            unallocated_bytes: self.totals.unallocated,
        })
    }

    /// Reserves `bytes`, if necessary from the global reserve.
    pub(crate) fn reserve_from_global(&mut self, kind: SpaceKind, bytes: u64) -> Result<(), Shortage> {
        self.reserve(kind, bytes).or_else(|shortage| {
            self.totals.global_reserved = self.totals.global_reserved.checked_sub(bytes).ok_or(shortage)?;
            self.add_may_use(bytes);
            Ok(())
        })
    }

    fn add_may_use(&mut self, bytes: u64) {
        self.totals.may_use = self.totals.may_use.checked_add(bytes).expect("I3: reservations stay below the limit");
    }

    pub(crate) fn unreserve(&mut self, bytes: u64) {
        self.totals.may_use = self.totals.may_use.checked_sub(bytes).expect("I2: returned bytes were reserved");
        self.refill_global();
    }

    pub(crate) fn set_global_size(&mut self, bytes: u64) {
        self.totals.global_size = bytes;
        self.totals.global_reserved = self.totals.global_reserved.min(bytes);
        self.refill_global();
    }

    pub(crate) fn set_unallocated(&mut self, bytes: u64) {
        self.totals.unallocated = bytes;
        self.refill_global();
    }

    /// The limit of all reservations: free space, and for metadata also half of the bytes that new chunks could add.
    /// The other half of these bytes is left to data. Metadata may be overcommitted because its reservations are for
    /// the worst case, which is rare.
    fn reservable(&self) -> u64 {
        let overcommit = if self.overcommits { self.totals.unallocated / 2 } else { 0 };
        self.totals.free.saturating_add(overcommit)
    }

    /// The part of [`Self::reservable`] that neither reservations nor the global reserve hold.
    fn unreserved(&self) -> u64 {
        let SpaceInfo { may_use, global_reserved, .. } = self.totals;
        self.reservable().saturating_sub(may_use.saturating_add(global_reserved))
    }

    fn refill_global(&mut self) {
        // I2: the global reserve stays within its wanted size.
        let filled = self.totals.global_reserved.saturating_add(self.unreserved());
        self.totals.global_reserved = filled.min(self.totals.global_size);
    }

    /// Changes a block group, and adjusts `totals` and `by_run` (I1).
    fn update<T>(&mut self, start: u64, change: impl FnOnce(&mut BlockGroupState) -> T) -> Option<T> {
        let group = self.groups.get_mut(&start)?;
        let (contributed, entry) = (contribution(group), run_entry(group));
        let result = change(group);
        let (contributes, new_entry) = (contribution(group), run_entry(group));
        match group.is_empty() {
            true => self.empty.insert(start),
            false => self.empty.remove(&start),
        };
        self.totals = sum(difference(self.totals, contributed), contributes);
        if entry != new_entry {
            if let Some(entry) = entry {
                self.by_run.remove(&entry);
            }
            self.by_run.extend(new_entry);
        }
        Some(result)
    }

    fn group_of(&self, extent: Extent) -> Option<u64> {
        let (&start, group) = self.groups.range(..=extent.bytenr.0).next_back()?;
        (extent.len_bytes > 0 && extent.end() <= group.end()).then_some(start)
    }

    fn take(&mut self, range: Range<u64>) -> Extent {
        let extent = Extent::new(Logical(range.start), len_of(&range));
        let start = self.group_of(extent).expect("I1: a free run lies in a block group");
        self.update(start, |group| group.allocate(range));
        extent
    }

    fn writable_group_at(&self, at: u64) -> Option<&BlockGroupState> {
        let (_, group) = self.groups.range(..=at).next_back()?;
        (at < group.end() && !group.read_only).then_some(group)
    }

    /// Finds room for all wanted bytes at `at` or later, in the run that contains `at`.
    fn fit_at(&self, at: u64, fit: Fit) -> Option<Range<u64>> {
        let run = self.writable_group_at(at)?.free().ranges().containing(at)?;
        fit.whole(at..run.end)
    }

    /// Finds room for all wanted bytes in one of the next long runs after the cursor.
    fn fit_after_cursor(&self, fit: Fit) -> Option<Range<u64>> {
        let group = self.writable_group_at(self.cursor)?;
        let mut runs = group.free().ranges().from(self.cursor).take(RUNS_SCANNED);
        runs.find(|run| len_of(run) >= fit.want.max(CLUSTER_BYTES)).and_then(|run| fit.whole(run))
    }

    fn fit_any(&self, fit: Fit) -> Option<Range<u64>> {
        let roomy = fit.want.saturating_add(fit.align).max(CLUSTER_BYTES);
        // Choose the group whose longest run is the shortest that has room, and in this group the shortest run that has
        // room. So empty groups and long runs stay whole.
        let tight = self.by_run.range((roomy, 0)..).next().and_then(|(_, start)| self.groups.get(start));
        if let Some(run) = tight.and_then(|group| group.free().at_least(roomy).next()) {
            return fit.whole(run);
        }
        // Space is fragmented: take the longest run that has room for all wanted bytes.
        for group in self.groups_with_runs(fit.want) {
            if let Some(range) = group.free().at_least(fit.want).rev().find_map(|run| fit.whole(run)) {
                return Some(range);
            }
        }
        // No run has room for all wanted bytes: take the longest part of a run. Within a group, the longest runs are
        // tried first.
        let longest = |group: &BlockGroupState| group.free().at_least(fit.min).rev().find_map(|run| fit.part(run));
        let parts = self.groups_with_runs(fit.min).take(RUNS_SCANNED).filter_map(longest);
        parts.max_by_key(len_of).or_else(|| self.groups_with_runs(fit.min).skip(RUNS_SCANNED).find_map(longest))
    }

    fn groups_with_runs(&self, len_bytes: u64) -> impl Iterator<Item = &BlockGroupState> {
        self.by_run.range((len_bytes, 0)..).rev().filter_map(|(_, start)| self.groups.get(start))
    }
}

impl Fit {
    fn part(&self, run: Range<u64>) -> Option<Range<u64>> {
        let start = run.start.checked_next_multiple_of(self.align)?;
        let room = run.end.checked_sub(start)?;
        let len_bytes = self.want.min(room.checked_div(self.align)?.checked_mul(self.align)?);
        let end = start.checked_add(len_bytes)?;
        (len_bytes >= self.min).then_some(start..end)
    }

    fn whole(&self, run: Range<u64>) -> Option<Range<u64>> {
        Self { min: self.want, ..*self }.part(run)
    }
}

fn run_entry(group: &BlockGroupState) -> Option<(u64, u64)> {
    let longest = group.free().longest();
    (!group.read_only && longest > 0).then_some((longest, group.item.start.0))
}

/// A group's contribution to the totals.
fn contribution(group: &BlockGroupState) -> SpaceInfo {
    let free = group.free().ranges().bytes();
    SpaceInfo {
        total: group.item.len_bytes,
        used: group.item.used,
        pinned: group.pinned,
        reserved: group.allocated,
        readonly: group.mirror_bytes().saturating_add(if group.read_only { free } else { 0 }),
        free: if group.read_only { 0 } else { free },
        nr_free_ranges: if group.read_only { 0 } else { group.free().ranges().nr_ranges() },
        ..SpaceInfo::default()
    }
}

fn sum(a: SpaceInfo, b: SpaceInfo) -> SpaceInfo {
    combine(a, b, u64::saturating_add)
}

fn difference(a: SpaceInfo, b: SpaceInfo) -> SpaceInfo {
    combine(a, b, u64::saturating_sub)
}

fn combine(a: SpaceInfo, b: SpaceInfo, op: impl Fn(u64, u64) -> u64) -> SpaceInfo {
    SpaceInfo {
        total: op(a.total, b.total),
        used: op(a.used, b.used),
        pinned: op(a.pinned, b.pinned),
        reserved: op(a.reserved, b.reserved),
        readonly: op(a.readonly, b.readonly),
        free: op(a.free, b.free),
        nr_free_ranges: op(a.nr_free_ranges, b.nr_free_ranges),
        ..a
    }
}

fn outside(extent: Extent) -> ubtrfs_error::Error {
    corrupt("extent", "length", extent.len_bytes, "expected an extent inside a block group", extent.bytenr)
}
