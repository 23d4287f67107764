//! The commit thread. The thread commits every `commit=` seconds. It also commits soon after a burst of changes ends,
//! because the kernel does not pass sync(2) on to the server of a mount of type `fuse`. On the engine's request, it
//! commits or flushes delayed items.
//!
//! - I1. The thread holds a strong reference to the filesystem only while it looks for changes and commits, so that
//!   dropping the last handle closes the filesystem.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ubtrfs_transaction::BackgroundWork;

use crate::Fs;
use crate::error::Error;
use crate::service_threads::ServiceThreads;

/// Handle of the commit thread.
#[derive(Debug)]
pub(crate) struct CommitThread {
    shared: Arc<Shared>,
    thread: ServiceThreads,
    interval: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    /// Whether changes were announced since the thread last looked.
    has_new_changes: AtomicBool,
    /// Whether the thread looks for changes only at the longer interval `IDLE`, because there is nothing to commit.
    idle: AtomicBool,
    stopped: AtomicBool,
    /// Whether a commit is requested.
    commit_requested: AtomicBool,
    /// Whether the engine requests a flush of its delayed items.
    flush_requested: AtomicBool,
    /// Set to true to wake the thread from its sleep.
    wake: Mutex<bool>,
    changed: Condvar,
}

impl CommitThread {
    pub(crate) fn new(commit_secs: u32) -> Self {
        Self {
            shared: Arc::default(),
            thread: ServiceThreads::default(),
            interval: Duration::from_secs(commit_secs.max(1).into()),
        }
    }

    /// Announces a change that is about to be made.
    pub(crate) fn note_change(&self) {
        let shared = &self.shared;
        // Load before storing: the flag is nearly always set, and a load leaves copies in other processors' caches
        // valid.
        if !shared.has_new_changes.load(Ordering::Relaxed) {
            shared.has_new_changes.store(true, Ordering::Release);
        }
        if shared.idle.load(Ordering::Acquire) {
            shared.wake();
        }
    }

    /// Requests background work, which never writes dirty file data. Returns false if no thread is running.
    pub(crate) fn request_work(&self, work: BackgroundWork) -> bool {
        let asked = match work {
            BackgroundWork::Commit => &self.shared.commit_requested,
            BackgroundWork::FlushDelayedItems => &self.shared.flush_requested,
        };
        asked.store(true, Ordering::Release);
        self.shared.wake();
        self.thread.is_running()
    }

    /// Starts the thread.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak, interval) = (Arc::clone(&self.shared), Arc::downgrade(fs), self.interval);
        self.thread.start("ubtrfs-commit", 1, move || run(&shared, &weak, interval));
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        self.shared.wake();
        self.thread.join();
    }
}

impl Shared {
    fn wake(&self) {
        *self.wake.lock() = true;
        self.changed.notify_all();
    }

    /// Sleeps until the thread is woken, at most for `limit`.
    fn sleep(&self, limit: Duration) {
        let mut wake = self.wake.lock();
        if !*wake {
            self.changed.wait_for(&mut wake, limit);
        }
        *wake = false;
    }
}

fn run(shared: &Shared, fs: &Weak<Fs>, interval: Duration) {
    // `dirty_since`: when the first change since the last commit was seen. `last_news`: when changes were last
    // announced.
    let mut dirty_since = None;
    let mut last_news = Instant::now();
    // Whether some data could not be written. Without new changes, the thread retries after the commit interval, not
    // as soon as changes pause.
    let mut has_failed = false;
    loop {
        shared.sleep(if dirty_since.is_some() { TICK.min(interval) } else { IDLE });
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        let Some(fs) = fs.upgrade() else { return };
        // Look for changes after setting the flag: a change that is announced later wakes the thread. A change that was
        // announced before the flag was set, and is made afterwards, is found when the thread looks again.
        shared.idle.store(true, Ordering::Release);
        if !fs.has_changes() {
            dirty_since = None;
            continue;
        }
        shared.idle.store(false, Ordering::Release);
        if let Some(done) = do_requested(shared, &fs) {
            fs.evict_committed_subvolumes();
            if let Err(error) = done {
                tracing::error!("the commit failed: {error}");
            }
            continue;
        }
        if shared.has_new_changes.swap(false, Ordering::AcqRel) {
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
        while fs.read_only().is_none() && fs.engine.has_steps_left() && !shared.stopped.load(Ordering::Acquire) {
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
        shared.has_new_changes.store(false, Ordering::Release);
        last_news = Instant::now();
        shared.idle.store(true, Ordering::Release);
    }
}

/// Does the requested work; returns `None` if no work is requested.
fn do_requested(shared: &Shared, fs: &Fs) -> Option<ubtrfs_error::Result<()>> {
    let flush = shared.flush_requested.swap(false, Ordering::AcqRel);
    if shared.commit_requested.swap(false, Ordering::AcqRel) {
        return Some(fs.engine.commit());
    }
    flush.then(|| fs.engine.flush_delayed_items())
}

/// Interval at which the thread looks for work while there are changes.
const TICK: Duration = Duration::from_millis(500);
/// A burst is over after this long without changes.
const QUIET: Duration = Duration::from_millis(1500);
/// Interval at which the thread looks for changes while it knows of no change.
const IDLE: Duration = Duration::from_secs(2);
