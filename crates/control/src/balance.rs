//! Balance: moving block groups to compact, convert or drain them.
//!
//! | command                        | needs                                          |
//! |--------------------------------|------------------------------------------------|
//! | start, resume, pause, cancel   | CAP_SYS_ADMIN, or the user who mounted         |
//! | status                         | the same, as in Linux                          |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::Profile;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem};
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{BalanceFailure, BalanceReport, Error, Fs};

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};

/// A command on the balance of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Balances the block groups that the filters of their type select: [`Response::Done`].
    Start(Box<StartBalance>),
    /// Resumes a paused balance: [`Response::Done`].
    Resume,
    /// Pauses a running balance, and waits until it has stopped.
    Pause,
    /// Ends a balance, and waits until it has ended.
    Cancel,
    /// Describes the running or paused balance: [`Response::Status`].
    Status,
}

/// The block groups that a balance works on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartBalance {
    /// Data block groups.
    pub data: Option<Filters>,
    /// Metadata block groups.
    pub metadata: Option<Filters>,
    /// System block groups.
    pub system: Option<Filters>,
    /// Whether a conversion may reduce the number of copies of metadata.
    pub force: bool,
}

/// The filters of one type of block group. A block group must match all filters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Filters {
    /// Names of profiles: `single`, `dup`, `raid1`, ...
    pub profiles: Vec<String>,
    /// Used bytes in percent of the block group: at least the first number, below the second.
    pub usage: Option<(u32, u32)>,
    /// A device that must hold a stripe of the block group.
    pub devid: Option<u64>,
    /// Start and end of a range of bytes on the device `devid`, which a stripe of the block group must overlap.
    pub drange: Option<(u64, u64)>,
    /// Start and end of a range of logical addresses, which the block group must overlap.
    pub vrange: Option<(u64, u64)>,
    /// The name of the profile to convert to.
    pub convert: Option<String>,
    /// Whether block groups that already have the profile `convert` are skipped.
    pub soft: bool,
    /// The minimum number of matching block groups, and the maximum number of block groups to move. If fewer block
    /// groups match, none of them is moved.
    pub limit: Option<(u32, u32)>,
    /// The smallest and the largest number of stripes.
    pub stripes: Option<(u32, u32)>,
}

/// The result of a command on the balance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The balance is complete.
    Done(BalanceReportMessage),
    /// The balance is paused or cancelled, as requested.
    Stopped,
    /// The running or paused balance; `None` if no balance is running or paused.
    Status(Option<BalanceStatusMessage>),
}

/// The result of a balance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalanceReportMessage {
    /// Block groups that were moved.
    pub completed: u64,
    /// The block groups in `completed` that kept their logical addresses.
    pub migrated: u64,
    /// Block groups that the filters selected.
    #[serde(default)]
    pub expected: u64,
    /// Block groups that were examined, including the block groups that the filters leave out.
    pub considered: u64,
    /// Block groups that were not moved because there was no space for their content.
    pub without_space: u64,
    /// Extents that could not be moved.
    pub failures: Vec<Unmoved>,
}

/// An extent that could not be moved. The block group of such an extent stays where it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unmoved {
    /// The extent's logical address.
    pub bytenr: u64,
    /// The reason.
    pub reason: String,
    /// Paths of the files that use the extent, from the top level, escaped for messages.
    pub files: Vec<String>,
}

/// The state of a running or paused balance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BalanceStatusMessage {
    /// `running`, `paused`, `pausing` or `cancelling`.
    pub state: String,
    /// Block groups that the filters selected. The number can grow while a conversion runs.
    pub expected: u64,
    /// Block groups that were examined so far, including the block groups that the filters leave out.
    pub considered: u64,
    /// Block groups that were moved so far.
    pub completed: u64,
    /// The filters of each type of block group: `data`, `metadata` or `system`.
    pub filters: Vec<(String, Filters)>,
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        !matches!(self, Self::Status)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        !matches!(self, Self::Status)
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    let fs = context.fs;
    match request {
        Request::Start(start) => fs
            .balance(item_of(*start)?, context.job)
            .map(|report| Response::Done(report.into()))
            .map_err(|error| stopped(fs, error)),
        Request::Resume => fs
            .resume_balance(context.job)
            .map(|report| Response::Done(report.into()))
            .map_err(|error| stopped(fs, error)),
        Request::Pause => fs.pause_balance().map(|()| Response::Stopped).map_err(told),
        Request::Cancel => fs.cancel_balance().map(|()| Response::Stopped).map_err(told),
        Request::Status => Ok(Response::Status(fs.balance_status().map(|status| {
            let state = match (status.is_cancelling, status.is_pausing, status.is_running) {
                (true, ..) => "cancelling",
                (_, true, _) => "pausing",
                (.., true) => "running",
                _ => "paused",
            };
            BalanceStatusMessage {
                state: state.to_owned(),
                expected: status.counts.expected,
                considered: status.counts.considered,
                completed: status.counts.completed,
                filters: filters_of(&status.item),
            }
        }))),
    }
}

