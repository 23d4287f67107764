//! Balance: block groups move to other places, and get other profiles.

use std::ops::Range;

use ubtrfs_format::Profile;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_fs::{BalanceReport, BalanceStatus, Error as FsError, Job};

use crate::Filesystem;
use crate::error::{Result, ResultExt};

/// The block groups that [`Filesystem::balance`] moves. `None` leaves out a type of block group.
///
/// ```
/// use ubtrfs::format::BlockGroupFlags;
/// use ubtrfs::manage::{BalanceFilter, BalanceOptions};
///
/// // Free block groups of data that are nearly empty, and keep two copies of metadata on two devices.
/// let options = BalanceOptions {
///     data: Some(BalanceFilter { usage_percent: Some(0..10), ..BalanceFilter::default() }),
///     metadata: Some(BalanceFilter { convert: Some(BlockGroupFlags::RAID1), soft: true, ..BalanceFilter::default() }),
///     ..BalanceOptions::default()
/// };
/// # assert!(options.system.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalanceOptions {
    /// Block groups of data.
    pub data: Option<BalanceFilter>,
    /// Block groups of metadata.
    pub metadata: Option<BalanceFilter>,
    /// Block groups of the chunk tree.
    pub system: Option<BalanceFilter>,
    /// Whether a conversion may reduce the number of copies of metadata.
    pub force: bool,
}

/// Chooses block groups of one type. A block group must match everything that is set.
///
/// ```
/// use ubtrfs::manage::BalanceFilter;
///
/// // Three block groups on device 2.
/// let filter = BalanceFilter { device: Some(2), limit: Some(3), ..BalanceFilter::default() };
/// # assert!(filter.convert.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalanceFilter {
    /// Profiles, of which the block group has one; any if this is empty. `BlockGroupFlags::empty()` is single.
    pub profiles: Vec<BlockGroupFlags>,
    /// The used part of the block group, in percent.
    pub usage_percent: Option<Range<u32>>,
    /// A device on which the block group has a part.
    pub device: Option<u64>,
    /// Logical addresses, of which the block group has some.
    pub range: Option<Range<u64>>,
    /// The most block groups to move.
    pub limit: Option<u32>,
    /// The profile that the block groups get.
    pub convert: Option<BlockGroupFlags>,
    /// Leave out block groups that have the profile `convert` already.
    pub soft: bool,
}

impl BalanceOptions {
    /// All block groups. They take as little space as possible afterwards.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(1 << 30)?;
    /// use ubtrfs::manage::BalanceOptions;
    ///
    /// fs.balance(&BalanceOptions::everything(), &ubtrfs::Job::new())?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn everything() -> Self {
        let all = || Some(BalanceFilter::default());
        Self { data: all(), metadata: all(), system: all(), force: false }
    }

    fn item(&self) -> Result<BalanceItem, FsError> {
        let mut item = BalanceItem {
            flags: 0,
            data: BalanceArgs::NONE,
            metadata: BalanceArgs::NONE,
            system: BalanceArgs::NONE,
            unused: [0; 4],
        };
        if self.force {
            item.flags |= BalanceFlags::FORCE.bits();
        }
        for (kind, filter, args) in [
            (BalanceFlags::DATA, &self.data, &mut item.data),
            (BalanceFlags::METADATA, &self.metadata, &mut item.metadata),
            (BalanceFlags::SYSTEM, &self.system, &mut item.system),
        ] {
            if let Some(filter) = filter {
                item.flags |= kind.bits();
                *args = filter.args()?;
            }
        }
        Ok(item)
    }
}

