//! Inodes in memory: state, dirty data, read-ahead, cache, attributes, extended attributes, ACLs, properties.
//!
//! - `state`, `subvolume`: the current state of an inode, and of a subvolume with its inode numbers.
//! - `entered`: the subvolumes in memory.
//! - `cache`, `handle`: the inodes that stay in memory, access by id, atime.
//! - `location`: where names lead across subvolumes.
//! - `file_data`, `buf_pool`, `readahead`: dirty data, its memory, and data read ahead.
//! - `read_extents`, `extent_users`: reading the data of extent items, and waiting for its readers.
//! - `blocks`: the number of blocks that `stat` shows.
//! - `known_names`: finds out without a tree search that a directory lacks a name. (`server.rs` of crate `fuse` decides
//!   how long the kernel may cache a missing name.)
//! - `setattr`, `xattr`, `acl`, `property`: flags and extended attributes, and their rules.
//! - `writeback_lock`: waiting for writeback of a file.

pub(crate) mod acl;
pub(crate) mod bare_inodes;
mod blocks;
pub(crate) mod buf_pool;
pub(crate) mod cache;
pub(crate) mod entered;
pub(crate) mod extent_users;
pub(crate) mod file_data;
pub(crate) mod handle;
pub(crate) mod known_names;
pub(crate) mod location;
pub(crate) mod property;
mod read_extents;
pub(crate) mod readahead;
pub(crate) mod setattr;
pub(crate) mod state;
pub(crate) mod subvolume;
pub(crate) mod writeback_lock;
pub(crate) mod xattr;
