//! `ubtrfs filesystem df`, `usage` and `show`: space by kind and by device, in the format of btrfs-progs.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use serde_json::json;
use ubtrfs_control::filesystem::{BlockGroupTotals, DeviceInfo, FilesystemInfo, FilesystemUsage, Request, Response};
use ubtrfs_format::Profile;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::insert_name;
use ubtrfs_fuse::FirstMount;
use uuid::Uuid;

use super::shown_device::{json_of, name, name_with_state, shares, state_text};
use super::unmounted::unmounted;
use super::{call, info, usage_table};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::commands::umount;
use crate::common::{Shown, each, print_json, print_out, print_progs_json, stdout, warn};
use crate::progs::is_progs;
use crate::units::{UnitLetters, Units};

/// Show how much of each kind of space is used
#[derive(clap::Args)]
pub(super) struct DfArgs {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: CommandTarget,
    #[command(flatten)]
    letters: UnitLetters,
    #[command(flatten)]
    common: Common,
}

/// Show how the space is used, in total and by device
#[derive(clap::Args)]
pub(super) struct UsageArgs {
    /// Paths in mounts, or images
    #[arg(value_name = "PATH|IMAGE", required = true)]
    targets: Vec<CommandTarget>,
    /// Print a table with a line for each device
    #[arg(short = 'T', conflicts_with = "json")]
    table: bool,
    #[command(flatten)]
    letters: UnitLetters,
    #[command(flatten)]
    common: Common,
}

/// Show how much of each device is used by each kind of space
#[derive(clap::Args)]
pub(crate) struct DeviceUsageArgs {
    /// Paths in mounts, or images
    #[arg(value_name = "PATH|IMAGE", required = true)]
    targets: Vec<CommandTarget>,
    #[command(flatten)]
    letters: UnitLetters,
    #[command(flatten)]
    common: Common,
}

