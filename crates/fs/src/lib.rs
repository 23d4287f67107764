//! Subvolumes and inodes: names, attributes, file data, extended attributes.
//!
//! The floor above the transaction engine and below FUSE and the command line. [`Fs`] is the one entry; every method
//! takes `&self` and may be called from any thread. Nothing here knows trees' layout on disk or allocates space; it
//! reads and puts items of subvolumes.
//!
//! - `mount`: [`Fs`] itself: opening and closing, options, memory budget, background commits, log replay, statistics.
//! - `namei`: names: looking up, listing directories, creating, linking, removing, renaming.
//! - `inode`: inodes in memory and on disk: state, cache, orphans, attributes, extended attributes, ACLs, properties.
//! - `file`: file content between the caller and the trees: reading, writing, dirty data, extents, holes, sharing.
//! - `writeback`: which dirty data is written when, how it becomes extents, and fsync.
//! - `subvolume`: subvolumes and snapshots.

#![forbid(unsafe_code)]

mod error;
mod file;
mod inode;
mod mount;
mod namei;
mod subvolume;
mod types;
mod writeback;

pub use error::{Error, Result};
pub use file::extent_map::{ExtentInfo, ExtentKind};
pub use mount::fs::Fs;
pub use mount::options::{AtimeMode, CompressSpec, MountOptions};
pub use types::{
    Attr, Caller, DirEntryOut, FallocateMode, FlagRights, InodeId, NewInode, RenameFlags, SeekWhence, SetAttr, SetTime,
    StatFs, SubvolumeInfo, XattrFlags, mode, rdev_from_parts, rdev_parts,
};
pub use ubtrfs_transaction::Metric;
pub use ubtrfs_transaction::note_panic;
pub use writeback::compression::decompress;
pub use writeback::errors::Descriptor;
