//! Devices and block groups: sizes of devices, use of their space, and moving block groups on the devices.
//!
//! This folder only calls the engine. The decisions are in crate `transaction`: `extents/device_size.rs`,
//! `extents/chunk_migration.rs` and `extents/trim.rs`.

mod block_group;
pub(crate) mod size;
pub(crate) mod space;
