//! What can be wrong with bytes from a disk, and the error that the engine below `fs` fails with.

use std::{fmt, io};

use crate::ids::{Logical, RootId};
use crate::key::Key;

/// Why bytes are not what the format says. Carries the field and the value found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A structure is cut off.
    #[error("{what} needs {need} bytes and has {have}")]
    Short {
        /// The structure.
        what: &'static str,
        /// Bytes that it takes.
        need: usize,
        /// Bytes that were there.
        have: usize,
    },
    /// A field holds a value that it cannot have.
    #[error("{what}: {field} is {value:#x}, {expected}")]
    Value {
        /// The structure.
        what: &'static str,
        /// Its field.
        field: &'static str,
        /// What was found.
        value: u64,
        /// What is allowed, as a phrase: "expected a multiple of the sector size".
        expected: &'static str,
    },
    /// A field differs from what refers to it.
    #[error("{what}: {field} is {found}, expected {expected}")]
    Mismatch {
        /// The structure.
        what: &'static str,
        /// Its field.
        field: &'static str,
        /// What was found.
        found: Box<str>,
        /// What it should be.
        expected: Box<str>,
    },
    /// Keys do not ascend.
    #[error("key {key} follows key {prev}, expected keys to ascend")]
    KeyOrder {
        /// The key before.
        prev: Key,
        /// The key that is not above it.
        key: Key,
    },
    /// A checksum does not match.
    #[error("{what}: checksum is {found}, computed {computed}")]
    Checksum {
        /// The structure.
        what: &'static str,
        /// Stored, in hex.
        found: String,
        /// Computed, in hex.
        computed: String,
    },
}

/// Disk content that contradicts the format, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Corrupt {
    /// The tree it belongs to, where known.
    pub tree: Option<RootId>,
    /// The block, or the start of the data.
    pub bytenr: Option<Logical>,
    /// The slot inside the block.
    pub slot: Option<usize>,
    /// What is wrong.
    #[source]
    pub cause: FormatError,
}

impl Corrupt {
    /// Wrong content whose place is not known yet.
    pub fn new(cause: FormatError) -> Self {
        Self { tree: None, bytenr: None, slot: None, cause }
    }

    /// The same, in this tree.
    pub fn in_tree(mut self, tree: RootId) -> Self {
        self.tree.get_or_insert(tree);
        self
    }

    /// The same, in this block.
    pub fn at(mut self, bytenr: Logical) -> Self {
        self.bytenr.get_or_insert(bytenr);
        self
    }

    /// The same, in this slot.
    pub fn in_slot(mut self, slot: usize) -> Self {
        self.slot.get_or_insert(slot);
        self
    }
}

impl From<FormatError> for Corrupt {
    fn from(cause: FormatError) -> Self {
        Self::new(cause)
    }
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("corrupt")?;
        if let Some(tree) = self.tree {
            write!(f, " tree {tree}")?;
        }
        if let Some(bytenr) = self.bytenr {
            write!(f, " bytenr {bytenr}")?;
        }
        if let Some(slot) = self.slot {
            write!(f, " slot {slot}")?;
        }
        write!(f, ": {}", self.cause)
    }
}

/// What device, volumes, tree, space and transaction fail with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Disk content contradicts the format.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// A device failed.
    #[error("{op} of {len_bytes} bytes at {offset} of {device} failed: {source}")]
    Io {
        /// "read", "write", "flush", "discard", "open".
        op: &'static str,
        /// The device, as it describes itself.
        device: String,
        /// Byte offset on the device.
        offset: u64,
        /// Bytes asked for.
        len_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// No space is left, after everything that could be reclaimed was.
    #[error("no space left")]
    NoSpace,
    /// The filesystem does not take changes.
    #[error("read-only filesystem: {reason}")]
    ReadOnly {
        /// Why.
        reason: String,
    },
    /// A format feature that this program does not know or does not write yet.
    #[error("{what}; {hint}")]
    Unsupported {
        /// What was met.
        what: String,
        /// What to do next.
        hint: &'static str,
    },
    /// The device or file cannot be used as asked: missing, locked, mounted, not btrfs.
    #[error("{what}; {hint}")]
    Refused {
        /// What was met.
        what: String,
        /// What to do next.
        hint: &'static str,
    },
}

/// For all who wait for one result. The copy of a system's error has its number, or else its kind and text.
impl Clone for Error {
    fn clone(&self) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.clone()),
            Self::Io { op, device, offset, len_bytes, source } => {
                let source = match source.raw_os_error() {
                    Some(number) => io::Error::from_raw_os_error(number),
                    None => io::Error::new(source.kind(), source.to_string()),
                };
                Self::Io { op, device: device.clone(), offset: *offset, len_bytes: *len_bytes, source }
            }
            Self::NoSpace => Self::NoSpace,
            Self::ReadOnly { reason } => Self::ReadOnly { reason: reason.clone() },
            Self::Unsupported { what, hint } => Self::Unsupported { what: what.clone(), hint },
            Self::Refused { what, hint } => Self::Refused { what: what.clone(), hint },
        }
    }
}

impl From<FormatError> for Error {
    fn from(cause: FormatError) -> Self {
        Self::Corrupt(Corrupt::new(cause))
    }
}

impl Error {
    /// Adds the block to an error about corrupt content.
    pub fn at(self, bytenr: Logical) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.at(bytenr)),
            other => other,
        }
    }

    /// Adds the tree to an error about corrupt content.
    pub fn in_tree(self, tree: RootId) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.in_tree(tree)),
            other => other,
        }
    }

    /// Adds the slot to an error about corrupt content.
    pub fn in_slot(self, slot: usize) -> Self {
        match self {
            Self::Corrupt(corrupt) => Self::Corrupt(corrupt.in_slot(slot)),
            other => other,
        }
    }
}

/// Result of the engine below `fs`.
pub type Result<T, E = Error> = std::result::Result<T, E>;
