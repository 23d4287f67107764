//! Images named by path, without a mount: `disk.img` is the top level, `disk.img:/path` a file below the top level.
//!
//! - G1. A path means an image only where the original could not work: the path is a regular file with a filesystem in
//!   it and does not itself lie on btrfs, or there is no such path, and the part before its last `:/` is such a file.
//! - G2. Each function opens the image, works, and closes the image, so its changes are durable. An image that is in use
//!   cannot be opened: EBUSY.
//! - G3. Permissions inside of the image are not checked, as everywhere for images.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use ubtrfs::{Filesystem, MountOptions};
use ubtrfs_control::filesystem::{Request as OnFilesystem, Response as FilesystemFound};
use ubtrfs_control::subvolume::{Request, Response};
use ubtrfs_control::{Channel, CommandFailure, OpenedFile, Request as Command, Response as Found};
use ubtrfs_format::RootId;
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS};
use ubtrfs_fs::{Fs, SubvolumeInfo};

use crate::edit::SnapshotKind;
use crate::failure::{Result, UtilError, UtilFailure};
use crate::info::UtilSubvolumeInfo;
use crate::iterator::{FoundSubvolume, WalkOrder};
use crate::path::split;
use crate::place::{FilesystemKind, OpenPlace};
use crate::qgroup::QgroupsToJoin;
use crate::search::not_found;

/// A file in an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileInImage {
    image: PathBuf,
    /// The path from the image's root.
    path: Vec<u8>,
}

/// Whether a function changes the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageAccess {
    Read,
    Write,
}

/// An image that is open in this process.
struct ImageInProcess<'f> {
    fs: &'f Fs,
    channel: Channel<'f>,
}

impl FileInImage {
    /// The image at a path that was opened (G1).
    pub(crate) fn opened(path: &CStr, place: OpenPlace<'_>) -> Option<Self> {
        let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
        let is_other = place.kind() == Ok(FilesystemKind::Other);
        (is_other && is_image(&path)).then(|| Self { image: path, path: b"/".to_vec() })
    }

    /// The file in an image at a path that could not be opened (G1).
    pub(crate) fn missing(path: &CStr, errno: Errno) -> Option<Self> {
        let path = path.to_bytes();
        let at = path.windows(2).rposition(|pair| pair == b":/")?;
        let image = PathBuf::from(OsStr::from_bytes(&path[..at]));
        let is_missing = matches!(errno, Errno::NOENT | Errno::NOTDIR);
        (is_missing && is_image(&image)).then(|| Self { image, path: path[at + 1..].to_vec() })
    }

    /// Opens the image as a file of the host.
    pub(crate) fn open_host(&self) -> Result<OwnedFd> {
        File::open(&self.image)
            .map(OwnedFd::from)
            .map_err(|error| UtilError::OpenFailed.with(Errno::from_io_error(&error).unwrap_or(Errno::IO)))
    }