/// As [`told`], for the command whose balance ended: it may have been paused or cancelled.
fn stopped(fs: &Fs, error: Error) -> CommandFailure {
    if !matches!(error, Error::Engine(EngineError::Cancelled)) {
        return told(error);
    }
    let (how, next) = match fs.balance_status() {
        Some(_) => ("paused", "the others are moved by: ubtrfs balance resume"),
        None => ("cancelled", "the same command moves the others"),
    };
    let text = format!("the balance was {how}; block groups moved so far keep their new place, and {next}");
    CommandFailure::new(Errno::CANCELED, text)
}

/// What to do if a balance finds no space.
pub const MAKE_ROOM: &str = "free empty block groups first with -dusage=0 -musage=0, delete something, or make the filesystem larger: \
                             ubtrfs filesystem resize, ubtrfs device add";

/// Converts an error of a balance into a failure that says what to do next.
fn told(error: Error) -> CommandFailure {
    let errno = Errno::from_raw_os_error(error.errno());
    match error {
        Error::InProgress(_) | Error::NotRunning(_) | Error::InvalidArgument(_) => {
            let text = error.to_string();
            let text = text.strip_prefix("invalid argument: ").unwrap_or(&text);
            CommandFailure::new(errno, text)
        }
        Error::Engine(EngineError::NoSpace) => {
            CommandFailure::new(errno, format!("no space left to move block groups to; {MAKE_ROOM}"))
        }
        other => other.into(),
    }
}

impl StartBalance {
    /// The block groups that a balance item selects.
    pub fn of(item: &BalanceItem) -> Self {
        let filters = |kind: BalanceFlags, args| (item.flags & kind.bits() != 0).then(|| Filters::of(args));
        Self {
            data: filters(BalanceFlags::DATA, &item.data),
            metadata: filters(BalanceFlags::METADATA, &item.metadata),
            system: filters(BalanceFlags::SYSTEM, &item.system),
            force: item.flags & BalanceFlags::FORCE.bits() != 0,
        }
    }
}

impl BalanceStatusMessage {
    /// The filters as a balance item.
    ///
    /// # Errors
    ///
    /// Fails if a filter contradicts itself or names an unknown profile.
    pub fn item(&self) -> Result<BalanceItem> {
        let of = |kind: &str| self.filters.iter().find(|(name, _)| name == kind).map(|(_, filters)| filters.clone());
        item_of(StartBalance { data: of("data"), metadata: of("metadata"), system: of("system"), force: false })
    }
}

fn item_of(start: StartBalance) -> Result<BalanceItem> {
    let StartBalance { data, metadata, system, force } = start;
    let mut item = BalanceItem {
        flags: if force { BalanceFlags::FORCE.bits() } else { 0 },
        data: BalanceArgs::NONE,
        metadata: BalanceArgs::NONE,
        system: BalanceArgs::NONE,
        unused: [0; 4],
    };
    for (kind, filters, args) in [
        (BalanceFlags::DATA, data, &mut item.data),
        (BalanceFlags::METADATA, metadata, &mut item.metadata),
        (BalanceFlags::SYSTEM, system, &mut item.system),
    ] {
        if let Some(filters) = filters {
            item.flags |= kind.bits();
            *args = filters.args()?;
        }
    }
    Ok(item)
}

