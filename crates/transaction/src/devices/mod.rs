//! Work on whole devices, in steps that are each a part of one commit.
//!
//! - `add`, `remove`: devices that join the filesystem, and devices that leave it.
//! - `replace`: devices that take the place of others.
//! - `resync`: bringing a device up to date that missed commits.
//! - `rewrite_id`: changing the id of an unmounted filesystem.
//! - `scrub`: checking everything on a device.
//! - `size`: the bytes that the filesystem uses on a device.
//! - `sprout`: making a filesystem on a seed.
//! - `trim`: discarding free space.

pub(crate) mod add;
pub(crate) mod remove;
pub(crate) mod replace;
pub(crate) mod resync;
pub(crate) mod rewrite_id;
pub(crate) mod scrub;
pub(crate) mod size;
pub(crate) mod sprout;
pub(crate) mod trim;
