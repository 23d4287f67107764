//! Subvolumes and inodes: names, attributes, file data, extended attributes.
//!
//! The floor above the transaction engine and below FUSE and the command line. [`Fs`] is the one entry; every method
//! takes `&self` and may be called from any thread. Nothing here knows trees' layout on disk or allocates space; it
//! reads and puts items of subvolumes.

#![forbid(unsafe_code)]

mod error;
mod fs;
mod options;
mod types;

// The data path.
mod compression;
mod fallocate;
mod file_data;
mod read;
mod reflink;
mod write;

pub use error::{Error, Result};
pub use fs::Fs;
pub use options::{AtimeMode, CompressSpec, MountOptions};
pub use types::{
    Attr, Caller, DirEntryOut, FallocateMode, InodeId, NewInode, RenameFlags, SeekWhence, SetAttr, SetTime, StatFs,
    SubvolumeInfo, XattrFlags, mode, rdev_from_parts, rdev_parts,
};
