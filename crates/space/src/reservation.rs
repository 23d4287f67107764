//! Reservations: tokens that hold bytes of a kind of space until they are dropped.
//!
//! Invariants:
//! - I1. `may_use` of a kind counts the bytes of each live token of that kind once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::SpaceKind;
use crate::space::SharedSpace;

/// A token for reserved bytes. Dropping the token gives the bytes back.
#[must_use = "a reservation that is dropped at once holds nothing"]
pub struct Reservation {
    inner: Arc<SharedSpace>,
    kind: SpaceKind,
    bytes: u64,
}

/// The reason why a reservation was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Requested kind.
    pub kind: SpaceKind,
    /// Requested bytes.
    pub want_bytes: u64,
    /// Requested bytes that are not available.
    pub missing_bytes: u64,
    /// Bytes of this kind that a commit would free.
    pub pinned_bytes: u64,
    /// Bytes of this kind held by other reservations. Most of these bytes usually become available when dirty data is
    /// written out and a commit ends.
    pub may_use_bytes: u64,
    /// Logical bytes that new chunks of this kind could add.
    pub unallocated_bytes: u64,
}

impl Reservation {
    /// Makes a token for bytes that the caller has just added to `may_use`.
    pub(crate) fn new(inner: Arc<SharedSpace>, kind: SpaceKind, bytes: u64) -> Self {
        inner.tokens().fetch_add(1, Ordering::Relaxed);
        Self { inner, kind, bytes }
    }

    /// The kind of space.
    pub fn kind(&self) -> SpaceKind {
        self.kind
    }

    /// The reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves up to `bytes` into a new reservation.
    pub fn split(&mut self, bytes: u64) -> Reservation {
        let bytes = self.take(bytes);
        Self::new(Arc::clone(&self.inner), self.kind, bytes)
    }

    /// Adds all bytes of another reservation of equal kind.
    pub fn merge(&mut self, mut other: Reservation) {
        self.take_from(&mut other, u64::MAX);
    }

    /// Moves up to `bytes` from another reservation of equal kind into this one.
    pub fn take_from(&mut self, other: &mut Reservation, bytes: u64) {
        assert!(self.kind == other.kind && Arc::ptr_eq(&self.inner, &other.inner), "I1: both tokens have equal kinds");
        self.bytes = self.bytes.checked_add(other.take(bytes)).expect("I1: `may_use` is the sum of all tokens");
    }

    /// Adds bytes to this token. The caller has just added these bytes to `may_use`.
    pub(crate) fn grow(&mut self, bytes: u64) {
        self.bytes = self.bytes.checked_add(bytes).expect("I1: `may_use` is the sum of all tokens");
    }

    /// Gives back up to `bytes`, because they were allocated or are not needed. Returns the number of bytes given back.
    pub fn consume(&mut self, bytes: u64) -> u64 {
        let bytes = self.take(bytes);
        if bytes > 0 {
            self.inner.state(self.kind).lock().unreserve(bytes);
        }
        bytes
    }

    /// Removes up to `bytes` from this token. The caller must add the removed bytes to another token, or subtract them
    /// from `may_use`.
    fn take(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.min(self.bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
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
