//! All block groups of a filesystem, shared by all threads. Calls are short and never wait for I/O.
//!
//! Invariants:
//! - I1. `starts` maps every block group to its kind, and the block group is in the `SpaceState` of this kind.
//!
//! Lock order: `starts` is locked before a `SpaceState`. No thread locks two states at once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock};
use ubtrfs_error::Result;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Generation, Logical};

use crate::block_group::{BlockGroup, BlockGroupState, corrupt};
use crate::space_info::{Fit, SpaceInfo, SpaceState};
use crate::{Extent, Reservation, Shortage, SpaceKind};

/// Fixed properties of the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceConfig {
    /// Bytes of a sector.
    pub sectorsize: u32,
    /// Bytes of a tree block.
    pub nodesize: u32,
    /// Whether data and metadata share block groups.
    pub mixed: bool,
}

/// The other block groups of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherGroups {
    /// There are no others.
    None,
    /// All others are read-only.
    ReadOnly,
    /// At least one other takes allocations.
    Writable,
}

/// A block group whose items on disk are outdated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyGroup {
    /// Start address.
    pub start: Logical,
    /// The ranges whose items in the free space tree may be outdated, sorted and coalesced.
    pub changed: Vec<Range<u64>>,
}

/// All block groups with their free space, and the reservations.
#[derive(Debug)]
pub struct Space {
    inner: Arc<SharedSpace>,
}

#[derive(Debug)]
pub(crate) struct SharedSpace {
    config: SpaceConfig,
    starts: RwLock<BTreeMap<u64, SpaceKind>>,
    states: [Mutex<SpaceState>; 3],
    tokens: AtomicU64,
    /// Block groups visited by walks of all block groups.
    walked: AtomicU64,
}

impl Space {
    /// Makes the space of a filesystem; it has no block groups yet.
    pub fn new(config: SpaceConfig) -> Self {
        let (starts, tokens, walked) = Default::default();
        let states = [false, !config.mixed, false].map(|overcommits| Mutex::new(SpaceState::new(overcommits)));
        Self { inner: Arc::new(SharedSpace { config, starts, states, tokens, walked }) }
    }

    /// Adds a block group and marks it dirty. `free` comes from the free space tree, or from the gaps between extents.
    /// `reserved` has the ranges of superblock mirrors, which are never allocated, even if `free` includes the mirrors.
    pub fn insert_block_group(
        &self,
        group: BlockGroup,
        free: Vec<Range<u64>>,
        reserved: Vec<Range<u64>>,
    ) -> Result<()> {
        let kind = self.inner.kind_of(group.flags).ok_or_else(|| {
            let expected = "expected one of data, metadata and system, or data and metadata if mixed";
            corrupt("block group", "flags", group.flags.bits(), expected, group.start)
        })?;
        let state = BlockGroupState::new(group, free, reserved, self.inner.config.sectorsize.into())?;
        let mut starts = self.inner.starts.write();
        let overlap =
            || corrupt("block group", "length", group.len_bytes, "expected no other block group there", group.start);
        let end = state.end();
        if starts.range(group.start.0..end).next().is_some() {
            return Err(overlap());
        }
        if let Some((&start, &before)) = starts.range(..group.start.0).next_back()
            && self.inner.state(before).lock().group(start).is_some_and(|before| before.end() > group.start.0)
        {
            return Err(overlap());
        }
        self.inner.state(kind).lock().insert_group(state).ok_or_else(overlap)?;
        starts.insert(group.start.0, kind);
        Ok(())
    }

    /// Removes a block group with its pinned extents.
    pub fn remove_block_group(&self, start: Logical) -> Option<BlockGroup> {
        let mut starts = self.inner.starts.write();
        let kind = starts.remove(&start.0)?;
        self.inner.state(kind).lock().remove_group(start.0)
    }

    /// Forbids allocations in a block group for ever, because it lies on a seed device.
    pub fn set_on_seed(&self, start: Logical) {
        if let Some(mut state) = self.inner.state_of_group(start) {
            state.set_on_seed(start.0);
        }
    }

    /// Whether the block group that starts at `start` lies on a seed device.
    pub fn is_on_seed(&self, start: Logical) -> bool {
        self.inner.state_of_group(start).is_some_and(|state| state.group(start.0).is_some_and(|group| group.is_on_seed))
    }

    /// Allows allocations in a block group again, unless it lies on a seed device.
    pub fn set_writable(&self, start: Logical) {
        if let Some(mut state) = self.inner.state_of_group(start) {
            state.set_read_only(start.0, false);
        }
    }

