//! [`ReceiveError`]: a failure, the command of the stream at which it happened, and the command's path.

use std::fmt;

use rustix::io::Errno;
use ubtrfs_stream::{PathProblem, Position, StreamError, StreamProblem};
use uuid::Uuid;

use crate::Error;

/// A stream that could not be received, or a command that could not be applied.
#[derive(Debug)]
pub struct ReceiveError {
    /// The failed command; `None` if the failure has another cause.
    pub position: Option<Position>,
    /// The path of the command; empty if the command has no path.
    pub path: Vec<u8>,
    /// What is wrong.
    pub problem: Box<ReceiveProblem>,
}

/// The reason of a [`ReceiveError`].
#[derive(Debug, thiserror::Error)]
pub enum ReceiveProblem {
    /// The stream is damaged.
    #[error("{0}")]
    Stream(StreamProblem),
    /// The filesystem refuses the command.
    #[error("{0}")]
    Fs(#[from] Error),
    /// The path is not allowed in a stream.
    #[error("{0}")]
    Path(#[from] PathProblem),
    /// A name on the path is a symbolic link or another subvolume.
    #[error("'{}' is {what}; a stream may not lead through it", .name.escape_ascii())]
    NotFollowed {
        /// The name.
        name: Vec<u8>,
        /// The kind of target that the name leads to.
        what: &'static str,
    },
    /// No subvolume on this filesystem is the parent of the sent subvolume.
    #[error(
        "the parent subvolume is not here: no subvolume has the received UUID or UUID {uuid} (transaction {ctransid} of the sender); receive the parent first, or send without it"
    )]
    NoParent {
        /// The parent's UUID at the sender.
        uuid: Uuid,
        /// The parent's transid at the sender.
        ctransid: u64,
    },
    /// No subvolume on this filesystem is the clone source.
    #[error(
        "the clone source is not here: no subvolume has the received UUID or UUID {uuid} (transaction {ctransid} of the sender); receive it first, or send without it"
    )]
    NoCloneSource {
        /// The clone source's UUID at the sender.
        uuid: Uuid,
        /// The clone source's transid at the sender.
        ctransid: u64,
    },
    /// The parent or clone source is writable, so it may have changed since it was received or sent.
    #[error(
        "the subvolume {uuid} is writable, so it may have changed since it was sent; it cannot serve as parent or clone source"
    )]
    Writable {
        /// The subvolume's UUID at the sender.
        uuid: Uuid,
    },
    /// The UUID tree's item for the received UUID is full.
    #[error("too many subvolumes have the received UUID {uuid}; delete some first: ubtrfs subvolume delete")]
    TooMany {
        /// UUID of the subvolume that is sent.
        uuid: Uuid,
    },
    /// The name is taken.
    #[error("'{}' exists already", .0.escape_ascii())]
    Exists(Vec<u8>),
    /// Another receive is making the subvolume that has the name.
    #[error("'{}' is being received by another command", .0.escape_ascii())]
    InProgress(Vec<u8>),
    /// The name belongs to a subvolume whose receive was interrupted.
    #[error("'{}' is left from a receive that did not end; {hint}", .name.escape_ascii())]
    Incomplete {
        /// The name.
        name: Vec<u8>,
        /// The next step for the user.
        hint: &'static str,
    },
    /// Verification failed: data or attributes on the devices differ from the stream.
    #[error("'{}' differs from the stream when it is read again: {what}", .path.escape_ascii())]
    Differs {
        /// The path.
        path: Vec<u8>,
        /// The part that differs.
        what: &'static str,
    },
    /// The command needs something that this program does not support.
    #[error("{0}")]
    NotSupported(String),
    /// The command is not allowed at this place of the stream.
    #[error("{0}")]
    Order(&'static str),
}

impl ReceiveProblem {
    /// The Linux error number.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::Fs(error) => return error.errno(),
            Self::Stream(StreamProblem::Io(error)) => Errno::from_io_error(error).unwrap_or(Errno::IO),
            Self::Stream(_) => Errno::BADMSG,
            Self::Differs { .. } => Errno::IO,
            Self::Path(_) | Self::Order(_) => Errno::INVAL,
            Self::NotFollowed { .. } => Errno::LOOP,
            Self::NoParent { .. } | Self::NoCloneSource { .. } => Errno::NOENT,
            Self::InProgress(_) => Errno::BUSY,
            Self::Writable { .. } => Errno::STALE,
            Self::TooMany { .. } => Errno::OVERFLOW,
            Self::Exists(_) | Self::Incomplete { .. } => Errno::EXIST,
            Self::NotSupported(_) => Errno::OPNOTSUPP,
        };
        errno.raw_os_error()
    }
}

impl fmt::Display for ReceiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(position) = &self.position {
            write!(f, "{position}: ")?;
        }
        // The messages about unusable paths and taken names contain the path already.
        let names_path = matches!(
            *self.problem,
            ReceiveProblem::Path(_)
                | ReceiveProblem::Exists(_)
                | ReceiveProblem::InProgress(_)
                | ReceiveProblem::Incomplete { .. }
        );
        if !self.path.is_empty() && !names_path {
            write!(f, "'{}': ", self.path.get(..MOST_SHOWN).unwrap_or(&self.path).escape_ascii())?;
        }
        self.problem.fmt(f)
    }
}

impl std::error::Error for ReceiveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.problem)
    }
}

impl From<StreamError> for ReceiveError {
    fn from(error: StreamError) -> Self {
        Self {
            position: Some(error.position),
            path: Vec::new(),
            problem: Box::new(ReceiveProblem::Stream(error.problem)),
        }
    }
}

impl From<Error> for ReceiveError {
    fn from(error: Error) -> Self {
        Self { position: None, path: Vec::new(), problem: Box::new(error.into()) }
    }
}

impl ReceiveError {
    /// Whether the caller cancelled the work.
    pub fn is_cancelled(&self) -> bool {
        matches!(*self.problem, ReceiveProblem::Fs(Error::Engine(ubtrfs_error::Error::Cancelled)))
    }

    /// Whether later commands of the stream cannot be applied either: the stream or the filesystem is damaged, the
    /// filesystem takes no more changes, or the receive was cancelled.
    pub(crate) fn ends_stream(&self) -> bool {
        let no_filesystem = |error: &Error| {
            use ubtrfs_error::Error as Engine;
            let ends =
                |error: &Engine| matches!(error, Engine::Cancelled | Engine::ReadOnly { .. } | Engine::Corrupt(_));
            matches!(error, Error::Closed | Error::ReadOnlyMount)
                || matches!(error, Error::Engine(error) if ends(error))
        };
        match &*self.problem {
            ReceiveProblem::Stream(_) => true,
            ReceiveProblem::Fs(error) => no_filesystem(error),
            _ => false,
        }
    }
}

/// Maximum number of bytes of a path that a message shows.
const MOST_SHOWN: usize = 300;
