//! The thread that commits: every `commit=` seconds, and soon after a burst of changes went quiet, because sync(2) does
//! not reach a FUSE server. And when the engine asks for it, because its delayed items take much memory.
//!
//! - I1. The thread holds the filesystem only while it commits, so that dropping the last handle ends it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ubtrfs_transaction::BackgroundWork;

use crate::Fs;
use crate::service_threads::ServiceThreads;

/// Starts, feeds and stops the commit thread.
#[derive(Debug)]
pub(crate) struct CommitThread {
    shared: Arc<Shared>,
    thread: ServiceThreads,
    interval: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    /// Changes were announced since the thread looked last.
    news: AtomicBool,
    /// The thread sleeps long because there was nothing to commit.
    idle: AtomicBool,
    stopped: AtomicBool,
    /// A commit is asked for.
    commit_asked: AtomicBool,
    /// The engine wants its delayed items flushed.
    flush_asked: AtomicBool,
    /// Guards the sleep; true asks for a look.
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

    /// A change is about to be made.
    pub(crate) fn note_change(&self) {
        let shared = &self.shared;
        // Looked at first: nearly always it is, and then nobody's copy of it goes stale.
        if !shared.news.load(Ordering::Relaxed) {
            shared.news.store(true, Ordering::Release);
        }
        if shared.idle.load(Ordering::Acquire) {
            shared.wake();
        }
    }

    /// Has the thread do this, file data left alone. False where there is no thread.
    pub(crate) fn do_soon(&self, work: BackgroundWork) -> bool {
        let asked = match work {
            BackgroundWork::Commit => &self.shared.commit_asked,
            BackgroundWork::FlushDelayedItems => &self.shared.flush_asked,
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

    /// Sleeps until it is woken, at most for `limit`.
    fn sleep(&self, limit: Duration) {
        let mut wake = self.wake.lock();
        if !*wake {
            self.changed.wait_for(&mut wake, limit);
        }
        *wake = false;
    }
}

fn run(shared: &Shared, fs: &Weak<Fs>, interval: Duration) {
    // When the first change since the last commit was seen, and when there were news last.
    let mut dirty_since = None;
    let mut last_news = Instant::now();
    // Some data could not be written: that alone is tried again at the interval, not as soon as it is quiet.
    let mut has_failed = false;
    loop {
        shared.sleep(if dirty_since.is_some() { TICK.min(interval) } else { IDLE });
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        let Some(fs) = fs.upgrade() else { return };
        // Asked after the flag is set: a change that is announced later wakes the thread, one that was announced before
        // and is made after is found at the next look.
        shared.idle.store(true, Ordering::Release);
        if !fs.has_changes() {
            dirty_since = None;
            continue;
        }
        shared.idle.store(false, Ordering::Release);
        if let Some(done) = do_asked(shared, &fs) {
            if let Err(error) = done {
                tracing::error!("commit: {error}");
            }
            continue;
        }
        if shared.news.swap(false, Ordering::AcqRel) {
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
        // Deleted subvolumes give back a part with each commit.
        while fs.read_only().is_none() && fs.engine.nr_dead_roots() > 0 && !shared.stopped.load(Ordering::Acquire) {
            if let Err(error) = fs.engine.commit() {
                synced = Err(error.into());
                break;
            }
        }
        has_failed = synced.is_err();
        if let Err(error) = synced {
            tracing::error!("commit: {error}");
        }
        // Also after a failure: what failed may need time, or space.
        dirty_since = None;
        shared.news.store(false, Ordering::Release);
        last_news = Instant::now();
        shared.idle.store(true, Ordering::Release);
    }
}

/// Does what the thread was asked for, or answers `None`.
fn do_asked(shared: &Shared, fs: &Fs) -> Option<ubtrfs_error::Result<()>> {
    let flush = shared.flush_asked.swap(false, Ordering::AcqRel);
    if shared.commit_asked.swap(false, Ordering::AcqRel) {
        return Some(fs.engine.commit());
    }
    flush.then(|| fs.engine.flush_delayed_items())
}

/// How often changes are looked for while there are some.
const TICK: Duration = Duration::from_millis(500);
/// Without changes for so long, a burst is over.
const QUIET: Duration = Duration::from_millis(1500);
/// How often the thread looks while it knows of no change.
const IDLE: Duration = Duration::from_secs(2);