/// Show label, UUID and devices
///
/// Without a path, shows all filesystems that ubtrfs has mounted, and those on block devices that are not mounted; `btrfs`
/// shows those that Linux has mounted, too.
#[derive(clap::Args)]
pub(super) struct ShowArgs {
    /// Any path in a mount, an image, or the UUID or label of a filesystem that is mounted or on block devices
    #[arg(value_name = "PATH|IMAGE|UUID|LABEL")]
    target: Option<OsString>,
    /// Show only filesystems on block devices
    #[arg(short = 'd', long)]
    all_devices: bool,
    /// Show only mounted filesystems
    #[arg(short = 'm', long)]
    mounted: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    #[command(flatten)]
    units: Units,
    /// Print JSON
    #[arg(long, conflicts_with = "raw")]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

impl Common {
    fn usage(&self, target: &CommandTarget) -> anyhow::Result<FilesystemUsage> {
        let target = target.clone().or_image().or_its_mount();
        with_channel(&target, &self.image, ImageUse::Read, |channel| {
            match call(channel, &target, "read the space of", Request::Usage)? {
                Response::Usage(usage) => Ok(usage),
                _ => bail!("the server of {target} answered something else"),
            }
        })
    }
}

pub(super) fn df(args: &DfArgs) -> anyhow::Result<()> {
    let usage = args.common.usage(&args.target)?;
    if args.common.json {
        return print_df_json(&usage);
    }
    warn_of_several_profiles(&usage);
    let units = args.common.units.with(args.letters);
    let size = |bytes| units.format(bytes);
    let mut text = String::new();
    for group in sorted(&usage.groups, DF_ORDER) {
        let (kind, profile) = names(group.flags);
        writeln!(text, "{kind}, {profile}: total={}, used={}", size(group.total), size(group.used))?;
    }
    let (total, used) = (usage.global_reserve, usage.global_reserve_used);
    writeln!(text, "GlobalReserve, single: total={}, used={}", size(total), size(used))?;
    print_out(&text)
}

/// Asks for the usage of a filesystem, and prints the warning of btrfs-progs about kinds of space with several profiles.
/// Prints nothing if the filesystem cannot be asked, because the command has told its own result already.
pub(crate) fn warn_of_profiles_in(target: &CommandTarget, options: &ImageOptions) {
    if !is_progs() {
        return;
    }
    let asked = with_channel(target, options, ImageUse::Read, |channel| {
        call(channel, target, "read the space of", Request::Usage)
    });
    if let Ok(Response::Usage(usage)) = asked {
        warn_of_several_profiles(&usage);
    }
}

/// The warning of btrfs-progs about kinds of space with several profiles.
fn warn_of_several_profiles(usage: &FilesystemUsage) {
    if !is_progs() || !has_several_profiles(&usage.groups) {
        return;
    }
    let mut profiles: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for group in sorted(&usage.groups, DF_ORDER) {
        let (kind, profile) = names(group.flags);
        profiles.entry(kind).or_default().push(profile.to_lowercase());
    }
    warn("Multiple block group profiles detected, see 'man btrfs(5)'");
    for (kind, profiles) in profiles.iter().filter(|(_, profiles)| profiles.len() > 1) {
        warn(&format!("   {kind}: {}", profiles.join(", ")));
    }
}

pub(super) fn usage(args: &UsageArgs) -> anyhow::Result<ExitCode> {
    let units = args.common.units.with(args.letters);
    let mut is_first = true;
    Ok(each(&args.targets, |target| {
        let usage = args.common.usage(target)?;
        if args.common.json {
            return print_df_json(&usage);
        }
        let mut text = if std::mem::take(&mut is_first) { String::new() } else { "\n".to_owned() };
        text += &overall(&units, &usage)?;
        match args.table {
            true => text += &format!("\n{}", usage_table::table(&usage, &units)),
            false => text += &by_group(&units, &usage)?,
        }
        print_out(&text)
    }))
}

/// Shows for each device how many bytes each kind of space has there.
pub(crate) fn device_usage(args: &DeviceUsageArgs) -> ExitCode {
    let units = args.common.units.with(args.letters);
    each(&args.targets, |target| {
        let usage = args.common.usage(target)?;
        if args.common.json {
            return print_df_json(&usage);
        }
        warn_of_several_profiles(&usage);
        let mut text = String::new();
        let has_several = own_devices(&usage).count() > 1;
        for device in own_devices(&usage) {
            let line = |title: &str, value: &str| {
                let width = DEVICE_LINE.saturating_sub(title.len());
                format!("   {title}{value:>width$}\n")
            };
            let of_bytes = |title: &str, bytes| line(title, &units.format(bytes));
            writeln!(text, "{}, ID: {}", name(device), device.devid)?;
            if has_several && !is_progs() {
                text += &line("Device state:", state_text(device.state()));
            }
            text += &of_bytes("Device size:", if is_progs() && device.state().is_absent() { 0 } else { device.total });
            text += &of_bytes("Device slack:", device.slack);
            for group in sorted(&usage.groups, USAGE_ORDER) {
                for (kind, bytes) in shares(device, group.flags) {
                    if bytes > 0 {
                        text += &of_bytes(&format!("{kind}:"), bytes);
                    }
                }
            }
            text += &of_bytes("Unallocated:", unallocated(device));
            text.push('\n');
        }
        print_out(&text)
    })
}

/// Width of a title and its size in `device usage`.
const DEVICE_LINE: usize = 32;

/// Bytes that block groups with these flags take on a device.
pub(super) fn bytes_of(device: &DeviceInfo, flags: u64) -> u64 {
    let found = device.groups.iter().flatten().filter(|(found, _)| *found == flags);
    found.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
}

/// The devices without those of seeds, which btrfs-progs leaves out too. Only the bytes in chunks count on all devices.
pub(super) fn own_devices(usage: &FilesystemUsage) -> impl Iterator<Item = &DeviceInfo> {
    usage.devices.iter().filter(|device| !device.is_seed)
}

/// Bytes of a device that belong to no chunk.
pub(super) fn unallocated(device: &DeviceInfo) -> u64 {
    device.total.saturating_sub(device.allocated)
}

/// The sums over the filesystem.
fn overall(units: &Units, usage: &FilesystemUsage) -> Result<String, std::fmt::Error> {
    let sums = Sums::of(usage);
    let width = if units.is_default() { 10 } else { 18 };
    let column = |bytes| format!("{:>width$}", units.format(bytes));
    let ratio = |ratio: f64| format!("{ratio:>width$.2}");
    let mut text = String::from("Overall:\n");
    for (title, value) in [
        ("Device size:\t\t", column(sums.size)),
        ("Device allocated:\t\t", column(sums.allocated)),
        ("Device unallocated:\t\t", column(sums.unallocated)),
        ("Device missing:\t\t", column(sums.missing)),
        ("Device slack:\t\t", column(sums.slack)),
        ("Used:\t\t\t", column(sums.used)),
    ] {
        writeln!(text, "    {title}{value}")?;
    }
    writeln!(text, "    Free (estimated):\t\t{}\t(min: {})", column(sums.free), units.format(sums.free_min))?;
    writeln!(text, "    Free (statfs, df):\t\t{}", column(usage.available))?;
    writeln!(text, "    Data ratio:\t\t\t{}", ratio(sums.data_ratio))?;
    writeln!(text, "    Metadata ratio:\t\t{}", ratio(sums.metadata_ratio))?;
    let (reserve, used) = (usage.global_reserve, usage.global_reserve_used);
    writeln!(text, "    Global reserve:\t\t{}\t(used: {})", column(reserve), units.format(used))?;
    let several = if has_several_profiles(&usage.groups) { "yes" } else { "no" };
    writeln!(text, "    Multiple profiles:\t\t{several:>width$}")?;
    Ok(text)
}

/// A bar for a terminal. Every share above 0 shows.
fn bar(percent: f64) -> String {
    let share = BAR_LEN as f64 * percent / 100.0;
    let filled = if share < 1.0 { share.ceil() } else { share.round() }.clamp(0.0, BAR_LEN as f64) as usize;
    format!("  [{}{}]", "#".repeat(filled), "-".repeat(BAR_LEN - filled))
}

const BAR_LEN: usize = 24;

/// The space of each kind, by device.
fn by_group(units: &Units, usage: &FilesystemUsage) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    for group in sorted(&usage.groups, USAGE_ORDER) {
        let (kind, profile) = names(group.flags);
        let share = if group.total == 0 { 0.0 } else { 100.0 * group.used as f64 / group.total as f64 };
        let (size, used) = (units.format(group.total), units.format(group.used));
        let bar = if stdout().is_terminal() && !is_progs() { bar(share) } else { String::new() };
        writeln!(text, "\n{kind},{profile}: Size:{size}, Used:{used} ({share:.2}%){bar}")?;
        for device in own_devices(usage) {
            let bytes = bytes_of(device, group.flags);
            if bytes > 0 {
                writeln!(text, "   {}\t{:>10}", name_with_state(device), units.format(bytes))?;
            }
        }
    }
    if usage.devices.iter().all(|device| device.groups.is_some()) {
        writeln!(text, "\nUnallocated:")?;
        for device in own_devices(usage) {
            writeln!(text, "   {}\t{:>10}", name_with_state(device), units.format(unallocated(device)))?;
        }
    }
    Ok(text)
}

