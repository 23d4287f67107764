//! Mounts that show a part of a FUSE filesystem: one subvolume of several.
//!
//! ```text
//! first mount:   fsopen, fsmount --> [detached mount of the top level] --clone--> subvolume --move_mount--> directory
//! another mount: open mount of the filesystem --file handle--> top level --clone--> subvolume --move_mount--> directory
//! ```
//!
//! All mounts of an image have one superblock, so the kernel has one cache of its pages and names. The root of the FUSE
//! filesystem is the top level (subvolume 5). Every mount is a clone of a mount, and shows one subvolume of it.
//!
//! - P1. No descriptor of a mount outlives the function that places a mount: the filesystem ends with its last mount on a
//!   directory. A failed placing of the first mount ends it too.
//! - P2. The path of a subvolume is resolved in a clone of the top level, which has no other mounts in it. Links are not
//!   followed, as for `subvol=` on Linux.
//! - P3. A mount appears with its flags: they are set before it is on a directory.
//! - P4. The server must answer requests while a mount is placed, so it cannot place a mount before it serves. A
//!   confined server cannot place a mount at all; its helper does (`sandbox/helper.rs`).

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};
use ubtrfs_device::{change_mount_flags, open_fuse_root};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId};

use crate::mount::{MountConfig, MountError, is_root};
use crate::mount_table::{self, MountInfo};
use crate::other_user::{self, MountPoint};

/// The path of the selected subvolume from the top level, if a mount of it should have the top level as the root of its
/// FUSE filesystem. `None` if the selected subvolume is the top level, if this process cannot mount so, or if no path leads
/// to the subvolume; the subvolume is the root of the FUSE filesystem then.
pub(crate) fn path_of_selected(fs: &Fs) -> Option<Vec<u8>> {
    if fs.root() == InodeId::root_of(RootId::FS_TREE)
        || !is_root()
        || fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).is_err()
    {
        return None;
    }
    fs.path_of(fs.root()).ok().filter(|path| !path.is_empty() && path.len() < PATH_MAX)
}

/// The longest path that a system call takes, with the zero byte at its end.
const PATH_MAX: usize = 4096;

/// Makes a mount that is on no directory. `data` has the options for the kernel's FUSE as mount(2) takes them.
pub(crate) fn mount_detached(kind: &str, data: &str, config: &MountConfig) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", config.fsname.as_str())?;
    fsconfig_set_string(&context, "subtype", config.subtype)?;
    for option in data.split(',') {
        match option.split_once('=') {
            Some((key, value)) => fsconfig_set_string(&context, key, value)?,
            None => fsconfig_set_flag(&context, option)?,
        }
    }
    for (is_set, flag) in [(config.read_only, "ro"), (config.dirsync, "dirsync"), (config.sync, "sync")] {
        if is_set {
            fsconfig_set_flag(&context, flag)?;
        }
    }
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes(config))?)
}

