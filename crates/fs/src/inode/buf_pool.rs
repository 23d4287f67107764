//! Memory for dirty data: reusable buffers in size classes.

#![allow(clippy::arithmetic_side_effects, reason = "sizes of buffers in memory")]

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_device::AlignedBuf;

/// Size of the largest buffer. A sequential writer fills a buffer of this size before it takes the next.
pub(crate) const BUF_MAX: usize = 1 << 20;
const BUF_MIN_LOG: u32 = 12;
/// The total memory of the buffers, idle ones included, may exceed the pool's limit by one `SLACK`th of the limit.
/// Writers use up the limit most of the time. Without the slack, the buffers that writeback empties would be freed
/// instead of being reused for the next writes.
const SLACK: u64 = 8;
const NR_CLASSES: usize = (BUF_MAX.trailing_zeros() - BUF_MIN_LOG) as usize + 1;

/// Memory for dirty data of the whole filesystem, in size classes of powers of two.
#[derive(Debug)]
pub(crate) struct BufPool {
    idle: [Mutex<Vec<AlignedBuf>>; NR_CLASSES],
    idle_bytes: AtomicU64,
    max_bytes: u64,
    used_bytes: AtomicU64,
    nr_used: AtomicU64,
}

impl BufPool {
    /// Makes a pool that keeps idle buffers for reuse while the buffers together take little more than `max_bytes`.
    pub(crate) fn new(max_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            idle: Default::default(),
            idle_bytes: AtomicU64::new(0),
            max_bytes,
            used_bytes: AtomicU64::new(0),
            nr_used: AtomicU64::new(0),
        })
    }

    /// Bytes of memory in buffers that hold data.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Number of buffers that hold data.
    pub(crate) fn nr_used(&self) -> u64 {
        self.nr_used.load(Ordering::Relaxed)
    }

    /// Bytes of memory in idle buffers.
    #[cfg(test)]
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.idle_bytes.load(Ordering::Relaxed)
    }

    fn class(len: usize) -> usize {
        let log = len.clamp(1 << BUF_MIN_LOG, BUF_MAX).next_power_of_two().trailing_zeros();
        (log - BUF_MIN_LOG) as usize
    }

    /// Takes an empty buffer with room for `len` bytes, at most [`BUF_MAX`].
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buf {
        let class = Self::class(len);
        let size = 1usize << (class as u32 + BUF_MIN_LOG);
        let bytes = match self.idle[class].lock().pop() {
            Some(bytes) => {
                self.idle_bytes.fetch_sub(size as u64, Ordering::Relaxed);
                bytes
            }
            None => AlignedBuf::with_capacity(size),
        };
        self.used_bytes.fetch_add(size as u64, Ordering::Relaxed);
        self.nr_used.fetch_add(1, Ordering::Relaxed);
        Buf { bytes, size, pool: Arc::clone(self) }
    }

    /// Takes a buffer with room for whole sectors and lets `fill` write its `len` bytes, at most [`BUF_MAX`].
    pub(crate) fn filled<E>(
        self: &Arc<Self>,
        len: usize,
        sectorsize: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Buf, E> {
        let mut buf = self.take(len.next_multiple_of(sectorsize as usize));
        buf.bytes.extend_with(len, fill)?;
        Ok(buf)
    }

    /// Keeps a buffer of a class for reuse. If the pool exceeds its limit, idle buffers of other classes are freed
    /// first, because their sizes may not be needed any more.
    fn keep(&self, mut bytes: AlignedBuf, class: usize) {
        bytes.clear();
        self.idle_bytes.fetch_add(bytes.capacity() as u64, Ordering::Relaxed);
        self.idle[class].lock().push(bytes);
        let most = self.max_bytes + self.max_bytes / SLACK;
        while self.idle_bytes.load(Ordering::Relaxed) + self.used_bytes() > most {
            let others = (0..NR_CLASSES).filter(|other| *other != class);
            let largest = others.max_by_key(|other| self.idle[*other].lock().len() << other).unwrap_or(class);
            let evicted = self.idle[largest].lock().pop();
            let Some(evicted) = evicted.or_else(|| self.idle[class].lock().pop()) else { return };
            self.idle_bytes.fetch_sub(evicted.capacity() as u64, Ordering::Relaxed);
        }
    }
}

/// A buffer of a pool; it returns to the pool when dropped.
#[derive(Debug)]
pub(crate) struct Buf {
    pub(crate) bytes: AlignedBuf,
    /// The size of the buffer's class; the buffer never grows beyond it.
    pub(crate) size: usize,
    pub(crate) pool: Arc<BufPool>,
}

impl Buf {
    /// Makes room for `more` bytes, up to [`BUF_MAX`] in all.
    pub(crate) fn make_room(&mut self, more: usize) {
        if self.bytes.len() + more > self.size {
            let mut larger = self.pool.take(self.bytes.len() + more);
            larger.bytes.extend_from_slice(&self.bytes);
            *self = larger;
        }
    }
}

impl AsRef<Self> for Buf {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.pool.used_bytes.fetch_sub(self.size as u64, Ordering::Relaxed);
        self.pool.nr_used.fetch_sub(1, Ordering::Relaxed);
        self.pool.keep(std::mem::take(&mut self.bytes), BufPool::class(self.size));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_are_in_use_displace_others() {
        let pool = BufPool::new(4 << 20);
        let small: Vec<Buf> = (0..1100).map(|_| pool.take(4096)).collect();
        drop(small);
        assert_eq!(pool.idle_bytes(), 1100 * 4096);
        for _ in 0..3 {
            let large = [pool.take(BUF_MAX), pool.take(BUF_MAX)];
            assert_eq!(pool.used_bytes(), 2 << 20);
            drop(large);
            assert_eq!(pool.idle[NR_CLASSES - 1].lock().len(), 2);
            assert!(pool.idle_bytes() <= (4 << 20) + (4 << 20) / SLACK);
        }
        assert_eq!(pool.idle[0].lock().len(), (4 << 20) / 4096 + (4 << 20) / 4096 / SLACK as usize - 512);
    }
}
