//! Background threads that write data back while writers continue. While one thread waits for the device, another
//! prepares the next batch. [`crate::writeback::data_path`] decides when the threads write.
//!
//! - I1. A thread holds a strong reference to the filesystem only while it writes, so dropping the last handle closes
//!   the filesystem.
//! - I2. Nothing depends on the threads: writers over the limit write data back themselves, and sync writes all data
//!   itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::Fs;
use crate::service_threads::ServiceThreads;

/// Starts, wakes and stops the threads.
#[derive(Debug, Default)]
pub(crate) struct WritebackThreads {
    shared: Arc<WritebackCalls>,
    threads: ServiceThreads,
}

#[derive(Debug, Default)]
struct WritebackCalls {
    stopped: AtomicBool,
    /// Number of threads that were woken and have not looked for work yet; a thread sleeps while this is 0.
    calls: Mutex<usize>,
    wake: Condvar,
    /// Whether a wake-up was sent that no thread has seen yet. While this is set, writers skip the lock.
    woken: AtomicBool,
}

impl WritebackThreads {
    /// Starts the threads.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(fs));
        self.threads.start("ubtrfs-writeback", NR_THREADS, move || run(&shared, &weak));
    }

    /// Wakes the threads.
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

fn run(shared: &WritebackCalls, fs: &Weak<Fs>) {
    loop {
        {
            let mut calls = shared.calls.lock();
            while *calls == 0 {
                shared.wake.wait(&mut calls);
            }
            *calls = calls.saturating_sub(1);
            shared.woken.store(false, Ordering::Release);
        }
        if shared.stopped.load(Ordering::Acquire) {
            return;
        }
        let Some(fs) = fs.upgrade() else { return };
        if fs.context.read_only().is_some() {
            continue;
        }
        if let Err(error) = fs.flush_background() {
            tracing::warn!("writing data back: {error}");
            // An error means that nothing can be written at all: pause before the next attempt.
            drop(fs);
            std::thread::sleep(PAUSE);
        }
    }
}

/// With two threads, one prepares data while the other waits for the device.
const NR_THREADS: usize = 2;
/// A thread pauses this long after a failure.
const PAUSE: Duration = Duration::from_millis(500);
