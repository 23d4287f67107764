//! The thread that writes data back while writers go on, so that copying and compressing run beside each other.
//!
//! - I1. The thread holds the filesystem only while it writes, so that dropping the last handle ends it.
//! - I2. Nothing depends on it: writers over the limit write back themselves, and sync waits for nobody's goodwill.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::Fs;

/// Starts, wakes and stops the thread.
#[derive(Debug, Default)]
pub(crate) struct WritebackThread {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    stopped: AtomicBool,
    /// Guards the sleep; true: there is something to do.
    work: Mutex<bool>,
    wake: Condvar,
    /// Whether a wake-up was sent that the thread has not answered yet: spares writers the lock.
    woken: AtomicBool,
}

impl WritebackThread {
    /// Starts the thread.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(fs));
        let spawned =
            std::thread::Builder::new().name("ubtrfs-writeback".to_owned()).spawn(move || run(&shared, &weak));
        match spawned {
            Ok(thread) => *self.thread.lock() = Some(thread),
            Err(error) => tracing::warn!("no writeback thread, writers write back themselves: {error}"),
        }
    }

    /// There is enough dirty data for the thread.
    pub(crate) fn wake(&self) {
        if !self.shared.woken.swap(true, Ordering::AcqRel) {
            *self.shared.work.lock() = true;
            self.shared.wake.notify_one();
        }
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        *self.shared.work.lock() = true;
        self.shared.wake.notify_all();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the writeback thread panicked");
        }
    }
}

fn run(shared: &Shared, fs: &Weak<Fs>) {
    loop {
        {
            let mut work = shared.work.lock();
            while !*work {
                shared.wake.wait(&mut work);
            }
            *work = false;
            shared.woken.store(false, Ordering::Release);
        }
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        let Some(fs) = fs.upgrade() else { return };
        if fs.read_only().is_some() {
            continue;
        }
        if let Err(error) = fs.flush_background() {
            tracing::warn!("writing data back: {error}");
            // What failed is tried again when more is written, or synced; not at once.
            drop(fs);
            std::thread::sleep(PAUSE);
        }
    }
}

/// How long the thread rests after a failure.
const PAUSE: Duration = Duration::from_millis(500);
