//! Moving block groups: every extent to other addresses, or the chunk to other places on the devices.
//!
//! ```text
//! group becomes read-only -> writes in place end -> commit
//! [ extents found -> data copied and verified -> commit with a STEP ]*   until the group is empty
//! readers of old addresses end -> commit that removes the group
//! ```
//!
//! - `relocate`: emptying a block group, which commits the steps of [`crate::relocation`].
//! - `data_copy`: copies of data extents, before a step.
//! - `migrate`: moving a chunk, which keeps its logical addresses.
//! - `copy_check`: checking what is copied.

pub(crate) mod copy_check;
pub(crate) mod data_copy;
pub(crate) mod migrate;
pub(crate) mod relocate;