    /// Forbids allocations in a block group, unless reservations need the group's free space. Reservations of metadata
    /// do not prevent this if metadata may be overcommitted. Returns whether the group is read-only now.
    pub fn try_set_read_only(&self, start: Logical) -> bool {
        self.inner.state_of_group(start).is_some_and(|mut state| state.try_set_read_only(start.0))
    }

    /// Sets type and profile of a block group, and marks it dirty. The type must stay the same.
    pub fn set_profile(&self, start: Logical, flags: BlockGroupFlags) {
        if let Some(mut state) = self.inner.state_of_group(start) {
            state.set_profile(start.0, flags);
        }
    }

    /// The parts of a range of a block group that are not free for allocation, in order.
    pub fn taken_ranges(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let Some((start, kind)) = self.inner.kind_at(Logical(range.start)) else { return Vec::new() };
        let state = self.inner.state(kind).lock();
        state.group(start).map(|group| group.free().ranges().gaps(range)).unwrap_or_default()
    }

    /// Whether the block group that contains this address takes no allocations.
    pub fn is_read_only(&self, bytenr: Logical) -> bool {
        let Some((start, kind)) = self.inner.kind_at(bytenr) else { return false };
        self.inner.state(kind).lock().group(start).is_some_and(|group| group.read_only)
    }

    /// Whether no space is used, allocated or pinned in the block group that starts at `start`. True if there is no
    /// such group.
    pub fn is_empty(&self, start: Logical) -> bool {
        self.inner.state_of_group(start).is_none_or(|state| state.group(start.0).is_none_or(BlockGroupState::is_empty))
    }

    /// All block groups, sorted.
    pub fn block_groups(&self) -> Vec<BlockGroup> {
        let mut groups = Vec::new();
        for state in &self.inner.states {
            let state = state.lock();
            self.inner.walked.fetch_add(state.nr_groups() as u64, Ordering::Relaxed);
            groups.extend(state.groups().map(|group| group.item));
        }
        groups.sort_unstable_by_key(|group| group.start);
        groups
    }

    /// Block groups in which nothing is used, allocated or pinned.
    pub fn empty_groups(&self) -> Vec<BlockGroup> {
        let mut groups = Vec::new();
        for state in &self.inner.states {
            groups.extend(state.lock().empty_groups().map(|group| group.item));
        }
        groups.sort_unstable_by_key(|group: &BlockGroup| group.start);
        groups
    }

    /// Type and profile of the last block group of this kind, by address.
    pub fn last_flags(&self, kind: SpaceKind) -> Option<BlockGroupFlags> {
        self.inner.state(kind).lock().last_flags(kind.flags())
    }

    /// Bytes of extents in all block groups.
    pub fn used_bytes(&self) -> u64 {
        self.inner.states.iter().map(|state| state.lock().info().used).fold(0, u64::saturating_add)
    }

    /// Whether other block groups with the types of this one exist, and whether one of them takes allocations.
    pub fn other_groups(&self, group: &BlockGroup) -> OtherGroups {
        let Some(kind) = self.inner.kind_of(group.flags) else { return OtherGroups::None };
        let state = self.inner.state(kind).lock();
        let mut others = state.others(group.start.0, group.flags & BlockGroupFlags::TYPES).peekable();
        match (others.peek().is_some(), others.any(|other| !other.read_only)) {
            (false, _) => OtherGroups::None,
            (true, false) => OtherGroups::ReadOnly,
            (true, true) => OtherGroups::Writable,
        }
    }

    /// The block group that contains this address.
    pub fn block_group_at(&self, bytenr: Logical) -> Option<BlockGroup> {
        let (start, kind) = self.inner.kind_at(bytenr)?;
        let item = self.inner.state(kind).lock().group(start)?.item;
        bytenr.offset_from(Logical(start)).is_some_and(|offset| offset < item.len_bytes).then_some(item)
    }

    /// The block group that contains this address or, if there is none, the next one.
    pub fn block_group_from(&self, bytenr: Logical) -> Option<BlockGroup> {
        self.block_group_at(bytenr).or_else(|| {
            let next = self.inner.starts.read().range(bytenr.0..).next().map(|(&start, _)| start)?;
            self.block_group_at(Logical(next))
        })
    }

