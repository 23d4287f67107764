//! Balance: moving block groups that filters take, to compact, convert or drain them.
//!
//! - [`run`]: start, resume, pause, cancel; how each block group is moved.
//! - [`filter`]: which block groups are taken.
//! - [`state`]: whether a balance runs, and what others ask of it.
//! - [`relocate`]: emptying one block group, and the waiting that the engine asks for.

pub(crate) mod filter;
pub(crate) mod relocate;
pub(crate) mod run;
pub(crate) mod state;
