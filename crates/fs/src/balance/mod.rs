//! Balance: moving block groups that filters select, to compact, convert or drain them.
//!
//! - [`run`]: start, resume, pause, cancel; how each block group is moved.
//! - [`filter`]: which block groups are taken.
//! - [`state`]: whether a balance runs or is paused, its counts, and requests to stop it.
//! - [`reclaim`]: emptying nearly empty block groups, and discarding, in the background.
//! - [`relocate`]: emptying one block group.

pub(crate) mod filter;
pub(crate) mod reclaim;
pub(crate) mod relocate;
pub(crate) mod run;
pub(crate) mod state;
