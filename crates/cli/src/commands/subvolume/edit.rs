//! `ubtrfs subvolume create`, `delete`, `set-default`, `set-read-only`, `sync`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use rustix::fs::Mode;
use rustix::io::Errno;
use ubtrfs_control::subvolume::Request;
use ubtrfs_control::{Channel, CommandFailure, OpenedFile};
use ubtrfs_format::RootId;
use ubtrfs_fs::{QgroupId, SubvolumeInfo};

use super::open_subvolume;
use super::problem::{DELETE, SET_DEFAULT, explain};
use crate::commands::offline::import::parse_owner;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, open, open_here, with_channel, with_channel_of};
use crate::commands::qgroup::parse_qgroup;
use crate::common::{Shown, calling_user, print_error, print_out};
use crate::job::with_progress;
use crate::progs::is_progs;

/// Make empty subvolumes
#[derive(clap::Args)]
pub(super) struct CreateArgs {
    /// Paths of the new subvolumes, in mounts or images
    #[arg(value_name = "PATH|IMAGE:/PATH", required = true)]
    paths: Vec<CommandTarget>,
    /// Owner of subvolumes in images: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    owner: Option<(u32, u32)>,
    /// A quota group (LEVEL/NUMBER) that each new subvolume joins; can be given several times
    #[arg(short = 'i', value_name = "QGROUP", value_parser = parse_qgroup)]
    qgroups: Vec<QgroupId>,
    /// Make missing parents, as directories
    #[arg(short, long)]
    parents: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Delete subvolumes with everything in them except other subvolumes
#[derive(clap::Args)]
pub(super) struct DeleteArgs {
    /// Subvolumes in mounts or images
    #[arg(value_name = "PATH|IMAGE:/PATH", required = true)]
    paths: Vec<CommandTarget>,
    /// Delete the subvolume with this id, in the filesystem that holds the path
    #[arg(short = 'i', long, value_name = "ID")]
    subvolid: Option<u64>,
    /// Delete the subvolumes in it too, at any depth
    #[arg(short = 'R', long, conflicts_with = "subvolid")]
    recursive: bool,
    /// Commit after each deletion, so that it is durable on return
    #[arg(short, long = "commit-after", visible_alias = "commit")]
    commit: bool,
    /// Do what --commit-after does
    #[arg(short = 'C', long)]
    commit_each: bool,
    /// Print whether each deletion is committed
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    image: ImageOptions,
}

impl DeleteArgs {
    fn commits(&self) -> bool {
        self.commit || self.commit_each
    }

    /// The words with which btrfs-progs marks a deletion. Empty without `-v`, unless the program was called as `btrfs`.
    fn mark(&self) -> &'static str {
        match (self.verbose || is_progs(), self.commits()) {
            (false, _) => "",
            (true, true) => " (commit)",
            (true, false) => " (no-commit)",
        }
    }
}

/// Set the subvolume that is mounted by default
#[derive(clap::Args)]
pub(super) struct SetDefaultArgs {
    /// The subvolume; or its id (5 for the top level) and any path in its filesystem
    #[arg(value_names = ["ID", "PATH|IMAGE:/PATH"], num_args = 1..=2, required = true)]
    words: Vec<std::ffi::OsString>,
    #[command(flatten)]
    image: ImageOptions,
}