    /// Opens the image, does the work, and closes the image (G2).
    fn with<T>(&self, access: ImageAccess, work: impl FnOnce(&ImageInProcess<'_>) -> Result<T>) -> Result<T> {
        let failed = |error: ubtrfs::Error| UtilError::OpenFailed.with(errno_of(&error));
        let options = MountOptions {
            read_only: access == ImageAccess::Read,
            // With the default subvolume as the root, a program that sets it would change the meaning of its paths.
            subvolid: Some(RootId::FS_TREE),
            // Programs do not expect large caches in a library.
            memory_bytes: MEMORY,
            ..MountOptions::default()
        };
        let filesystem = Filesystem::open_image_with(&self.image, options).map_err(failed)?;
        let fs = filesystem.engine().clone();
        let channel = Channel::image(&fs, geteuid().as_raw(), getegid().as_raw());
        let worked = work(&ImageInProcess { fs: &fs, channel });
        let closed = filesystem.close().map_err(|error| UtilError::SyncFailed.with(errno_of(&error)));
        worked.and_then(|value| closed.map(|()| value))
    }

    pub(crate) fn check_subvolume(&self) -> Result<()> {
        let of_path = |failure: UtilFailure| match failure.error {
            // Nothing is opened on Linux.
            UtilError::OpenFailed => UtilError::StatfsFailed.with(failure.errno),
            _ => failure,
        };
        self.with(ImageAccess::Read, |image| image.root(&self.path).map(drop).map_err(of_path))
    }

    /// Returns the id of the subvolume that holds the file.
    pub(crate) fn id(&self) -> Result<u64> {
        self.with(ImageAccess::Read, |image| image.open(&self.path).map(|(_, info, _)| info.id.0))
    }

    /// Returns the path of a subvolume from the top level.
    pub(crate) fn subvolume_path(&self, id_or_0: u64) -> Result<Vec<u8>> {
        self.with(ImageAccess::Read, |image| image.subvolume(&self.path, id_or_0).map(|info| info.path))
    }

    /// Describes a subvolume.
    pub(crate) fn info(&self, id_or_0: u64) -> Result<UtilSubvolumeInfo> {
        self.with(ImageAccess::Read, |image| image.subvolume(&self.path, id_or_0).map(|info| (&info).into()))
    }

    pub(crate) fn is_read_only(&self) -> Result<bool> {
        self.with(ImageAccess::Read, |image| image.flags(&self.path).map(|(_, read_only)| read_only))
    }

    pub(crate) fn set_read_only(&self, read_only: bool) -> Result<()> {
        self.with(ImageAccess::Write, |image| {
            let (file, _) = image.flags(&self.path)?;
            image.run(Request::SetReadOnly { of: 0, read_only, force: true }, &[&file], UtilError::SubvolSetflagsFailed)
        })
    }

    pub(crate) fn default_subvolume(&self) -> Result<u64> {
        self.with(ImageAccess::Read, |image| {
            image.open(&self.path)?;
            match image.channel.subvolume(Request::Default, &[]) {
                Ok(Response::Default { id }) => Ok(id),
                Ok(_) => Err(UtilError::SearchFailed.with(Errno::PROTO)),
                Err(failure) => Err(UtilError::SearchFailed.with(failure.errno())),
            }
        })
    }

    pub(crate) fn set_default(&self, id_or_0: u64) -> Result<()> {
        self.with(ImageAccess::Write, |image| {
            let id = match id_or_0 {
                0 => image.root(&self.path)?.1.id.0,
                id => id,
            };
            image.run(Request::SetDefault { id: Some(id) }, &[], UtilError::DefaultSubvolFailed)
        })
    }

    /// Creates an empty subvolume at the path.
    pub(crate) fn create(&self, qgroups: Option<&QgroupsToJoin>) -> Result<()> {
        self.with(ImageAccess::Write, |image| {
            let (dir, name) = split(&self.path);
            let dir = image.open_dir(dir)?;
            let qgroups = qgroups.map(|qgroups| qgroups.groups.clone()).unwrap_or_default();
            let request = Request::Create { dir: 0, name: name.to_vec(), umask: UMASK, qgroups, limits: None };
            image.run(request, &[&dir], UtilError::SubvolCreateFailed)
        })
    }

    /// Makes a snapshot of the subvolume at the path; `made` is the path of the snapshot.
    pub(crate) fn snapshot(&self, made: &Self, kind: SnapshotKind, qgroups: Option<&QgroupsToJoin>) -> Result<()> {
        if !is_same_file(&self.image, &made.image) {
            return Err(UtilError::SubvolCreateFailed.with(Errno::XDEV));
        }
        self.with(ImageAccess::Write, |image| {
            let (source, info, _) = image.open(&self.path)?;
            // The subvolumes below the source, before the snapshot is one of them.
            let below = match kind.recursive {
                true => image.below(info.id, WalkOrder::Pre)?,
                false => Vec::new(),
            };
            let qgroups = qgroups.map(|qgroups| qgroups.groups.clone()).unwrap_or_default();
            image.snapshot(&source, &made.path, kind.read_only, qgroups)?;
            for (path, _) in below {
                let (from, to) = (join(&self.path, &path), join(&made.path, &path));
                image.remove_dir(&to)?;
                image.snapshot(&image.open(&from)?.0, &to, false, Vec::new())?;
            }
            Ok(())
        })
    }

    /// Deletes the subvolume at the path; with `recursive`, first the subvolumes below it.
    pub(crate) fn delete(&self, recursive: bool) -> Result<()> {
        self.with(ImageAccess::Write, |image| {
            if recursive {
                let top = image.root(&self.path)?.1.id;
                for (path, _) in image.below(top, WalkOrder::Post)? {
                    image.delete(&join(&self.path, &path))?;
                }
            }
            image.delete(&self.path)
        })
    }

    /// Finds the subvolumes below a subvolume. A wrong order fails after a path that cannot be opened, as on Linux.
    pub(crate) fn walk(&self, top_or_0: u64, order: Result<WalkOrder>) -> Result<Vec<FoundSubvolume>> {
        self.with(ImageAccess::Read, |image| {
            image.open(&self.path)?;
            let order = order?;
            let top = match top_or_0 {
                0 => image.root(&self.path)?.1.id,
                id => RootId(id),
            };
            let found = image.below(top, order)?.into_iter();
            Ok(found.map(|(path, info)| FoundSubvolume { path, id: info.id.0, info: Some((&info).into()) }).collect())
        })
    }

    /// Lists deleted subvolumes whose space is not free yet.
    pub(crate) fn deleted(&self) -> Result<Vec<u64>> {
        self.with(ImageAccess::Read, |image| {
            let found = image.channel.deleted_subvolumes().map_err(|failure| search_failed(&failure))?;
            Ok(found.into_iter().map(|info| info.id.0).collect())
        })
    }

    /// Returns the last transaction. All changes of an image are durable (G2).
    pub(crate) fn generation(&self) -> Result<u64> {
        self.with(ImageAccess::Read, |image| {
            image.open(&self.path)?;
            match image.channel.call(Command::Filesystem(OnFilesystem::Info), &[]) {
                Ok(Found::Filesystem(FilesystemFound::Info(info))) => Ok(info.generation),
                Ok(_) => Err(UtilError::SyncFailed.with(Errno::PROTO)),
                Err(failure) => Err(UtilError::SyncFailed.with(failure.errno())),
            }
        })
    }

    /// Fails for a transaction that does not exist yet.
    pub(crate) fn wait_sync(&self, transid: u64) -> Result<()> {
        match transid <= self.generation()? {
            true => Ok(()),
            false => Err(UtilError::WaitSyncFailed.with(Errno::INVAL)),
        }
    }
}

impl ImageInProcess<'_> {
    /// Opens a file. Returns its subvolume, and whether it is the root directory of the subvolume.
    fn open(&self, path: &[u8]) -> Result<(OpenedFile, SubvolumeInfo, bool)> {
        let failed = |failure: CommandFailure| UtilError::OpenFailed.with(failure.errno());
        let file = self.channel.open(Path::new(OsStr::from_bytes(path))).map_err(failed)?;
        let (info, is_root) = self.channel.subvolume_of(&file).map_err(failed)?;
        Ok((file, info, is_root))
    }

