//! Paths for commands that work both on mounts and on images, through a [`Channel`].

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Display};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use ubtrfs_control::{Channel, ConnectError, InMountOfOther, OpenedFile, Way, find_file, open_image, stopped_process};
use ubtrfs_device::{find_server, is_url};
use ubtrfs_format::superblock::{MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS};
use ubtrfs_fuse::MountError;

use super::offline::{ImageOptions, ImagePath, ImageUse, child_path, join, lacks_slash, os_string, with_image};
use super::servers_of::served_mount_of;
use crate::common::{Shown, calling_user, error_text};
use crate::progs::is_progs;

// This struct has no doc comment, because it would become the help of every command that uses the struct.
#[derive(clap::Args)]
pub(crate) struct FilesystemArgs {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    pub(crate) path: CommandTarget,
    #[command(flatten)]
    pub(crate) image: ImageOptions,
}

/// A path in the filesystem that a command works on.
#[derive(Clone, Debug)]
pub(crate) enum CommandTarget {
    /// A path in an image.
    Image(ImagePath),
    /// A path in a mount.
    Mounted(PathBuf),
}

impl From<OsString> for CommandTarget {
    fn from(text: OsString) -> Self {
        ImagePath::split(&text).map_or_else(|| Self::Mounted(PathBuf::from(text)), Self::Image)
    }
}

impl Display for CommandTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(at) => at.fmt(f),
            Self::Mounted(path) => f.write_str(&path.shown()),
        }
    }
}

impl CommandTarget {
    /// Treats a file or block device as an image if it holds a btrfs or is not in a mount of ubtrfs.
    pub(crate) fn or_image(self) -> Self {
        match self {
            Self::Mounted(path) if await_server(&path).is_ok() && is_image(&path) => {
                Self::Image(ImagePath { image: path, path: b"/".to_vec() })
            }
            other => other,
        }
    }

    /// Treats a file or block device as an image if it is not in a mount of ubtrfs.
    pub(crate) fn or_image_elsewhere(self) -> Self {
        match self {
            Self::Mounted(path) if is_in_mount(&path) => Self::Mounted(path),
            other => other.or_image(),
        }
    }

    /// Takes the mount of an image that ubtrfs has mounted for the image itself, for commands on a whole filesystem.
    pub(crate) fn or_its_mount(self) -> Self {
        match &self {
            Self::Image(at) if at.names().is_empty() => match served_mount_of(&at.image) {
                Some(dir) if Channel::mount(&dir).is_ok() => Self::Mounted(dir),
                _ => self,
            },
            _ => self,
        }
    }

    /// Whether both paths are in one image, or both are in mounts.
    pub(crate) fn shares_filesystem_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Image(one), Self::Image(other)) => is_same_file(&one.image, &other.image),
            (Self::Mounted(_), Self::Mounted(_)) => true,
            _ => false,
        }
    }

    /// The path in the form that the channel takes.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Image(at) => Path::new(OsStr::from_bytes(&at.path)),
            Self::Mounted(path) => path,
        }
    }

    /// The bytes of the path as the user wrote it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Image(at) => [at.image.as_os_str().as_bytes(), b":", &at.path].concat(),
            Self::Mounted(path) => path.as_os_str().as_bytes().to_vec(),
        }
    }

    /// Splits the path into its directory and its last name, for commands that make or delete this name.
    pub(crate) fn split(&self) -> anyhow::Result<(Self, Vec<u8>)> {
        self.await_server()?;
        match self {
            Self::Image(at) => {
                let names = at.names();
                let Some((name, dirs)) = names.split_last() else {
                    bail!("{at} is the image's root directory; name a file or directory in it");
                };
                Ok((Self::Image(ImagePath { image: at.image.clone(), path: join(dirs) }), name.to_vec()))
            }
            Self::Mounted(path) if is_file_or_device(path) && holds_btrfs(path) && !is_in_mount(path) => {
                let image = path.shown();
                bail!("{image} is an image; name a file or directory in it: {image}:/PATH");
            }
            Self::Mounted(path) => {
                let Some(name) = path.file_name() else {
                    bail!("{} does not end in a name; name a subvolume", path.shown());
                };
                let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
                Ok((Self::Mounted(dir.to_owned()), name.as_encoded_bytes().to_vec()))
            }
        }
    }

    /// The path of something new, for messages. `btrfs` puts `./` before a name without a directory.
    pub(crate) fn as_made(&self) -> String {
        match self {
            Self::Mounted(path) if is_progs() && path.parent().is_some_and(|dir| dir.as_os_str().is_empty()) => {
                format!("./{self}")
            }
            _ => self.to_string(),
        }
    }

    /// The path of a name in this directory.
    pub(crate) fn child(&self, name: &[u8]) -> Self {
        match self {
            Self::Image(at) => Self::Image(ImagePath { image: at.image.clone(), path: child_path(&at.path, name) }),
            Self::Mounted(path) => Self::Mounted(path.join(os_string(name))),
        }
    }

    /// Resolves links and `..` of a path in a mount. A path in an image stays unchanged.
    pub(crate) fn canonical(&self) -> anyhow::Result<Self> {
        self.await_server()?;
        match self {
            Self::Image(_) => Ok(self.clone()),
            Self::Mounted(path) => {
                let full = std::fs::canonicalize(path).with_context(|| format!("cannot open {}", path.shown()))?;
                Ok(Self::Mounted(full))
            }
        }
    }

    /// Works like [`await_server`]; does nothing for a path in an image.
    pub(crate) fn await_server(&self) -> anyhow::Result<()> {
        match self {
            Self::Image(_) => Ok(()),
            Self::Mounted(path) => await_server(path),
        }
    }

    /// Returns the name of the filesystem for messages: the path of the image, or the path in the mount.
    pub(crate) fn filesystem(&self) -> String {
        match self {
            Self::Image(at) => at.image.shown(),
            Self::Mounted(path) => path.shown(),
        }
    }
}

