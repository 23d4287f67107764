//! Devices and block groups: sizes of devices, how their space is used, and moving block groups as they are.

mod block_group;
mod size;
pub(crate) mod space;
