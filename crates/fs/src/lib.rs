//! ubtrfs-fs.
