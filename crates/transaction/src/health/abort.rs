//! [`AbortState`]: whether the filesystem is read-only, and the reason. A failed commit makes the filesystem read-only
//! through [`AbortState::or_abort`].
//!
//! Owns the reason and the cause, each under a lock; no lock is taken under these locks.
//!
//! Invariants:
//! - I1. A filesystem that turned read-only stays read-only until it is closed; the first reason is kept.
//! - I2. The flags and the reason are set under one lock, so a reader that sees a flag finds the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ubtrfs_error::{Error, Result};
use ubtrfs_volumes::Volumes;

use crate::health::unwind::EngineId;

/// Whether a filesystem is read-only, and the reason.
#[derive(Debug)]
pub(crate) struct AbortState {
    id: EngineId,
    read_only: AtomicBool,
    /// Whether the filesystem turned read-only while it was open, so that changes since the last commit are lost.
    aborted: AtomicBool,
    reason: Mutex<Option<String>>,
    /// The failure that turned the filesystem read-only, for all callers that waited for the failed work.
    cause: Mutex<Option<Error>>,
}

impl AbortState {
    /// Makes the state of a filesystem that is read-only for this reason, or writable if the reason is `None`.
    pub(crate) fn new(reason: Option<String>) -> Self {
        Self {
            id: EngineId::new(),
            read_only: AtomicBool::new(reason.is_some()),
            aborted: AtomicBool::new(false),
            reason: Mutex::new(reason),
            cause: Mutex::default(),
        }
    }

    /// Registers this engine with the panic hook: a panic of a thread that entered the engine aborts the engine.
    pub(crate) fn register(self: &Arc<Self>) {
        self.id.register(Arc::downgrade(self));
    }

    /// The id of this engine in the process.
    pub(crate) fn engine_id(&self) -> EngineId {
        self.id
    }

    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// The reason why the filesystem is read-only, or `None` if it is writable.
    pub(crate) fn read_only(&self) -> Option<String> {
        if !self.read_only.load(Ordering::Acquire) {
            return None;
        }
        self.reason.lock().clone()
    }

    /// Declares that this thread works on the filesystem: from now on, a panic of this thread turns the filesystem
    /// read-only.
    pub(crate) fn enter(&self) {
        self.id.enter();
    }

    /// Checks that the filesystem is writable.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] with the reason.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.enter();
        match self.read_only() {
            None => Ok(()),
            Some(reason) => Err(Error::ReadOnly { reason }),
        }
    }

    /// Makes the filesystem read-only until it is closed: nothing is committed any more. The first reason is kept
    /// (I1).
    pub(crate) fn abort(&self, reason: String) {
        let mut kept = self.reason.lock();
        if !self.read_only.load(Ordering::Acquire) {
            debug_assert!(kept.is_none(), "I1: the first reason is lost");
            self.read_only.store(true, Ordering::Release);
            self.aborted.store(true, Ordering::Release);
            // Only now is the message true.
            tracing::error!("the filesystem is read-only until it is opened again: {reason}");
            *kept = Some(reason);
        }
    }

    /// Aborts because `what` failed. All callers that waited for the failed work get the same error from
    /// [`Self::check_not_failed`].
    pub(crate) fn fail(&self, what: &str, error: &Error) {
        self.cause.lock().get_or_insert_with(|| error.clone());
        self.abort(format!("{what} failed: {error}"));
    }

    /// Like [`Self::check_not_aborted`], but returns the original error. This check is for callers that passed
    /// [`Self::check_not_aborted`] and then waited for the commit lock.
    pub(crate) fn check_not_failed(&self) -> Result<()> {
        match self.cause.lock().clone().filter(|_| self.is_aborted()) {
            Some(cause) => Err(cause),
            None => self.check_not_aborted(),
        }
    }

    /// Fails after an abort. Without this check, a caller could believe its changes to be durable: the failed commit
    /// has taken the changes, so nothing seems left to commit.
    pub(crate) fn check_not_aborted(&self) -> Result<()> {
        if self.is_aborted() { self.check_writable() } else { Ok(()) }
    }

    /// Runs `work`, and makes the filesystem read-only if it fails or panics.
    pub(crate) fn or_abort(&self, what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut guard = AbortOnUnwind { state: self, what, armed: true };
        let result = work();
        guard.armed = false;
        if let Err(error) = &result {
            self.fail(what, error);
        }
        result
    }

    /// Makes the filesystem read-only if another program wrote a superblock. Does the same if a device lost writes, or
    /// its image file was removed, replaced or truncated, and the filesystem does not survive without this device.
    /// Called before each write; a recent check is not repeated.
    pub(crate) fn check_still_ours(&self, volumes: &Volumes) -> Result<()> {
        if volumes.are_superblocks_checked_recently() {
            return Ok(());
        }
        self.or_abort("write", || volumes.check_superblocks_are_ours())
    }
}

/// Makes the filesystem read-only if the work panics.
struct AbortOnUnwind<'s> {
    state: &'s AbortState,
    what: &'s str,
    armed: bool,
}

impl Drop for AbortOnUnwind<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.state.abort(format!("{} panicked", self.what));
        }
    }
}