/// Make a subvolume read-only or writable
#[derive(clap::Args)]
pub(super) struct SetReadOnlyArgs {
    /// Make a received subvolume writable, which removes its received UUID
    #[arg(short, long)]
    force: bool,
    /// The subvolume
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: CommandTarget,
    /// Whether the subvolume becomes read-only
    #[arg(value_name = "true|false", action = clap::ArgAction::Set)]
    read_only: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Wait until the space of all deleted subvolumes is free
#[derive(clap::Args)]
pub(super) struct SyncArgs {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: CommandTarget,
    /// Say of these subvolumes, too, when they are gone; the command waits for all in any case
    #[arg(value_name = "ID")]
    ids: Vec<u64>,
    /// Accepted for compatibility: the command is told when space becomes free
    #[arg(short, value_name = "SECONDS")]
    sleep: Option<u64>,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn create(args: &CreateArgs) -> ExitCode {
    let owner = args.owner.unwrap_or_else(calling_user);
    let near = if args.parents { nearest } else { near };
    for_each(&args.paths, &args.image, (owner, near), |channel, target| {
        let (dir, name) = target.split()?;
        if args.parents {
            make_dirs(channel, &dir)?;
        }
        // The root of the mount exists, but its directory is in another filesystem.
        let exists = || explain("make", target, CommandFailure::from(ubtrfs_fs::Error::Exists));
        let dir = match open_here(channel, &dir)? {
            None if target.path().exists() => return Err(exists()),
            None => open(channel, &dir)?,
            Some(dir) => dir,
        };
        let umask = if channel.is_mount() { umask() } else { DEFAULT_UMASK };
        let qgroups = args.qgroups.iter().map(|id| id.0).collect();
        let made = channel.subvolume(Request::Create { dir: 0, name, umask, qgroups, limits: None }, &[&dir]);
        made.map_err(|failure| explain("make", target, failure))?;
        print_out(&format!("Create subvolume '{}'\n", target.as_made()))
    })
}

/// Makes a directory and its missing parents.
fn make_dirs(channel: &Channel<'_>, dir: &CommandTarget) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    let mut at = dir.clone();
    while channel.is_dir(at.path()).map_err(|failure| explain("make", &at, failure))?.is_none() {
        let (parent, _) = at.split()?;
        missing.push(std::mem::replace(&mut at, parent));
    }
    missing.iter().rev().try_for_each(|dir| {
        channel.create_dir(dir.path(), DEFAULT_UMASK).map_err(|failure| explain("make", dir, failure))
    })
}

/// The umask of this process.
fn umask() -> u32 {
    let umask = rustix::process::umask(Mode::from_raw_mode(0o077));
    rustix::process::umask(umask);
    umask.as_raw_mode()
}

pub(super) fn delete(args: &DeleteArgs) -> anyhow::Result<ExitCode> {
    if args.verbose && !is_progs() {
        print_out(if args.commits() {
            "Transaction commit: after each\n"
        } else {
            "Transaction commit: none (default)\n"
        })?;
    }
    if let Some(id) = args.subvolid {
        return delete_by_id(args, id).map(|()| ExitCode::SUCCESS);
    }
    // The first path is an id if it is a number, and a second one leads to the filesystem.
    if let [CommandTarget::Mounted(id), of, ..] = args.paths.as_slice()
        && id.to_str().is_some_and(|id| id.parse::<u64>().is_ok())
        && !id.exists()
        && !is_progs()
    {
        let id = id.shown();
        bail!("{id} does not exist; to delete the subvolume with this id: ubtrfs subvolume delete -i {id} {of}");
    }
    Ok(delete_by_path(args))
}

fn delete_by_id(args: &DeleteArgs, id: u64) -> anyhow::Result<()> {
    let [target] = args.paths.as_slice() else {
        bail!("-i needs one path in the filesystem of subvolume {id}; delete each subvolume by a command of its own");
    };
    let target = target.clone().or_image();
    let shown = format!("subvolume {id} of {}", target.filesystem());
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        if is_progs() {
            // As btrfs-progs does, print the path from the top level below the given path.
            let subvolumes = super::list(channel, &target).unwrap_or_default();
            let path = subvolumes.iter().find(|subvolume| subvolume.id.0 == id).map(|found| found.path.as_slice());
            let named = path.map_or_else(|| format!("subvolid={id}"), |path| format!("'{}'", below(&target, path)));
            print_out(&format!("Delete subvolume{}: {named}\n", args.mark()))?;
        }
        channel.subvolume(Request::DeleteById { id }, &[]).map_err(|failure| match failure.errno() {
            Errno::NOENT => {
                let path = target.filesystem();
                anyhow!("cannot delete {shown}: it does not exist; list them with: ubtrfs subvolume list {path}")
            }
            _ => explain(DELETE, &shown, failure),
        })?;
        if args.commits() {
            channel.sync().map_err(|failure| explain("sync", &shown, failure))?;
        }
        if is_progs() {
            return Ok(());
        }
        print_out(&format!("Delete {shown}{}\n", args.mark()))
    })
}