    /// Opens a directory.
    fn open_dir(&self, path: &[u8]) -> Result<OpenedFile> {
        let found = self.fs.lookup_path(path, true);
        let found = found.map_err(|error| UtilError::OpenFailed.with(Errno::from_raw_os_error(error.errno())))?;
        match found.is_dir() {
            true => Ok(OpenedFile::Inode(found.id)),
            false => Err(UtilError::OpenFailed.with(Errno::NOTDIR)),
        }
    }

    /// Opens the root directory of a subvolume.
    fn root(&self, path: &[u8]) -> Result<(OpenedFile, SubvolumeInfo)> {
        match self.open(path)? {
            (file, info, true) => Ok((file, info)),
            _ => Err(UtilError::NotSubvolume.with(Errno::INVAL)),
        }
    }

    /// Opens the root directory of a subvolume, and tells whether the subvolume is read-only.
    fn flags(&self, path: &[u8]) -> Result<(OpenedFile, bool)> {
        match self.open(path)? {
            (file, info, true) => Ok((file, info.flags.contains(ubtrfs_format::item::RootFlags::RDONLY))),
            _ => Err(UtilError::SubvolGetflagsFailed.with(Errno::INVAL)),
        }
    }

    /// The subvolume with an id, or the one whose root directory is at the path.
    fn subvolume(&self, path: &[u8], id_or_0: u64) -> Result<SubvolumeInfo> {
        match id_or_0 {
            0 => self.root(path).map(|(_, info)| info),
            id => self.list()?.into_iter().find(|info| info.id.0 == id).ok_or_else(not_found),
        }
    }