/// The flags that each mount of a filesystem has for itself.
pub(crate) fn attributes(config: &MountConfig) -> MountAttrFlags {
    let mut flags = MountAttrFlags::empty();
    for (wanted, flag) in [
        (config.read_only, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (config.nodev, MountAttrFlags::MOUNT_ATTR_NODEV),
        (config.nosuid, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (config.noexec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (config.noatime, MountAttrFlags::MOUNT_ATTR_NOATIME),
        (config.nosymfollow, MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW),
    ] {
        flags.set(flag, wanted);
    }
    flags
}

/// A mount of the top level that is on no directory, and the place for the subvolume that it should show.
#[derive(Debug)]
pub struct DetachedMount {
    pub(crate) top: OwnedFd,
    /// The path of the subvolume from the top level.
    pub(crate) path: Vec<u8>,
    pub(crate) dir: PathBuf,
}

/// A mount on a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedMount {
    /// The number in the table of mounts, which another mount may have later.
    pub(crate) id: u64,
    /// The number that no other mount ever has, if this kernel has such numbers (Linux 6.8).
    pub(crate) unique: Option<u64>,
    /// The number of the filesystem (`st_dev`).
    pub(crate) device: u64,
}

impl PlacedMount {
    /// The mount of this open directory.
    pub(crate) fn of(mount: impl AsFd) -> io::Result<Self> {
        let mount = mount.as_fd();
        let id = other_user::mount_id_of(mount)?;
        Ok(Self { id, unique: mount_table::unique_id_of(mount), device: mount_table::device_of_file(mount)? })
    }

    /// The number by which the server knows the mount.
    pub(crate) fn key(&self) -> u64 {
        self.unique.unwrap_or(self.id)
    }
}

impl DetachedMount {
    /// Mounts the subvolume on the directory. Asks the server, which must be answering (P4).
    pub(crate) fn place(self) -> io::Result<PlacedMount> {
        let tree = subtree(self.top.as_fd(), &self.path, None)?;
        put(&tree, &self.dir)
    }
}

/// A mount of a filesystem whose other subvolumes can be mounted too.
#[derive(Clone, Debug)]
pub struct FirstMount {
    found: MountInfo,
}

impl FirstMount {
    /// All mounts of ubtrfs that root or this user made and that nothing covers. Mounts whose source is `image` come
    /// first.
    pub fn all(image: &Path) -> Vec<Self> {
        let full = std::fs::canonicalize(image).unwrap_or_default();
        let is_ours = |found: &MountInfo| found.is_of_ubtrfs() && other_user::other_user_of(found).is_none();
        let mut mounts: Vec<MountInfo> = mount_table::mounts().into_iter().filter(is_ours).collect();
        mounts.retain(|found| MountPoint::open(found).is_ok());
        mounts.sort_by_key(|found| Path::new(&found.source) != full);
        mounts.into_iter().map(|found| Self { found }).collect()
    }

    /// Whether this mount lies in the other one and has its source, as a submount has.
    pub fn is_submount_of(&self, other: &Self) -> bool {
        self.found.parent == other.found.id && self.found.source == other.found.source
    }

    /// The mount of ubtrfs that root or this user made and that lies topmost on a directory.
    pub fn on(dir: &Path) -> Option<Self> {
        let found = mount_table::find_mount(&other_user::full_path(dir).ok()?)?;
        let is_ours = found.is_of_ubtrfs() && other_user::other_user_of(&found).is_none();
        is_ours.then_some(Self { found })
    }

    /// Whether this mount shows the directory at `path` in the filesystem of `other`.
    pub fn shows(&self, other: &Self, path: &[u8]) -> bool {
        self.found.device == other.found.device && self.found.root == Path::new("/").join(OsStr::from_bytes(path))
    }

    /// The number of the shown filesystem (`major:minor`), which all its mounts have in common.
    pub fn filesystem(&self) -> &[u8] {
        &self.found.device
    }

    /// Whether the kernel refuses writes through all mounts of the filesystem.
    pub fn filesystem_is_read_only(&self) -> bool {
        self.found.is_filesystem_read_only()
    }

    /// The directory on which it is mounted.
    pub fn dir(&self) -> &Path {
        &self.found.dir
    }

    /// Whether root made the mount. If not, no other subvolume of its filesystem can be mounted.
    pub fn is_of_root(&self) -> bool {
        self.found.user().is_some_and(|(uid, _)| uid.is_root())
    }

    /// Mounts a subvolume of this filesystem on `dir`, with the flags of `config`. `path` leads from the top level to the
    /// subvolume, whose root directory has the inode number `st_ino`. Returns the number by which the server should know
    /// the new mount.
    ///
    /// # Errors
    /// This mount has gone, the subvolume has another path by now, or the system refuses to mount.
    pub fn mount_beside(&self, path: &[u8], st_ino: u64, dir: &Path, config: &MountConfig) -> Result<u64, MountError> {
        let failed = |source: io::Error| MountError::Mount { dir: dir.display().to_string(), source };
        let placed = self.top_level().and_then(|top| {
            let tree = subtree(top.as_fd(), path, Some(st_ino))?;
            let set = attributes(config);
            change_mount_flags(&tree, set, (OWN_FLAGS - set) | MountAttrFlags::MOUNT_ATTR__ATIME)?;
            put(&tree, dir)
        });
        placed.map(|placed| placed.key()).map_err(failed)
    }

    /// A mount of the top level that is on no directory.
    fn top_level(&self) -> io::Result<OwnedFd> {
        let point = MountPoint::open(&self.found)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(point.path(), flags, Mode::empty())?;
        if other_user::mount_id_of(&dir)? != self.found.id {
            return Err(io::Error::other("its mount point changed meanwhile"));
        }
        // A mount of the top level needs no privilege to be followed.
        let root = if self.found.root == Path::new("/") { dir } else { open_fuse_root(&dir)? };
        clone(&root)
    }
}

/// The flags that a mount has for itself (P3).
pub(crate) const OWN_FLAGS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_RDONLY
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC)
    .union(MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW)
    .union(MountAttrFlags::MOUNT_ATTR_NODIRATIME)
    .union(MountAttrFlags::MOUNT_ATTR__ATIME);

/// Clones the directory at a path in a mount of the top level (P2). Fails if its inode number is not `st_ino`.
fn subtree(top: BorrowedFd<'_>, path: &[u8], st_ino: Option<u64>) -> io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let found = openat2(top, OsStr::from_bytes(path), flags, Mode::empty(), resolve)?;
    if let Some(wanted) = st_ino {
        let found = statx(&found, "", AtFlags::EMPTY_PATH, StatxFlags::INO)?.stx_ino;
        if found != wanted {
            return Err(Errno::STALE.into());
        }
    }
    clone(&found)
}

fn clone(dir: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(dir, "", flags)?)
}

fn put(tree: &OwnedFd, dir: &Path) -> io::Result<PlacedMount> {
    move_mount(tree, "", CWD, dir, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    PlacedMount::of(tree)
}
