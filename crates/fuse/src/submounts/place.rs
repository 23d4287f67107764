//! The places of submounts: opening stubs, mounting on them, and unmounting.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags, move_mount};
use ubtrfs_device::change_mount_flags;
use ubtrfs_format::RootId;

use crate::mount_table::MountInfo;
use crate::other_user::{self, MountPoint};
use crate::subtree::OWN_FLAGS;

/// A mount that the mounter made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlacedOn {
    pub(super) subvolume: RootId,
    /// The device and the inode number of the directory that holds the stub.
    above: (u64, u64),
    /// A number that no other submount of this process has. Linux soon gives the number in the table to another mount.
    pub(super) serial: u64,
}

/// The open stub of a subvolume.
#[derive(Debug)]
pub(super) struct OpenStub {
    /// The root directory of the mount that shows the stub.
    root: OwnedFd,
    dir: OwnedFd,
    above: (u64, u64),
}

/// Opens the stub at `path` from the root of the view that is mounted at `mount` (I5). `shown` are the device and the inode
/// number of the stub.
///
/// # Errors
/// `EXDEV` if something is mounted on the stub, or on the way to it; `ENOENT` if the mount does not show the stub.
pub(super) fn open_stub(mount: &MountInfo, path: &[u8], shown: (u64, u64)) -> io::Result<OpenStub> {
    let root = open_root(mount)?;
    let dir = open_below(&root, shown_path(mount, path)?)?;
    if identity(&dir)? != shown {
        return Err(not_shown());
    }
    let above = identity(&openat(&dir, c"..", PATH_FLAGS, Mode::empty())?)?;
    Ok(OpenStub { root, dir, above })
}

/// Opens the root directory of a mount.
///
/// # Errors
/// Another mount is there, or on it, by now.
pub(super) fn open_root(mount: &MountInfo) -> io::Result<OwnedFd> {
    let root = rustix::fs::open(MountPoint::open(mount)?.path(), PATH_FLAGS, Mode::empty())?;
    if other_user::mount_id_of(&root)? == mount.id { Ok(root) } else { Err(not_shown()) }
}

/// Makes the kernel look up a path from the root of the view that is mounted at `mount`.
pub(super) fn look_up(root: &OwnedFd, mount: &MountInfo, path: &[u8]) -> io::Result<()> {
    open_below(root, shown_path(mount, path)?).map(drop)
}

/// Makes the kernel look up a path from the root directory of a view.
pub(super) fn look_up_at(root: &OwnedFd, path: &[u8]) -> io::Result<()> {
    open_below(root, Path::new(OsStr::from_bytes(path))).map(drop)
}

/// The part of a path from the root of a view that lies below the directory which a mount shows.
fn shown_path<'p>(mount: &MountInfo, path: &'p [u8]) -> io::Result<&'p Path> {
    let shows = mount.root.strip_prefix("/").map_err(|_| not_shown())?;
    Path::new(OsStr::from_bytes(path)).strip_prefix(shows).map_err(|_| not_shown())
}

fn open_below(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    Ok(openat2(root, path, PATH_FLAGS, Mode::empty(), resolve)?)
}

fn not_shown() -> io::Error {
    Errno::NOENT.into()
}

/// Mounts `tree`, a mount of a subvolume that is on no directory, on its stub in `mount`, with the flags of `mount`. Makes
/// `mount` private first (I12). Returns the number of the new mount.
pub(super) fn place(
    tree: &OwnedFd,
    stub: &OpenStub,
    mount: &MountInfo,
    subvolume: RootId,
) -> io::Result<(u64, PlacedOn)> {
    set_flags(tree, flags_of(mount))?;
    if mount.is_shared {
        // I12. The path leads to this mount also if another mount is on it.
        rustix::mount::mount_change(path_of(&stub.root), MountPropagationFlags::PRIVATE)?;
    }
    let how = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, "", &stub.dir, "", how)?;
    Ok((other_user::mount_id_of(tree)?, PlacedOn { subvolume, above: stub.above, serial: 0 }))
}

/// Gives a mount exactly these flags.
fn set_flags(tree: impl AsFd, set: MountAttrFlags) -> io::Result<()> {
    change_mount_flags(tree, set, (OWN_FLAGS - set) | MountAttrFlags::MOUNT_ATTR__ATIME)
}

/// Adds flags to a mount that the table of mounts shows.
pub(super) fn add_flags(mount: &MountInfo, flags: MountAttrFlags) -> io::Result<()> {
    set_flags(&open_root(mount)?, flags_of(mount) | flags)
}

/// The flags that a mount has for itself.
pub(super) fn flags_of(mount: &MountInfo) -> MountAttrFlags {
    let mut flags = MountAttrFlags::empty();
    for (name, flag) in [
        ("ro", MountAttrFlags::MOUNT_ATTR_RDONLY),
        ("nodev", MountAttrFlags::MOUNT_ATTR_NODEV),
        ("nosuid", MountAttrFlags::MOUNT_ATTR_NOSUID),
        ("noexec", MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ("nosymfollow", MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW),
        ("nodiratime", MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        ("noatime", MountAttrFlags::MOUNT_ATTR_NOATIME),
    ] {
        flags.set(flag, mount.options.iter().any(|option| option == name));
    }
    flags
}

/// How a submount is unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// If nothing has used it since the last call. A mount that was put on it since then is fresh, and stays (I11).
    Expired,
    /// In any case. Programs that use it keep it until they end. A mount that is put on it in this moment goes too.
    Always,
}

/// Unmounts a submount. A touch of the mount counts as use, so only the directory above it is opened. While the mount is
/// there, the stub cannot be renamed (I5). The kernel unmounts the topmost mount, so nothing may lie on the submount (I11).
pub(super) fn leave(mount: &MountInfo, placed: &PlacedOn, how: Leaving) -> io::Result<()> {
    let (Some(above), Some(name)) = (mount.dir.parent(), mount.dir.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let above = rustix::fs::open(above, PATH_FLAGS, Mode::empty())?;
    if identity(&above)? != placed.above {
        return Err(Errno::NOENT.into());
    }
    let flags = match how {
        Leaving::Expired => UnmountFlags::EXPIRE,
        Leaving::Always => UnmountFlags::DETACH,
    };
    Ok(rustix::mount::unmount(path_of(&above).join(name), flags | UnmountFlags::NOFOLLOW)?)
}

/// A path of an open file.
fn path_of(file: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// The device and the inode number of an open file.
fn identity(file: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