fn filters_of(item: &BalanceItem) -> Vec<(String, Filters)> {
    let kinds = [
        ("data", BalanceFlags::DATA, &item.data),
        ("metadata", BalanceFlags::METADATA, &item.metadata),
        ("system", BalanceFlags::SYSTEM, &item.system),
    ];
    let named = kinds.into_iter().filter(|(_, kind, _)| item.flags & kind.bits() != 0);
    named.map(|(name, _, args)| (name.to_owned(), Filters::of(args))).collect()
}

impl Filters {
    fn args(&self) -> Result<BalanceArgs> {
        let mut args = BalanceArgs::NONE;
        let mut filters = BalanceFilters::empty();
        let ordered = |name: &str, is_ordered: bool| match is_ordered {
            true => Ok(()),
            false => {
                Err(CommandFailure::new(Errno::INVAL, format!("the range of filter {name} ends before it begins")))
            }
        };
        if !self.profiles.is_empty() {
            filters |= BalanceFilters::PROFILES;
            for name in &self.profiles {
                args.profiles |= if name == NO_PROFILE { 0 } else { profile_named(name)? };
            }
        }
        if let Some((min, max)) = self.usage {
            ordered("usage", min <= max)?;
            filters |= BalanceFilters::USAGE_RANGE;
            (args.usage_min, args.usage_max) = (min, max);
        }
        if let Some(devid) = self.devid {
            filters |= BalanceFilters::DEVID;
            args.devid = devid;
        }
        if let Some((start, end)) = self.drange {
            ordered("drange", start < end)?;
            filters |= BalanceFilters::DRANGE;
            (args.pstart, args.pend) = (start, end);
        }
        if let Some((start, end)) = self.vrange {
            ordered("vrange", start < end)?;
            filters |= BalanceFilters::VRANGE;
            (args.vstart, args.vend) = (start, end);
        }
        if let Some((min, max)) = self.limit {
            ordered("limit", min <= max)?;
            filters |= BalanceFilters::LIMIT_RANGE;
            (args.limit_min, args.limit_max) = (min, max);
        }
        if let Some((min, max)) = self.stripes {
            ordered("stripes", min <= max)?;
            filters |= BalanceFilters::STRIPES_RANGE;
            (args.stripes_min, args.stripes_max) = (min, max);
        }
        if let Some(name) = &self.convert {
            filters |= BalanceFilters::CONVERT;
            args.target = profile_to_write(name)?;
        }
        filters.set(BalanceFilters::SOFT, self.soft);
        args.flags = filters.bits();
        Ok(args)
    }

    fn of(args: &BalanceArgs) -> Self {
        let filters = args.filters();
        let if_set = |filter| filters.contains(filter);
        Self {
            profiles: if if_set(BalanceFilters::PROFILES) { names_of_profiles(args.profiles) } else { Vec::new() },
            usage: match () {
                () if if_set(BalanceFilters::USAGE_RANGE) => Some((args.usage_min, args.usage_max)),
                () if if_set(BalanceFilters::USAGE) => Some((0, args.usage_min)),
                () => None,
            },
            devid: if_set(BalanceFilters::DEVID).then_some(args.devid),
            drange: if_set(BalanceFilters::DRANGE).then_some((args.pstart, args.pend)),
            vrange: if_set(BalanceFilters::VRANGE).then_some((args.vstart, args.vend)),
            convert: if_set(BalanceFilters::CONVERT).then(|| name_of_profile(args.target)),
            soft: if_set(BalanceFilters::SOFT),
            limit: match () {
                () if if_set(BalanceFilters::LIMIT_RANGE) => Some((args.limit_min, args.limit_max)),
                // The limit is a number of 64 bits, whose high half is `limit_max`.
                () if if_set(BalanceFilters::LIMIT) && args.limit_max != 0 => Some((0, u32::MAX)),
                () if if_set(BalanceFilters::LIMIT) => Some((0, args.limit_min)),
                () => None,
            },
            stripes: if_set(BalanceFilters::STRIPES_RANGE).then_some((args.stripes_min, args.stripes_max)),
        }
    }
}

fn profile_named(name: &str) -> Result<u64> {
    Profile::named(name).map(BalanceArgs::profile_bit).ok_or_else(|| unknown_profile(name, |_| true))
}

/// The profile that block groups are to get.
fn profile_to_write(name: &str) -> Result<u64> {
    let known = Profile::named(name).ok_or_else(|| unknown_profile(name, |profile| !profile.has_parity()))?;
    Ok(BalanceArgs::profile_bit(known))
}

