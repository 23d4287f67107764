//! The FUSE server: turns requests of the kernel into calls of `fs`. The server implements only the protocol, and
//! decides nothing about the filesystem.
//!
//! | module       | contents                                                    |
//! |--------------|-------------------------------------------------------------|
//! | `mount`      | mount(2), fusermount3, and what can go wrong                |
//! | `session`    | a mount's life from mounting to the last commit             |
//! | `server`     | one handler for each request; how long the kernel may cache names and attributes |
//! | `protocol`   | decodes requests, encodes answers                           |
//! | `transport`  | carries requests and answers: /dev/fuse, io_uring rings     |
//! | `node`       | node ids and inode numbers                                  |
//! | `attr`       | attributes and times on the wire                            |
//! | `caller`     | the caller's rights, and the mode bits that a change clears |
//! | `dir_end`    | where a reader of a directory stops                         |
//! | `ioctl`      | the ioctls on flags of files                                |
//! | `admin_ioctl` | ioctls on balance, quotas, defragmentation and free space    |
//! | `btrfs_ioctl` | btrfs's ioctls on the whole filesystem                     |
//! | `subvolume_ioctl` | the ioctls on subvolumes                                  |
//! | `host`       | the mount as commands of crate `control` use it             |
//! | `interrupt`  | cancels ioctls whose process got a signal                   |
//! | `name_cache` | names that the kernel must forget                           |
//! | `other_user` | questions to the mounts of other users                    |
//! | `seek`       | data and holes of files that are being written              |
//! | `lent_device` | the claim on the block device of a `fuseblk` mount          |
//! | `listing`    | which listings bring attributes                              |
//! | `lost_pages` | files with written pages that could not be stored            |
//! | `remaining_mounts` | bind mounts and other uses that remain after an unmount   |
//! | `submounts`  | a mount of its own for each subvolume                       |
//! | `view`       | the FUSE filesystems of one btrfs filesystem                |
//! | `subtree`    | mounts that show one subvolume of several                   |
//! | `running_programs` | files that are open for execution, which cannot be truncated |
//! | `sandbox`    | seccomp, Landlock and giving up root                        |
//! | `activity`   | commits when a burst of changes ends                        |
#![forbid(unsafe_code)]

mod activity;
mod admin_ioctl;
mod attr;
mod btrfs_ioctl;
mod caller;
mod dir_end;
mod host;
mod interrupt;
mod ioctl;
mod lent_device;
mod listing;
mod lost_pages;
mod mount;
mod mount_table;
mod name_cache;
mod node;
mod other_user;
pub mod protocol;
mod remaining_mounts;
mod running_programs;
mod sandbox;
mod seek;
mod served_fs;
mod server;
mod session;
mod submounts;
mod subtree;
mod subvolume_ioctl;
pub mod transport;
mod view;

pub use mount::{MountConfig, MountError, Mounted, RemountScope, SUBTYPE, cannot_open, check, is_root, mount};
pub use mount_table::{holding_mount, image_mounted_at, mount_point_of, mount_points_of};
pub use other_user::{HelperCommand, server_answers, tell_control_name};
pub use sandbox::{Confinement, Identity, PrivilegedHelper, confine, serve_unmounts};
pub use session::{Session, unmount, unmount_with_helper};
pub use subtree::{DetachedMount, FirstMount};
