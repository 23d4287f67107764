//! The throttle: keeps delayed items within their share of memory, by flushing them and by slowing writers during a
//! flush.
//!
//! ```text
//! bytes of active items   0 ........ start ............ limit
//! writers                 not slowed | paced            | wait for the flush, and start the next
//!                                    a flush is requested
//! ```
//!
//! A flush is a commit, or an apply of rows that leaves the names delayed ([`crate::commit::apply_rows`]). While a
//! flush runs, its progress is compared with the writers' progress from `start` to `limit`: writers that are ahead of
//! the flush sleep now and then, and more often if they are further ahead. So writers reach the limit about when the
//! flush ends and the next flush can begin, and no writer waits for a whole flush.
//!
//! While many items are frozen, the limit for active items is lower; if this limit is not above `start`, pacing begins
//! at half of the limit.
//!
//! Invariants:
//! - I1. No writer depends on the commit thread: if that thread does not begin a flush in time, the writer flushes.
//!   (The writer may be the commit thread itself, which writes file data back before it commits.)
//! - I2. Active and frozen items together take no more than [`DELAYED_PART`] of the engine's memory, plus about a MiB
//!   of operations that are under way or not counted yet ([`crate::handle::metadata_reservation`]).
//! - I3. Each changed tree counts, with one node, from its first change on: a transaction may change thousands of small
//!   subvolumes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_error::Result;

use crate::engine::{BackgroundWork, Engine, MemoryPart};

/// Progress of the running flush, and the time that writers still have to sleep.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// Thousandths of the running flush that are done; [`IDLE`] while no flush runs.
    progress: AtomicU64,
    /// Microseconds that writers still have to sleep.
    debt_micros: AtomicU64,
}

impl Default for Throttle {
    fn default() -> Self {
        Self { progress: AtomicU64::new(IDLE), debt_micros: AtomicU64::new(0) }
    }
}

/// Marks a flush as running. Dropping this value ends the flush.
pub(crate) struct FlushProgress<'a> {
    throttle: &'a Throttle,
}

impl Throttle {
    /// Begins a flush.
    pub(crate) fn begin(&self) -> FlushProgress<'_> {
        self.progress.store(0, Ordering::Relaxed);
        FlushProgress { throttle: self }
    }

    /// Notes that `done` of `all` frozen items are applied to the trees.
    pub(crate) fn applied(&self, done: usize, all: usize) {
        let share = APPLY_SHARE.saturating_mul(done as u64).checked_div(all as u64).unwrap_or_default();
        self.progress.fetch_max(share.min(APPLY_SHARE), Ordering::Relaxed);
    }

    fn progress(&self) -> Option<u64> {
        Some(self.progress.load(Ordering::Relaxed)).filter(|&progress| progress != IDLE)
    }

    /// The time that this writer has to sleep now. `fill` is the progress of the writers from `start` to the limit, in
    /// thousandths.
    fn pause(&self, fill: u64) -> Option<Duration> {
        let ahead = fill.saturating_sub(self.progress()?);
        if ahead == 0 {
            return None;
        }
        let nap = POLL_INTERVAL.as_micros() as u64;
        let more = ahead.saturating_mul(MICROS_AHEAD);
        let owed = self.debt_micros.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        // If two writers add to a debt that suffices for one nap, only one of them sleeps. The end of the flush cancels
        // the rest of the debt.
        let pays = |debt: u64| debt.checked_sub(nap);
        if owed < nap || self.debt_micros.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pays).is_err() {
            return None;
        }
        Some(POLL_INTERVAL)
    }
}

impl Drop for FlushProgress<'_> {
    fn drop(&mut self) {
        self.throttle.progress.store(IDLE, Ordering::Relaxed);
        self.throttle.debt_micros.store(0, Ordering::Relaxed);
    }
}

