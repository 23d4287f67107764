//! Large aligned reads and writes that bypass the page cache (`O_DIRECT`).
//!
//! Copying the data into the page cache, and the memory for the copy, are the largest costs of a large write. Small or
//! unaligned writes use the page cache, which merges adjacent writes. Linux keeps direct I/O and the page cache
//! coherent: a direct write first writes out and drops the cached pages of its range.
//!
//! A large read or write becomes several concurrent requests of an io_uring ([`crate::io_ring`]). If the kernel has no
//! io_uring, or all rings are in use, the read or write is a single system call.
//!
//! Many small buffers, such as scattered changed sectors, are copied into a large buffer first, because the copy costs
//! less than requests with many segments.
//!
//! Large writes with a ring take turns: the next write starts when half of the previous write is done. Writes that
//! start together would also end together, and the device would idle while all threads prepare their next write.
//!
//! Invariants:
//! - I1. A result of 0 bytes means that direct I/O was not used and nothing was transferred; the caller then reads or
//!   writes through the page cache.
//! - I2. After the filesystem refused direct I/O, direct I/O is not tried again. When the kernel denies the use of a
//!   ring, the ring is dropped.
//! - I3. All rings are made at open, before the process gives up the right to make rings.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::AlignedBuf;
use crate::file::NR_BUFS_MAX;
use crate::io_ring::IoRing;

/// A second file descriptor of an image file or block device, for direct I/O.
#[derive(Debug)]
pub(crate) struct Direct {
    file: Option<File>,
    refused: AtomicBool,
    /// Rings not in use.
    rings: Mutex<Vec<Ring>>,
    nr_rings: AtomicUsize,
    /// Large writes with a ring take turns: a write holds this lock until half of its requests are done.
    turn: Mutex<()>,
}

/// A ring and a buffer, used by one call at a time.
#[derive(Debug)]
struct Ring {
    io: IoRing,
    /// Small buffers are copied into this buffer. The buffer gets its capacity of [`JOINED_BYTES`] at the first use.
    joined: AlignedBuf,
}

impl Direct {
    /// Opens `path` for direct I/O. `path` must still lead to the file that is open as `file`. On failure, all reads
    /// and writes transfer 0 bytes (I1).
    pub(crate) fn open(path: &Path, file: &File, writable: bool) -> Self {
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
        let opened = File::options().read(true).write(writable).custom_flags(flags).open(path).ok();
        // The path may lead to another file by now, so compare both open files.
        let same = |other: &File| {
            let (a, b) = (rustix::fs::fstat(file), rustix::fs::fstat(other));
            matches!((a, b), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
        };
        let file = opened.filter(same);
        let nr_rings = if file.is_some() { NR_RINGS } else { 0 };
        let rings: Vec<_> = (0..nr_rings)
            .map_while(|_| Some(Ring { io: IoRing::new().ok()?, joined: AlignedBuf::default() }))
            .collect();
        Self {
            file,
            refused: AtomicBool::new(false),
            nr_rings: AtomicUsize::new(rings.len()),
            rings: Mutex::new(rings),
            turn: Mutex::default(),
        }
    }

    /// Whether large reads and writes are split into concurrent requests.
    pub(crate) fn has_rings(&self) -> bool {
        !self.refused.load(Ordering::Relaxed) && self.nr_rings.load(Ordering::Relaxed) > 0
    }

    /// Simulates a kernel without io_uring.
    #[cfg(test)]
    pub(crate) fn deny_rings(&self) {
        lock(&self.rings).clear();
        self.nr_rings.store(0, Ordering::Relaxed);
    }

    /// The number of bytes in the rings' buffers for joined writes.
    #[cfg(test)]
    pub(crate) fn nr_joined(&self) -> usize {
        lock(&self.rings).iter().map(|ring| ring.joined.len()).sum()
    }

    /// Writes a prefix of `bufs` and returns its length; 0 if direct I/O was not used (I1).
    pub(crate) fn write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        if !suits(offset, bufs.iter().map(|buf| &**buf)) {
            return Ok(0);
        }
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let written = match total / bufs.len().max(1) {
            ..SMALL_BUF => self.with_ring(total, |ring, file| {
                ring.join(bufs);
                ring.io.write(file, offset, &[IoSlice::new(&ring.joined)], PIECE_BYTES, lock(&self.turn))
            }),
            SMALL_BUF..LARGE_BUF => 0,
            _ => self.with_ring(total, |ring, file| ring.io.write(file, offset, bufs, PIECE_BYTES, lock(&self.turn))),
        };
        match written {
            0 => self.run(|file| rustix::io::pwritev(file, &bufs[..bufs.len().min(NR_BUFS_MAX)], offset)),
            written => Ok(written),
        }
    }

