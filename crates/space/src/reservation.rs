//! Promises of space: tokens that hold bytes of a kind until they are dropped.

#![allow(clippy::todo)]

use std::fmt;
use std::sync::Arc;

use crate::SpaceKind;
use crate::space_info::Inner;

/// Bytes promised to its holder. Dropping it gives them back.
#[must_use = "a reservation that is dropped at once holds nothing"]
pub struct Reservation {
    pub(crate) inner: Arc<Inner>,
    pub(crate) kind: SpaceKind,
    pub(crate) bytes: u64,
}

/// Why a reservation was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What was asked for.
    pub kind: SpaceKind,
    /// How much was asked for.
    pub want_bytes: u64,
    /// How much of it is not there.
    pub missing_bytes: u64,
    /// Bytes of this kind that a commit would make free.
    pub pinned_bytes: u64,
    /// Bytes promised to others of this kind; flushing them usually frees most.
    pub may_use_bytes: u64,
    /// Logical bytes that new chunks of this kind could add.
    pub unallocated_bytes: u64,
}

impl Reservation {
    /// What it is for.
    pub fn kind(&self) -> SpaceKind {
        self.kind
    }

    /// How much it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves up to `bytes` of it into another token.
    pub fn split(&mut self, bytes: u64) -> Reservation {
        let _ = bytes;
        todo!()
    }

    /// Takes over another token of the same kind.
    pub fn merge(&mut self, other: Reservation) {
        let _ = other;
        todo!()
    }

    /// Gives back up to `bytes` of it: they were allocated, or are not needed. Returns how much that was.
    pub fn consume(&mut self, bytes: u64) -> u64 {
        let _ = bytes;
        todo!()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("kind", &self.kind).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
