//! Relocation: the part inside of a commit that moves extents out of a block group.
//!
//! [`crate::moving::relocate`] has the whole sequence, for one block group.
//!
//! Trees are not copied as a whole: each step copies the blocks that move, and their ancestors. A block is copied
//! once for all the subvolumes that share it. So the cost of a relocation depends on the extents moved, not on the
//! number of snapshots.
//!
//! - [`step`]: the part inside a commit.
//! - [`closure`]: the blocks that a step copies.
//! - [`copy`]: the copies, and the references that they take over.
//! - [`extent_record`]: the record of an extent in the extent tree.

pub(crate) mod closure;
pub(crate) mod copy;
pub(crate) mod extent_record;
pub(crate) mod step;
