//! Devices and block groups: sizes of devices, use of their space, and moving block groups on the devices.
//!
//! These are calls of the engine: crate `transaction` decides in `extents/device_size.rs`, `extents/chunk_migration.rs`
//! and `extents/trim.rs`.

mod block_group;
mod size;
pub(crate) mod space;
