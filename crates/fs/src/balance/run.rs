//! Running a balance: start, resume, pause, cancel.
//!
//! Block groups are taken from the highest address down, as Linux does, so the balance does not reach the new groups
//! that it makes, which have higher addresses. A conversion takes metadata and system block groups first, because on a
//! nearly full filesystem, data would leave no room for them. Each group is emptied
//! ([`Engine::relocate_block_group`](ubtrfs_transaction::Engine::relocate_block_group)). If only the group's place or
//! profile changes, or if the group is nearly full, so that emptying it would gain nothing, its chunk is copied instead
//! ([`Engine::migrate_chunk`](ubtrfs_transaction::Engine::migrate_chunk)).
//!
//! Invariants:
//! - I1. The balance item is durable before the first block group is touched, and is removed when the balance ends.
//!   So a mount, here or in Linux, resumes an interrupted balance.
//! - I2. From the start of a conversion to its end, also while it is paused, new chunks have the conversion's target
//!   profile ([`Engine::set_conversion`](ubtrfs_transaction::Engine::set_conversion)). The conversion ends when every
//!   block group that its filters select has the target profile, could not be moved, or is beyond the filters' limit on
//!   the number of block groups.
//! - I3. A block group for which a conversion finds no space is tried again after other groups have moved, because they
//!   free their old places.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_format::{Key, KeyType, Logical, Profile, RootId, objectid};
use ubtrfs_transaction::{BlockGroup, ChunkPlacement, ConversionTargets, Job, RelocationFailure};

use crate::balance::filter::{args_for, clear_unused, for_resumption, has_usage, limits, profile_of, takes};
use crate::balance::state::{BalanceCounts, BalanceStatus, StopRequest};
use crate::session::context::MetadataPurpose;
use crate::watched_job::watched;
use crate::{Error, Fs, InodeId, Result};

/// The result of a balance.
#[derive(Debug, Default)]
pub struct BalanceReport {
    /// Numbers of block groups by outcome.
    pub counts: BalanceCounts,
    /// Extents that could not be moved.
    pub failures: Vec<BalanceFailure>,
}

/// An extent that could not be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalanceFailure {
    /// Its address.
    pub bytenr: u64,
    /// The reason.
    pub reason: String,
    /// The files that use the extent: subvolume, inode, and a path from the top level if the file has one.
    pub files: Vec<(InodeId, Option<Vec<u8>>)>,
}

/// What became of a block group that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupOutcome {
    Moved,
    WithoutSpace,
    Unchanged,
}

impl Fs {
    /// Balances the block groups that the filters of `item` select. `job` counts the bytes that move.
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if a balance runs or is paused, or a device is being replaced; [`Error::InvalidArgument`]
    /// for filters that contradict each other; `Cancelled` if the balance is paused or cancelled, or `job` is cancelled; otherwise the error that
    /// stopped the balance. Extents that cannot be moved do not stop the balance.
    pub fn balance(&self, mut item: BalanceItem, job: &Job) -> Result<BalanceReport> {
        self.context.check_mounted_writable()?;
        self.check_filters(&item)?;
        clear_unused(&mut item);
        self.engine.refuse_relocation_trees()?;
        let (item, inner) = self.balance.begin(Some(item))?;
        self.run_balance(&item, &inner, job, true)
    }

    /// Resumes a paused balance.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no balance is paused; otherwise as for [`Fs::balance`].
    pub fn resume_balance(&self, job: &Job) -> Result<BalanceReport> {
        self.context.check_mounted_writable()?;
        if self.balance.is_paused() {
            // If relocation trees of Linux exist, fail before the balance begins. So the balance stays paused, and
            // Linux can resume it.
            self.engine.refuse_relocation_trees()?;
        }
        let (mut item, inner) = self.balance.begin(None)?;
        for_resumption(&mut item);
        self.run_balance(&item, &inner, job, false)
    }

