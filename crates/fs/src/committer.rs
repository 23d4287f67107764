//! The thread that commits: every `commit=` seconds, and soon after a burst of changes went quiet, because sync(2) does
//! not reach a FUSE server.
//!
//! - I1. The thread holds the filesystem only while it commits, so that dropping the last handle ends it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::Fs;

/// Starts, feeds and stops the commit thread.
#[derive(Debug)]
pub(crate) struct Committer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    interval: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    /// Changes since the filesystem was opened.
    nr_changes: AtomicU64,
    /// Value of `nr_changes` that the last commit covers.
    nr_committed: AtomicU64,
    stopped: AtomicBool,
    /// Guards the sleep; true asks for a look.
    wake: Mutex<bool>,
    changed: Condvar,
}

impl Committer {
    pub(crate) fn new(commit_secs: u32) -> Self {
        Self {
            shared: Arc::default(),
            thread: Mutex::default(),
            interval: Duration::from_secs(commit_secs.max(1).into()),
        }
    }

    /// Something is there to commit.
    pub(crate) fn note_change(&self) {
        let shared = &self.shared;
        let before = shared.nr_changes.fetch_add(1, Ordering::AcqRel);
        // The thread sleeps without a limit only while everything is committed.
        if before == shared.nr_committed.load(Ordering::Acquire) {
            shared.wake();
        }
    }

    /// A commit by someone else begins.
    pub(crate) fn note_commit(&self) {
        self.shared.nr_committed.store(self.shared.nr_changes.load(Ordering::Acquire), Ordering::Release);
    }

    /// Starts the thread.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak, interval) = (Arc::clone(&self.shared), Arc::downgrade(fs), self.interval);
        let spawned =
            std::thread::Builder::new().name("ubtrfs-commit".to_owned()).spawn(move || run(&shared, &weak, interval));
        match spawned {
            Ok(thread) => *self.thread.lock() = Some(thread),
            Err(error) => tracing::warn!("no commit thread, changes are committed on sync and close only: {error}"),
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        self.shared.wake();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the commit thread panicked");
        }
    }
}

impl Shared {
    fn wake(&self) {
        *self.wake.lock() = true;
        self.changed.notify_all();
    }

    fn is_clean(&self) -> bool {
        self.nr_changes.load(Ordering::Acquire) == self.nr_committed.load(Ordering::Acquire)
    }

    /// Sleeps until a change or stop; at most `limit`.
    fn sleep(&self, limit: Option<Duration>) {
        let mut wake = self.wake.lock();
        if !*wake {
            match limit {
                Some(limit) => drop(self.changed.wait_for(&mut wake, limit)),
                None => self.changed.wait(&mut wake),
            }
        }
        *wake = false;
    }
}

fn run(shared: &Shared, fs: &Weak<Fs>, interval: Duration) {
    let mut dirty_since = Instant::now();
    let mut seen = (0, Instant::now());
    loop {
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        if shared.is_clean() {
            shared.sleep(None);
            dirty_since = Instant::now();
            seen = (shared.nr_changes.load(Ordering::Acquire), dirty_since);
            continue;
        }
        shared.sleep(Some(TICK.min(interval)));
        let nr_changes = shared.nr_changes.load(Ordering::Acquire);
        if nr_changes != seen.0 {
            seen = (nr_changes, Instant::now());
        }
        let is_quiet = seen.1.elapsed() >= QUIET;
        if !(is_quiet || dirty_since.elapsed() >= interval) || shared.stopped.load(Ordering::Acquire) {
            continue;
        }
        let Some(fs) = fs.upgrade() else { return };
        if fs.read_only().is_some() {
            return;
        }
        if let Err(error) = fs.sync() {
            tracing::error!("commit: {error}");
            // Not at every tick again: what failed may need time, or space.
            shared.sleep(Some(QUIET));
        }
        dirty_since = Instant::now();
    }
}

/// How often changes are looked for while there are some.
const TICK: Duration = Duration::from_millis(500);
/// Without changes for so long, a burst is over.
const QUIET: Duration = Duration::from_millis(1500);