fn unknown_profile(name: &str, is_offered: impl Fn(&Profile) -> bool) -> CommandFailure {
    let offered = Profile::ALL.iter().filter(|profile| is_offered(profile));
    let names: Vec<String> = offered.map(|profile| profile.name.to_lowercase()).collect();
    CommandFailure::new(Errno::INVAL, format!("there is no profile '{name}'; use one of {}", names.join(", ")))
}

/// The names of the profiles with these bits. Without names there would be no filter, so bits that no profile has get
/// the name [`NO_PROFILE`].
fn names_of_profiles(bits: u64) -> Vec<String> {
    let named = Profile::ALL.iter().filter(|profile| bits & BalanceArgs::profile_bit(profile) != 0);
    let names: Vec<String> = named.map(|profile| profile.name.to_lowercase()).collect();
    if names.is_empty() { vec![NO_PROFILE.to_owned()] } else { names }
}

fn name_of_profile(bits: u64) -> String {
    let profile = Profile::ALL.iter().find(|profile| BalanceArgs::profile_bit(profile) == bits);
    profile.map_or_else(|| format!("{bits:#x}"), |profile| profile.name.to_lowercase())
}

impl From<BalanceReport> for BalanceReportMessage {
    fn from(report: BalanceReport) -> Self {
        let unmoved = |failure: BalanceFailure| Unmoved {
            bytenr: failure.bytenr,
            reason: failure.reason,
            files: failure.files.into_iter().map(|(id, path)| shown(id, path)).collect(),
        };
        Self {
            completed: report.counts.completed,
            migrated: report.counts.migrated,
            without_space: report.counts.without_space,
            expected: report.counts.expected,
            considered: report.counts.considered,
            failures: report.failures.into_iter().map(unmoved).collect(),
        }
    }
}

/// The path of a file, or its inode and subvolume numbers if it has no path.
fn shown(id: ubtrfs_fs::InodeId, path: Option<Vec<u8>>) -> String {
    match path {
        Some(path) if !path.is_empty() => escaped(&path),
        _ => format!("inode {} of subvolume {}", id.ino, id.root),
    }
}

/// The filter `profiles` with this name selects no block group.
const NO_PROFILE: &str = "none";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_an_ioctl_select_as_many_block_groups_as_in_linux() {
        let args = |filter: BalanceFilters| BalanceArgs { flags: filter.bits(), ..BalanceArgs::NONE };
        // No block group has a profile with these bits.
        for profiles in [0, 1 << 60] {
            let asked = BalanceArgs { profiles, ..args(BalanceFilters::PROFILES) };
            let taken = Filters::of(&asked).args().unwrap();
            assert!(taken.filters().contains(BalanceFilters::PROFILES) && taken.profiles == 0, "{profiles}: {taken:?}");
        }
        // This limit is 2^32, not 0.
        let asked = BalanceArgs { limit_min: 0, limit_max: 1, ..args(BalanceFilters::LIMIT) };
        let taken = Filters::of(&asked).args().unwrap();
        assert_eq!((taken.limit_min, taken.limit_max), (0, u32::MAX));
        let asked = BalanceArgs { limit_min: 7, ..args(BalanceFilters::LIMIT) };
        assert_eq!(Filters::of(&asked).limit, Some((0, 7)));
    }

    #[test]
    fn filters_come_back_from_their_item() {
        let all = Filters {
            profiles: vec!["single".to_owned(), "dup".to_owned()],
            usage: Some((5, 50)),
            devid: Some(1),
            drange: Some((1, 2)),
            vrange: Some((3, 4)),
            convert: Some("dup".to_owned()),
            soft: true,
            limit: Some((1, 2)),
            stripes: Some((1, 3)),
        };
        for filters in [Filters::default(), all] {
            assert_eq!(Filters::of(&filters.args().unwrap()), filters);
        }
        let wrong = |filters: Filters| filters.args().unwrap_err().text;
        assert!(wrong(Filters { convert: Some("triple".to_owned()), ..Filters::default() }).contains("'triple'"));
        assert!(wrong(Filters { usage: Some((5, 4)), ..Filters::default() }).contains("usage"));
    }
}
