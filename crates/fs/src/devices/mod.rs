//! Devices and block groups: sizes of devices, use of their space, scrubs, and moving block groups on the devices.
//!
//! This folder only calls the engine. The decisions are in crate `transaction`: `extents/device_size.rs`,
//! `extents/chunk_migration.rs`, `extents/trim.rs`
//! and `devices/scrub.rs`.

mod block_group;
pub(crate) mod scrub;
pub(crate) mod size;
pub(crate) mod space;
