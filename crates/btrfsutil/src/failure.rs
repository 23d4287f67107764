//! The results of the library: the numbers of `enum btrfs_util_error`, and their texts.

use std::ffi::CStr;

use rustix::io::Errno;

/// A result of the library, with the number that C programs see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum UtilError {
    StopIteration = 1,
    NoMemory,
    InvalidArgument,
    NotBtrfs,
    NotSubvolume,
    SubvolumeNotFound,
    OpenFailed,
    RmdirFailed,
    StatFailed = 10,
    StatfsFailed,
    SearchFailed,
    InoLookupFailed,
    SubvolGetflagsFailed,
    SubvolSetflagsFailed,
    SubvolCreateFailed,
    SnapDestroyFailed = 18,
    DefaultSubvolFailed,
    SyncFailed,
    StartSyncFailed,
    WaitSyncFailed,
    GetSubvolInfoFailed,
    GetSubvolRootrefFailed,
    InoLookupUserFailed,
    FsInfoFailed,
}

/// The result of a failed call, and the value that `errno` gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UtilFailure {
    pub(crate) error: UtilError,
    pub(crate) errno: Errno,
}

pub(crate) type Result<T> = std::result::Result<T, UtilFailure>;

impl UtilError {
    /// Makes the failure with this number.
    pub(crate) fn with(self, errno: Errno) -> UtilFailure {
        UtilFailure { error: self, errno }
    }

    /// The text of a number, in the original's words; `None` for a number that no result has.
    pub(crate) fn text(number: u32) -> Option<&'static CStr> {
        TEXTS.get(usize::try_from(number).ok()?).copied()
    }
}

impl UtilFailure {
    /// An argument is wrong.
    pub(crate) fn invalid() -> Self {
        UtilError::InvalidArgument.with(Errno::INVAL)
    }
}

const TEXTS: [&CStr; 27] = [
    c"Success",
    c"Stop iteration",
    c"Cannot allocate memory",
    c"Invalid argument",
    c"Not a Btrfs filesystem",
    c"Not a Btrfs subvolume",
    c"Subvolume not found",
    c"Could not open",
    c"Could not rmdir",
    c"Could not unlink",
    c"Could not stat",
    c"Could not statfs",
    c"Could not search B-tree",
    c"Could not lookup inode",
    c"Could not get subvolume flags",
    c"Could not set subvolume flags",
    c"Could not create subvolume",
    c"Could not create snapshot",
    c"Could not destroy subvolume/snapshot",
    c"Could not set default subvolume",
    c"Could not sync filesystem",
    c"Could not start filesystem sync",
    c"Could not wait for filesystem sync",
    c"Could not get subvolume information with BTRFS_IOC_GET_SUBVOL_INFO",
    c"Could not get rootref information with BTRFS_IOC_GET_SUBVOL_ROOTREF",
    c"Could not resolve subvolume path with BTRFS_IOC_INO_LOOKUP_USER",
    c"Could not get filesystem information",
];
