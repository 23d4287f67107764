//! A device whose n-th request fails.
//!
//! I1. A failed or short write writes part of its range, as on a real device: the first half, in whole sectors
//!     of 4096 bytes, because disks do not tear sectors. A short read fills the first half of its range.
//! I2. The device counts a request, and decides its fault, before it passes the request to the device below.
//! I3. A failed flush loses each sector that was written since the last completed flush, or keeps it. A later flush does
//!     not bring it back, as on Linux, where a failed write-back is reported once.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ubtrfs_device::Device;

use crate::Rng;
use crate::unflushed::Unflushed;

const SECTOR: usize = 4096;

/// The beginning of the message of a planned panic.
pub(crate) const PLANNED_PANIC: &str = "planned panic";

/// The effect of a planned fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultKind {
    /// The request fails, as on a failing disk. A failed write is done in part (I1).
    #[default]
    Error,
    /// The request transfers fewer bytes than requested and fails.
    Short,
    /// The request succeeds, but one byte in the middle of each sector is wrong, as with bad RAM, cables or
    /// firmware. A flush fails as with [`FaultKind::Error`].
    Wrong,
    /// A write reports success but is not done. Other requests fail as with [`FaultKind::Error`].
    Lost,
    /// The thread panics.
    Panic,
}

/// The requests that fail. Each kind of request is counted from 0. With `None`, no request of the kind fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultPlan {
    /// The number of the read that fails.
    pub read: Option<u64>,
    /// The number of the write that fails.
    pub write: Option<u64>,
    /// The number of the flush that fails.
    pub flush: Option<u64>,
    /// Whether all later requests of the kind fail as well.
    pub persistent: bool,
    /// The effect of the fault.
    pub kind: FaultKind,
    /// If set, only reads and writes that touch this range (start, end) are counted.
    pub within: Option<(u64, u64)>,
    /// If set, every write of a sector that begins with these bytes fails, so that this data can never be
    /// stored.
    pub refused: Option<[u8; 16]>,
}

/// A device that fails as planned.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    plan: FaultPlan,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    faults: AtomicU64,
    threads: Mutex<BTreeSet<String>>,
    /// The writes since the last completed flush, if a flush may fail (I3).
    unflushed: Option<Mutex<Unflushed>>,
}

impl FaultDevice {
    /// Makes a device that applies a plan to requests for `inner`.
    pub fn new(inner: Arc<dyn Device>, plan: FaultPlan) -> Self {
        Self {
            inner,
            plan,
            reads: 0.into(),
            writes: 0.into(),
            flushes: 0.into(),
            faults: 0.into(),
            threads: Mutex::default(),
            unflushed: plan.flush.map(|_| Mutex::default()),
        }
    }

    /// The numbers of reads, writes and flushes so far. A plan refers to requests by these numbers.
    pub fn counts(&self) -> (u64, u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        (load(&self.reads), load(&self.writes), load(&self.flushes))
    }

    /// The number of faults that happened.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::SeqCst)
    }

    /// Names of the threads that made a request with a fault, except writes that [`FaultPlan::refused`] refused.
    pub fn threads(&self) -> BTreeSet<String> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn with_unflushed(&self, act: impl FnOnce(&mut Unflushed)) {
        if let Some(unflushed) = &self.unflushed {
            act(&mut unflushed.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn touches(&self, offset: u64, len: usize) -> bool {
        self.plan.within.is_none_or(|(start, end)| offset < end && offset + len as u64 > start)
    }

    /// Counts the request, and returns its fault, if any (I2).
    fn fault(&self, what: &str, counter: &AtomicU64, planned: Option<u64>) -> Option<FaultKind> {
        let number = counter.fetch_add(1, Ordering::SeqCst);
        if !planned.is_some_and(|planned| number == planned || (self.plan.persistent && number > planned)) {
            return None;
        }
        self.faults.fetch_add(1, Ordering::SeqCst);
        let thread = std::thread::current().name().unwrap_or("unnamed").to_owned();
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).insert(thread);
        assert!(self.plan.kind != FaultKind::Panic, "{PLANNED_PANIC} in {what} {number}");
        Some(self.plan.kind)
    }
}

fn failure(what: &str) -> io::Error {
    // The engine turns this error into EIO, as for a failing disk.
    io::Error::other(format!("planned {what} failure"))
}

fn corrupt(buf: &mut [u8]) {
    for sector in buf.chunks_mut(SECTOR) {
        let middle = sector.len() / 2;
        sector[middle] ^= 0x10;
    }
}

impl Device for FaultDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if !self.touches(offset, buf.len()) {
            return self.inner.read_at(offset, buf);
        }
        match self.fault("read", &self.reads, self.plan.read) {
            None => self.inner.read_at(offset, buf),
            Some(FaultKind::Wrong) => {
                self.inner.read_at(offset, buf)?;
                corrupt(buf);
                Ok(())
            }
            Some(FaultKind::Short) => {
                let half = buf.len() / 2;
                self.inner.read_at(offset, &mut buf[..half])?;
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "planned short read"))
            }
            Some(_) => Err(failure("read")),
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let is_refused = |refused: [u8; 16]| buf.chunks(SECTOR).any(|sector| sector.starts_with(&refused));
        if self.plan.refused.is_some_and(is_refused) {
            self.faults.fetch_add(1, Ordering::SeqCst);
            return Err(failure("write"));
        }
        self.with_unflushed(|unflushed| unflushed.before_write(&*self.inner, offset, buf.len()));
        if !self.touches(offset, buf.len()) {
            return self.inner.write_at(offset, buf);
        }
        let fault = self.fault("write", &self.writes, self.plan.write);
        match fault {
            None => self.inner.write_at(offset, buf),
            Some(FaultKind::Lost) => Ok(()),
            Some(FaultKind::Wrong) => {
                let mut wrong = buf.to_vec();
                corrupt(&mut wrong);
                self.inner.write_at(offset, &wrong)
            }
            Some(kind) => {
                self.inner.write_at(offset, &buf[..buf.len() / 2 / SECTOR * SECTOR])?;
                Err(match kind {
                    FaultKind::Short => io::Error::new(io::ErrorKind::WriteZero, "planned short write"),
                    _ => failure("write"),
                })
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        match self.fault("flush", &self.flushes, self.plan.flush) {
            None => {
                self.inner.flush()?;
                self.with_unflushed(Unflushed::flushed);
                Ok(())
            }
            Some(_) => {
                let mut rng = Rng::new(self.counts().1);
                self.with_unflushed(|unflushed| unflushed.lose(&*self.inner, &mut rng));
                Err(failure("flush"))
            }
        }
    }

    fn can_discard(&self) -> bool {
        self.inner.can_discard()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Medium, MediumDevice};

    #[test]
    fn a_flush_after_a_failed_one_does_not_bring_its_writes_back() {
        let below = Arc::new(MediumDevice::new(Medium::zeros(1 << 20)));
        let plan = FaultPlan { flush: Some(1), ..FaultPlan::default() };
        let device = FaultDevice::new(below.clone(), plan);
        device.write_at(0, &[1; 64 << 10]).unwrap();
        device.flush().unwrap();
        device.write_at(0, &[2; 64 << 10]).unwrap();
        device.flush().unwrap_err();
        device.flush().unwrap();
        let mut found = vec![0; 64 << 10];
        below.read_at(0, &mut found).unwrap();
        let sectors: BTreeSet<u8> = found.chunks(SECTOR).map(|sector| sector[0]).collect();
        assert_eq!(sectors, BTreeSet::from([1, 2]));
    }
}