fn delete_by_path(args: &DeleteArgs) -> ExitCode {
    for_each(&args.paths, &args.image, (calling_user(), near), |channel, target| {
        // Resolve links and `..`, because the subvolume to delete is the one that the path leads to.
        let full = target.canonical()?;
        let subvolume = open_subvolume(channel, target)?.1;
        if subvolume.id == RootId::FS_TREE {
            bail!(
                "cannot delete {target}: it is the top level (id 5), which every filesystem has; delete the files and subvolumes in it"
            );
        }
        let busy = || match channel.is_mount() {
            true => anyhow!(
                "cannot delete {target}: it is the root of the mount; unmount it, and delete it through another mount with -o subvolid=5"
            ),
            false => {
                explain(DELETE, target, CommandFailure::from(ubtrfs_fs::Error::Busy("it is the opened subvolume")))
            }
        };
        let Ok((dir, name)) = full.split() else { return Err(busy()) };
        // The root of the mount has its name in another filesystem.
        let Some(dir) = open_here(channel, &dir)? else { return Err(busy()) };
        if args.recursive {
            for inner in nested(&super::list(channel, target)?, subvolume.id) {
                let names = inner.path.strip_prefix(subvolume.path.as_slice()).unwrap_or(&inner.path);
                delete_one(
                    channel,
                    args,
                    (&below(target, names), &below(&full, names)),
                    (Request::DeleteById { id: inner.id.0 }, &[]),
                )?;
            }
        }
        delete_one(channel, args, (target, &full), (Request::Delete { dir: 0, name }, &[&dir]))
    })
}

/// The place that a path leads to from `target`.
fn below(target: &CommandTarget, path: &[u8]) -> CommandTarget {
    let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    names.fold(target.clone(), |dir, name| dir.child(name))
}

/// Deletes one subvolume, and says so, with its path as given and in full.
fn delete_one(
    channel: &Channel<'_>,
    args: &DeleteArgs,
    (target, full): (&CommandTarget, &CommandTarget),
    (request, files): (Request, &[&OpenedFile]),
) -> anyhow::Result<()> {
    if is_progs() {
        print_out(&format!("Delete subvolume{}: '{full}'\n", args.mark()))?;
    }
    channel.subvolume(request, files).map_err(|failure| explain(DELETE, target, failure))?;
    if args.commits() {
        channel.sync().map_err(|failure| explain("sync", target, failure))?;
    }
    print_out(&match args.mark() {
        _ if is_progs() => String::new(),
        "" => format!("Delete subvolume '{target}'\n"),
        mark => format!("Delete subvolume{mark}: '{target}'\n"),
    })
}

/// The subvolumes in the subvolume `top`, at any depth, each after the subvolumes in it.
fn nested(list: &[SubvolumeInfo], top: RootId) -> Vec<&SubvolumeInfo> {
    let mut inside: BTreeMap<RootId, Vec<&SubvolumeInfo>> = BTreeMap::new();
    for info in list.iter().filter(|info| info.id != top) {
        inside.entry(info.parent.unwrap_or(info.id)).or_default().push(info);
    }
    let mut found: Vec<&SubvolumeInfo> = inside.remove(&top).unwrap_or_default();
    let mut passed = 0;
    while let Some(info) = found.get(passed) {
        found.extend(inside.remove(&info.id).unwrap_or_default());
        passed += 1;
    }
    found.reverse();
    found
}

pub(super) fn sync(args: &SyncArgs) -> anyhow::Result<()> {
    let target = args.target.clone().or_image();
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        let (nr, s) = (args.ids.len(), if args.ids.len() == 1 { "" } else { "s" });
        if let Some(id) = existing(channel, &target, &args.ids)? {
            bail!("subvolume {id} of {} is not deleted; delete it by: ubtrfs subvolume delete", target.filesystem());
        }
        if nr > 0 {
            print_out(&format!("Waiting for {nr} subvolume{s}\n"))?;
        }
        free_deleted_space(channel, &target)?;
        for (at, id) in args.ids.iter().enumerate() {
            print_out(&format!("Subvolume id {id} is gone ({}/{nr})\n", at + 1))?;
        }
        Ok(())
    })
}

/// The first of these subvolumes that is not deleted.
fn existing(channel: &Channel<'_>, target: &CommandTarget, ids: &[u64]) -> anyhow::Result<Option<u64>> {
    if ids.is_empty() {
        return Ok(None);
    }
    let list = super::list(channel, target)?;
    Ok(ids.iter().copied().find(|id| list.iter().any(|info| info.id == RootId(*id))))
}

