//! ubtrfs-mkfs.
