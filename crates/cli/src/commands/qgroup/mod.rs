//! `ubtrfs qgroup ...`: shows and changes quota groups. Options and output are those of btrfs-progs.

mod show;

pub(super) use show::all_groups;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_control::Channel;
use ubtrfs_control::quota::{LimitChange, Request, Response};
use ubtrfs_fs::QgroupId;

use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, FilesystemArgs, open, with_channel};
use super::quota::{call, status_of, wait};
use crate::common::{parse_size, print_out, warn};
use crate::progs::is_progs;

/// Show and change quota groups
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Show(show::Args),
    /// Make a quota group
    Create(GroupArgs),
    /// Remove a quota group
    Destroy(GroupArgs),
    /// Put a quota group into a group of a higher level
    Assign(RelationArgs),
    /// Take a quota group out of a group of a higher level
    Remove(RelationArgs),
    Limit(QgroupLimitArgs),
    /// Remove the quota groups of subvolumes that no longer exist
    ClearStale(ClearStaleArgs),
}

// This struct has no doc comment, because it would replace the help of the command.
#[derive(clap::Args)]
struct ClearStaleArgs {
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

#[derive(clap::Args)]
struct GroupArgs {
    /// The group: LEVEL/NUMBER, or the id of a subvolume
    #[arg(value_name = "QGROUP", value_parser = parse_qgroup)]
    group: QgroupId,
    #[command(flatten)]
    of: FilesystemArgs,
}

#[derive(clap::Args)]
struct RelationArgs {
    /// The group of the lower level: LEVEL/NUMBER, or the id or the absolute path of a subvolume
    #[arg(value_name = "SRC", value_parser = parse_group_or_path)]
    member: GroupOrPath,
    /// The group of the higher level: LEVEL/NUMBER
    #[arg(value_name = "DST", value_parser = parse_group_or_path)]
    parent: GroupOrPath,
    /// Start a rescan if the new numbers cannot be computed; the default
    #[arg(long, overrides_with = "no_rescan")]
    rescan: bool,
    /// Do not start a rescan, even if the numbers become unreliable
    #[arg(long)]
    no_rescan: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

/// Limit the space of a quota group
#[derive(clap::Args)]
struct QgroupLimitArgs {
    /// Limit exclusive bytes instead of referenced bytes
    #[arg(short = 'e')]
    exclusive: bool,
    /// Accepted for compatibility; limits always count bytes after compression
    #[arg(short = 'c')]
    compressed: bool,
    /// The limit, such as 10G, or none
    #[arg(value_name = "SIZE|none", value_parser = parse_limit)]
    limit: LimitChange,
    /// [GROUP] PATH; without a group, the group of the path's subvolume
    #[arg(value_names = ["QGROUP", "PATH|IMAGE:/PATH"], num_args = 1..=2, required = true)]
    words: Vec<OsString>,
    #[command(flatten)]
    image: ImageOptions,
}

/// Reads `LEVEL/NUMBER`, or the number of a group of level 0.
pub(crate) fn parse_qgroup(text: &str) -> Result<QgroupId, String> {
    let (level, number) = text.split_once('/').unwrap_or(("0", text));
    let parsed = level.parse().ok().zip(number.parse().ok());
    parsed
        .and_then(|(level, number)| QgroupId::new(level, number))
        .ok_or_else(|| "expected LEVEL/NUMBER, such as 1/100, or the id of a subvolume".to_owned())
}

/// A group, or the absolute path of a subvolume that has the group.
#[derive(Clone, Debug)]
enum GroupOrPath {
    Group(QgroupId),
    Path(CommandTarget),
}

fn parse_group_or_path(text: &str) -> Result<GroupOrPath, String> {
    match text.starts_with('/') || text.contains(":/") {
        true => Ok(GroupOrPath::Path(CommandTarget::from(OsString::from(text)))),
        false => parse_qgroup(text).map(GroupOrPath::Group),
    }
}

impl GroupOrPath {
    fn group(&self, channel: &Channel<'_>, filesystem: &CommandTarget) -> anyhow::Result<QgroupId> {
        let path = match self {
            Self::Group(group) => return Ok(*group),
            Self::Path(path) => path,
        };
        if !path.shares_filesystem_with(filesystem) {
            bail!("{path} is not in the filesystem of {filesystem}; name a subvolume of that filesystem");
        }
        match channel.subvolume_of(&open(channel, path)?)? {
            (info, true) => Ok(QgroupId::of_subvolume(info.id)),
            (_, false) => bail!("{path} is not a subvolume; list them with: ubtrfs subvolume list {filesystem}"),
        }
    }
}

fn parse_limit(text: &str) -> Result<LimitChange, String> {
    if text == "none" { Ok(LimitChange::None) } else { parse_size(text).map(LimitChange::Bytes) }
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Show(args) => show::run(&args)?,
        Command::Create(args) => {
            let what = format!("make quota group {} in", args.group);
            change(&args.of, &what, Request::Create { id: args.group.0 })?;
        }
        Command::Destroy(args) => {
            let what = format!("remove quota group {} of", args.group);
            change(&args.of, &what, Request::Destroy { id: args.group.0 })?;
        }
        Command::Assign(args) => relate(&args, true)?,
        Command::Remove(args) => relate(&args, false)?,
        Command::Limit(args) => limit(&args)?,
        Command::ClearStale(args) => {
            let done = change(&args.of, "remove stale quota groups of", Request::ClearStale)?;
            if let Response::Removed(number) = done
                && !args.quiet
                && !is_progs()
            {
                print_out(&format!("Removed {number} quota groups\n"))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn change(args: &FilesystemArgs, what: &str, request: Request) -> anyhow::Result<Response> {
    let target = args.path.clone().or_image();
    with_channel(&target, &args.image, ImageUse::Write, |channel| call(channel, &target, what, request))
}

fn relate(args: &RelationArgs, assigns: bool) -> anyhow::Result<()> {
    let target = args.of.path.clone().or_image();
    with_channel(&target, &args.of.image, ImageUse::Write, |channel| {
        let (member, parent) = (args.member.group(channel, &target)?, args.parent.group(channel, &target)?);
        let (what, request) = match assigns {
            true => (format!("put {member} into {parent} in"), Request::Assign { member: member.0, parent: parent.0 }),
            false => {
                (format!("take {member} out of {parent} in"), Request::Remove { member: member.0, parent: parent.0 })
            }
        };
        let done = call(channel, &target, &what, request)?;
        if done != Response::NeedsRescan(true) {
            return Ok(());
        }
        if args.no_rescan {
            warn("the numbers of quota groups are unreliable; update them with: ubtrfs quota rescan");
            return Ok(());
        }
        count_anew(channel, &target)
    })
}

fn count_anew(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<()> {
    if status_of(channel, target)?.is_some_and(|status| status.rescan.is_none()) {
        call(channel, target, "start a rescan of", Request::Rescan)?;
    }
    match channel.is_mount() {
        true => print_out("Quota data changed, rescan scheduled\n"),
        false => wait(channel, target),
    }
}

fn limit(args: &QgroupLimitArgs) -> anyhow::Result<()> {
    let (id, path) = match args.words.as_slice() {
        [path] => (None, path),
        [id, path] => {
            let id = id.to_str().context("the quota group is not text")?;
            (Some(parse_qgroup(id).map_err(|problem| anyhow::anyhow!("quota group '{id}': {problem}"))?), path)
        }
        _ => bail!("name a path"),
    };
    let target = CommandTarget::from(path.clone()).or_image();
    let (referenced, exclusive) =
        if args.exclusive { (LimitChange::Keep, args.limit) } else { (args.limit, LimitChange::Keep) };
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        let file = open(channel, &target)?;
        let request = Request::Limit { id: id.map(|id| id.0), of: 0, referenced, exclusive };
        channel
            .call(ubtrfs_control::Request::Quota(request), &[&file])
            .with_context(|| format!("cannot limit the space of {target}"))?;
        Ok(())
    })
}
