//! ubtrfs-fuse.
