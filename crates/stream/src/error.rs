//! [`StreamError`]: a problem of a stream, with the position of the command that has the problem.

use std::fmt;
use std::io;

use crate::command::{Attribute, CommandKind, StreamVersion};
use crate::{MAX_COMMAND_BYTES, path::PathProblem};

/// The place of a command in the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The number of the command in the input, from 1; 0 for a stream's header.
    pub index: u64,
    /// Offset of the command's first byte in the input.
    pub offset: u64,
    /// Kind of the command, if it is known.
    pub kind: Option<CommandKind>,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.index, self.kind) {
            (0, _) => write!(f, "header at byte {}", self.offset),
            (index, Some(kind)) => write!(f, "command {index} ({kind}) at byte {}", self.offset),
            (index, None) => write!(f, "command {index} at byte {}", self.offset),
        }
    }
}

/// A stream that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{position}: {problem}")]
pub struct StreamError {
    /// The place of the problem.
    pub position: Position,
    /// The problem.
    pub problem: StreamProblem,
}

/// The reason of a [`StreamError`].
#[derive(Debug, thiserror::Error)]
pub enum StreamProblem {
    /// The input could not be read.
    #[error("cannot read the stream: {0}")]
    Io(io::Error),
    /// The input does not start with the magic.
    #[error("this is not a send stream (it does not start with 'btrfs-stream')")]
    NotAStream,
    /// The input is empty.
    #[error("the stream is empty")]
    Empty,
    /// The stream has a version that this program does not know.
    #[error("version {0} of the send stream is not supported; versions 1 to 3 are")]
    Version(u32),
    /// The input ends within a command or a header.
    #[error("the stream ends here, {missing} bytes early")]
    Truncated {
        /// Bytes that are missing.
        missing: u64,
    },
    /// The input ends where a command was expected.
    #[error("the stream ends without an end command")]
    NoEnd,
    /// A command claims to be longer than [`MAX_COMMAND_BYTES`].
    #[error("a length of {0} bytes is beyond the limit of {MAX_COMMAND_BYTES}")]
    TooLong(u64),
    /// The checksum does not match.
    #[error("bad crc: the command states {found:#010x}, its bytes have {computed:#010x}; the stream was damaged")]
    Crc {
        /// The checksum stated in the command.
        found: u32,
        /// The checksum computed from the bytes of the command.
        computed: u32,
    },
    /// No command has this number.
    #[error("unknown command number {0}")]
    UnknownCommand(u16),
    /// The stream's version does not have this command.
    #[error("version {version} of the send stream does not have this command")]
    NotInVersion {
        /// The stream's version.
        version: StreamVersion,
    },
    /// An attribute is missing.
    #[error("attribute {0} is missing")]
    Missing(Attribute),
    /// An attribute occurs twice.
    #[error("attribute {0} occurs twice")]
    Twice(Attribute),
    /// An attribute has a length that it cannot have.
    #[error("attribute {attribute} has {found} bytes, expected {expected}")]
    Length {
        /// The attribute.
        attribute: Attribute,
        /// The length of the attribute.
        found: usize,
        /// The length that the attribute's type requires.
        expected: usize,
    },
    /// An attribute has a value that it cannot have.
    #[error("attribute {attribute} is {value}, {expected}")]
    Value {
        /// The attribute.
        attribute: Attribute,
        /// The value.
        value: u64,
        /// The allowed values, as a phrase.
        expected: &'static str,
    },
    /// An attribute does not fit into the command.
    #[error("an attribute (number {number}) reaches beyond the end of the command")]
    AttributeBounds {
        /// The attribute's number.
        number: u16,
    },
    /// A path that a receiver must not follow.
    #[error("{0}")]
    Path(#[from] PathProblem),
}