    /// Pauses a running balance, and returns after it has stopped.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no balance runs.
    pub fn pause_balance(&self) -> Result<()> {
        if self.balance.stop(StopRequest::Pause) { Ok(()) } else { Err(Error::NotRunning("no balance is running")) }
    }

    /// Ends a running or paused balance. Extents that were moved stay in their new places.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no balance runs or is paused; `Refused` if Linux left relocation trees, which belong to
    /// the balance and which only Linux can complete; an error of the commit that removes the balance item.
    pub fn cancel_balance(&self) -> Result<()> {
        loop {
            if self.balance.stop(StopRequest::Cancel) {
                return Ok(());
            }
            // While the item is being removed, the balance counts as running, so no other thread resumes the balance.
            match self.balance.begin(None) {
                Ok(_) => break,
                Err(Error::InProgress(_)) => {}
                Err(Error::NotRunning(_)) => return Err(Error::NotRunning("there is no balance to cancel")),
                Err(error) => return Err(error),
            }
        }
        // If relocation trees of Linux exist, cancelling fails, and the balance stays paused. Linux completes the trees
        // when it mounts the filesystem, and then resumes the balance.
        let removed = self.engine.refuse_relocation_trees().map_err(Error::from);
        let removed = removed.and_then(|()| self.put_balance_item(None));
        if removed.is_ok() {
            self.engine.set_conversion(ConversionTargets::default());
        }
        self.balance.end(removed.is_err());
        removed
    }

    /// The balance that runs or is paused, if any.
    pub fn balance_status(&self) -> Option<BalanceStatus> {
        self.balance.status()
    }

    /// Finds a balance that an earlier mount left unfinished.
    pub(crate) fn find_balance(&self) -> Result<()> {
        let Some(roots) = self.engine.tree(RootId::ROOT_TREE)? else { return Ok(()) };
        let Some(item) = roots.get(&ITEM_KEY)? else { return Ok(()) };
        let item = BalanceItem::decode(&item).map_err(|cause| EngineError::from(cause).in_tree(RootId::ROOT_TREE))?;
        if self.context.read_only().is_none() {
            self.engine.set_conversion(targets_of(&item));
        }
        self.balance.found(item);
        Ok(())
    }

    /// Resumes a balance that an earlier mount left unfinished, on a new thread.
    pub fn resume_balance_in_background(self: &Arc<Self>) {
        if !self.balance.is_paused() || self.options.skip_balance || self.context.read_only().is_some() {
            return;
        }
        let fs = Arc::clone(self);
        let resume = move || match fs.resume_balance(&Job::new()) {
            Ok(report) => tracing::info!("the resumed balance is complete: {:?}", report.counts),
            Err(Error::Engine(EngineError::Cancelled)) => {}
            Err(error) => tracing::warn!("the resumed balance has stopped: {error}"),
        };
        if let Err(error) = std::thread::Builder::new().name("ubtrfs-balance".to_owned()).spawn(resume) {
            tracing::warn!("resuming the interrupted balance failed: {error}");
        }
    }

