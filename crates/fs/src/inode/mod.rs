//! Inodes in memory: state, dirty data, read-ahead, cache, attributes, extended attributes, ACLs, properties.

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