    /// Allocates a contiguous extent of `want` bytes. If there is none, allocates the longest extent of at least `min`
    /// bytes. If a new chunk is better than a shorter extent, first call this function with `min == want`; if it
    /// returns `None`, make a chunk and call it again. Start and length of metadata and system extents are multiples of
    /// the node size.
    pub fn allocate(&self, kind: SpaceKind, want: u64, min: u64, hint: Option<Logical>) -> Option<Extent> {
        let align = self.inner.align(kind);
        let round = |bytes: u64| bytes.max(1).checked_next_multiple_of(align);
        let fit = Fit { want: round(want.max(min))?, min: round(min)?, align };
        self.inner.state(kind).lock().allocate(fit, hint.map(|hint| hint.0))
    }

    /// Allocates exactly this extent. Returns `false`, without a change, if a part of it is not free.
    pub fn allocate_exact(&self, extent: Extent) -> bool {
        let kind = self.inner.kind_at(extent.bytenr);
        kind.is_some_and(|(_, kind)| self.inner.state(kind).lock().allocate_exact(extent))
    }

    /// Frees an allocated extent, or a part of one, that has no committed or pending extent item.
    pub fn release(&self, extent: Extent) {
        if let Some((_, kind)) = self.inner.kind_at(extent.bytenr) {
            self.inner.state(kind).lock().release(extent);
        }
    }

    /// Releases an extent as [`Space::release`] does, and adds its bytes to `reservation` in the same step, so no other
    /// reservation can get them. The reservation must be of the extent's kind.
    pub fn release_to_reservation(&self, extent: Extent, reservation: &mut Reservation) {
        if let Some((_, kind)) = self.inner.kind_at(extent.bytenr) {
            self.inner.state(kind).lock().release_to_reservation(extent);
            reservation.grow(extent.len_bytes);
        }
    }

    /// Notes that the items of these extents, ordered by address, were inserted: the extents leave the on-disk free
    /// space and count as used. Adjacent extents are counted together.
    pub fn extents_added(&self, mut extents: &[Extent]) -> Result<()> {
        while let Some((first, behind)) = extents.split_first() {
            let nr_counted = self.inner.state_at(*first)?.lock().extents_added(*first, behind)?;
            extents = &behind[nr_counted..];
        }
        Ok(())
    }

    /// Notes that an extent item was deleted: the extent joins the on-disk free space and stays pinned until
    /// [`Space::unpin`].
    pub fn extent_removed(&self, extent: Extent, generation: Generation) -> Result<()> {
        self.inner.state_at(extent)?.lock().extent_removed(extent, generation)
    }

    /// Makes the extents that transactions up to `upto` removed available for allocation. Returns these extents,
    /// coalesced.
    pub fn unpin(&self, upto: Generation) -> Vec<Extent> {
        let extents = self.start_unpin(upto);
        self.finish_unpin(&extents);
        extents
    }

    /// Takes the extents removed by transactions up to `upto`, coalesced. The caller may discard the extents, which
    /// become free for allocation only by [`Space::finish_unpin`].
    #[must_use = "the space stays pinned until `finish_unpin`"]
    pub fn start_unpin(&self, upto: Generation) -> Vec<Extent> {
        let mut extents: Vec<Extent> =
            self.inner.states.iter().flat_map(|state| state.lock().take_pinned(upto)).collect();
        extents.sort_unstable();
        extents
    }

    /// Makes the extents that [`Space::start_unpin`] returned available for allocation.
    pub fn finish_unpin(&self, extents: &[Extent]) {
        for extent in extents {
            if let Some((_, kind)) = self.inner.kind_at(extent.bytenr) {
                self.inner.state(kind).lock().finish_unpin(*extent);
            }
        }
    }

    /// Returns the dirty block groups, sorted, and marks them as clean. Call this once after loading a filesystem,
    /// because all items on disk are up to date then.
    pub fn take_dirty_groups(&self) -> Vec<DirtyGroup> {
        let taken = self.inner.states.iter().flat_map(|state| state.lock().take_dirty());
        let mut dirty: Vec<DirtyGroup> =
            taken.map(|(start, changed)| DirtyGroup { start: Logical(start), changed }).collect();
        dirty.sort_unstable_by_key(|group| group.start);
        dirty
    }

    /// Number of ranges of a block group that the free space tree must contain.
    pub fn nr_disk_free(&self, start: Logical) -> u64 {
        self.inner
            .state_of_group(start)
            .map_or(0, |state| state.group(start.0).map_or(0, BlockGroupState::nr_disk_free))
    }

    /// Of these ranges, the ranges that overlap or touch `window`, sorted.
    pub fn disk_free(&self, start: Logical, window: &Range<u64>) -> Vec<Range<u64>> {
        let Some(state) = self.inner.state_of_group(start) else { return Vec::new() };
        state.group(start.0).map(|group| group.disk_free().touching(window).collect()).unwrap_or_default()
    }