pub(super) fn show(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let common = &args.common;
    let named = args.target.clone().map(CommandTarget::from);
    if let (Some(target), false) = (&named, args.target.as_deref().is_some_and(is_id)) {
        let target = target.clone().or_image().or_its_mount();
        show_one(common, &Described::of(&target, &common.image)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let is_wanted = |shown: &Described| {
        let is_named = args.target.as_ref().is_none_or(|id| {
            let id = id.as_encoded_bytes();
            id == shown.info.label || id.eq_ignore_ascii_case(shown.info.fsid.to_string().as_bytes())
        });
        is_named && (!args.all_devices || shown.is_on_block_devices())
    };
    let mounted = mounted();
    let fsids: Vec<Uuid> = mounted.iter().map(|shown| shown.info.fsid).collect();
    let mut ours: Vec<Described> = mounted.into_iter().filter(is_wanted).collect();
    if !args.mounted && !is_progs() {
        ours.extend(unmounted(&fsids).into_iter().filter(is_wanted));
    }
    ours.iter().try_for_each(|shown| show_one(common, shown))?;
    if args.target.is_some() && !ours.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let linux = if is_progs() { crate::progs::linux_output()? } else { None };
    if let Some((text, status)) = linux {
        let is_ours = |text: &str| ours.iter().any(|shown| text.contains(&shown.info.fsid.to_string()));
        let others = text.split_inclusive("\n\n").filter(|part| !is_ours(part));
        print_out(&others.collect::<String>())?;
        return Ok(status);
    }
    match &args.target {
        Some(id) if is_progs() => bail!("not a valid btrfs filesystem: {}", id.shown()),
        Some(id) => {
            bail!(
                "{} is neither a path nor the UUID or label of a filesystem that ubtrfs has mounted or that is on block devices",
                id.shown()
            )
        }
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Whether a word is no path, and may be a UUID or a label.
fn is_id(word: &OsStr) -> bool {
    !word.as_encoded_bytes().contains(&b'/') && std::fs::symlink_metadata(word).is_err()
}

/// All filesystems that ubtrfs has mounted for root or this user. Warns of servers that do not answer.
fn mounted() -> Vec<Described> {
    let mut seen: Vec<Vec<u8>> = Vec::new();
    let mut found = Vec::new();
    let mounts = FirstMount::all(Path::new(""));
    for mount in &mounts {
        let is_shown = seen.iter().any(|other| other == mount.filesystem());
        if is_shown || mounts.iter().any(|other| mount.is_submount_of(other)) {
            continue;
        }
        seen.push(mount.filesystem().to_vec());
        let target = CommandTarget::Mounted(mount.dir().to_owned());
        if let Err(error) = target.await_server() {
            warn(&format!("{error}; its filesystem is left out"));
        } else if ubtrfs_fuse::server_answers(mount.dir(), &umount::helper) {
            found.extend(Described::of(&target, &ImageOptions::default()));
        } else {
            warn(&format!("{}: its server does not answer, so its filesystem is left out", mount.dir().shown()));
        }
    }
    found
}

/// What `filesystem show` tells about a filesystem.
pub(super) struct Described {
    pub(super) info: FilesystemInfo,
    pub(super) usage: FilesystemUsage,
    /// Bytes that extents occupy.
    pub(super) used: u64,
    pub(super) is_mounted: bool,
}

impl Described {
    fn of(target: &CommandTarget, image: &ImageOptions) -> anyhow::Result<Self> {
        with_channel(target, image, ImageUse::Read, |channel| {
            let info = info(channel, target)?;
            match call(channel, target, "read the space of", Request::Usage)? {
                Response::Usage(usage) => {
                    let used = usage.groups.iter().fold(0u64, |sum, group| sum.saturating_add(group.used));
                    Ok(Self { info, usage, used, is_mounted: matches!(target, CommandTarget::Mounted(_)) })
                }
                _ => bail!("the server of {target} answered something else"),
            }
        })
    }

    fn is_on_block_devices(&self) -> bool {
        self.usage.devices.iter().filter_map(|device| device.path.as_deref()).all(|path| {
            use std::os::unix::fs::FileTypeExt;
            std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
        })
    }
}

fn show_one(common: &Common, Described { info, usage, used, is_mounted }: &Described) -> anyhow::Result<()> {
    if common.json {
        let mut value = json!({ "info": info, "devices": usage.devices.iter().map(json_of).collect::<Vec<_>>() });
        insert_name(&mut value["info"], "label", &info.label);
        return print_json(&value);
    }
    let label = match info.label.as_slice() {
        b"" => "none".to_owned(),
        label => format!("'{}'", printable(label)),
    };
    let mut text = format!("Label: {label}  uuid: {}\n", info.fsid);
    writeln!(text, "\tTotal devices {} FS bytes used {}", info.num_devices, common.units.format(*used))?;
    for device in &usage.devices {
        let (size, used) = (common.units.format(device.total), common.units.format(device.allocated));
        match device.path {
            Some(_) if !(is_progs() && device.state().is_absent()) => {
                let path = name_with_state(device);
                writeln!(text, "\tdevid {:>4} size {size} used {used} path {path}", device.devid)?;
            }
            _ if *is_mounted => writeln!(text, "\tdevid {:>4} size 0 used 0 path  MISSING", device.devid)?,
            _ => {}
        }
    }
    let nr_present = usage.devices.iter().filter(|device| device.path.is_some()).count();
    if !is_mounted && u64::try_from(nr_present).is_ok_and(|present| present < info.num_devices) {
        text.push_str("\t*** Some devices missing\n");
    }
    text.push('\n');
    print_out(&text)
}

fn print_df_json(usage: &FilesystemUsage) -> anyhow::Result<()> {
    if is_progs() {
        let of = |kind: &str, profile: &str, total: u64, used: u64| json!({ "bg-type": kind, "bg-profile": profile, "total": total.to_string(), "used": used.to_string() });
        let groups = sorted(&usage.groups, DF_ORDER);
        let groups = groups.iter().map(|group| {
            let (kind, profile) = names(group.flags);
            of(kind, profile, group.total, group.used)
        });
        let reserve = of("GlobalReserve", "single", usage.global_reserve, usage.global_reserve_used);
        return print_progs_json("filesystem-df", &groups.chain([reserve]).collect());
    }
    let groups: Vec<_> = sorted(&usage.groups, DF_ORDER)
        .iter()
        .map(|group| {
            let (kind, profile) = names(group.flags);
            json!({ "type": kind, "profile": profile, "total": group.total, "used": group.used })
        })
        .collect();
    let devices: Vec<_> = usage.devices.iter().map(json_of).collect();
    let reserve = json!({ "total": usage.global_reserve, "used": usage.global_reserve_used });
    let value =
        json!({ "groups": groups, "global_reserve": reserve, "devices": devices, "available": usage.available });
    print_json(&value)
}

/// Sums over all devices and block groups. `used` counts bytes of the devices: a logical byte counts once for each copy
/// that its profile keeps.
struct Sums {
    size: u64,
    allocated: u64,
    unallocated: u64,
    missing: u64,
    slack: u64,
    used: u64,
    /// Estimated free space for data if new chunks get the current data profile.
    free: u64,
    /// Estimated free space for data if new chunks get the profile with the most copies.
    free_min: u64,
    data_ratio: f64,
    metadata_ratio: f64,
}

impl Sums {
    fn of(usage: &FilesystemUsage) -> Self {
        let sum = |values: &mut dyn Iterator<Item = u64>| values.fold(0u64, u64::saturating_add);
        let size = sum(&mut own_devices(usage).map(|device| device.total));
        let allocated = sum(&mut usage.devices.iter().map(|device| device.allocated));
        let missing = own_devices(usage).filter(|device| device.state().is_absent());
        let is_data = |group: &&BlockGroupTotals| group.flags & BlockGroupFlags::DATA.bits() != 0;
        let is_metadata = |group: &&BlockGroupTotals| group.flags & BlockGroupFlags::METADATA.bits() != 0;
        let ratio_of = |wanted: &dyn Fn(&&BlockGroupTotals) -> bool| {
            let groups = || usage.groups.iter().filter(wanted);
            let logical = sum(&mut groups().map(|group| group.total));
            let raw = sum(&mut groups().map(|group| raw_of(usage, group)));
            if logical == 0 { 1.0 } else { raw as f64 / logical as f64 }
        };
        let (data_ratio, metadata_ratio) = (ratio_of(&is_data), ratio_of(&is_metadata));
        let most = usage
            .groups
            .iter()
            .filter(|group| group.total > 0)
            .map(|group| raw_of(usage, group) as f64 / group.total as f64)
            .fold(1.0, f64::max);
        let unallocated = size.saturating_sub(allocated);
        let in_chunks =
            sum(&mut usage.groups.iter().filter(is_data).map(|group| group.total.saturating_sub(group.used)));
        // In mixed block groups, the global reserve takes space that data could use, so its unused bytes are
        // subtracted.
        let is_mixed = usage.groups.iter().any(|group| is_data(&group) && is_metadata(&group));
        let reserved = if is_mixed { usage.global_reserve.saturating_sub(usage.global_reserve_used) } else { 0 };
        let with = |ratio: f64| in_chunks.saturating_sub(reserved).saturating_add((unallocated as f64 / ratio) as u64);
        let used = usage.groups.iter().map(|group| {
            let ratio = if group.total == 0 { 1.0 } else { raw_of(usage, group) as f64 / group.total as f64 };
            (group.used as f64 * ratio) as u64
        });
        Self {
            size,
            allocated,
            unallocated,
            missing: sum(&mut missing.map(|device| device.total)),
            slack: sum(&mut own_devices(usage).map(|device| device.slack)),
            used: sum(&mut used.into_iter()),
            free: with(data_ratio),
            free_min: with(most),
            data_ratio,
            metadata_ratio,
        }
    }
}

/// Bytes that block groups of one type and profile take on the devices. If the caller may not see the usage of devices,
/// the bytes are estimated from the number of copies.
fn raw_of(usage: &FilesystemUsage, group: &BlockGroupTotals) -> u64 {
    let on_devices = usage.devices.iter().map(|device| device.groups.as_ref());
    match on_devices.collect::<Option<Vec<_>>>() {
        Some(_) => usage.devices.iter().fold(0, |sum: u64, device| sum.saturating_add(bytes_of(device, group.flags))),
        None => {
            let flags = BlockGroupFlags::from_bits_retain(group.flags);
            group.total.saturating_mul(Profile::copies_of(flags))
        }
    }
}

fn has_several_profiles(groups: &[BlockGroupTotals]) -> bool {
    let profile = |group: &BlockGroupTotals| group.flags & BlockGroupFlags::PROFILES.bits();
    [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM].iter().any(|kind| {
        let mut profiles: Vec<u64> =
            groups.iter().filter(|group| group.flags & kind.bits() != 0).map(profile).collect();
        profiles.sort_unstable();
        profiles.dedup();
        profiles.len() > 1
    })
}

/// Sorts the groups by type in the given order, and then by profile.
pub(super) fn sorted(groups: &[BlockGroupTotals], order: [BlockGroupFlags; 4]) -> Vec<BlockGroupTotals> {
    let mut groups = groups.to_vec();
    let place = |group: &BlockGroupTotals| {
        let kind = BlockGroupFlags::from_bits_retain(group.flags) & BlockGroupFlags::TYPES;
        (order.iter().position(|other| *other == kind).unwrap_or(order.len()), group.flags)
    };
    groups.sort_by_key(place);
    groups
}

const MIXED: BlockGroupFlags = BlockGroupFlags::DATA.union(BlockGroupFlags::METADATA);
const DF_ORDER: [BlockGroupFlags; 4] =
    [BlockGroupFlags::DATA, BlockGroupFlags::SYSTEM, BlockGroupFlags::METADATA, MIXED];
pub(super) const USAGE_ORDER: [BlockGroupFlags; 4] =
    [BlockGroupFlags::DATA, MIXED, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM];

/// The names of a block group's type and profile, as btrfs-progs prints them.
pub(crate) fn names(flags: u64) -> (&'static str, &'static str) {
    let flags = BlockGroupFlags::from_bits_retain(flags);
    let kind = match flags & BlockGroupFlags::TYPES {
        BlockGroupFlags::DATA => "Data",
        BlockGroupFlags::SYSTEM => "System",
        BlockGroupFlags::METADATA => "Metadata",
        MIXED => "Data+Metadata",
        _ => "unknown",
    };
    (kind, Profile::name_of(flags))
}
