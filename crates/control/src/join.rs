//! Further mounts of a filesystem that a server has mounted already.
//!
//! | command | needs                                                              |
//! |---------|--------------------------------------------------------------------|
//! | all     | the rights of an administrator ([`CommandContext::require_admin`]) |
//!
//! The command `ubtrfs mount` makes such a mount itself: the server may be confined, and then cannot mount. The server says
//! which subvolume is wanted and where it lies, and remembers the new mount:
//!
//! ```text
//! ubtrfs mount --Find--> path of the subvolume; mounts it --Joined--> remembered as a mount of its own
//! ubtrfs umount, while other mounts remain --Mounts--> the mounts that have been made so
//! ```
//!
//! A mount that the server remembers is unmounted by itself. Bind mounts, which the server does not know, are further uses of
//! a mount.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::RootId;
use ubtrfs_fs::MountOptions;

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};
use crate::resolve::PathBytes;

/// A command on the mounts of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Finds the subvolume to mount, as the options `subvol` and `subvolid` do: [`Response::Found`].
    Find {
        /// The path of the subvolume from the top level.
        #[serde(default)]
        subvol: Option<PathBytes>,
        /// The id of the subvolume.
        #[serde(default)]
        subvolid: Option<u64>,
    },
    /// Remembers a new mount.
    Joined {
        /// The number of the mount: unique (`STATX_MNT_ID_UNIQUE`) if the kernel has such numbers.
        mount: u64,
    },
    /// Returns the numbers of the mounts that `ubtrfs mount` made: [`Response::Mounts`]. Some may be unmounted by now.
    Mounts,
    /// Unmounts the submounts that are not in use, before the mount itself is unmounted.
    LeaveSubmounts,
}

/// The result of a command on the mounts of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The command succeeded.
    Done,
    /// The subvolume to mount.
    Found(SubvolumeToMount),
    /// Numbers of mounts.
    Mounts(Vec<u64>),
}

/// A subvolume to mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubvolumeToMount {
    /// The path of the subvolume from the top level, empty for the top level.
    #[serde(with = "crate::bytes")]
    pub path: Vec<u8>,
    /// The inode number that `stat` shows for the subvolume's root directory.
    pub st_ino: u64,
    /// The reason why the server writes nothing, if it does not.
    pub read_only: Option<String>,
}

impl Request {
    /// See [`crate::Request::changes`]. A new mount is no change of the filesystem.
    pub(crate) fn changes(&self) -> bool {
        false
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    match request {
        Request::Find { subvol, subvolid } => find(context, subvol.map(|path| path.0), subvolid).map(Response::Found),
        Request::Joined { mount } => {
            context.host.note_mount(mount);
            Ok(Response::Done)
        }
        Request::LeaveSubmounts => {
            context.host.leave_submounts();
            Ok(Response::Done)
        }
        Request::Mounts => Ok(Response::Mounts(context.host.mounts())),
    }
}

fn find(context: &CommandContext<'_>, subvol: Option<Vec<u8>>, subvolid: Option<u64>) -> Result<SubvolumeToMount> {
    let (fs, host) = (context.fs, context.host);
    let st_ino = |id| {
        host.st_ino(id).ok_or_else(|| CommandFailure::new(Errno::INVAL, "an image that is not mounted has no mounts"))
    };
    let options = MountOptions { subvol, subvolid: subvolid.map(RootId), ..MountOptions::default() };
    if host.has_submounts() {
        let root = fs.selected_root(&options)?;
        if root != host.root(fs) {
            let text = "it is mounted with submounts, so its subvolumes are mounts already; use mount --bind with the \
                        directory of the subvolume";
            return Err(CommandFailure::new(Errno::BUSY, text));
        }
        return Ok(SubvolumeToMount { path: Vec::new(), st_ino: st_ino(root)?, read_only: fs.read_only() });
    }
    if !fs.shows_top_level() {
        let text = "its server shows one subvolume only; unmount it, and mount it as root on a kernel with fsopen(2)";
        return Err(CommandFailure::new(Errno::BUSY, text));
    }
    let root = fs.selected_root(&options)?;
    let missing = |_| CommandFailure::new(Errno::NOENT, format!("no path leads to subvolume {}", root.root));
    let path = if root.root == RootId::FS_TREE { Vec::new() } else { fs.path_of(root).map_err(missing)? };
    Ok(SubvolumeToMount { path, st_ino: st_ino(root)?, read_only: fs.read_only() })
}
