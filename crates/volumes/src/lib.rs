//! ubtrfs-volumes.
