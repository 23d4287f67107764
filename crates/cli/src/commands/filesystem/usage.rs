//! `ubtrfs filesystem df`, `usage` and `show`: space by kind and by device, in the format of btrfs-progs.

use std::fmt::Write as _;

use anyhow::bail;
use serde_json::json;
use ubtrfs_control::filesystem::{Group, Request, Response, Usage};
use ubtrfs_format::Profile;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::{escaped, insert_name};

use super::{call, info};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, with_channel};
use crate::common::{print_json, print_out};
use crate::units::Units;

/// Show how much of each kind of space is used
#[derive(clap::Args)]
pub(super) struct DfArgs {
    #[command(flatten)]
    common: Common,
}

/// Show how the space is used, in total and by device
#[derive(clap::Args)]
pub(super) struct UsageArgs {
    #[command(flatten)]
    common: Common,
}

/// Show label, UUID and devices
#[derive(clap::Args)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: Target,
    #[command(flatten)]
    units: Units,
    /// Print JSON
    #[arg(long, conflicts_with = "raw")]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

impl Common {
    fn size(&self, bytes: u64) -> String {
        self.units.format(bytes)
    }

    /// Formats a size for a column.
    fn column(&self, bytes: u64) -> String {
        let width = if self.units.is_raw() { 18 } else { 10 };
        format!("{:>width$}", self.units.format(bytes))
    }

    fn usage(&self) -> anyhow::Result<Usage> {
        let target = self.target.clone().or_image().or_its_mount();
        with_channel(&target, &self.image, Use::Read, |channel| {
            match call(channel, &target, "read the space of", Request::Usage)? {
                Response::Usage(usage) => Ok(usage),
                _ => bail!("the server of {target} answered something else"),
            }
        })
    }
}

pub(super) fn df(args: &DfArgs) -> anyhow::Result<()> {
    let usage = args.common.usage()?;
    if args.common.json {
        return print_df_json(&usage);
    }
    let size = |bytes| args.common.size(bytes);
    let mut text = String::new();
    for group in sorted(&usage.groups, DF_ORDER) {
        let (kind, profile) = names(group.flags);
        writeln!(text, "{kind}, {profile}: total={}, used={}", size(group.total), size(group.used))?;
    }
    let (total, used) = (usage.global_reserve, usage.global_reserve_used);
    writeln!(text, "GlobalReserve, single: total={}, used={}", size(total), size(used))?;
    print_out(&text)
}

pub(super) fn usage(args: &UsageArgs) -> anyhow::Result<()> {
    let usage = args.common.usage()?;
    match args.common.json {
        true => print_df_json(&usage),
        false => print_out(&usage_text(&args.common, &usage)?),
    }
}

fn usage_text(args: &Common, usage: &Usage) -> Result<String, std::fmt::Error> {
    let sums = Sums::of(usage);
    let column = |bytes| args.column(bytes);
    let ratio = |ratio: f64| if args.units.is_raw() { format!("{ratio:>18.2}") } else { format!("{ratio:>10.2}") };
    let width = if args.units.is_raw() { 18 } else { 10 };
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
    writeln!(text, "    Free (estimated):\t\t{}\t(min: {})", column(sums.free), args.size(sums.free_min))?;
    writeln!(text, "    Free (statfs, df):\t\t{}", column(usage.available))?;
    writeln!(text, "    Data ratio:\t\t\t{}", ratio(sums.data_ratio))?;
    writeln!(text, "    Metadata ratio:\t\t{}", ratio(sums.metadata_ratio))?;
    let (reserve, used) = (usage.global_reserve, usage.global_reserve_used);
    writeln!(text, "    Global reserve:\t\t{}\t(used: {})", column(reserve), args.size(used))?;
    let several = if has_several_profiles(&usage.groups) { "yes" } else { "no" };
    writeln!(text, "    Multiple profiles:\t\t{several:>width$}")?;
    for group in sorted(&usage.groups, USAGE_ORDER) {
        let (kind, profile) = names(group.flags);
        let share = if group.total == 0 { 0.0 } else { 100.0 * group.used as f64 / group.total as f64 };
        let (size, used) = (args.size(group.total), args.size(group.used));
        writeln!(text, "\n{kind},{profile}: Size:{size}, Used:{used} ({share:.2}%)")?;
        for device in &usage.devices {
            let bytes: u64 = device
                .groups
                .iter()
                .flatten()
                .filter(|(flags, _)| *flags == group.flags)
                .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes));
            if bytes > 0 {
                writeln!(text, "   {}\t{:>10}", path_of(device.path.as_deref()), args.size(bytes))?;
            }
        }
    }
    if usage.devices.iter().all(|device| device.groups.is_some()) {
        writeln!(text, "\nUnallocated:")?;
        for device in &usage.devices {
            let free = device.total.saturating_sub(device.allocated);
            writeln!(text, "   {}\t{:>10}", path_of(device.path.as_deref()), args.size(free))?;
        }
    }
    Ok(text)
}

