//! The FUSE server: turns requests of the kernel into calls of `fs`. It only speaks the protocol, and decides nothing
//! about the filesystem.
//!
//! | module       | contents                                                    |
//! |--------------|-------------------------------------------------------------|
//! | `mount`      | mount(2), fusermount3, and what can go wrong                |
//! | `session`    | a mount's life from mounting to the last commit             |
//! | `server`     | one handler for each request                                |
//! | `protocol`   | decodes requests, encodes answers                           |
//! | `transport`  | how they travel: /dev/fuse, rings of io_uring               |
//! | `node`       | node ids and inode numbers                                  |
//! | `attr`       | attributes and times on the wire                            |
//! | `caller`     | the caller's rights, and the mode bits that a change clears |
//! | `access`     | whether a caller may change a directory, where the kernel does not check |
//! | `dir_end`    | where a reader of a directory stops                         |
//! | `ioctl`      | the ioctls that reach a FUSE server                         |
//! | `subvolumes` | permissions on subvolumes, by attributes (`subvolume_control`) and ioctls (`subvolume_ioctl`) |
//! | `name_cache` | names that the kernel must forget                           |
//! | `control`    | how umount waits for the last commit                        |
//! | `seek`       | data and holes of files that are being written              |
//! | `sandbox`    | seccomp, Landlock and giving up root                        |
//! | `activity`   | commits when a burst of changes ends                        |
#![forbid(unsafe_code)]

mod access;
mod activity;
mod attr;
mod caller;
mod control;
mod dir_end;
mod ioctl;
mod mount;
mod name_cache;
mod node;
pub mod protocol;
mod sandbox;
mod seek;
mod server;
mod session;
mod subvolume_control;
mod subvolume_ioctl;
mod subvolumes;
pub mod transport;

pub use mount::{MountConfig, MountError, SUBTYPE, check, is_root, mount, remount};
pub use sandbox::{Confinement, Identity, Unmounter, confine, serve_unmounts};
pub use session::{Session, stats, sync, unmount};
pub use subvolume_control::MountedPath;