    fn check_filters(&self, item: &BalanceItem) -> Result<()> {
        let types = BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM;
        if item.flags & types.bits() == 0 {
            return Err(Error::InvalidArgument("select the block groups to balance: data, metadata or system"));
        }
        if self.geometry.mixed && (item.data != item.metadata || item.flags & 5 != 5) {
            return Err(Error::InvalidArgument(
                "data and metadata share block groups here, so both need the same filters",
            ));
        }
        for (kind, args) in [
            (BalanceFlags::DATA, &item.data),
            (BalanceFlags::METADATA, &item.metadata),
            (BalanceFlags::SYSTEM, &item.system),
        ] {
            if item.flags & kind.bits() == 0 {
                continue;
            }
            let filters = args.filters();
            if filters.contains(BalanceFilters::DRANGE) && !filters.contains(BalanceFilters::DEVID) {
                return Err(Error::InvalidArgument("the filter drange needs devid"));
            }
            if filters.contains(BalanceFilters::SOFT) && !filters.contains(BalanceFilters::CONVERT) {
                return Err(Error::InvalidArgument("the filter soft needs convert"));
            }
            if !filters.contains(BalanceFilters::CONVERT) {
                continue;
            }
            let target = conversion_target(args)
                .ok_or(Error::InvalidArgument("block groups cannot be converted to profiles with parity"))?;
            let devices = self.engine.devices();
            let nr_devices = devices.iter().filter(|device| device.state.is_complete() && !device.is_seed).count();
            let needed = Profile::of(target).map_or(1, |profile| profile.devs_min);
            if nr_devices < usize::from(needed) {
                return Err(Error::InvalidArgument(match (nr_devices, needed) {
                    (1, _) => {
                        "with one device, block groups can only be converted to single, dup or raid0; add a device first: \
                         ubtrfs device add"
                    }
                    (_, ..=3) => "the profile to convert to needs 3 devices; add a device first: ubtrfs device add",
                    _ => "the profile to convert to needs 4 devices; add devices first: ubtrfs device add",
                }));
            }
            // Other filters choose some of the block groups, and the rest stays as it is.
            if (BalanceFilters::CONVERT | BalanceFilters::SOFT).contains(filters) {
                self.check_room_for(kind, target)?;
            }
            let loses_copies = |group: &BlockGroup| {
                group.flags.bits() & kind.bits() != 0 && Profile::copies_of(group.flags) > Profile::copies_of(target)
            };
            if kind != BalanceFlags::DATA
                && item.flags & BalanceFlags::FORCE.bits() == 0
                && Profile::copies_of(target) == 1
                && self.block_groups().iter().any(loses_copies)
            {
                return Err(Error::InvalidArgument(
                    "this would leave only one copy of metadata; use --force to do it anyway",
                ));
            }
        }
        Ok(())
    }

    /// Fails if the devices cannot hold the content of these block groups in the profile `target`, in whatever order
    /// the block groups move.
    fn check_room_for(&self, kind: BalanceFlags, target: BlockGroupFlags) -> Result<()> {
        let flags = BlockGroupFlags::from_bits_retain(kind.bits()) | target;
        let of_kind = self.block_groups().into_iter().filter(|group| group.flags.bits() & kind.bits() != 0);
        let used = of_kind.map(|group| group.used).fold(0, u64::saturating_add);
        let room = self.engine.capacity_bytes(flags);
        if used <= room {
            return Ok(());
        }
        Err(Error::Engine(EngineError::Refused {
            what: format!(
                "the devices can hold {room} bytes as {}, and {used} bytes are there: {} bytes are missing",
                Profile::name_of(flags),
                used.saturating_sub(room)
            ),
            hint: "add a device first (ubtrfs device add), or remove files",
        }))
    }

    /// Runs a balance on the calling thread. `inner` is the job through which other threads stop the balance; `job` is
    /// the caller's.
    fn run_balance(&self, item: &BalanceItem, inner: &Job, job: &Job, is_new: bool) -> Result<BalanceReport> {
        let mut report = BalanceReport::default();
        self.engine.set_conversion(targets_of(item));
        let began = if is_new { self.put_balance_item(Some(item)) } else { Ok(()) };
        let result = began.and_then(|()| watched(inner, job, || self.balance_groups(item, inner, &mut report)));
        report.counts = self.balance.counts();
        let is_stopped = matches!(&result, Err(Error::Engine(EngineError::Cancelled)));
        let keep = is_stopped && self.balance.wish() == Some(StopRequest::Pause);
        let removed = if keep || self.context.read_only().is_some() { Ok(()) } else { self.put_balance_item(None) };
        if !keep {
            self.engine.set_conversion(ConversionTargets::default());
        }
        self.balance.end(keep);
        result.and(removed).map(|()| report)
    }

