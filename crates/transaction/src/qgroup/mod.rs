//! Quota groups: the space that each subvolume refers to, exclusively and shared, and the limits on that space.
//!
//! `account` finds the users of changed extents, `groups` changes the numbers, `rescan` counts all extents again,
//! `limits` refuses reservations, `new_group` makes the groups of new subvolumes and snapshots. Users change groups
//! through [`crate::durable::quota`].
//!
//! Accounting happens in the commit. A user of an extent is a subvolume that reaches the extent. For each extent whose
//! users a transaction changed, the users before the change (in the trees of the last commit, or right after the last
//! snapshot of this commit) are compared with the users after it (in the applied trees). No writer waits for the
//! accounting.
//!
//! ```text
//! apply: blocks added and dropped, data references added and dropped --OwnerMark--> heads of the delayed refs
//! run delayed refs: marked heads --OwnerChange--> account: sets before and after --> groups --> quota tree
//! snapshot: account pending changes -> copy the root -> compute the numbers by arithmetic -> count from there
//! dropped subvolume: trace its shared blocks, as long as the numbers of another group change
//! rescan: a part of the extent tree in each commit
//! ```
//!
//! Everything above concerns full quotas. Simple quotas (`simple`) charge an extent to one subvolume, and need none of
//! these steps.
//!
//! Most changes need no search for users. A block that is newer than its tree's last snapshot has one user. A data
//! extent also has one user if only one subvolume's items refer to it, and that subvolume is not a snapshot and was
//! never snapshotted. A change of references that does not change the users is not marked: when a block is copied, the
//! copy takes over the references to the block's children, and relocation only moves references.

pub(crate) mod account;
pub(crate) mod groups;
pub(crate) mod items;
pub(crate) mod limits;
pub(crate) mod new_group;
pub(crate) mod rescan;
pub(crate) mod simple;
pub(crate) mod state;
