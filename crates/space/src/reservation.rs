//! Promises of space: tokens that hold bytes of a kind until they are dropped.
//!
//! I1. The bytes of a token are counted in `may_use` of its kind, from the grant to the drop, once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::SpaceKind;
use crate::space::Inner;

/// Bytes promised to its holder. Dropping it gives them back.
#[must_use = "a reservation that is dropped at once holds nothing"]
pub struct Reservation {
    inner: Arc<Inner>,
    kind: SpaceKind,
    bytes: u64,
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
    /// Stands for bytes that were added to `may_use` just now.
    pub(crate) fn new(inner: Arc<Inner>, kind: SpaceKind, bytes: u64) -> Self {
        inner.tokens().fetch_add(1, Ordering::Relaxed);
        Self { inner, kind, bytes }
    }

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
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self::new(Arc::clone(&self.inner), self.kind, bytes)
    }

    /// Takes over another token of the same kind.
    pub fn merge(&mut self, mut other: Reservation) {
        assert!(self.kind == other.kind && Arc::ptr_eq(&self.inner, &other.inner), "I1: tokens of one kind are merged");
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Takes over up to `bytes` of another token of the same kind.
    pub fn take_from(&mut self, other: &mut Reservation, bytes: u64) {
        assert!(self.kind == other.kind && Arc::ptr_eq(&self.inner, &other.inner), "I1: tokens of one kind are merged");
        let bytes = bytes.min(other.bytes);
        other.bytes -= bytes;
        self.bytes += bytes;
    }

    /// Gives back up to `bytes` of it: they were allocated, or are not needed. Returns how much that was.
    pub fn consume(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        if bytes > 0 {
            self.inner.state(self.kind).lock().unreserve(bytes);
        }
        bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.consume(u64::MAX);
        self.inner.tokens().fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("kind", &self.kind).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
