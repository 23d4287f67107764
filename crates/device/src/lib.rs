//! ubtrfs-device.
