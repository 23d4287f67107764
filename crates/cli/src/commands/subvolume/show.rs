//! `ubtrfs subvolume show` and `get-default`.

use std::fmt::Write as _;

use anyhow::anyhow;
use rustix::io::Errno;
use serde_json::json;
use ubtrfs_control::Channel;
use ubtrfs_control::quota::QuotaGroup;
use ubtrfs_format::RootId;
use ubtrfs_format::item::Timespec;
use ubtrfs_format::print::insert_names;
use ubtrfs_fs::{QgroupId, SubvolumeInfo};
use uuid::Uuid;

use super::list::{is_read_only, json_of, plain_line, seconds_text, uuid_text};
use super::problem::explain;
use super::{find, list, open_subvolume};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::commands::qgroup::all_groups;
use crate::commands::quota::status_of;
use crate::common::{print_json, print_out, warn};
use crate::units::{UnitLetters, Units};

/// Show all attributes of a subvolume
#[derive(clap::Args)]
pub(super) struct Args {
    /// Show the subvolume with this id, in the filesystem that holds the path
    #[arg(short, long, value_name = "ID")]
    rootid: Option<u64>,
    /// Show the subvolume with this UUID, in the filesystem that holds the path
    #[arg(short, long, conflicts_with = "rootid")]
    uuid: Option<Uuid>,
    #[command(flatten)]
    units: Units,
    #[command(flatten)]
    letters: UnitLetters,
    /// The subvolume
    #[arg(value_name = "PATH|IMAGE[:/PATH]")]
    path: CommandTarget,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Show the subvolume that is mounted by default
#[derive(clap::Args)]
pub(super) struct DefaultArgs {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: CommandTarget,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let is_by_path = args.rootid.is_none() && args.uuid.is_none();
    let target = &if is_by_path { args.path.or_image_elsewhere() } else { args.path.or_image() };
    let (info, list, group) = with_channel(target, &args.image, ImageUse::Read, |channel| {
        let of_path = if is_by_path { Some(open_subvolume(channel, target)?.1) } else { None };
        // A user who may not list subvolumes gets only the attributes of the named subvolume.
        let list = match channel.subvolumes() {
            Err(failure) if is_by_path && failure.errno() == Errno::PERM => Vec::new(),
            list => list.map_err(|failure| explain("list the subvolumes of", target.filesystem(), failure))?,
        };
        let missing = |what: String| {
            let shown = target.filesystem();
            anyhow!("{shown} has no subvolume {what}; list them with: ubtrfs subvolume list -u {shown}")
        };
        let info = match (of_path, args.rootid, args.uuid) {
            (Some(info), ..) => info,
            (_, Some(id), _) => {
                list.iter().find(|info| info.id == RootId(id)).ok_or_else(|| missing(format!("with id {id}")))?.clone()
            }
            (.., uuid) => {
                let uuid = uuid.unwrap_or_default();
                let found = list.iter().find(|info| info.uuid == uuid && !uuid.is_nil());
                found.ok_or_else(|| missing(format!("with UUID {uuid}")))?.clone()
            }
        };
        let group = if list.is_empty() { None } else { quota_group(channel, target, info.id)? };
        Ok((info, list, group))
    })?;
    // Without a UUID, the subvolume's snapshots cannot be recognized.
    let snapshots = list.iter().filter(|other| !info.uuid.is_nil() && other.parent_uuid == info.uuid);
    if args.json {
        let mut value = json_of(&info);
        insert_names(&mut value, "snapshots", snapshots.map(|other| other.path.as_slice()));
        if let Some(group) = group {
            value["qgroup"] = json!({
                "qgroupid": QgroupId(group.id).to_string(),
                "max_referenced": group.max_referenced,
                "max_exclusive": group.max_exclusive,
                "referenced": group.referenced,
                "exclusive": group.exclusive,
            });
        }
        return print_json(&value);
    }
    let quota = group.map_or_else(String::new, |group| quota_text(&group, &args.units.with(args.letters)));
    print_out(&(text(&info, snapshots)? + &quota))?;
    if !is_read_only(&info) && !info.received_uuid.is_nil() {
        warn(
            "WARNING: the subvolume is writable and has a received_uuid, so it may differ from the sent one; do not send or receive \
             increments based on it",
        );
    }
    Ok(())
}

/// The quota group of a subvolume; `None` if quotas are off.
fn quota_group(channel: &Channel<'_>, target: &CommandTarget, id: RootId) -> anyhow::Result<Option<QuotaGroup>> {
    if status_of(channel, target)?.is_none() {
        return Ok(None);
    }
    Ok(all_groups(channel, target)?.into_iter().find(|group| group.id == id.0))
}

/// Formats a quota group as btrfs-progs does.
fn quota_text(group: &QuotaGroup, units: &Units) -> String {
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |bytes| units.format(bytes));
    format!(
        "\tQuota group:\t\t{}\n\t  Limit referenced:\t{}\n\t  Limit exclusive:\t{}\n\t  Usage referenced:\t{}\n\t  Usage exclusive:\t{}\n",
        QgroupId(group.id),
        limit(group.max_referenced),
        limit(group.max_exclusive),
        units.format(group.referenced),
        units.format(group.exclusive),
    )
}