    #[allow(clippy::arithmetic_side_effects, reason = "counts of block groups and of waits")]
    fn balance_groups(&self, item: &BalanceItem, job: &Job, report: &mut BalanceReport) -> Result<()> {
        let mut chosen = self.choose_groups(item);
        self.balance.count(|counts| {
            counts.expected = chosen.len() as u64;
            counts.considered = (self.block_groups().len() as u64).saturating_sub(counts.expected);
        });
        let mut settled = BTreeSet::new();
        // Block groups for which there was no space, and whether any group has moved since the last attempt (I3).
        let (mut without_space, mut has_moved) = (Vec::new(), false);
        let (mut nr_waits, mut may_wait) = (0, true);
        loop {
            let (mut busy, mut awaited) = (Vec::new(), Vec::new());
            for group in chosen {
                job.check()?;
                match self.balance_chosen(item, group, job, report) {
                    Ok(outcome) => {
                        settled.insert(group);
                        self.balance.count(|counts| counts.considered += 1);
                        has_moved |= outcome == GroupOutcome::Moved;
                        without_space.extend((outcome == GroupOutcome::WithoutSpace).then_some(group));
                    }
                    Err(Error::Engine(EngineError::BlockGroupBusy { start, .. })) if may_wait => {
                        busy.push(group);
                        awaited.push(start);
                    }
                    Err(error) => return Err(error),
                }
            }
            // A resize or another thread is moving the block groups in `busy`.
            if !busy.is_empty() {
                nr_waits += 1;
                may_wait = self.engine.wait_for_block_groups(&awaited, PATIENCE, job)? && nr_waits < MAX_WAITS;
            }
            // Choose further block groups that do not have the target profile yet, until none is left (I2).
            let added = self.choose_unconverted(item, |group| settled.contains(&group) || busy.contains(&group));
            self.balance.count(|counts| counts.expected += added.len() as u64);
            chosen = busy.into_iter().chain(added).collect();
            if chosen.is_empty() && std::mem::take(&mut has_moved) {
                let (tried, left): (Vec<Logical>, Vec<Logical>) =
                    std::mem::take(&mut without_space).into_iter().partition(|group| self.is_converted(item, *group));
                without_space = left;
                self.balance.count(|counts| {
                    let nr = tried.len() as u64;
                    counts.considered = counts.considered.saturating_sub(nr);
                    counts.failed = counts.failed.saturating_sub(nr);
                    counts.without_space = counts.without_space.saturating_sub(nr);
                });
                chosen = tried;
            }
            if chosen.is_empty() {
                return Ok(());
            }
        }
    }

    /// Whether the filters convert the block group at this address.
    fn is_converted(&self, item: &BalanceItem, start: Logical) -> bool {
        let group = self.engine.block_group(start);
        group.and_then(|group| args_for(item, group.flags)).and_then(target_of).is_some()
    }

    /// Balances a block group that was chosen, unless it has changed since then.
    #[allow(clippy::arithmetic_side_effects, reason = "counts of block groups and of waits")]
    fn balance_chosen(
        &self,
        item: &BalanceItem,
        start: Logical,
        job: &Job,
        report: &mut BalanceReport,
    ) -> Result<GroupOutcome> {
        let find = || self.engine.block_group(start);
        // The group may have been removed because it was empty.
        let Some(group) = find() else { return Ok(GroupOutcome::Unchanged) };
        let Some(args) = args_for(item, group.flags) else { return Ok(GroupOutcome::Unchanged) };
        let target = target_of(args);
        if target.is_some_and(|target| profile_of(target) == profile_of(group.flags))
            && args.filters().contains(BalanceFilters::SOFT)
        {
            return Ok(GroupOutcome::Unchanged);
        }
        // Extents of other block groups may have moved into this one since it was chosen.
        if !has_usage(args, &group) {
            return Ok(GroupOutcome::Unchanged);
        }
        let counts = self.balance.counts();
        let nr_done = counts.completed.saturating_add(counts.failed);
        job.set_step(format!("block group {start}, {} of {}", nr_done.saturating_add(1), counts.expected));
        match self.balance_group(&group, args, target, job) {
            Ok(failures) => {
                let failed = !failures.is_empty();
                for failure in failures {
                    tracing::warn!("balance: {}: {}", failure.bytenr, failure.error);
                    report.failures.push(self.named_failure(failure));
                }
                self.balance.count(|counts| {
                    counts.failed += u64::from(failed);
                    counts.completed += u64::from(!failed);
                });
                Ok(if failed { GroupOutcome::Unchanged } else { GroupOutcome::Moved })
            }
            // As in Linux, the balance continues with the other block groups.
            Err(Error::Engine(EngineError::NoSpace)) => {
                tracing::warn!("balance: no space left to move block group {start} to");
                self.balance.count(|counts| {
                    counts.failed += 1;
                    counts.without_space += 1;
                });
                Ok(GroupOutcome::WithoutSpace)
            }
            Err(Error::Engine(EngineError::Refused { .. })) if find().is_none() => Ok(GroupOutcome::Unchanged),
            Err(error) => Err(error),
        }
    }