fn free_deleted_space(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<()> {
    let what = "freeing the space of deleted subvolumes";
    let request = ubtrfs_control::Request::Subvolume(Request::Sync);
    let done = with_progress(what, |job| channel.call_with(request, &[], job));
    done.map(|_| ()).map_err(|failure| explain("free the space of deleted subvolumes of", target.filesystem(), failure))
}

pub(super) fn set_default(args: &SetDefaultArgs) -> anyhow::Result<()> {
    let (id, path) = match args.words.as_slice() {
        [path] => (None, path),
        [id, path] => match id.to_str().and_then(|id| id.parse().ok()) {
            Some(id) => (Some(id), path),
            None => bail!(
                "'{}' is not a subvolume id; list the ids with: ubtrfs subvolume list {}",
                id.shown(),
                CommandTarget::from(path.clone()).filesystem()
            ),
        },
        _ => bail!("name a subvolume"),
    };
    let target = CommandTarget::from(path.clone());
    let target = if id.is_some() { target.or_image() } else { target };
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        let file = match id {
            Some(_) => open(channel, &target)?,
            None => open_subvolume(channel, &target)?.0,
        };
        let done = channel.subvolume(Request::SetDefault { id }, &[&file]);
        done.map(|_| ()).map_err(|failure| match id {
            Some(id) => explain(SET_DEFAULT, format!("{id} in {}", target.filesystem()), failure),
            None => explain(SET_DEFAULT, &target, failure),
        })
    })
}

pub(super) fn set_read_only(args: &SetReadOnlyArgs) -> anyhow::Result<()> {
    let (target, read_only, force) = (&args.path, args.read_only, args.force);
    with_channel(target, &args.image, ImageUse::Write, |channel| {
        let (file, _) = open_subvolume(channel, target)?;
        // Write dirty pages first, because the server refuses writes once the subvolume is read-only.
        let flushed = if read_only { channel.flush(&file) } else { Ok(()) };
        let done = flushed.and_then(|()| channel.subvolume(Request::SetReadOnly { of: 0, read_only, force }, &[&file]));
        done.map(|_| ()).map_err(|failure| explain("change", target, failure))
    })
}

/// A path in the filesystem of a target that may not exist yet: the target, or its directory.
fn near(target: &CommandTarget) -> anyhow::Result<CommandTarget> {
    target.await_server()?;
    let is_dir = std::fs::metadata(target.path()).is_ok_and(|meta| meta.is_dir());
    if is_dir { Ok(target.clone()) } else { target.split().map(|(dir, _)| dir) }
}

/// Works like [`near`], for a target whose directory may not exist either: its nearest directory that exists.
fn nearest(target: &CommandTarget) -> anyhow::Result<CommandTarget> {
    let mut at = near(target)?;
    while std::fs::symlink_metadata(at.path()).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        at = at.split()?.0;
    }
    Ok(at)
}

/// Calls `work` for each target. A failure does not stop the work on other targets, but makes the exit status 1. Opens
/// an image only once for consecutive targets in it. Frees the space of deleted subvolumes before closing an image.
/// `near` returns a path that leads to the mount of a target.
fn for_each(
    targets: &[CommandTarget],
    options: &ImageOptions,
    (owner, near): ((u32, u32), impl Fn(&CommandTarget) -> anyhow::Result<CommandTarget>),
    mut work: impl FnMut(&Channel<'_>, &CommandTarget) -> anyhow::Result<()>,
) -> ExitCode {
    let mut failed = None;
    for targets in targets.chunk_by(CommandTarget::shares_filesystem_with) {
        let of_image = |failed: &mut Option<ExitCode>, work: &mut dyn FnMut(&Channel<'_>, &CommandTarget) -> _| {
            with_channel_of(&targets[0], options, ImageUse::Write, owner, |channel| {
                for target in targets {
                    if let Err(error) = work(channel, target) {
                        *failed = Some(print_error(&error));
                    }
                }
                free_deleted_space(channel, &targets[0])
            })
        };
        if let CommandTarget::Image(_) = &targets[0] {
            if let Err(error) = of_image(&mut failed, &mut work) {
                failed = Some(print_error(&error));
            }
            continue;
        }
        for target in targets {
            let done = near(target).and_then(|near| {
                with_channel_of(&near, options, ImageUse::Write, owner, |channel| work(channel, target))
            });
            if let Err(error) = done {
                failed = Some(print_error(&error));
            }
        }
    }
    failed.unwrap_or(ExitCode::SUCCESS)
}

/// The umask for subvolumes in images. The umask of this process applies only to files of the host.
const DEFAULT_UMASK: u32 = 0o022;
