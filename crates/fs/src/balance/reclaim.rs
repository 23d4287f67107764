//! Automatic reclaim of nearly empty data block groups (`bg_reclaim_threshold=`), and discarding in the background
//! (`discard=async`).
//!
//! As in Linux, a block group is reclaimed when removals bring its used part below the threshold. A new block group
//! that is being filled is left alone, because its used part was never above the threshold.
//!
//! I1. The thread holds a strong reference to the filesystem only while it works, so that dropping the last handle ends
//!   the thread.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::Logical;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_transaction::{BlockGroup, Job};

use crate::Fs;
use crate::service_threads::ServiceThreads;

/// The thread that reclaims and discards, and its state.
#[derive(Debug)]
pub(crate) struct ReclaimThread {
    /// A data block group is reclaimed when less than this percentage of it is used; 0 means never.
    threshold: u32,
    shared: Arc<ReclaimCalls>,
    thread: ServiceThreads,
}

#[derive(Debug, Default)]
struct ReclaimCalls {
    /// Data block groups that were seen at or above the threshold.
    above: Mutex<BTreeSet<Logical>>,
    nr_reclaimed: AtomicU64,
    is_stopped: Mutex<bool>,
    stop: Condvar,
    /// Cancelled when the filesystem is closed.
    job: Job,
}

impl ReclaimThread {
    pub(crate) fn new(threshold: u32) -> Self {
        Self { threshold, shared: Arc::default(), thread: ServiceThreads::default() }
    }

    /// Starts the thread if an option needs it.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak, threshold) = (Arc::clone(&self.shared), Arc::downgrade(fs), self.threshold);
        let discards = fs.options.discard_async;
        if threshold > 0 || discards {
            self.thread.start("ubtrfs-reclaim", 1, move || run(&shared, &weak, threshold, discards));
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.shared.job.cancel();
        *self.shared.is_stopped.lock() = true;
        self.shared.stop.notify_all();
        self.thread.join();
    }

    /// The number of block groups that were reclaimed.
    pub(crate) fn nr_reclaimed(&self) -> u64 {
        self.shared.nr_reclaimed.load(Ordering::Relaxed)
    }
}

fn run(shared: &ReclaimCalls, fs: &Weak<Fs>, threshold: u32, discards: bool) {
    loop {
        {
            let mut is_stopped = shared.is_stopped.lock();
            if !*is_stopped {
                shared.stop.wait_for(&mut is_stopped, INTERVAL);
            }
            if *is_stopped {
                return;
            }
        }
        // I1
        let Some(fs) = fs.upgrade() else { return };
        if fs.context.read_only().is_some() {
            return;
        }
        if discards && let Err(error) = fs.engine.discard_freed(&shared.job) {
            tracing::warn!("discard: {error}");
        }
        if threshold > 0 {
            fs.reclaim_groups(shared, threshold);
        }
    }
}

impl Fs {
    /// Empties the data block groups whose used part fell below the threshold.
    fn reclaim_groups(&self, shared: &ReclaimCalls, threshold: u32) {
        let chosen = {
            let mut groups = self.block_groups();
            groups.retain(|group| !self.engine.is_on_seed(group.start));
            let mut above = shared.above.lock();
            above.retain(|start| groups.binary_search_by_key(start, |group| group.start).is_ok());
            choose(&groups, &mut above, threshold)
        };
        for start in chosen {
            // The thread does not wait for sends, because the wait would also delay discards. It tries the block group
            // again later.
            let Some(moving) = self.subvolumes.sends.try_begin_move() else {
                shared.above.lock().insert(start);
                continue;
            };
            let done = self.engine.relocate_block_group(start, &shared.job);
            drop(moving);
            match done {
                Ok(report) if report.failures.is_empty() => {
                    shared.nr_reclaimed.fetch_add(1, Ordering::Relaxed);
                }
                Ok(_) => tracing::warn!("block group {start} holds data that cannot be moved, and is not reclaimed"),
                Err(EngineError::Cancelled) => return,
                // Most often, another thread is moving the block group, or there is no room. The block group is tried
                // again after its used part has risen above the threshold and fallen below it once more.
                Err(error) => tracing::debug!("block group {start} is not reclaimed: {error}"),
            }
        }
    }
}

/// The block groups that fell below the threshold, if the other block groups have room for their content. Updates the
/// set of block groups that are at or above the threshold.
fn choose(groups: &[BlockGroup], above: &mut BTreeSet<Logical>, threshold: u32) -> Vec<Logical> {
    let is_data = |group: &&BlockGroup| group.flags & BlockGroupFlags::TYPES == BlockGroupFlags::DATA;
    let mut free: u64 = groups.iter().filter(is_data).map(|group| group.len_bytes.saturating_sub(group.used)).sum();
    let mut chosen = Vec::new();
    for group in groups.iter().filter(is_data) {
        let is_below =
            u128::from(group.used).saturating_mul(100) < u128::from(group.len_bytes).saturating_mul(threshold.into());
        if !is_below {
            above.insert(group.start);
        } else if group.used > 0 && above.contains(&group.start) {
            // Empty block groups are not chosen, because the next commit removes them.
            let elsewhere = free.saturating_sub(group.len_bytes.saturating_sub(group.used));
            if elsewhere >= group.used {
                above.remove(&group.start);
                free = elsewhere.saturating_sub(group.used);
                chosen.push(group.start);
            }
        }
    }
    chosen
}

/// Interval at which the thread examines the block groups.
const INTERVAL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_block_groups_that_fell_below_are_chosen() {
        let group = |start: u64, used, flags| BlockGroup { start: Logical(start), len_bytes: 100, flags, used };
        let data = |start, used| group(start, used, BlockGroupFlags::DATA);
        let mut above = BTreeSet::new();
        let metadata = group(7, 1, BlockGroupFlags::METADATA);
        let mixed = group(8, 1, BlockGroupFlags::METADATA | BlockGroupFlags::DATA);
        let groups = |first, second| [data(1, first), data(2, second), data(3, 0), metadata, mixed];
        assert_eq!(choose(&groups(10, 50), &mut above, 30), [], "the first is being filled");
        assert_eq!(choose(&groups(40, 50), &mut above, 30), []);
        assert_eq!(choose(&groups(29, 30), &mut above, 30), [Logical(1)]);
        assert_eq!(choose(&groups(20, 30), &mut above, 30), [], "once each time that it falls");
        assert_eq!(choose(&groups(20, 0), &mut above, 30), [], "empty ones are removed anyway");
        // Block group 2 has no room for the content of block group 1.
        let mut above = BTreeSet::from([Logical(1)]);
        assert_eq!(choose(&[data(1, 29), data(2, 90)], &mut above, 30), []);
        assert!(above.contains(&Logical(1)), "it is tried again");
    }
}
