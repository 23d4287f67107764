//! A device whose n-th request fails.
//!
//! I1. A failed write may have written any part of its range, as on a real device; here it has written its first half.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_device::Device;

/// Which requests fail. Requests of one kind are counted from 0; `None` never fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultPlan {
    /// This read and, with `persistent`, all later ones.
    pub read: Option<u64>,
    /// This write.
    pub write: Option<u64>,
    /// This flush.
    pub flush: Option<u64>,
    /// Every later request of the kind fails as well.
    pub persistent: bool,
}

/// A device that fails as planned.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    plan: FaultPlan,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
}

impl FaultDevice {
    /// This device with these faults.
    pub fn new(inner: Arc<dyn Device>, plan: FaultPlan) -> Self {
        Self { inner, plan, reads: 0.into(), writes: 0.into(), flushes: 0.into() }
    }

    /// Reads, writes and flushes so far: what a plan can name.
    pub fn counts(&self) -> (u64, u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        (load(&self.reads), load(&self.writes), load(&self.flushes))
    }

    fn fails(&self, counter: &AtomicU64, planned: Option<u64>) -> bool {
        let number = counter.fetch_add(1, Ordering::SeqCst);
        planned.is_some_and(|planned| number == planned || (self.plan.persistent && number > planned))
    }
}

fn failure(what: &str) -> io::Error {
    // EIO, as a failing disk gives.
    io::Error::other(format!("planned {what} failure"))
}

impl Device for FaultDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.fails(&self.reads, self.plan.read) {
            return Err(failure("read"));
        }
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if self.fails(&self.writes, self.plan.write) {
            // I1: half of it arrived.
            self.inner.write_at(offset, &buf[..buf.len() / 2])?;
            return Err(failure("write"));
        }
        self.inner.write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        if self.fails(&self.flushes, self.plan.flush) {
            return Err(failure("flush"));
        }
        self.inner.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        format!("{} with faults", self.inner.describe())
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }
}