pub(super) fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let common = &args.common;
    let target = common.target.clone().or_image().or_its_mount();
    let (info, usage) = with_channel(&target, &common.image, Use::Read, |channel| {
        let info = info(channel, &target)?;
        match call(channel, &target, "read the space of", Request::Usage)? {
            Response::Usage(usage) => Ok((info, usage)),
            _ => bail!("the server of {target} answered something else"),
        }
    })?;
    if common.json {
        let mut value = json!({ "info": info, "devices": usage.devices });
        insert_name(&mut value["info"], "label", &info.label);
        return print_json(&value);
    }
    let label = match info.label.as_slice() {
        b"" => "none".to_owned(),
        label => format!("'{}'", printable(label)),
    };
    let used = usage.groups.iter().fold(0u64, |sum, group| sum.saturating_add(group.used));
    let mut text = format!("Label: {label}  uuid: {}\n", info.fsid);
    writeln!(text, "\tTotal devices {} FS bytes used {}", info.num_devices, common.size(used))?;
    for device in &usage.devices {
        let (size, used) = (common.size(device.total), common.size(device.allocated));
        let path = path_of(device.path.as_deref());
        writeln!(text, "\tdevid {:>4} size {size} used {used} path {path}", device.devid)?;
    }
    text.push('\n');
    print_out(&text)
}

fn print_df_json(usage: &Usage) -> anyhow::Result<()> {
    let groups: Vec<_> = sorted(&usage.groups, DF_ORDER)
        .iter()
        .map(|group| {
            let (kind, profile) = names(group.flags);
            json!({ "type": kind, "profile": profile, "total": group.total, "used": group.used })
        })
        .collect();
    let devices: Vec<_> = usage
        .devices
        .iter()
        .map(|device| {
            json!({
                "devid": device.devid, "uuid": device.uuid, "path": device.path, "size": device.total,
                "slack": device.slack, "allocated": device.allocated,
            })
        })
        .collect();
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
    fn of(usage: &Usage) -> Self {
        let sum = |values: &mut dyn Iterator<Item = u64>| values.fold(0u64, u64::saturating_add);
        let size = sum(&mut usage.devices.iter().map(|device| device.total));
        let allocated = sum(&mut usage.devices.iter().map(|device| device.allocated));
        let missing = usage.devices.iter().filter(|device| device.path.is_none());
        let is_data = |group: &&Group| group.flags & BlockGroupFlags::DATA.bits() != 0;
        let is_metadata = |group: &&Group| group.flags & BlockGroupFlags::METADATA.bits() != 0;
        let ratio_of = |wanted: &dyn Fn(&&Group) -> bool| {
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
            slack: sum(&mut usage.devices.iter().map(|device| device.slack)),
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
fn raw_of(usage: &Usage, group: &Group) -> u64 {
    let on_devices = usage.devices.iter().map(|device| device.groups.as_ref());
    match on_devices.collect::<Option<Vec<_>>>() {
        Some(devices) => devices
            .into_iter()
            .flatten()
            .filter(|(flags, _)| *flags == group.flags)
            .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
        None => {
            let flags = BlockGroupFlags::from_bits_retain(group.flags);
            group.total.saturating_mul(Profile::copies_of(flags))
        }
    }
}

fn has_several_profiles(groups: &[Group]) -> bool {
    let profile = |group: &Group| group.flags & BlockGroupFlags::PROFILES.bits();
    [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM].iter().any(|kind| {
        let mut profiles: Vec<u64> =
            groups.iter().filter(|group| group.flags & kind.bits() != 0).map(profile).collect();
        profiles.sort_unstable();
        profiles.dedup();
        profiles.len() > 1
    })
}

/// Sorts the groups by type in the given order, and then by profile.
fn sorted(groups: &[Group], order: [BlockGroupFlags; 4]) -> Vec<Group> {
    let mut groups = groups.to_vec();
    let place = |group: &Group| {
        let kind = BlockGroupFlags::from_bits_retain(group.flags) & BlockGroupFlags::TYPES;
        (order.iter().position(|other| *other == kind).unwrap_or(order.len()), group.flags)
    };
    groups.sort_by_key(place);
    groups
}

const MIXED: BlockGroupFlags = BlockGroupFlags::DATA.union(BlockGroupFlags::METADATA);
const DF_ORDER: [BlockGroupFlags; 4] =
    [BlockGroupFlags::DATA, BlockGroupFlags::SYSTEM, BlockGroupFlags::METADATA, MIXED];
const USAGE_ORDER: [BlockGroupFlags; 4] =
    [BlockGroupFlags::DATA, MIXED, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM];

/// The names of a block group's type and profile, as btrfs-progs prints them.
fn names(flags: u64) -> (&'static str, &'static str) {
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

fn path_of(path: Option<&str>) -> String {
    path.map_or_else(|| "missing".to_owned(), |path| escaped(path.as_bytes()))
}
