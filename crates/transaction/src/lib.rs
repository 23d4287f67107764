//! ubtrfs-transaction.
