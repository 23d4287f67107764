//! The threads that write data back while writers go on: copying and compressing run beside each other, and while one
//! thread waits for the device another prepares the next batch.
//!
//! - I1. A thread holds the filesystem only while it writes, so that dropping the last handle ends it.
//! - I2. Nothing depends on them: writers over the limit write back themselves, and sync waits for nobody's goodwill.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::Fs;
use crate::service_threads::ServiceThreads;

/// Starts, wakes and stops the threads.
#[derive(Debug, Default)]
pub(crate) struct WritebackThreads {
    shared: Arc<Shared>,
    threads: ServiceThreads,
}

#[derive(Debug, Default)]
struct Shared {
    stopped: AtomicBool,
    /// Guards the sleep: how many threads are to look for work.
    calls: Mutex<usize>,
    wake: Condvar,
    /// Whether a wake-up was sent that no thread has answered yet: spares writers the lock.
    woken: AtomicBool,
}

impl WritebackThreads {
    /// Starts the threads.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(fs));
        self.threads.start("ubtrfs-writeback", NR_THREADS, move || run(&shared, &weak));
    }

    /// There is enough dirty data for the threads.
    pub(crate) fn wake(&self) {
        if !self.shared.woken.swap(true, Ordering::AcqRel) {
            *self.shared.calls.lock() = NR_THREADS;
            self.shared.wake.notify_all();
        }
    }

    /// Ends the threads and waits for them.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        *self.shared.calls.lock() = NR_THREADS;
        self.shared.wake.notify_all();
        self.threads.join();
    }
}

fn run(shared: &Shared, fs: &Weak<Fs>) {
    loop {
        {
            let mut calls = shared.calls.lock();
            while *calls == 0 {
                shared.wake.wait(&mut calls);
            }
            *calls -= 1;
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

/// One waits for the device while the other works.
const NR_THREADS: usize = 2;
/// How long a thread rests after a failure.
const PAUSE: Duration = Duration::from_millis(500);