impl Engine {
    /// Keeps delayed items within their share of memory. May sleep or flush. Called before a change, with no lock held
    /// that a commit needs.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "bytes of memory; both `bytes` and `limit` are at least `paced_from`"
    )]
    pub(crate) fn limit_delayed_items(&self) -> Result<()> {
        let bytes = self.admission.load.memory_bytes();
        if bytes < self.memory_part(FREE_PART) {
            return Ok(());
        }
        let (start, limit) = (self.flush_start(), self.active_limit());
        if bytes >= start {
            self.request(BackgroundWork::FlushDelayedItems);
        }
        if bytes >= limit {
            return self.wait_for_room();
        }
        let paced_from = if start < limit { start } else { limit / 2 };
        if bytes >= paced_from
            && let Some(nap) = self.admission.throttle.pause((bytes - paced_from) * 1000 / (limit - paced_from).max(1))
        {
            std::thread::sleep(nap);
        }
        Ok(())
    }

    /// The current limit of active items: it is lower while many items are frozen (I2).
    fn active_limit(&self) -> u64 {
        let rest = self.memory_part(DELAYED_PART).saturating_sub(self.admission.load.frozen_memory_bytes());
        rest.clamp(self.memory_part(FREE_PART).saturating_mul(2), self.memory_part(LIMIT_PART))
    }

    fn memory_part(&self, part: MemoryPart) -> u64 {
        self.options.memory_part(part)
    }

    /// Bytes of active items at which a flush is requested.
    fn flush_start(&self) -> u64 {
        let (names, names_max) = (self.admission.load.name_memory_bytes(), self.memory_part(NAMES_PART));
        if names >= names_max {
            names_max
        } else if self.tree_log.was_used_lately(self.generation()) {
            self.memory_part(START_PART)
        } else {
            names.saturating_add(self.memory_part(ROWS_PART)).min(self.memory_part(ROWS_START_MAX))
        }
    }

    /// Estimated memory of a changed tree until the commit, without its delayed items: the tree, its subvolume, and a new
    /// node (I3).
    pub(crate) fn changed_tree_bytes(&self) -> u64 {
        CHANGED_TREE_BYTES.saturating_add(self.geometry.nodesize.into())
    }

    /// Waits until the active items are below their limit again: the next flush freezes them, or the end of the running
    /// flush raises the limit. Flushes if no other thread begins a flush in time (I1).
    fn wait_for_room(&self) -> Result<()> {
        let mut idle_since = None;
        while self.admission.load.memory_bytes() >= self.active_limit() {
            self.check_writable()?;
            if self.admission.throttle.progress().is_some() {
                idle_since = None;
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() > FLUSH_START_TIMEOUT {
                return self.flush_delayed_items();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Requests background work, unless it was requested already for the current active items.
    pub(crate) fn request(&self, work: BackgroundWork) {
        let asked = match work {
            BackgroundWork::Commit => &self.admission.load.asked_for_commit,
            BackgroundWork::FlushDelayedItems => &self.admission.load.asked_for_flush,
        };
        if !asked.load(Ordering::Relaxed)
            && !asked.swap(true, Ordering::Relaxed)
            && let Some(flusher) = self.flusher()
        {
            flusher.request_work(work);
        }
    }
}

const IDLE: u64 = u64::MAX;
/// Progress of a flush, in thousandths, when all frozen items are applied.
const APPLY_SHARE: u64 = 900;
/// Microseconds of debt that a change adds for each thousandth that its writer is ahead.
const MICROS_AHEAD: u64 = 2;
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time within which the commit thread must begin a flush.
const FLUSH_START_TIMEOUT: Duration = Duration::from_millis(50);
/// Memory of cached nodes that are also on the devices.
pub(crate) const CACHE_PART: MemoryPart = (6, 16);
/// Maximum memory of delayed items, active and frozen together.
const DELAYED_PART: MemoryPart = (11, 16);
/// Maximum memory of active delayed items.
const LIMIT_PART: MemoryPart = (9, 16);
/// Memory of names at which a flush becomes a commit.
pub(crate) const NAMES_PART: MemoryPart = (7, 16);
/// Memory of active items at which a flush begins, if fsync is in use.
const START_PART: MemoryPart = (5, 16);
/// Memory of rows at which a flush begins, if fsync is not in use.
pub(crate) const ROWS_PART: MemoryPart = (2, 16);
/// Memory of rows and names together at which a flush begins in any case.
const ROWS_START_MAX: MemoryPart = (8, 16);
/// Estimated memory of a changed tree and its subvolume, without nodes.
const CHANGED_TREE_BYTES: u64 = 8192;
/// Memory of active items below which writers are not slowed.
const FREE_PART: MemoryPart = (1, 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_slowed_by_how_far_they_are_ahead_of_the_commit() {
        let throttle = Throttle::default();
        let naps = |fill| (0..1000).filter(|_| throttle.pause(fill).is_some()).count();
        assert_eq!(naps(1000), 0, "no commit runs");
        let commit = throttle.begin();
        let (near, far) = (naps(100), naps(900));
        assert!(near > 100 && far > 5 * near / 2, "{near} {far}");
        throttle.applied(1, 2);
        assert!(naps(400) <= 1, "the commit is ahead");
        throttle.applied(1, 4);
        assert_eq!(throttle.progress(), Some(450), "it never goes back");
        drop(commit);
        assert_eq!(throttle.progress(), None);
    }
}
