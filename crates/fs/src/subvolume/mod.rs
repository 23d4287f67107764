//! Subvolumes and snapshots: creating, deleting, listing, renaming, quotas, and searching their items.
//!
//! - `create`: making subvolumes and snapshots, and making a subvolume read-only. The commit makes the snapshot
//!   (`roots/subvolume_roots.rs` of crate `transaction`).
//! - `dedupe`: deduplication, also in read-only subvolumes.
//! - `delete`: deleting subvolumes.
//! - `list`: paths and parents of subvolumes, and the choice of the subvolume to mount.
//! - `rename`: renames that move a subvolume.
//! - `sends`: changes that are refused or wait while a subvolume is being sent.
//! - `receives`: the subvolumes that are being received.
//! - `quota`, `resolve`, `search`: quota groups, paths of addresses and inodes, items of a tree.
//!
//! Crate `control` decides which users may call these functions (`control/src/subvolume.rs`).

pub(crate) mod create;
mod dedupe;
pub(crate) mod delete;
pub(crate) mod list;
pub(crate) mod quota;
pub(crate) mod receives;
pub(crate) mod rename;
pub(crate) mod resolve;
mod search;
pub(crate) mod sends;
pub(crate) mod state;
