//! Changes that are durable when the call returns.
//!
//! - `fsync`: the items of an inode, through the tree log or a commit.
//! - `quota`: enabling and disabling quotas, and changing groups, relations and limits.
//! - `subvolume`, `label`, `dev_stats`: new subvolumes, the label, the error counters of devices.

mod dev_stats;
pub(crate) mod fsync;
mod label;
pub(crate) mod quota;
mod subvolume;