    /// Reserves space, or returns the shortage. Never blocks.
    pub fn reserve(&self, kind: SpaceKind, bytes: u64) -> Result<Reservation, Shortage> {
        self.inner.state(kind).lock().reserve(kind, bytes)?;
        Ok(self.token(kind, bytes))
    }

    /// Reserves metadata space, if necessary from the global reserve. Meant for operations that free space.
    pub fn reserve_from_global(&self, bytes: u64) -> Result<Reservation, Shortage> {
        self.inner.state(SpaceKind::Metadata).lock().reserve_from_global(SpaceKind::Metadata, bytes)?;
        Ok(self.token(SpaceKind::Metadata, bytes))
    }

    /// Sets the size of the global reserve of metadata. Space that becomes free fills the reserve first.
    pub fn set_global_reserve(&self, bytes: u64) {
        self.inner.state(SpaceKind::Metadata).lock().set_global_size(bytes);
    }

    /// Sets the logical bytes that new chunks could add. Metadata reservations may exceed the free metadata space by
    /// half of `metadata_bytes`. Data, system and mixed block groups are never overcommitted.
    pub fn set_unallocated(&self, data_bytes: u64, metadata_bytes: u64) {
        for (kind, bytes) in [(SpaceKind::Data, data_bytes), (SpaceKind::Metadata, metadata_bytes)] {
            self.inner.state(kind).lock().set_unallocated(bytes);
        }
    }

    /// The space info of a kind.
    pub fn info(&self, kind: SpaceKind) -> SpaceInfo {
        self.inner.state(kind).lock().info()
    }

    /// Number and bytes of live reservations. Both numbers are zero when no operation runs and no data is dirty.
    pub fn live_reservations(&self) -> (u64, u64) {
        let bytes = self.inner.states.iter().map(|state| state.lock().info().may_use).sum();
        (self.inner.tokens.load(Ordering::Relaxed), bytes)
    }

    /// Number of live reservations.
    pub fn nr_reservations(&self) -> u64 {
        self.inner.tokens.load(Ordering::Relaxed)
    }

    /// Number of block groups that walks of all block groups have visited. Work for one block group must not need such
    /// a walk.
    pub fn nr_walked(&self) -> u64 {
        self.inner.walked.load(Ordering::Relaxed)
    }

    fn token(&self, kind: SpaceKind, bytes: u64) -> Reservation {
        Reservation::new(Arc::clone(&self.inner), kind, bytes)
    }
}

impl SharedSpace {
    /// The state of a kind. Mixed block groups are in the state of metadata.
    pub(crate) fn state(&self, kind: SpaceKind) -> &Mutex<SpaceState> {
        match kind {
            SpaceKind::Data if !self.config.mixed => &self.states[0],
            SpaceKind::Data | SpaceKind::Metadata => &self.states[1],
            SpaceKind::System => &self.states[2],
        }
    }

    pub(crate) fn tokens(&self) -> &AtomicU64 {
        &self.tokens
    }

    fn align(&self, kind: SpaceKind) -> u64 {
        let bytes = if kind == SpaceKind::Data { self.config.sectorsize } else { self.config.nodesize };
        u64::from(bytes).max(1)
    }

    fn kind_of(&self, flags: BlockGroupFlags) -> Option<SpaceKind> {
        let types = flags & BlockGroupFlags::TYPES;
        let kind = SpaceKind::of(types);
        let is_mixed = self.config.mixed && types == BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
        (types == kind.flags() || is_mixed).then_some(kind)
    }

    /// The state of the block group that starts at this address. Locks the state of the group's kind.
    fn state_of_group(&self, start: Logical) -> Option<MutexGuard<'_, SpaceState>> {
        let (_, kind) = self.kind_at(start).filter(|(group, _)| *group == start.0)?;
        Some(self.state(kind).lock())
    }

    fn kind_at(&self, bytenr: Logical) -> Option<(u64, SpaceKind)> {
        self.starts.read().range(..=bytenr.0).next_back().map(|(&start, &kind)| (start, kind))
    }

    fn state_at(&self, extent: Extent) -> Result<&Mutex<SpaceState>> {
        let kind = self.kind_at(extent.bytenr).ok_or_else(|| {
            let expected = "expected an extent inside a block group";
            corrupt("extent", "length", extent.len_bytes, expected, extent.bytenr)
        })?;
        Ok(self.state(kind.1))
    }
}