/// Whether a path names an image, even if the image is a file in a mount.
fn is_image(path: &Path) -> bool {
    is_url(path)
        || is_file_or_device(path) && refuse_names_of_others(path).is_ok() && (holds_btrfs(path) || !is_in_mount(path))
}

/// Fails if the way to a path leads through names in a FUSE mount of another user, who can make them lead anywhere at any
/// time.
pub(crate) fn refuse_names_of_others(path: &Path) -> anyhow::Result<()> {
    find_own(path).map(drop)
}

/// Finds a file, and fails like [`refuse_names_of_others`]. `None` if the path leads nowhere. Whatever is opened by the
/// file that was found is the file that was checked.
pub(crate) fn find_own(path: &Path) -> anyhow::Result<Option<OwnedFd>> {
    match find_file(path, InMountOfOther::Refuse) {
        Ok(Way::To(found)) => Ok(Some(found)),
        Ok(Way::Nowhere) => Ok(None),
        Ok(Way::OfOther(Some(user))) => bail!(
            "{} leads through a mount of user {user}, whose names may lead anywhere; copy the file, or act as that user, \
             for example with: setpriv --reuid={user} --clear-groups",
            path.shown()
        ),
        Ok(Way::OfOther(None)) => bail!(
            "{} leads through a FUSE mount of another mount namespace, whose names may lead anywhere; copy the file",
            path.shown()
        ),
        Err(error) => Err(anyhow!("cannot find out through which mounts {} leads: {error}", path.shown())),
    }
}

/// Whether files can be opened again by their descriptors.
pub(crate) fn has_proc() -> bool {
    Path::new("/proc/self/fd").exists()
}

fn is_file_or_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() || meta.file_type().is_block_device())
}

/// Whether a path is in a mount of ubtrfs, or in one whose server is stopped.
pub(crate) fn is_in_mount(path: &Path) -> bool {
    await_server(path).is_err() || Channel::mount(path).is_ok()
}

/// Whether a file has btrfs's magic number at the offset where the first superblock has it.
pub(crate) fn holds_btrfs(path: &Path) -> bool {
    open_image(path, false).is_ok_and(|file| is_btrfs(&File::from(file)))
}

/// Works like [`holds_btrfs`], for a file that is open.
fn is_btrfs(file: &File) -> bool {
    let mut found = [0; MAGIC.len()];
    let read = file.read_exact_at(&mut found, SUPERBLOCK_OFFSETS[0] + MAGIC_OFFSET as u64);
    read.is_ok() && found == MAGIC
}

pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    one == other || std::fs::canonicalize(one).ok().is_some_and(|one| std::fs::canonicalize(other).ok() == Some(one))
}

/// Opens the filesystem of a path, does the work, and closes the filesystem. New files of an image belong to the
/// current user.
pub(crate) fn with_channel<T>(
    target: &CommandTarget,
    options: &ImageOptions,
    usage: ImageUse,
    work: impl FnOnce(&Channel<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    with_channel_of(target, options, usage, calling_user(), work)
}

/// Works like [`with_channel`], but new files of an image belong to `owner`.
pub(crate) fn with_channel_of<T>(
    target: &CommandTarget,
    options: &ImageOptions,
    usage: ImageUse,
    owner: (u32, u32),
    work: impl FnOnce(&Channel<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    in_filesystem(target, options, usage, owner, work).map_err(|error| with_place(error, target))
}

/// Completes advice to run a command on the filesystem with its path, which the engine and the server do not know.
fn with_place(error: anyhow::Error, target: &CommandTarget) -> anyhow::Error {
    const COMMANDS: [&str; 2] = ["ubtrfs subvolume list", "ubtrfs quota enable"];
    let text = error_text(&error);
    match COMMANDS.iter().any(|command| text.ends_with(command)) {
        true => anyhow::Error::new(CompleteError { text: format!("{text} {}", target.filesystem()), cause: error }),
        false => error,
    }
}

/// An error whose text is complete.
#[derive(Debug)]
struct CompleteError {
    text: String,
    cause: anyhow::Error,
}

impl Display for CompleteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for CompleteError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.chain().next()
    }
}

