//! Work on whole devices, in steps that are each a part of one commit.
//!
//! - `resync`: bringing a device up to date that missed commits.
//! - `scrub`: checking everything on a device.

pub(crate) mod resync;
pub(crate) mod scrub;
