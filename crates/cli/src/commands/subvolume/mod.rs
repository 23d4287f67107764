//! `ubtrfs subvolume ...`: commands and output as in btrfs-progs, for a path in an image or in a mount of ubtrfs.
//!
//! Invariants:
//! - I1. Only a mount's server changes the mount (`ubtrfs_fuse::MountedPath`). The engine in this process changes an
//!   image.
//! - I2. Errors read the same in both cases (`problem`).

mod edit;
mod list;
mod problem;
mod show;
mod snapshot;

use std::ffi::OsString;
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId, SubvolumeInfo};
use ubtrfs_fuse::MountedPath;

use super::offline::{ImageOptions, ImagePath, Use, lookup, with_image};
use problem::not_a_subvolume;

/// Make, list and delete subvolumes and snapshots
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Create(edit::CreateArgs),
    Snapshot(snapshot::Args),
    Delete(edit::DeleteArgs),
    List(list::Args),
    Show(show::Args),
    GetDefault(show::DefaultArgs),
    SetDefault(edit::SetDefaultArgs),
    SetReadOnly(edit::SetReadOnlyArgs),
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Create(args) => edit::create(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Delete(args) => edit::delete(&args),
        Command::List(args) => list::run(args),
        Command::Show(args) => show::run(args),
        Command::GetDefault(args) => show::get_default(args),
        Command::SetDefault(args) => edit::set_default(&args),
        Command::SetReadOnly(args) => edit::set_read_only(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// The filesystem that a command works on.
#[derive(Clone, Debug)]
enum Target {
    Image(ImagePath),
    Mounted(PathBuf),
}

impl From<OsString> for Target {
    fn from(text: OsString) -> Self {
        ImagePath::split(&text).map_or_else(|| Self::Mounted(PathBuf::from(text)), Self::Image)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(at) => at.fmt(f),
            Self::Mounted(path) => path.display().fmt(f),
        }
    }
}

impl Target {
    /// Treats a file or block device as an image.
    fn or_image(self) -> Self {
        let is_image = |path: &Path| {
            std::fs::metadata(path).is_ok_and(|meta| meta.is_file() || meta.file_type().is_block_device())
        };
        match self {
            Self::Mounted(path) if is_image(&path) => Self::Image(ImagePath { image: path, path: b"/".to_vec() }),
            other => other,
        }
    }

    /// Whether opening one image serves both; two paths in mounts always go together.
    fn is_beside(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Image(one), Self::Image(other)) => is_same_file(&one.image, &other.image),
            (Self::Mounted(_), Self::Mounted(_)) => true,
            _ => false,
        }
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    one == other || std::fs::canonicalize(one).ok().is_some_and(|one| std::fs::canonicalize(other).ok() == Some(one))
}

/// Opens a path in a mount of ubtrfs.
fn open_mounted(path: &Path) -> anyhow::Result<MountedPath> {
    MountedPath::open(path)?.with_context(|| {
        format!(
            "{0} is not in a mount of ubtrfs; write IMAGE:/path for an image (mounts: findmnt -t fuse.ubtrfs)",
            path.display()
        )
    })
}

/// Opens the root directory of a subvolume in a mount of ubtrfs.
fn open_subvolume(path: &Path) -> anyhow::Result<MountedPath> {
    let opened = open_mounted(path)?;
    if !opened.is_subvolume() {
        return Err(not_a_subvolume(path.display()));
    }
    Ok(opened)
}

/// The subvolume whose root directory is at a path of an image.
fn lookup_subvolume(fs: &Fs, at: &ImagePath) -> anyhow::Result<RootId> {
    let id = lookup(fs, at, true)?.id;
    if id != InodeId::root_of(id.root) {
        return Err(not_a_subvolume(at));
    }
    Ok(id.root)
}

/// All subvolumes of a filesystem.
struct View {
    /// In order of id, the top level first.
    list: Vec<SubvolumeInfo>,
}

impl View {
    fn find(&self, id: RootId) -> anyhow::Result<&SubvolumeInfo> {
        let found = self.list.iter().find(|info| info.id == id);
        found.with_context(|| format!("the subvolume {id} does not exist (any more)"))
    }
}

fn view_of_image(fs: &Fs, at: &ImagePath) -> anyhow::Result<View> {
    lookup(fs, at, true)?;
    let list = fs.subvolumes().with_context(|| format!("cannot list the subvolumes of {}", at.image.display()))?;
    Ok(View { list })
}

fn view_of_mount(path: &Path) -> anyhow::Result<View> {
    let opened = open_mounted(path)?;
    let list = opened.list().map_err(|error| problem::explain("list the subvolumes of", path.display(), error))?;
    Ok(View { list })
}

fn view(target: &Target, options: &ImageOptions) -> anyhow::Result<View> {
    match target {
        Target::Image(at) => with_image(&at.image, options, Use::Read, |fs| view_of_image(fs, at)),
        Target::Mounted(path) => view_of_mount(path),
    }
}

/// Splits the path of something to make or delete in a mount into directory and name.
fn split_name(path: &Path) -> anyhow::Result<(&Path, &[u8])> {
    let Some(name) = path.file_name() else {
        bail!("{} does not end in a name; name a subvolume", path.display());
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir, name.as_encoded_bytes()))
}
