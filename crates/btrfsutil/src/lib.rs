//! libbtrfsutil.so.1: the C library by which programs such as python3-btrfsutil manage subvolumes.
//!
//! The original library refuses a mount of ubtrfs, because `statfs` shows FUSE's type for it. Programs that are linked
//! with the original work on the btrfs of Linux and in mounts of ubtrfs with this library in its place. Functions,
//! structs, numbers and `errno` are those of the original's public header, versions 1.1 to 1.4.
//!
//! ```text
//! C program --> exports --> subvolume, edit, iterator, search --> ioctl --> the btrfs of Linux
//!                                              |                   \----> FUSE --> server of a mount
//!                       |                       \--> control socket of the mount, if an ioctl cannot do it
//!                       \--> image --> crate ubtrfs, for a path in an image that is not mounted
//! ```
//!
//! | module      | contents                                                              |
//! |-------------|-----------------------------------------------------------------------|
//! | `exports`   | the C functions                                                       |
//! | `failure`   | the results and their texts                                           |
//! | `place`     | open files, and what kind of filesystem holds them                    |
//! | `subvolume` | id, path, information, read-only flag, default subvolume, sync        |
//! | `edit`      | making and deleting subvolumes and snapshots                          |
//! | `iterator`  | the subvolumes below a subvolume                                      |
//! | `search`    | the items of the tree of trees                                        |
//! | `qgroup`    | quota groups that new subvolumes join                                 |
//! | `image`     | the functions on paths, for images without a mount                    |
//! | `info`      | `struct btrfs_util_subvolume_info`                                    |
//! | `path`      | how a path splits                                                     |
//! | `ioctl`     | the system call                                                       |
//!
//! `unsafe` is allowed in two files: `exports.rs` for what C programs pass, and `ioctl.rs` for the system call.
#![deny(unsafe_code)]

mod edit;
#[allow(unsafe_code, reason = "C programs pass addresses and descriptors")]
mod exports;
mod failure;
mod image;
mod info;
mod ioctl;
mod iterator;
mod path;
mod place;
mod qgroup;
mod search;
mod subvolume;
