//! Balance: block groups move to other places, and get other profiles

use std::ffi::{c_char, c_int};

use ubtrfs::manage::{BalanceCounts, BalanceFilter, BalanceOptions, BalanceReport};
use ubtrfs::{Filesystem, Job, bindings};

use crate::border::{Address, ErrorPlace, Given, GrowingStruct, OwnedAddress, ResultPlace, Text, TextList};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::Handle;
use crate::memory::{KeptTexts, give_struct};

/// Leaves out block groups that have the profile `convert` already.
pub const UBTRFS_FILTER_SOFT: u32 = 1;

/// Chooses block groups of one type. A block group must match everything that is set. Begin with
/// `UBTRFS_BALANCE_FILTER_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceFilter {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_FILTER_...`, or 0.
    pub flags: u32,
    /// The most block groups to move; 0 for any number.
    pub limit: u32,
    /// The least used part of the block group, in percent.
    pub usage_min: u32,
    /// The used part that the block group stays below, in percent; 100 for any. If both numbers are 0, the used part does
    /// not matter.
    pub usage_max: u32,
    /// A device on which the block group has a part; 0 for any.
    pub devid: u64,
    /// The begin of a range of logical addresses.
    pub range_start: u64,
    /// The end of the range, of which the block group has a part. If both numbers are 0, the addresses do not matter.
    pub range_end: u64,
    /// Names of profiles, of which the block group has one; or null.
    pub profiles: TextList,
    /// The number of `profiles`.
    pub nr_profiles: usize,
    /// The profile that the block groups get: "single", "dup", "raid0", "raid1", "raid1c3", "raid1c4" or "raid10"; or null.
    pub convert: Text,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsBalanceFilter {
    const NAME: &'static str = "ubtrfs_balance_filter";
}

/// Lets a conversion reduce the number of copies of metadata.
pub const UBTRFS_BALANCE_FORCE: u32 = 1;

/// The block groups that a balance moves. A null pointer leaves out a type of block group. If all three are null, the
/// balance moves all block groups. Begin with `UBTRFS_BALANCE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_BALANCE_...`, or 0.
    pub flags: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// Block groups of data; or null.
    pub data: Given<UbtrfsBalanceFilter>,
    /// Block groups of metadata; or null.
    pub metadata: Given<UbtrfsBalanceFilter>,
    /// Block groups of the chunk tree; or null.
    pub system: Given<UbtrfsBalanceFilter>,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsBalanceOptions {
    const NAME: &'static str = "ubtrfs_balance_options";
}

impl Given<UbtrfsBalanceOptions> {
    fn balance_options(&self) -> CallResult<BalanceOptions> {
        let given = self.read()?;
        check_flags(given.flags, UBTRFS_BALANCE_FORCE, "the flags of ubtrfs_balance_options")?;
        let force = given.flags & UBTRFS_BALANCE_FORCE != 0;
        let [data, metadata, system] = [given.data, given.metadata, given.system].map(|filter| filter.balance_filter());
        Ok(match (data?, metadata?, system?) {
            (None, None, None) => BalanceOptions { force, ..BalanceOptions::everything() },
            (data, metadata, system) => BalanceOptions { data, metadata, system, force },
        })
    }
}

impl Given<UbtrfsBalanceFilter> {
    fn balance_filter(&self) -> CallResult<Option<BalanceFilter>> {
        let Some(given) = self.optional()? else { return Ok(None) };
        check_flags(given.flags, UBTRFS_FILTER_SOFT, "the flags of ubtrfs_balance_filter")?;
        let profile = |name: &str| bindings::profile(name).map_err(CallFailure::argument);
        let profiles = given.profiles.strs(given.nr_profiles, "profiles")?;
        Ok(Some(BalanceFilter {
            profiles: profiles.into_iter().map(profile).collect::<CallResult<_>>()?,
            usage_percent: (given.usage_min != 0 || given.usage_max != 0).then_some(given.usage_min..given.usage_max),
            device: (given.devid != 0).then_some(given.devid),
            range: (given.range_start != 0 || given.range_end != 0).then_some(given.range_start..given.range_end),
            limit: (given.limit != 0).then_some(given.limit),
            convert: given.convert.str("convert")?.map(profile).transpose()?,
            soft: given.flags & UBTRFS_FILTER_SOFT != 0,
        }))
    }
}

/// Numbers of block groups.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceCounts {
    /// Block groups that the filters choose.
    pub expected: u64,
    /// Block groups that were looked at so far.
    pub considered: u64,
    /// Block groups that were moved.
    pub completed: u64,
    /// Block groups that stayed, because an extent could not be moved or because there was no space.
    pub failed: u64,
    /// Block groups among `failed` for which there was no space.
    pub without_space: u64,
    /// Not used: 0.
    pub more: [u64; 3],
}

/// A file that uses an extent.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsExtentUser {
    /// The id of its subvolume.
    pub subvolume_id: u64,
    /// Its inode number.
    pub ino: u64,
    /// A path from the top level, without a leading slash; null if the file has no name.
    pub path: Address<c_char>,
}

/// An extent that could not be moved.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceFailure {
    /// Its address.
    pub bytenr: u64,
    /// The reason.
    pub reason: Address<c_char>,
    /// Files that use the extent; or null.
    pub users: Address<UbtrfsExtentUser>,
    /// The number of `users`.
    pub nr_users: usize,
}

