//! [`ResyncThread`]: brings devices that missed commits up to date in the background.
//!
//! I1. The thread holds the filesystem only during a step, so dropping the last handle closes the filesystem.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ubtrfs_transaction::Resync;

use crate::Fs;
use crate::error::Result;
use crate::service_threads::ServiceThreads;

/// The thread, which ends when the devices are up to date.
#[derive(Debug, Default)]
pub(crate) struct ResyncThread {
    thread: ServiceThreads,
    is_stopped: Arc<AtomicBool>,
    walked_bytes: AtomicU64,
    copied_bytes: AtomicU64,
}

impl ResyncThread {
    /// Starts the thread if a device is stale.
    pub(crate) fn start(&self, fs: &Arc<Fs>) -> Result<()> {
        let Some(resync) = fs.engine.begin_resync()? else { return Ok(()) };
        let (fs, is_stopped) = (Arc::downgrade(fs), Arc::clone(&self.is_stopped));
        let resync = Arc::new(parking_lot::Mutex::new(resync));
        self.thread.start("ubtrfs-resync", 1, move || {
            let mut resync = resync.lock();
            while !is_stopped.load(Ordering::Acquire) {
                let Some(fs) = fs.upgrade() else { return };
                if is_done(&fs, &mut resync) {
                    return;
                }
            }
        });
        Ok(())
    }

    /// Bytes of extents that were examined, and bytes that were copied, since the filesystem was opened.
    pub(crate) fn done_bytes(&self) -> (u64, u64) {
        (self.walked_bytes.load(Ordering::Relaxed), self.copied_bytes.load(Ordering::Relaxed))
    }

    /// Ends the thread. Devices that are not up to date stay stale.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.thread.join();
    }
}

/// Does a step. Returns whether it was the last step.
fn is_done(fs: &Fs, resync: &mut Resync) -> bool {
    let is_last = fs.engine.resync_step(resync).unwrap_or_else(|error| {
        tracing::warn!("a device that missed commits is not brought up to date: {error}");
        true
    });
    fs.resync.walked_bytes.store(resync.walked_bytes(), Ordering::Relaxed);
    fs.resync.copied_bytes.store(resync.copied_bytes(), Ordering::Relaxed);
    is_last
}

impl Fs {
    /// Waits until devices that missed commits are up to date, or cannot be brought up to date.
    pub fn wait_for_resync(&self) {
        self.resync.thread.join();
    }
}
