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
//! - I4. A small delayed item can cause much memory in a commit: the removal of a file extent item takes a few bytes, and
//!   its commit makes a delayed ref, frees space and removes checksums. So the changes of file extent items since the
//!   last commit are limited, too, together with those of the running commit ([`WAITING_PART`]). While commits are held
//!   back, they are not.

use std::time::{Duration, Instant};

use ubtrfs_error::Result;

use crate::commit::apply_rows::{NAMES_PART, ROWS_PART, WAITING_BYTES, WAITING_START};
use crate::engine::{BackgroundWork, Engine, MemoryPart};

impl Engine {
    /// Keeps delayed items within their share of memory. May sleep or flush. Called before a change, with no lock held
    /// that a commit needs.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "bytes of memory; both `bytes` and `limit` are at least `paced_from`"
    )]
    pub(crate) fn limit_delayed_items(&self) -> Result<()> {
        let (bytes, waiting) = (self.admission.load.memory_bytes(), self.waiting_bytes());
        if waiting >= self.memory_part(WAITING_FREE) && !self.holds_commits() {
            if waiting >= self.memory_part(WAITING_START) {
                self.request(BackgroundWork::FlushDelayedItems);
            }
            if waiting >= self.waiting_limit() {
                return self.wait_for_room();
            }
        }
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

    /// The current limit of [`Self::waiting_bytes`] (I4).
    fn waiting_limit(&self) -> u64 {
        let frozen = self.admission.load.nr_frozen_extent_changes().saturating_mul(WAITING_BYTES);
        let rest = self.memory_part(WAITING_PART).saturating_sub(frozen);
        rest.max(self.memory_part(WAITING_FREE))
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

    /// Waits until the active items are below their limit again: the next flush freezes them, or the end of the running
    /// flush raises the limit. Flushes if no other thread begins a flush in time (I1).
    fn wait_for_room(&self) -> Result<()> {
        let throttle = &self.admission.throttle;
        let mut idle_since = None;
        loop {
            let seen = throttle.stages.current();
            let is_waiting_low = self.waiting_bytes() < self.waiting_limit() || self.holds_commits();
            if is_waiting_low && self.admission.load.memory_bytes() < self.active_limit() {
                return Ok(());
            }
            self.check_writable()?;
            if throttle.progress().is_some() {
                idle_since = None;
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() >= FLUSH_START_TIMEOUT {
                return self.flush_delayed_items();
            }
            throttle.stages.wait_for(seen, FLUSH_START_TIMEOUT);
        }
    }
}

/// Time within which the commit thread must begin a flush. Also the interval at which a waiter checks whether the
/// filesystem turned read-only.
const FLUSH_START_TIMEOUT: Duration = Duration::from_millis(50);
/// Maximum memory of delayed items, active and frozen together.
const DELAYED_PART: MemoryPart = (11, 16);
/// Maximum memory of active delayed items.
const LIMIT_PART: MemoryPart = (9, 16);
/// Memory of active items at which a flush begins, if fsync is in use.
const START_PART: MemoryPart = (5, 16);
/// Memory of rows and names together at which a flush begins in any case.
const ROWS_START_MAX: MemoryPart = (8, 16);
/// Memory of active items below which writers are not slowed.
const FREE_PART: MemoryPart = (1, 16);
/// Maximum memory that commits need for changes of file extent items, those of the active transaction and of the running
/// commit together (I4).
const WAITING_PART: MemoryPart = (8, 16);
/// Such memory of the active transaction below which writers are not slowed.
const WAITING_FREE: MemoryPart = (2, 16);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ubtrfs_device::MemoryDevice;
    use ubtrfs_format::{Key, KeyType, RootId};

    use super::*;
    use crate::EngineOptions;

    /// Removes file extent items in many operations. No item is there, so only the changes count.
    fn remove_extent_items(engine: &Engine, nr: u64) {
        let tree = engine.own_tree(RootId::FS_TREE).expect("there");
        for number in 0..nr {
            let handle = engine.begin(engine.reserve(16).expect("room"));
            handle.delete(&tree, Key::new(300, KeyType::EXTENT_DATA, number << 12));
            drop(handle);
            // Adds the counts of this thread.
            engine.admission.load.nr_reserved();
            let waiting = engine.waiting_bytes();
            assert!(engine.holds_commits() || waiting <= engine.memory_part(WAITING_PART) + WAITING_BYTES, "{waiting}");
        }
    }

    fn engine() -> Arc<Engine> {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        Engine::open(vec![device], EngineOptions { memory_bytes: 2 << 20, ..EngineOptions::default() }).expect("opened")
    }

    #[test]
    fn i4_changes_of_file_extent_items_are_limited_by_what_their_commit_needs() {
        let engine = engine();
        let before = engine.generation();
        remove_extent_items(&engine, 20_000);
        assert!(engine.generation() > before, "there were commits");
    }

    #[test]
    fn i4_changes_of_file_extent_items_are_not_limited_while_commits_are_held_back() {
        let engine = engine();
        engine.hold_commits().expect("held");
        let before = engine.generation();
        remove_extent_items(&engine, 10_000);
        assert_eq!(engine.generation(), before);
        engine.release_commits();
        engine.commit().expect("committed");
    }
}
