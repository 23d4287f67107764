//! [`Error`]: the failure that volumes, trees, space and transactions report, and its errno.
//!
//! A failure of a commit, or of writing a log, reaches every caller that waited for the commit or the log. So an error
//! can be cloned, and every clone has the same kind, message and errno.

#![forbid(unsafe_code)]

mod helper;

use std::io;
use std::sync::Arc;

pub use helper::{Helper, side_by_side, start_helper};
pub use rustix::io::Errno;
use ubtrfs_format::{Corrupt, FormatError, Logical, RootId};

/// A failure of the engine below `fs`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Disk content contradicts the format.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// A device failed.
    #[error("{op} of {len_bytes} bytes at {offset} of {device} failed: {source}")]
    Io {
        /// The operation that failed, such as "read" or "flush".
        op: &'static str,
        /// The device, as it describes itself.
        device: String,
        /// Byte offset on the device.
        offset: u64,
        /// Requested bytes.
        len_bytes: u64,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// No space is left, even after reclaiming.
    #[error("no space left")]
    NoSpace,
    /// The filesystem is read-only.
    #[error("read-only filesystem: {reason}")]
    ReadOnly {
        /// The reason.
        reason: String,
    },
    /// A format feature that this program does not know or does not write.
    #[error("{what}; {hint}")]
    Unsupported {
        /// The feature.
        what: String,
        /// The next step for the user.
        hint: &'static str,
    },
    /// The request cannot be carried out as given, for example because a device is locked or is not btrfs, or because
    /// a subvolume does not exist.
    #[error("{what}; {hint}")]
    Refused {
        /// The reason.
        what: String,
        /// The next step for the user.
        hint: &'static str,
    },
    /// Another thread empties, moves, removes or writes a block group.
    #[error("block group {start} is already being {work}; wait until the operation ends, then try again")]
    BlockGroupBusy {
        /// The start of the block group.
        start: Logical,
        /// The current use of the block group: "emptied", "moved", "removed" or "written".
        work: &'static str,
    },
    /// The caller cancelled a long operation.
    #[error("cancelled")]
    Cancelled,
    /// An invariant of the engine does not hold.
    #[error("{what}; this is a bug of ubtrfs: please report it")]
    Bug {
        /// The broken invariant.
        what: String,
    },
    /// A change of quotas or quota groups that their present state does not allow.
    #[error("{what}")]
    Qgroup {
        /// The reason.
        what: String,
        /// The errno that Linux returns for this failure.
        errno: i32,
    },
    /// A limit of a quota group would be exceeded.
    #[error("disk quota exceeded")]
    QuotaExceeded,
    /// Writeback of dirty data, which the engine requests from the crate above by a callback, failed.
    #[error("{message}")]
    Callback {
        /// The errno of that failure.
        errno: i32,
        /// Its message.
        message: String,
    },
}

/// Result of the engine below `fs`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<FormatError> for Error {
    fn from(cause: FormatError) -> Self {
        Self::Corrupt(Corrupt::new(cause))
    }
}

impl Error {
    /// Makes an [`Error::Io`].
    pub fn io(op: &'static str, device: String, offset: u64, len_bytes: u64, source: io::Error) -> Self {
        Self::Io { op, device, offset, len_bytes, source: Arc::new(source) }
    }

    /// The error number that Linux's btrfs returns for this failure.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            // Linux reports a wrong checksum as EIO, and any other content that contradicts the format as EUCLEAN.
            Self::Corrupt(Corrupt { cause: FormatError::Checksum { .. }, .. }) | Self::Io { .. } => Errno::IO,
            Self::Corrupt(_) | Self::Bug { .. } => Errno::UCLEAN,
            Self::NoSpace => Errno::NOSPC,
            Self::ReadOnly { .. } => Errno::ROFS,
            Self::Unsupported { .. } => Errno::OPNOTSUPP,
            Self::Refused { .. } => Errno::INVAL,
            Self::BlockGroupBusy { .. } => Errno::BUSY,
            Self::Cancelled => Errno::CANCELED,
            Self::QuotaExceeded => Errno::DQUOT,
            Self::Callback { errno, .. } | Self::Qgroup { errno, .. } => return *errno,
        };
        errno.raw_os_error()
    }

    /// Adds the block's address to an error about corrupt content.
    #[must_use]
    pub fn at(self, bytenr: Logical) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.at(bytenr)),
            other => other,
        }
    }

    /// Adds the tree's id to an error about corrupt content.
    #[must_use]
    pub fn in_tree(self, tree: RootId) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.in_tree(tree)),
            other => other,
        }
    }

    /// Adds the slot to an error about corrupt content.
    #[must_use]
    pub fn in_slot(self, slot: usize) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.in_slot(slot)),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clone_has_the_kind_message_and_errno_of_its_original() {
        let checksum = FormatError::Checksum { what: "node", found: "1".to_owned(), computed: "2".to_owned() };
        let short = FormatError::Short { what: "item", need: 2, have: 1 };
        let full = io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error());
        let all = [
            (Error::from(checksum), Errno::IO),
            (Error::from(short), Errno::UCLEAN),
            (Error::io("write", "disk".to_owned(), 4096, 512, full), Errno::IO),
            (Error::NoSpace, Errno::NOSPC),
            (Error::ReadOnly { reason: "mounted read-only".to_owned() }, Errno::ROFS),
            (Error::Unsupported { what: "zoned".to_owned(), hint: "use Linux" }, Errno::OPNOTSUPP),
            (Error::Refused { what: "locked".to_owned(), hint: "close it" }, Errno::INVAL),
            (Error::Bug { what: "rounds never end".to_owned() }, Errno::UCLEAN),
            (Error::Callback { errno: Errno::STALE.raw_os_error(), message: "stale".to_owned() }, Errno::STALE),
        ];
        for (error, errno) in all {
            let clone = error.clone();
            assert_eq!(std::mem::discriminant(&clone), std::mem::discriminant(&error), "{error}");
            assert_eq!((clone.to_string(), clone.errno()), (error.to_string(), errno.raw_os_error()));
        }
    }
}