/// Formats the attributes as btrfs-progs does, with times in UTC.
fn text<'a>(
    info: &SubvolumeInfo,
    snapshots: impl Iterator<Item = &'a SubvolumeInfo>,
) -> Result<String, std::fmt::Error> {
    let is_top = info.id == RootId::FS_TREE;
    let name = info.name();
    let parent = info.parent.map_or(0, |parent| parent.0);
    let time = |time: Timespec| match time.sec {
        0 => "-".to_owned(),
        _ => format!("{} +0000", seconds_text(time)),
    };
    let mut text = if is_top { "/\n".to_owned() } else { format!("{}\n", printable(&info.path)) };
    for (title, value) in [
        ("Name: \t\t", if is_top { "<FS_TREE>".to_owned() } else { printable(name) }),
        ("UUID: \t\t", uuid_text(info.uuid)),
        ("Parent UUID: \t", uuid_text(info.parent_uuid)),
        ("Received UUID: \t", uuid_text(info.received_uuid)),
        ("Creation time: \t", time(info.otime)),
        ("Subvolume ID: \t", info.id.0.to_string()),
        ("Generation: \t", info.generation.0.to_string()),
        ("Gen at creation: ", info.otransid.0.to_string()),
        ("Parent ID: \t", parent.to_string()),
        ("Top level ID: \t", parent.to_string()),
        ("Flags: \t\t", if is_read_only(info) { "readonly".to_owned() } else { "-".to_owned() }),
        ("Send transid: \t", info.stransid.0.to_string()),
        ("Send time: \t", time(info.stime)),
        ("Receive transid: ", info.rtransid.0.to_string()),
        ("Receive time: \t", time(info.rtime)),
    ] {
        writeln!(text, "\t{title}\t{value}")?;
    }
    writeln!(text, "\tSnapshot(s):")?;
    for other in snapshots {
        writeln!(text, "\t\t\t\t{}", printable(&other.path))?;
    }
    Ok(text)
}

pub(super) fn get_default(args: DefaultArgs) -> anyhow::Result<()> {
    let target = args.target.or_image();
    let text = with_channel(&target, &args.image, ImageUse::Read, |channel| {
        open(channel, &target)?;
        let read = |failure| explain("read the default subvolume of", target.filesystem(), failure);
        match channel.default_subvolume().map_err(read)? {
            RootId::FS_TREE => Ok("ID 5 (FS_TREE)\n".to_owned()),
            id => find(&list(channel, &target)?, id).map(plain_line),
        }
    })?;
    print_out(&text)
}
