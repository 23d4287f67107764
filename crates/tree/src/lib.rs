//! ubtrfs-tree.
