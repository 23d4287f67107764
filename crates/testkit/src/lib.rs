//! ubtrfs-testkit.