/// The result of a balance.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceReport {
    /// Numbers of block groups by outcome.
    pub counts: UbtrfsBalanceCounts,
    /// Extents that could not be moved; or null.
    pub failures: Address<UbtrfsBalanceFailure>,
    /// The number of `failures`.
    pub nr_failures: usize,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// There is no balance.
pub const UBTRFS_BALANCE_NONE: u32 = 0;
/// A balance runs.
pub const UBTRFS_BALANCE_RUNS: u32 = 1;
/// A balance is paused.
pub const UBTRFS_BALANCE_PAUSED: u32 = 2;

/// The state of the balance of a filesystem.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsBalanceState {
    /// `UBTRFS_BALANCE_NONE`, `UBTRFS_BALANCE_RUNS` or `UBTRFS_BALANCE_PAUSED`.
    pub state: u32,
    /// 1 if the balance is about to end, because it was cancelled, otherwise 0.
    pub is_cancelling: u32,
    /// 1 if the balance is about to pause, otherwise 0.
    pub is_pausing: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// Numbers of block groups so far.
    pub counts: UbtrfsBalanceCounts,
}

/// Moves block groups to other places. What they hold takes less space afterwards, or has another profile. Fails with
/// EINPROGRESS if a balance runs or is paused, or a device is being replaced; with ECANCELED if the balance is paused or
/// cancelled. Extents that cannot be moved are in the report, which is freed with `ubtrfs_free`. `options`, `job` and
/// `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_balance(
    fs: Handle<UbtrfsFs>,
    options: Given<UbtrfsBalanceOptions>,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<OwnedAddress<UbtrfsBalanceReport>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        report.set(OwnedAddress::NULL);
        let options = options.balance_options()?;
        balanced(fs, job, report, |fs, job| fs.balance(&options, job))
    })
}

/// Continues a paused balance, also one of an earlier session, as `ubtrfs_balance`. Fails with ENOTCONN if no balance is
/// paused. `job` and `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_balance_resume(
    fs: Handle<UbtrfsFs>,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<OwnedAddress<UbtrfsBalanceReport>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        report.set(OwnedAddress::NULL);
        balanced(fs, job, report, Filesystem::resume_balance)
    })
}

/// Pauses the balance that another thread runs, and waits until it has stopped. Fails with ENOTCONN if no balance runs.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_balance_pause(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.pause_balance()?))
}

/// Ends a running or paused balance. Block groups that were moved stay in their new places. Fails with ENOTCONN if there
/// is no balance.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_balance_cancel(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.cancel_balance()?))
}

/// Describes the balance that runs or is paused.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_balance_status(
    fs: Handle<UbtrfsFs>,
    state: ResultPlace<UbtrfsBalanceState>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        state.needed("state")?;
        let found = fs.get()?.balance_status();
        let kind = match &found {
            None => UBTRFS_BALANCE_NONE,
            Some(found) if found.is_running => UBTRFS_BALANCE_RUNS,
            Some(_) => UBTRFS_BALANCE_PAUSED,
        };
        state.set(UbtrfsBalanceState {
            state: kind,
            is_cancelling: found.as_ref().is_some_and(|found| found.is_cancelling).into(),
            is_pausing: found.as_ref().is_some_and(|found| found.is_pausing).into(),
            reserved: 0,
            counts: counts_of(&found.map(|found| found.counts).unwrap_or_default()),
        });
        Ok(())
    })
}

fn balanced(
    fs: Handle<UbtrfsFs>,
    job: Handle<UbtrfsJob>,
    place: ResultPlace<OwnedAddress<UbtrfsBalanceReport>>,
    balance: impl FnOnce(&Filesystem, &Job) -> ubtrfs::Result<BalanceReport>,
) -> CallResult<()> {
    let found = balance(&*fs.get()?, &*job_of(job)?)?;
    if place.is_given() {
        place.set(shown(&found));
    }
    Ok(())
}

fn counts_of(found: &BalanceCounts) -> UbtrfsBalanceCounts {
    UbtrfsBalanceCounts {
        expected: found.expected,
        considered: found.considered,
        completed: found.completed,
        failed: found.failed,
        without_space: found.without_space,
        more: [0; 3],
    }
}

fn shown(found: &BalanceReport) -> OwnedAddress<UbtrfsBalanceReport> {
    let mut texts = KeptTexts::default();
    let mut users: Vec<Vec<UbtrfsExtentUser>> = Vec::new();
    let mut failures = Vec::new();
    for failure in &found.failures {
        let of_failure = failure.files.iter().map(|(id, path)| UbtrfsExtentUser {
            subvolume_id: id.root.0,
            ino: id.ino.0,
            path: texts.keep_optional(path.as_deref()),
        });
        let list: Vec<UbtrfsExtentUser> = of_failure.collect();
        failures.push(UbtrfsBalanceFailure {
            bytenr: failure.bytenr,
            reason: texts.keep(failure.reason.as_str()),
            users: Address::of_list(&list),
            nr_users: list.len(),
        });
        users.push(list);
    }
    let report = UbtrfsBalanceReport {
        counts: counts_of(&found.counts),
        failures: Address::of_list(&failures),
        nr_failures: failures.len(),
        more: [0; 4],
    };
    give_struct(report, (failures, users, texts))
}