fn in_filesystem<T>(
    target: &CommandTarget,
    options: &ImageOptions,
    usage: ImageUse,
    owner: (u32, u32),
    work: impl FnOnce(&Channel<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    match target {
        CommandTarget::Image(at) => {
            with_image(&at.image, options, usage, |fs| work(&Channel::image(fs, owner.0, owner.1)))
        }
        CommandTarget::Mounted(path) => {
            let channel = connect(path)?;
            if !options.options.is_empty() || options.memory.is_some() {
                bail!(
                    "{} is in a mount, and -o and --memory are for images that are not mounted; omit them, or mount with them",
                    path.shown()
                );
            }
            work(&channel)
        }
    }
}

/// Fails if the server of a mount on the way to a path is stopped. Such a mount must not be entered: a process that waits
/// for the answer to a request that the server has taken does not end, not even by SIGKILL.
pub(crate) fn await_server(path: &Path) -> anyhow::Result<()> {
    let end = Instant::now() + STOPPED_PATIENCE;
    loop {
        let server = find_server(path, &|pid| stopped_process(pid).is_some());
        let Some(stopped) = server.and_then(stopped_process) else { return Ok(()) };
        if Instant::now() >= end {
            bail!("{}: {stopped}", path.shown());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How long a server may be stopped until a command gives up. A server that is traced stops at each of its system calls.
const STOPPED_PATIENCE: Duration = Duration::from_secs(1);

/// Connects to the mount that holds a path.
fn connect(path: &Path) -> anyhow::Result<Channel<'static>> {
    await_server(path)?;
    if let Some(advice) = lacks_slash(&path.shown()).filter(|_| !path.exists()) {
        bail!("{advice}");
    }
    Channel::mount(path).map_err(|error| match error {
        ConnectError::NotOurs => not_ours(path),
        ConnectError::Open(source) => anyhow::Error::from(match ubtrfs_fuse::cannot_open(path, source) {
            MountError::Open { source, .. } => MountError::Open { path: path.shown(), source },
            MountError::OfOtherUser { dir, uid, gid, .. } => {
                MountError::OfOtherUser { path: path.shown(), dir, uid, gid }
            }
            other => other,
        }),
        ConnectError::Server(_) => anyhow!("{}: {error}", path.shown()),
    })
}

/// Makes the error for a path that is neither in a mount of ubtrfs nor an image.
fn not_ours(path: &Path) -> anyhow::Error {
    /// Type of Linux's btrfs in `statfs`.
    const BTRFS_MAGIC: u64 = 0x9123_683e;
    let shown = path.shown();
    let is_linux = rustix::fs::statfs(path).is_ok_and(|stat| u64::try_from(stat.f_type) == Ok(BTRFS_MAGIC));
    let is_file = std::fs::metadata(path).is_ok_and(|meta| !meta.is_dir());
    if let Some(dir) = super::offline::mount_of(path).filter(|_| is_file) {
        let dir = dir.shown();
        return anyhow!("{shown} is an image that is mounted on {dir}; name {dir} in its place");
    }
    match () {
        () if is_linux => {
            anyhow!(
                "{shown} is not in a mount of ubtrfs but of Linux's btrfs; use btrfs, or unmount it and name the image"
            )
        }
        () if is_file => {
            anyhow!("{shown} is not in a mount of ubtrfs; if it is an image, write {shown}:/ and a path in it")
        }
        () => anyhow!(
            "{shown} is neither in a mount of ubtrfs nor an image; mount an image (mounts: findmnt -t fuse.ubtrfs,fuseblk.ubtrfs), or write \
             IMAGE:/path"
        ),
    }
}

/// Opens a file for commands. `None` if it is not in the mount of the channel.
pub(crate) fn open_here(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Option<OpenedFile>> {
    match channel.open(target.path()) {
        Err(failure) if failure.errno() == Errno::XDEV => Ok(None),
        opened => opened.map(Some).with_context(|| format!("cannot open {target}")),
    }
}

/// Opens a file for commands.
pub(crate) fn open(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<OpenedFile> {
    channel.open(target.path()).with_context(|| format!("cannot open {target}"))
}