    /// The block groups that the filters select, from the highest address down. A conversion of metadata comes first.
    #[allow(clippy::arithmetic_side_effects, reason = "counts of block groups and of waits")]
    fn choose_groups(&self, item: &BalanceItem) -> Vec<Logical> {
        let mut chosen: Vec<(BlockGroup, &BalanceArgs)> = Vec::new();
        for group in self.block_groups().into_iter().rev() {
            let Some(args) = args_for(item, group.flags) else { continue };
            if self.is_taken(&group, args) {
                chosen.push((group, args));
            }
        }
        chosen.sort_by_key(|(group, args)| target_of(args).is_none() || group.flags.contains(BlockGroupFlags::DATA));
        let of_kind = |args: &BalanceArgs| chosen.iter().filter(|(_, other)| std::ptr::eq(*other, args)).count() as u64;
        let mut taken = Vec::new();
        let mut nr_taken = [(&item.data, 0), (&item.metadata, 0), (&item.system, 0)];
        for (group, args) in &chosen {
            let (least, most) = limits(args);
            let Some((_, nr)) = nr_taken.iter_mut().find(|(other, _)| std::ptr::eq(*other, *args)) else { continue };
            if of_kind(args) >= least && *nr < most {
                *nr += 1;
                taken.push(group.start);
            }
        }
        taken
    }

    /// Block groups that the filters of a conversion select and that do not have its target profile yet, from the
    /// highest address down (I2). Empty if the filters limit the number of block groups.
    fn choose_unconverted(&self, item: &BalanceItem, is_known: impl Fn(Logical) -> bool) -> Vec<Logical> {
        let is_left = |group: &BlockGroup| {
            args_for(item, group.flags).is_some_and(|args| {
                let limited = BalanceFilters::LIMIT | BalanceFilters::LIMIT_RANGE;
                target_of(args).is_some_and(|target| profile_of(target) != profile_of(group.flags))
                    && !args.filters().intersects(limited)
                    && self.is_taken(group, args)
            })
        };
        let groups = self.block_groups().into_iter().rev();
        groups.filter(|group| !is_known(group.start) && is_left(group)).map(|group| group.start).collect()
    }

    /// Whether the filters, apart from the limit on the number of block groups, select this block group.
    fn is_taken(&self, group: &BlockGroup, args: &BalanceArgs) -> bool {
        let Some(chunk) = self.engine.chunk_at(group.start) else { return false };
        takes(args, group, &chunk)
    }

