//! Inodes in memory and on disk: state, cache, orphans, attributes, extended attributes, ACLs, properties.

pub(crate) mod acl;
pub(crate) mod cache;
pub(crate) mod handle;
pub(crate) mod orphan;
pub(crate) mod property;
pub(crate) mod setattr;
pub(crate) mod state;
pub(crate) mod xattr;
