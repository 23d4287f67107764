//! Inodes in memory: state, dirty data, read-ahead, cache, attributes, extended attributes, ACLs, properties.
//!
//! - `state`, `subvolume`: the current state of an inode, and of a subvolume with its inode numbers.
//! - `cache`, `handle`: the inodes that stay in memory, access by id, atime.
//! - `file_data`, `buf_pool`, `readahead`: dirty data, its memory, and data read ahead.
//! - `known_names`: finds out without a tree search that a directory lacks a name. (`server.rs` of crate `fuse` decides
//!   how long the kernel may cache a missing name.)
//! - `setattr`, `xattr`, `acl`, `property`: changes of attributes and their rules.
//! - `change_gate`, `writeback_lock`: waiting for running changes, and for writeback of a file.

pub(crate) mod acl;
pub(crate) mod buf_pool;
pub(crate) mod cache;
pub(crate) mod change_gate;
pub(crate) mod file_data;
pub(crate) mod handle;
pub(crate) mod known_names;
pub(crate) mod property;
pub(crate) mod readahead;
pub(crate) mod setattr;
pub(crate) mod state;
pub(crate) mod subvolume;
pub(crate) mod writeback_lock;
pub(crate) mod xattr;