impl BalanceFilter {
    fn args(&self) -> Result<BalanceArgs, FsError> {
        let (mut args, mut filters) = (BalanceArgs::NONE, BalanceFilters::empty());
        for profile in &self.profiles {
            filters |= BalanceFilters::PROFILES;
            args.profiles |= profile_bit(*profile)?;
        }
        if let Some(usage) = &self.usage_percent {
            filters |= BalanceFilters::USAGE_RANGE;
            (args.usage_min, args.usage_max) = (usage.start, usage.end);
        }
        if let Some(device) = self.device {
            filters |= BalanceFilters::DEVID;
            args.devid = device;
        }
        if let Some(range) = &self.range {
            filters |= BalanceFilters::VRANGE;
            (args.vstart, args.vend) = (range.start, range.end);
        }
        if let Some(limit) = self.limit {
            filters |= BalanceFilters::LIMIT_RANGE;
            (args.limit_min, args.limit_max) = (0, limit);
        }
        if let Some(profile) = self.convert {
            filters |= BalanceFilters::CONVERT;
            args.target = profile_bit(profile)?;
        }
        filters.set(BalanceFilters::SOFT, self.soft);
        let is_empty = |range: Option<(u64, u64)>| range.is_some_and(|(start, end)| start >= end);
        let usage = self.usage_percent.as_ref().map(|usage| (u64::from(usage.start), u64::from(usage.end)));
        if is_empty(usage) || is_empty(self.range.as_ref().map(|range| (range.start, range.end))) {
            return Err(FsError::InvalidArgument("a range of a filter is empty"));
        }
        args.flags = filters.bits();
        Ok(args)
    }
}

fn profile_bit(flags: BlockGroupFlags) -> Result<u64, FsError> {
    let profile = Profile::of(flags).filter(|profile| profile.flag == flags);
    profile.map(BalanceArgs::profile_bit).ok_or(FsError::InvalidArgument("the flags of a filter are no profile"))
}

impl Filesystem {
    /// Moves block groups to other places. What they hold takes less space afterwards, or has another profile. `job`
    /// counts the bytes that move. Extents that cannot be moved are in the report.
    ///
    /// ```
    /// use ubtrfs::format::BlockGroupFlags;
    /// use ubtrfs::manage::{BalanceFilter, BalanceOptions};
    /// use ubtrfs::{Filesystem, Job};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(1 << 30)?;
    /// fs.write("/f", vec![1; 1 << 20])?;
    /// let twice = BalanceFilter { convert: Some(BlockGroupFlags::DUP), ..BalanceFilter::default() };
    /// let report = fs.balance(&BalanceOptions { data: Some(twice), ..BalanceOptions::default() }, &Job::new())?;
    /// assert!(report.failures.is_empty());
    /// let data = |group: &&ubtrfs::manage::GroupUsage| group.flags.contains(BlockGroupFlags::DATA);
    /// assert!(fs.space_usage().groups.iter().filter(data).all(|group| group.flags.contains(BlockGroupFlags::DUP)));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for filters that contradict each other, and for profiles that need more devices; EINPROGRESS if a
    /// balance runs or is paused, or a device is being replaced; ECANCELED if the balance is paused or cancelled;
    /// `StorageFull`.
    pub fn balance(&self, options: &BalanceOptions, job: &Job) -> Result<BalanceReport> {
        let done = options.item().and_then(|item| self.engine().balance(item, job));
        done.while_doing("balance", self.device_name())
    }

    /// Goes on with a balance that was paused, also by the end of an earlier session.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// // There is none.
    /// assert!(fs.resume_balance(&ubtrfs::Job::new()).is_err());
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if no balance is paused; otherwise as [`balance`](Self::balance).
    pub fn resume_balance(&self, job: &Job) -> Result<BalanceReport> {
        self.engine().resume_balance(job).while_doing("resume the balance of", self.device_name())
    }

    /// Pauses the balance that another thread runs, and waits until it has stopped.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// assert!(fs.pause_balance().is_err());
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if no balance runs.
    pub fn pause_balance(&self) -> Result<()> {
        self.engine().pause_balance().while_doing("pause the balance of", self.device_name())
    }

    /// Ends a running or paused balance. Block groups that were moved stay in their new places.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// assert!(fs.cancel_balance().is_err());
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if there is no balance.
    pub fn cancel_balance(&self) -> Result<()> {
        self.engine().cancel_balance().while_doing("cancel the balance of", self.device_name())
    }

    /// Describes the balance that runs or is paused.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// assert_eq!(fs.balance_status(), None);
    /// ```
    pub fn balance_status(&self) -> Option<BalanceStatus> {
        self.engine().balance_status()
    }
}
