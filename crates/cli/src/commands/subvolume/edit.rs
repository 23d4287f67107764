//! `ubtrfs subvolume create`, `delete`, `set-default`, `set-read-only`.

use std::path::Path;

use anyhow::{Context, bail};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, Fs, InodeId};

use super::problem::{DELETE, Refusal, SET_DEFAULT, explain, explain_delete, not_a_subvolume};
use super::{Target, lookup_subvolume, open_mounted, open_subvolume, split_name};
use crate::commands::offline::import::parse_owner;
use crate::commands::offline::{ImageOptions, ImagePath, Use, lookup_parent, with_image};
use crate::common::{calling_user, print_out, progress_left};

/// Make empty subvolumes
#[derive(clap::Args)]
pub(super) struct CreateArgs {
    /// New names in mounts or images
    #[arg(value_name = "PATH|IMAGE:/PATH", required = true)]
    paths: Vec<Target>,
    /// Owner of subvolumes in images: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

/// Delete subvolumes with everything in them except other subvolumes
#[derive(clap::Args)]
pub(super) struct DeleteArgs {
    /// Subvolumes in mounts or images
    #[arg(value_name = "PATH|IMAGE:/PATH", required = true)]
    paths: Vec<Target>,
    /// Make all changes of the mounts durable, too
    #[arg(short, long)]
    commit: bool,
    #[command(flatten)]
    image: ImageOptions,
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
    /// The subvolume
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    /// Whether it is read-only from now on
    #[arg(value_name = "true|false", action = clap::ArgAction::Set)]
    read_only: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let (uid, gid) = args.owner.unwrap_or_else(calling_user);
    for_each(
        &args.paths,
        &args.image,
        Step { image: &|fs, at| create_in_image(fs, at, uid, gid), mounted: &create_mounted, last: &|_| Ok(()) },
    )
}

fn create_in_image(fs: &Fs, at: &ImagePath, uid: u32, gid: u32) -> anyhow::Result<()> {
    let (dir, name) = lookup_parent(fs, at)?;
    fs.create_subvolume(dir, name, &Caller { uid, gid, umask: 0o022 }).map_err(|error| explain("make", at, error))?;
    print_out(&format!("Create subvolume '{at}'\n"))
}

fn create_mounted(path: &Path) -> anyhow::Result<()> {
    let (dir, name) = split_name(path)?;
    open_mounted(dir)?.create(name).map_err(|error| explain("make", path.display(), error))?;
    print_out(&format!("Create subvolume '{}'\n", path.display()))
}

pub(super) fn delete(args: &DeleteArgs) -> anyhow::Result<()> {
    let delete_mounted = |path: &Path| delete_mounted(path, args.commit);
    for_each(
        &args.paths,
        &args.image,
        Step { image: &delete_in_image, mounted: &delete_mounted, last: &give_back_space },
    )
}

fn delete_in_image(fs: &Fs, at: &ImagePath) -> anyhow::Result<()> {
    let id = lookup_subvolume(fs, at)?;
    let (dir, name) = lookup_parent(fs, at)?;
    let is_held = |inode| fs.inode_flags(inode).is_ok_and(|flags| flags & (FS_IMMUTABLE_FL | FS_APPEND_FL) != 0);
    let why = || match () {
        () if fs.default_subvolume().is_ok_and(|default| default == id) => Refusal::Default,
        () if is_held(InodeId::root_of(id)) || is_held(dir) => Refusal::Flags,
        () => Refusal::NotAllowed,
    };
    fs.delete_subvolume(dir, name, None).map_err(|error| explain_delete(at, error, why))?;
    print_out(&format!("Delete subvolume '{at}'\n"))
}

fn give_back_space(fs: &Fs) -> anyhow::Result<()> {
    let bar = progress_left("freeing the space of deleted subvolumes");
    let done = fs.finish_deletions(&mut |left| {
        bar.set_position(left as u64);
        Ok(())
    });
    bar.finish_and_clear();
    done.context("cannot free the space of deleted subvolumes")
}

fn delete_mounted(path: &Path, commit: bool) -> anyhow::Result<()> {
    // Links and `..` are followed: the subvolume to delete is the one that the path leads to.
    let full = std::fs::canonicalize(path).with_context(|| format!("cannot open {}", path.display()))?;
    let subvolume = open_subvolume(path)?;
    let id = subvolume.subvolume().id;
    let is_held = subvolume.is_immutable_or_append_only();
    let busy = || std::io::Error::from(rustix::io::Errno::BUSY);
    let Ok((dir, name)) = split_name(&full) else { return Err(explain(DELETE, path.display(), busy())) };
    match ubtrfs_fuse::MountedPath::open(dir)? {
        Some(parent) if parent.is_same_mount(&subvolume)? => {
            drop(subvolume);
            let why = || match () {
                () if parent.default_subvolume().is_ok_and(|default| default == id) => Refusal::Default,
                () if is_held || parent.is_immutable_or_append_only() => Refusal::Flags,
                () => Refusal::NotAllowed,
            };
            parent.delete(name).map_err(|error| explain_delete(path.display(), error, why))?;
        }
        // The path is the root of the mount.
        _ => return Err(explain(DELETE, path.display(), busy())),
    }
    if commit {
        ubtrfs_fuse::sync(dir)?;
    }
    print_out(&format!("Delete subvolume '{}'\n", path.display()))
}

pub(super) fn set_default(args: &SetDefaultArgs) -> anyhow::Result<()> {
    let (id, path) = match args.words.as_slice() {
        [path] => (None, path),
        [id, path] => match id.to_str().and_then(|id| id.parse().ok()) {
            Some(id) => (Some(RootId(id)), path),
            None => bail!("'{}' is no id of a subvolume; see: ubtrfs subvolume list", id.display()),
        },
        _ => bail!("name a subvolume"),
    };
    let target = Target::from(path.clone());
    match if id.is_some() { target.or_image() } else { target } {
        Target::Image(at) => with_image(&at.image, &args.image, Use::Write, |fs| {
            let id = id.map_or_else(|| lookup_subvolume(fs, &at), Ok)?;
            fs.set_default_subvolume(id).map_err(|error| explain(SET_DEFAULT, &at, error))
        }),
        Target::Mounted(path) => {
            let opened = open_mounted(&path)?;
            if id.is_none() && !opened.is_subvolume() {
                return Err(not_a_subvolume(path.display()));
            }
            let id = id.unwrap_or(opened.subvolume().id);
            opened.set_default(id).map_err(|error| explain(SET_DEFAULT, path.display(), error))
        }
    }
}

pub(super) fn set_read_only(args: &SetReadOnlyArgs) -> anyhow::Result<()> {
    match &args.path {
        Target::Image(at) => with_image(&at.image, &args.image, Use::Write, |fs| {
            let id = lookup_subvolume(fs, at)?;
            fs.set_subvolume_read_only(id, args.read_only).map_err(|error| explain("change", at, error))
        }),
        Target::Mounted(path) => {
            let opened = open_subvolume(path)?;
            opened.set_read_only(args.read_only).map_err(|error| explain("change", path.display(), error))
        }
    }
}

/// The work on one path, and the work at the end on each image.
struct Step<'a> {
    image: &'a dyn Fn(&Fs, &ImagePath) -> anyhow::Result<()>,
    mounted: &'a dyn Fn(&Path) -> anyhow::Result<()>,
    last: &'a dyn Fn(&Fs) -> anyhow::Result<()>,
}

/// Opens each image once for all consecutive paths in it.
fn for_each(targets: &[Target], options: &ImageOptions, step: Step<'_>) -> anyhow::Result<()> {
    for targets in targets.chunk_by(Target::is_beside) {
        if let Target::Image(first) = &targets[0] {
            with_image(&first.image, options, Use::Write, |fs| {
                let done = targets.iter().try_for_each(|target| match target {
                    Target::Image(at) => (step.image)(fs, at),
                    Target::Mounted(_) => Ok(()),
                });
                // Work done before a failure is completed too.
                let last = (step.last)(fs);
                done.and(last)
            })?;
            continue;
        }
        targets.iter().try_for_each(|target| match target {
            Target::Mounted(path) => (step.mounted)(path),
            Target::Image(_) => Ok(()),
        })?;
    }
    Ok(())
}

/// Flags of inodes, as `chattr` sets them (linux/fs.h).
const FS_IMMUTABLE_FL: u32 = 0x10;
const FS_APPEND_FL: u32 = 0x20;
