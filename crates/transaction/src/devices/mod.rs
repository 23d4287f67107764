//! Work on whole devices, in steps that are each a part of one commit.
//!
//! - `resync`: bringing a device up to date that missed commits.

pub(crate) mod resync;