    /// Reads into a prefix of `buf` and returns its length; 0 if direct I/O was not used (I1).
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        if !suits(offset, std::iter::once(&*buf)) {
            return Ok(0);
        }
        match self.with_ring(buf.len(), |ring, file| ring.io.read(file, offset, buf, PIECE_BYTES)) {
            0 => self.run(|file| rustix::io::pread(file, &mut *buf, offset)),
            read => Ok(read),
        }
    }

    /// Reads into a prefix of `bufs` and returns its length; 0 if direct I/O was not used (I1).
    pub(crate) fn read_vectored(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if !suits(offset, bufs.iter().map(|buf| &**buf)) {
            return Ok(0);
        }
        self.run(|file| rustix::io::preadv(file, &mut *bufs, offset))
    }

    /// Runs `call` with a ring, if one is free and `total` bytes justify it. Returns the number of transferred bytes.
    /// If the number is 0, the caller repeats the read or write without a ring, and the repeated call returns the
    /// error, if there is one.
    fn with_ring(&self, total: usize, call: impl FnOnce(&mut Ring, &File) -> usize) -> usize {
        let file = self.file.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed) && total >= RING_MIN_BYTES);
        let Some(file) = file else { return 0 };
        let Some(mut ring) = lock(&self.rings).pop() else { return 0 };
        let done = call(&mut ring, file);
        if ring.io.is_denied() {
            self.nr_rings.fetch_sub(1, Ordering::Relaxed);
        } else {
            lock(&self.rings).push(ring);
        }
        done
    }

    fn run(&self, mut call: impl FnMut(&File) -> rustix::io::Result<usize>) -> io::Result<usize> {
        let Some(file) = self.file.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed)) else { return Ok(0) };
        loop {
            match call(file) {
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOTSUP) => {
                    self.refused.store(true, Ordering::Relaxed);
                    return Ok(0);
                }
                result => return Ok(result?),
            }
        }
    }
}

impl Ring {
    /// Copies a prefix of `bufs`, at most [`JOINED_BYTES`], into `joined`.
    fn join(&mut self, bufs: &[IoSlice<'_>]) {
        if self.joined.capacity() == 0 {
            self.joined = AlignedBuf::with_capacity(JOINED_BYTES);
        }
        self.joined.clear();
        for buf in bufs {
            let room = JOINED_BYTES - self.joined.len();
            self.joined.extend_from_slice(&buf[..buf.len().min(room)]);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether offset, addresses and lengths are aligned, and the total is large enough for direct I/O.
fn suits<'b>(offset: u64, bufs: impl Iterator<Item = &'b [u8]> + Clone) -> bool {
    let aligned = |value: usize| value.is_multiple_of(AlignedBuf::ALIGN);
    let total: usize = bufs.clone().map(<[u8]>::len).sum();
    total >= MIN_BYTES
        && offset.is_multiple_of(AlignedBuf::ALIGN as u64)
        && bufs.into_iter().all(|buf| aligned(buf.len()) && aligned(buf.as_ptr().addr()))
}

/// Smallest direct read or write. For fewer bytes the page cache is faster, because it merges adjacent writes.
const MIN_BYTES: usize = 64 << 10;
/// Number of bytes that one request of a ring transfers.
const PIECE_BYTES: usize = 1 << 20;
/// Smallest read or write that uses a ring.
const RING_MIN_BYTES: usize = 2 * PIECE_BYTES;
/// Buffers with a smaller average size are copied into one large buffer.
const SMALL_BUF: usize = 5 << 10;
/// Buffers with an average size from [`SMALL_BUF`] up to this size do not use a ring, because their I/O costs less on
/// the calling thread than on a kernel worker.
const LARGE_BUF: usize = 64 << 10;
/// Number of concurrent large reads and writes with a ring: enough for the writeback and readahead threads.
const NR_RINGS: usize = 8;
/// Maximum number of bytes of small buffers that are copied into one buffer for a write.
const JOINED_BYTES: usize = RING_MIN_BYTES;