    /// Moves one block group, by copying its chunk or by emptying it.
    #[allow(clippy::arithmetic_side_effects, reason = "counts of block groups and of waits")]
    fn balance_group(
        &self,
        group: &BlockGroup,
        args: &BalanceArgs,
        target: Option<BlockGroupFlags>,
        job: &Job,
    ) -> Result<Vec<RelocationFailure>> {
        let profile = target.unwrap_or(group.flags & BlockGroupFlags::PROFILES);
        let is_drain = args.filters().intersects(BalanceFilters::DEVID | BalanceFilters::DRANGE);
        let is_full = u128::from(group.used) * 100 >= u128::from(group.len_bytes) * FULL_PERCENT;
        let is_converted = profile_of(profile) != profile_of(group.flags);
        let is_mirrored = |flags| Profile::of(flags).is_some_and(|profile| !profile.is_striped());
        let is_simple = is_mirrored(group.flags) && is_mirrored(profile) && !self.engine.is_on_seed(group.start);
        if is_simple && (is_converted || is_drain || is_full) {
            let placement = ChunkPlacement { profile: target, keeps_stripes: is_converted };
            match self.engine.migrate_chunk(group.start, &placement, job) {
                Ok(_) => {
                    self.balance.count(|counts| counts.migrated += 1);
                    return Ok(Vec::new());
                }
                // If there is no space for a copy of the chunk, the block group is emptied instead, because other block
                // groups may have room.
                Err(EngineError::NoSpace) => {}
                // Emptying the block group moves the readable extents, and finds the files of the extents that cannot
                // be read.
                Err(error @ (EngineError::Corrupt(_) | EngineError::Io { op: "read", .. })) => {
                    tracing::warn!("balance: the chunk of block group {} is not copied: {error}", group.start);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.relocate_block_group(group.start, job)?.failures)
    }

    fn named_failure(&self, failure: RelocationFailure) -> BalanceFailure {
        let ids = failure.users.into_iter().map(|(root, ino)| InodeId { root, ino });
        let files = ids.map(|id| (id, self.path_of(id).ok())).collect();
        BalanceFailure { bytenr: failure.bytenr.0, reason: failure.error.to_string(), files }
    }

    /// Writes the item of a balance, or removes it with `None`, and commits (I1).
    fn put_balance_item(&self, item: Option<&BalanceItem>) -> Result<()> {
        self.engine.check_not_held()?;
        let roots = self.engine.tree(RootId::ROOT_TREE)?.ok_or(Error::NotFound)?;
        let purpose = if item.is_some() { MetadataPurpose::Change(1) } else { MetadataPurpose::Removal(1) };
        let reservation = self.context.reserve(purpose)?;
        {
            let op = self.engine.begin(reservation);
            match item {
                Some(item) => op.put(&roots, ITEM_KEY, item.encode()),
                None => op.delete(&roots, ITEM_KEY),
            }
        }
        Ok(self.engine.commit()?)
    }
}

/// The target profile, if the filters convert.
fn target_of(args: &BalanceArgs) -> Option<BlockGroupFlags> {
    args.filters().contains(BalanceFilters::CONVERT).then(|| conversion_target(args)).flatten()
}

/// The profiles of chunks that are made during the balance (I2).
fn targets_of(item: &BalanceItem) -> ConversionTargets {
    let of = |flags| args_for(item, flags).and_then(target_of);
    ConversionTargets {
        data: of(BlockGroupFlags::DATA),
        metadata: of(BlockGroupFlags::METADATA),
        system: of(BlockGroupFlags::SYSTEM),
    }
}

/// The target profile of the filters, if this program writes it.
fn conversion_target(args: &BalanceArgs) -> Option<BlockGroupFlags> {
    let target = Profile::ALL.iter().find(|profile| BalanceArgs::profile_bit(profile) == args.target);
    target.filter(|profile| !profile.has_parity()).map(|profile| profile.flag)
}

const ITEM_KEY: Key = Key { objectid: objectid::BALANCE, item_type: KeyType::TEMPORARY_ITEM, offset: 0 };
/// A block group is not worth emptying if at least this percentage of it is used: its extents would fill a new block
/// group.
const FULL_PERCENT: u128 = 95;
/// Maximum number of waits for block groups that other threads are moving.
const MAX_WAITS: u32 = 6000;
/// Time for which all block groups that are left may be in use by other threads.
const PATIENCE: Duration = Duration::from_secs(600);
