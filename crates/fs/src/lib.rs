//! Subvolumes and inodes: names, attributes, file data, extended attributes.
//!
//! The floor above the transaction engine and below FUSE and the command line. [`Fs`] is the one entry; every method
//! takes `&self` and may be called from any thread. Nothing here knows trees' layout on disk or allocates space; it
//! reads and puts items of subvolumes.

#![forbid(unsafe_code)]

mod acl;
mod committer;
mod create;
mod dir_item;
mod error;
mod fs;
mod fsync;
mod guard;
mod inode;
mod inode_cache;
mod known_names;
mod link;
mod log_replay;
mod lookup;
mod memory_budget;
mod options;
mod orphan;
mod property;
mod rename;
mod service_threads;
mod setattr;
mod statfs;
mod stats;
mod subvolume;
mod subvolume_delete;
mod subvolume_list;
mod subvolume_ops;
mod subvolume_rename;
mod types;
mod xattr;

// The data path.
mod buf_pool;
mod compression;
mod data_path;
mod delalloc;
mod extent_map;
mod fallocate;
mod file_data;
mod file_extent_ops;
mod inline_data;
mod ordered_data;
mod read;
mod readahead;
mod reflink;
mod truncate;
mod write;
mod writeback_errors;
mod writeback_lock;
mod writeback_thread;

pub use compression::decompress;
pub use error::{Error, Result};
pub use extent_map::{ExtentInfo, ExtentKind};
pub use fs::Fs;
pub use options::{AtimeMode, CompressSpec, MountOptions};
pub use types::{
    Attr, Caller, DirEntryOut, FallocateMode, FlagRights, InodeId, NewInode, RenameFlags, SeekWhence, SetAttr, SetTime,
    StatFs, SubvolumeInfo, XattrFlags, mode, rdev_from_parts, rdev_parts,
};
pub use ubtrfs_transaction::Metric;
pub use ubtrfs_transaction::note_panic;
pub use writeback_errors::Descriptor;
