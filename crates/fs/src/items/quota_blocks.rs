//! Number of tree blocks for which an operation must find room within the limits of its subvolume's quota groups.
//!
//! Each number is the number that Linux uses, so that Linux and ubtrfs refuse the operation at the same limit
//! (`tests/it/quota_limits.rs` compares them). An operation adds fewer blocks.

/// A new file, directory or device node, with its name.
pub(crate) const CREATE: u64 = 5;
/// A new symbolic link.
pub(crate) const SYMLINK: u64 = 6;
/// A new file without a name.
pub(crate) const TMPFILE: u64 = 3;
/// A new name of a file.
pub(crate) const LINK: u64 = 5;
/// A rename within a directory to a new name.
pub(crate) const RENAME: u64 = 8;
/// In addition, if two directories are involved.
pub(crate) const RENAME_OTHER_DIR: u64 = 1;
/// In addition, if the rename replaces an inode.
pub(crate) const RENAME_REPLACED: u64 = 5;
/// In addition, for a whiteout.
pub(crate) const RENAME_WHITEOUT: u64 = 4;
/// An exchange of two names in a directory.
pub(crate) const EXCHANGE: u64 = 15;
/// A new value of an extended attribute.
pub(crate) const SETXATTR: u64 = 2;
/// A change of mode, owner or times.
pub(crate) const SETATTR: u64 = 1;
/// A change of the flags that chattr sets.
pub(crate) const SET_FLAGS: u64 = 3;
/// The name of a new subvolume or snapshot, in the subvolume that gets the name.
pub(crate) const SUBVOLUME: u64 = 3;
