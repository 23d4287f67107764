//! Devices and block groups: sizes of devices, and moving block groups as they are.

mod block_group;
mod size;
