//! ubtrfs-space.
