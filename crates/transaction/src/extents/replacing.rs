//! [`Replacing`]: the replacement of a device that is not complete, which commits record in the device tree.
//!
//! ```text
//! none --begin--> running --suspend, at the end of a session--> suspended --end--> none
//!   |              |   ^                                           ^  |
//!   |              |   +---------------- resume -------------------|--+
//!   |              +------- end: it is complete, or given up ------|-----> none
//!   +--- found: an earlier session or Linux has begun it ----------+
//! ```
//!
//! Owns the state, under one lock. Under this lock, only locks of `volumes` are taken.
//!
//! Invariants:
//! - X1. A commit stores how much was copied before the commit flushed the new device (T6 of `volumes::twin`).
//! - X2. Without the new device, the next commit stores that nothing is copied, because the new device misses writes.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ubtrfs_error::Result;
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_volumes::{Volumes, unfinished_replacement};

/// A replacement that is not complete, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Replacing {
    unfinished: Mutex<Option<UnfinishedReplace>>,
    /// Whether a cancelled replacement is kept.
    is_kept: AtomicBool,
}

/// The progress of the copying.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyProgress {
    /// Everything below this offset of the device is copied.
    pub(crate) left: u64,
    /// Everything below this offset is copied or being copied.
    pub(crate) right: u64,
    /// Sectors without a good copy.
    pub(crate) uncorrectable_errors: u64,
}

/// Tells the progress of the copying.
pub(crate) type AskProgress = Box<dyn Fn() -> CopyProgress + Send + Sync>;

struct UnfinishedReplace {
    /// The item as it was when the replacement began, was found, or was suspended.
    item: DevReplaceItem,
    /// Whether the new device is present.
    has_target: bool,
    /// `None` while nothing is copied.
    progress: Option<AskProgress>,
    /// The item that the last commit stored.
    stored: Option<DevReplaceItem>,
}

/// A replacement that an earlier session or Linux has begun and that does not run now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspendedReplacement {
    /// The state of the replacement.
    pub item: DevReplaceItem,
    /// Whether the new device is present, so that the replacement can continue.
    pub has_target: bool,
}

impl UnfinishedReplace {
    fn now(&self) -> DevReplaceItem {
        let Some(progress) = self.progress.as_ref().map(|ask| ask()) else { return self.item.clone() };
        DevReplaceItem {
            cursor_left: progress.left,
            cursor_right: progress.right.max(progress.left),
            num_uncorrectable_read_errors: progress.uncorrectable_errors,
            ..self.item.clone()
        }
    }
}

impl fmt::Debug for UnfinishedReplace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnfinishedReplace").field("item", &self.now()).field("has_target", &self.has_target).finish()
    }
}

impl Replacing {
    /// Notes that a replacement has begun or was resumed. Commits record it from now on.
    pub(crate) fn run(&self, item: DevReplaceItem, progress: AskProgress) {
        let mut unfinished = self.unfinished.lock();
        let stored = unfinished.take().and_then(|before| before.stored);
        *unfinished = Some(UnfinishedReplace { item, has_target: true, progress: Some(progress), stored });
    }

    /// Notes a replacement that the device tree tells of.
    pub(crate) fn found(&self, found: SuspendedReplacement) {
        let SuspendedReplacement { mut item, has_target } = found;
        if !has_target {
            item.replace_state = DevReplaceItem::SUSPENDED;
        }
        *self.unfinished.lock() = Some(UnfinishedReplace { item, has_target, progress: None, stored: None });
    }

    /// Keeps replacements that are cancelled from now on.
    pub(crate) fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept.load(Ordering::Acquire)
    }

    /// Stops asking for progress. The replacement is stored as suspended since `stopped`, in seconds since 1970.
    pub(crate) fn suspend(&self, stopped: u64) {
        if let Some(unfinished) = &mut *self.unfinished.lock() {
            let item = unfinished.now();
            unfinished.item =
                DevReplaceItem { replace_state: DevReplaceItem::SUSPENDED, time_stopped: stopped, ..item };
            unfinished.progress = None;
        }
    }

    /// Notes that the running commit stores the end of the replacement.
    pub(crate) fn end(&self) {
        *self.unfinished.lock() = None;
    }

    /// The replacement that does not run and is not complete.
    pub(crate) fn suspended(&self) -> Option<SuspendedReplacement> {
        let unfinished = self.unfinished.lock();
        let suspended = unfinished.as_ref().filter(|unfinished| unfinished.progress.is_none())?;
        Some(SuspendedReplacement { item: suspended.item.clone(), has_target: suspended.has_target })
    }

    /// Fails if there is a replacement.
    pub(crate) fn check_none(&self) -> Result<()> {
        self.suspended().map_or(Ok(()), |suspended| Err(unfinished_replacement(Some(suspended.item.src_devid))))
    }

    /// Whether the next commit stores something new.
    pub(crate) fn has_news(&self) -> bool {
        self.unfinished.lock().as_ref().is_some_and(|unfinished| unfinished.stored.as_ref() != Some(&unfinished.now()))
    }

    /// The item that the running commit stores, if it changed (X1).
    pub(crate) fn record(&self, volumes: &Volumes) -> Option<DevReplaceItem> {
        let mut unfinished = self.unfinished.lock();
        let unfinished = unfinished.as_mut()?;
        let now = unfinished.now();
        let copied_to = match unfinished.has_target {
            true => volumes.record_copied(now.src_devid, now.cursor_left),
            false => 0,
        };
        let item = match copied_to < now.cursor_left {
            // X2, or the new device has failed.
            true => DevReplaceItem { cursor_left: 0, cursor_right: 0, ..now },
            false => now,
        };
        if !unfinished.has_target {
            unfinished.item = item.clone();
        }
        let has_changed = unfinished.stored.as_ref() != Some(&item);
        unfinished.stored = Some(item.clone());
        has_changed.then_some(item)
    }
}
