//! Remounting with submounts: all views become read-only or writable together with the first mount, or none does.
//!
//! The kernel has a superblock for each view, and a remount concerns one superblock. The kernel refuses to make a superblock
//! read-only while a file is open for writing.

use std::io;

use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_flag, fspick};

use super::place;
use crate::mount_table::{self, MountInfo};
use crate::other_user::{harmless, other_user_of};

/// Remounts the mount `first` of a filesystem by `remount`, and makes the other views of the filesystem in this mount
/// namespace read-only or writable. After a failure, all are as before; `undo` does that for `first`.
///
/// # Errors
/// A view becomes read-only while a file in it is open for writing, or `remount` fails.
pub(crate) fn remount(
    first: &MountInfo,
    read_only: bool,
    remount: impl FnOnce() -> io::Result<()>,
    undo: impl FnOnce(),
) -> io::Result<()> {
    let mut changed = Vec::new();
    let mut done = change_views(first, read_only, &mut changed).and_then(|()| remount());
    if done.is_ok() {
        // A view may have been made meanwhile.
        done = change_views(first, read_only, &mut changed);
        if done.is_err() {
            undo();
        }
    }
    if done.is_err() {
        for view in &changed {
            let _ = set_read_only(view, !read_only);
        }
    }
    done
}

/// The end of the message for a mount that cannot become read-only.
pub(crate) fn open_for_writing(dir: &str) -> String {
    format!(", because a file in it is open for writing (see: fuser -vm {dir})")
}

/// Makes all views but that of `first` read-only or writable. `changed` gets a mount of each view that was not.
fn change_views(first: &MountInfo, read_only: bool, changed: &mut Vec<MountInfo>) -> io::Result<()> {
    let is_other_view = |mount: &&MountInfo| {
        mount.is_of_ubtrfs()
            && mount.source == first.source
            && mount.device != first.device
            && other_user_of(mount).is_none()
            && mount.is_filesystem_read_only() != read_only
    };
    let table = mount_table::mounts();
    let mut failed: Vec<(&MountInfo, io::Error)> = Vec::new();
    for mount in table.iter().filter(is_other_view) {
        if changed.iter().any(|view| view.device == mount.device) {
            continue;
        }
        match set_read_only(mount, read_only) {
            Ok(()) => changed.push(mount.clone()),
            Err(error) => failed.push((mount, error)),
        }
    }
    // A mount that another one covers cannot be opened, but another mount of the view can.
    failed.retain(|(mount, _)| !changed.iter().any(|view| view.device == mount.device));
    match failed.pop() {
        Some((mount, error)) => {
            let dir = harmless(&mount.dir.display().to_string());
            let advice =
                if error.kind() == io::ErrorKind::ResourceBusy { open_for_writing(&dir) } else { String::new() };
            Err(io::Error::new(error.kind(), format!("{dir}: {error}{advice}; nothing was changed")))
        }
        None => Ok(()),
    }
}

/// Makes the view of a mount read-only or writable. The flags of its mounts stay.
fn set_read_only(mount: &MountInfo, read_only: bool) -> io::Result<()> {
    let root = place::open_root(mount)?;
    let context = fspick(&root, "", FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH)?;
    fsconfig_set_flag(&context, if read_only { "ro" } else { "rw" })?;
    Ok(fsconfig_reconfigure(&context)?)
}