    /// All subvolumes, in order of id.
    fn list(&self) -> Result<Vec<SubvolumeInfo>> {
        self.channel.subvolumes().map_err(|failure| search_failed(&failure))
    }

    /// The subvolumes below one, with their paths from there.
    fn below(&self, top: RootId, order: WalkOrder) -> Result<Vec<(Vec<u8>, SubvolumeInfo)>> {
        let list = self.list()?;
        let above = list.iter().find(|info| info.id == top).map(|info| info.path.clone()).unwrap_or_default();
        let mut children: HashMap<RootId, Vec<SubvolumeInfo>> = HashMap::new();
        for info in list {
            if let Some(parent) = info.parent {
                children.entry(parent).or_default().push(info);
            }
        }
        // Post-order is pre-order from the last child to the first one, backward.
        let mut found = Vec::new();
        let mut rest: Vec<SubvolumeInfo> = Vec::new();
        let mut push = |rest: &mut Vec<SubvolumeInfo>, id: RootId| {
            // Removed, so that each subvolume is found once.
            let below = children.remove(&id).unwrap_or_default();
            match order {
                WalkOrder::Pre => rest.extend(below.into_iter().rev()),
                WalkOrder::Post => rest.extend(below),
            }
        };
        push(&mut rest, top);
        while let Some(info) = rest.pop() {
            push(&mut rest, info.id);
            let path = info.path.strip_prefix(&above[..]).unwrap_or(&info.path);
            found.push((path.strip_prefix(b"/").unwrap_or(path).to_vec(), info));
        }
        if order == WalkOrder::Post {
            found.reverse();
        }
        Ok(found)
    }

    fn snapshot(&self, source: &OpenedFile, made: &[u8], read_only: bool, qgroups: Vec<u64>) -> Result<()> {
        let (dir, name) = split(made);
        let dir = self.open_dir(dir)?;
        let request = Request::Snapshot { source: 0, dir: 1, name: name.to_vec(), read_only, qgroups };
        self.run(request, &[source, &dir], UtilError::SubvolCreateFailed)
    }

    fn delete(&self, path: &[u8]) -> Result<()> {
        let (dir, name) = split(path);
        let dir = self.open_dir(dir)?;
        self.run(Request::Delete { dir: 0, name: name.to_vec() }, &[&dir], UtilError::SnapDestroyFailed)
    }

    fn remove_dir(&self, path: &[u8]) -> Result<()> {
        let failed = |error: ubtrfs_fs::Error| UtilError::RmdirFailed.with(Errno::from_raw_os_error(error.errno()));
        let (dir, name) = split(path);
        let dir = self.fs.lookup_path(dir, true).map_err(failed)?.id;
        self.fs.rmdir(dir, name).map_err(failed)
    }

    fn run(&self, request: Request, files: &[&OpenedFile], error: UtilError) -> Result<()> {
        self.channel.subvolume(request, files).map(drop).map_err(|failure| error.with(failure.errno()))
    }
}

/// Whether a regular file has a btrfs filesystem in it.
fn is_image(path: &Path) -> bool {
    let has_magic = || {
        // Opening a file that is not regular may wait or have effects.
        std::fs::metadata(path).ok().filter(|found| found.is_file())?;
        let mut magic = [0; MAGIC.len()];
        File::open(path).ok()?.read_exact_at(&mut magic, SUPERBLOCK_OFFSETS[0] + MAGIC_OFFSET).ok()?;
        Some(magic == MAGIC)
    };
    has_magic() == Some(true)
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    a == b || (id(a).is_some() && id(a) == id(b))
}

/// The path of a file below a directory.
fn join(dir: &[u8], path: &[u8]) -> Vec<u8> {
    [dir, b"/", path].concat()
}

fn search_failed(failure: &CommandFailure) -> UtilFailure {
    UtilError::SearchFailed.with(failure.errno())
}

fn errno_of(error: &ubtrfs::Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

/// Where the magic number is in a superblock.
const MAGIC_OFFSET: u64 = 64;
/// Memory for caches while a function works on an image.
const MEMORY: u64 = 144 << 20;
/// The umask for subvolumes in images. The umask of this process applies only to files of the host.
const UMASK: u32 = 0o022;
