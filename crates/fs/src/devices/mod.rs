//! Devices and block groups: adding, removing and replacing devices, their sizes, use of their space, scrubs, and moving
//! block groups on the devices.
//!
//! This folder only calls the engine. The decisions are in crate `transaction`: `devices` and `moving/migrate.rs`.

mod block_group;
mod change;
pub(crate) mod exclusive;
pub(crate) mod jobs;
pub(crate) mod replace;
pub(crate) mod scrub;
pub(crate) mod size;
pub(crate) mod space;
