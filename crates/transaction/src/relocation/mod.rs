//! Relocation: moving every extent out of a block group, and removing the group.
//!
//! ```text
//! group becomes read-only -> writes in place end -> commit
//! [ extents found -> data copied and verified -> commit with a STEP ]*   until the group is empty
//! readers of old addresses end -> commit that removes the group
//! ```
//!
//! Trees are not copied as a whole: each step copies the blocks that move, and their ancestors. A block is copied
//! once for all the subvolumes that share it. So the cost of a relocation depends on the extents moved, not on the
//! number of snapshots.
//!
//! - [`group`]: the whole sequence, for one block group.
//! - [`data_copy`]: copies of data extents, before the step.
//! - [`step`]: the part inside a commit.
//! - [`closure`]: the blocks that a step copies.
//! - [`copy`]: the copies, and the references that they take over.
//! - [`extent_record`]: the record of an extent in the extent tree.

pub(crate) mod closure;
pub(crate) mod copy;
pub(crate) mod data_copy;
pub(crate) mod extent_record;
pub(crate) mod group;
pub(crate) mod step;
