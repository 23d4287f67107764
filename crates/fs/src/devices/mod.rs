//! Devices and block groups: sizes of devices, use of their space, and moving block groups on the devices.

mod block_group;
mod size;
pub(crate) mod space;
