//! The commit thread. The thread commits every `commit=` seconds. It also commits soon after a burst of changes ends,
//! because the kernel does not pass sync(2) on to the server of a mount of type `fuse`. On the engine's request, it
//! commits or flushes delayed items.
//!
//! - I1. The thread holds a strong reference to the filesystem only while it looks for changes and commits, so that
//!   dropping the last handle closes the filesystem.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ubtrfs_transaction::BackgroundWork;

use crate::Fs;
use crate::error::Error;
use crate::service_threads::ServiceThreads;
use crate::session::commit_requests::CommitRequests;

/// Handle of the commit thread.
#[derive(Debug)]
pub(crate) struct CommitThread {
    requests: Arc<CommitRequests>,
    thread: ServiceThreads,
    /// Seconds between commits; at least 1.
    interval_secs: AtomicU32,
}

impl CommitThread {
    /// The thread that serves `requests`; it is not started yet.
    pub(crate) fn new(requests: Arc<CommitRequests>, commit_secs: u32) -> Self {
        Self { requests, thread: ServiceThreads::default(), interval_secs: AtomicU32::new(commit_secs.max(1)) }
    }

    /// Changes the time between commits, at the latest from the next commit on.
    pub(crate) fn set_interval(&self, secs: u32) {
        self.interval_secs.store(secs.max(1), Ordering::Relaxed);
    }

    /// The time between commits.
    pub(crate) fn interval_secs(&self) -> u32 {
        self.interval_secs.load(Ordering::Relaxed)
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(self.interval_secs().into())
    }

    /// Starts the thread.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (requests, weak, interval) = (Arc::clone(&self.requests), Arc::downgrade(fs), self.interval());
        self.thread.start("ubtrfs-commit", 1, move || run(&requests, &weak, interval));
        self.requests.set_served(self.thread.is_running());
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.requests.stop();
        self.requests.set_served(false);
        self.thread.join();
    }
}

fn run(requests: &CommitRequests, fs: &Weak<Fs>, mut interval: Duration) {
    // `dirty_since`: when the first change since the last commit was seen. `last_news`: when changes were last
    // announced.
    let mut dirty_since = None;
    let mut last_news = Instant::now();
    // Whether some data could not be written. Without new changes, the thread retries after the commit interval, not
    // as soon as changes pause.
    let mut has_failed = false;
    loop {
        requests.sleep(if dirty_since.is_some() { TICK.min(interval) } else { IDLE });
        if requests.is_stopped() {
            return;
        }
        let Some(fs) = fs.upgrade() else { return };
        interval = fs.commit_thread.interval();
        // Look for changes after setting the flag: a change that is announced later wakes the thread. A change that was
        // announced before the flag was set, and is made afterwards, is found when the thread looks again.
        requests.set_idle(true);
        if !fs.has_changes() {
            dirty_since = None;
            continue;
        }
        requests.set_idle(false);
        if let Some(done) = do_requested(requests, &fs) {
            fs.evict_committed_subvolumes();
            if let Err(error) = done {
                tracing::error!("the commit failed: {error}");
            }
            continue;
        }
        if fs.engine.holds_commits() {
            dirty_since = None;
            continue;
        }
        if requests.take_changes() {
            last_news = Instant::now();
            has_failed = false;
        }
        let since = *dirty_since.get_or_insert_with(Instant::now);
        let is_quiet = !has_failed && last_news.elapsed() >= QUIET;
        if !is_quiet && since.elapsed() < interval {
            continue;
        }
        if fs.read_only().is_some() {
            return;
        }
        let mut synced = fs.sync();
        // Each commit frees only a part of the deleted subvolumes' space, and does only a part of a quota rescan, so
        // commit until nothing is left to do.
        while fs.read_only().is_none() && fs.engine.has_steps_left() && !requests.is_stopped() {
            if let Err(error) = fs.engine.commit() {
                synced = Err(error.into());
                break;
            }
        }
        has_failed = synced.is_err();
        match synced {
            // If the filesystem is being closed, the closing thread commits everything.
            Ok(()) | Err(Error::Closed) => {}
            Err(error) => tracing::error!("the commit failed: {error}"),
        }
        // Wait for the next interval or for new changes, after a failure too: by then, a commit may succeed.
        dirty_since = None;
        requests.forget_changes();
        last_news = Instant::now();
        requests.set_idle(true);
    }
}

/// Does the requested work; returns `None` if no work is requested.
fn do_requested(requests: &CommitRequests, fs: &Fs) -> Option<ubtrfs_error::Result<()>> {
    match requests.take_work()? {
        BackgroundWork::Commit => Some(fs.engine.commit_to_reclaim()),
        BackgroundWork::FlushDelayedItems => Some(fs.engine.flush_delayed_items()),
    }
}

/// Interval at which the thread looks for work while there are changes.
const TICK: Duration = Duration::from_millis(500);
/// A burst is over after this long without changes.
const QUIET: Duration = Duration::from_millis(1500);
/// Interval at which the thread looks for changes while it knows of no change.
const IDLE: Duration = Duration::from_secs(2);
