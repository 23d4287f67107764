//! Subvolumes and inodes: names, attributes, file data, extended attributes.
//!
//! FUSE and the command line use this crate, and this crate uses the transaction engine. [`Fs`] is the entry point;
//! every method takes `&self` and may be called from any thread. This crate neither knows how trees lie on disk nor
//! allocates space: it reads and puts items of subvolumes.
//!
//! The modules, from the top down. Apart from [`Fs`], each module imports only from modules below it:
//!
//! - `send`: subvolumes as streams, and differences of snapshots.
//! - `receive`: applying send streams.
//! - `mount`: [`Fs`] itself: opening and closing, memory budget, background commits, log replay, statistics.
//! - `balance`: moving the block groups that filters select.
//! - `devices`: sizes of devices, and moving block groups.
//! - `subvolume`: subvolumes and snapshots.
//! - `namei`: names: lookup, listing, creating, linking, removing, renaming; unlinked inodes.
//! - `file`: file content: reading, writing, truncating, holes, reflinks.
//! - `writeback`: writing dirty data, turning it into extents, and fsync.
//! - `inode`: inodes in memory: state, dirty data, read-ahead, cache, attributes, extended attributes, ACLs,
//!   properties.
//! - `items`: items of names and of file data.
//! - `compression`: zlib, lzo and zstd as btrfs uses them.
//! - `session`: admission of changes: writable, counted, reserved.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod balance;
mod compression;
mod devices;
mod error;
mod file;
mod inode;
mod items;
mod mount;
mod namei;
mod options;
mod receive;
mod send;
mod service_threads;
mod session;
mod subvolume;
mod types;
mod watched_job;
mod writeback;

pub use balance::run::{BalanceFailure, BalanceReport};
pub use balance::state::{BalanceCounts, BalanceStatus};
pub use compression::decompress;
pub use devices::replace::{REPLACE_RUNS, ReplaceReport, ReplaceStatus};
pub use devices::scrub::{
    Damage, FILES_MAX, FileDamages, ScrubEnd, ScrubReport, ScrubStart, ScrubStatus, ScrubbedDevice,
};
pub use devices::space::{DeviceShare, DeviceUsage, GroupUsage, SpaceUsage};
pub use error::{Error, Result};
pub use file::defragment::Defragment;
pub use file::extent_map::{FileExtentInfo, FileExtentKind};
pub use mount::fs::Fs;
pub use options::{AtimeMode, CompressSpec, MountOptions};
pub use receive::{
    INCOMPLETE_XATTR, ReceiveError, ReceiveOptions, ReceiveProblem, ReceiveReport, ReceivedSubvolume, Verified,
};
pub use send::changes::{ChangeKind, InodeChange};
pub use send::request::SendRequest;
pub use types::{
    Attr, Caller, DirEntryOut, FallocateMode, FlagRights, InodeId, NewInode, RenameFlags, SeekWhence, SetAttr, SetTime,
    StatFs, SubvolumeInfo, XattrFlags, mode, rdev_from_parts, rdev_parts,
};
pub use ubtrfs_transaction::note_panic;
pub use ubtrfs_transaction::{
    BlockGroup, ChunkPlacement, DeviceSummary, ExtentUse, Job, JobProgress, MemberState, Metric, MigratedChunk,
    QgroupId, QgroupSummary, QuotaKind, QuotaStatus, RelocatedGroup, RelocationFailure, ReplaceRequest, Rescue,
    ScrubCounts, find_devices, rewrite_id,
};
pub use writeback::errors::Descriptor;
