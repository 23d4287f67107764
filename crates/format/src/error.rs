//! Errors about bytes from a disk: [`FormatError`] says what is wrong, [`Corrupt`] says where.

use std::fmt;

use crate::ids::{Logical, RootId};
use crate::key::Key;

/// A violation of the disk format. Says what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A structure is cut off.
    #[error("{what} needs {need} bytes and has {have}")]
    Short {
        /// The structure.
        what: &'static str,
        /// Number of bytes that the structure needs.
        need: usize,
        /// Bytes available.
        have: usize,
    },
    /// A field holds a value that it cannot have.
    #[error("{what}: {field} is {value:#x}, {expected}")]
    Value {
        /// The structure.
        what: &'static str,
        /// Its field.
        field: &'static str,
        /// The value found.
        value: u64,
        /// The allowed values, as a phrase: "expected a multiple of the sector size".
        expected: &'static str,
    },
    /// A field differs from the value that the pointer to the structure promises, or that the superblock requires.
    #[error("{what}: {field} is {found}, expected {expected}")]
    Mismatch {
        /// The structure.
        what: &'static str,
        /// Its field.
        field: &'static str,
        /// The value found.
        found: Box<str>,
        /// The expected value.
        expected: Box<str>,
    },
    /// Keys do not ascend.
    #[error("key {key} follows key {prev}, expected keys to ascend")]
    KeyOrder {
        /// The preceding key.
        prev: Key,
        /// The key that is not greater than the preceding key.
        key: Key,
    },
    /// A checksum does not match.
    #[error("{what}: checksum is {found}, computed {computed}")]
    Checksum {
        /// The structure.
        what: &'static str,
        /// The stored checksum, in hex.
        found: String,
        /// The computed checksum, in hex.
        computed: String,
    },
}

impl FormatError {
    /// Whether the content has another generation than its pointer promises: a device missed the write of it.
    pub fn is_generation(&self) -> bool {
        matches!(self, Self::Mismatch { field: "generation", .. } | Self::Value { field: "generation", .. })
    }
}

/// Disk content that contradicts the format, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Corrupt {
    /// The tree that the block belongs to, if known.
    pub tree: Option<RootId>,
    /// The address of the block or of the data.
    pub bytenr: Option<Logical>,
    /// The slot inside the block.
    pub slot: Option<usize>,
    /// The violation.
    #[source]
    pub cause: FormatError,
}

impl Corrupt {
    /// An error whose place is not known yet.
    pub fn new(cause: FormatError) -> Self {
        Self { tree: None, bytenr: None, slot: None, cause }
    }

    /// Sets the tree, if none is set.
    pub fn in_tree(mut self, tree: RootId) -> Self {
        self.tree.get_or_insert(tree);
        self
    }

    /// Sets the block's address, if none is set.
    pub fn at(mut self, bytenr: Logical) -> Self {
        self.bytenr.get_or_insert(bytenr);
        self
    }

    /// Sets the slot, if none is set.
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
