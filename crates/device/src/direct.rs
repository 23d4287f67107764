//! Large aligned reads and writes past the page cache (`O_DIRECT`): the device works on the engine's buffers.
//!
//! A copy into the page cache, and the memory for it, cost more than everything else that a large write does. Small or
//! unaligned writes go through the page cache, where neighbours meet. Linux keeps the two coherent: a direct write writes
//! out and drops what the page cache holds of its range.
//!
//! What is large enough goes to the device as several requests at once, through io_uring ([`crate::io_ring`]) where the
//! kernel has it. Where it has not, or all rings are in use, threads that read and write side by side are all there is.
//!
//! What is written from many small buffers, such as sectors that were changed here and there, is joined in a large one first:
//! a copy costs less than requests of so many pieces, or than a write that others wait for.
//!
//! Large writes take turns: the next one starts when the last one is half done. So the device always has work, and writes
//! end one after the other; if they were all started at once, they would all end at once, and the device would wait while
//! everybody prepares the next one.
//!
//! Invariants:
//! - I1. What does not suit is left to the caller; nothing was written then.
//! - I2. A filesystem that refuses direct I/O is asked once, and a ring that is denied is not used again.
//! - I3. All rings are made before the process gives up the right to make any.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::AlignedBuf;
use crate::file::NR_BUFS_MAX;
use crate::io_ring::IoRing;

/// A second handle of an image file or block device, for direct I/O.
#[derive(Debug)]
pub(crate) struct Direct {
    file: Option<File>,
    refused: AtomicBool,
    /// Rings that nobody uses at the moment.
    rings: Mutex<Vec<Ring>>,
    nr_rings: AtomicUsize,
    /// Held by the large write that was started last.
    turn: Mutex<()>,
}

/// For the requests of one call at a time.
#[derive(Debug)]
struct Ring {
    io: IoRing,
    /// For joining small buffers: of [`JOINED_BYTES`] once that was wanted.
    joined: AlignedBuf,
}

impl Direct {
    /// A handle for `file`, which `path` led to; one that takes nothing where the filesystem has no direct I/O.
    pub(crate) fn open(path: &Path, file: &File, writable: bool) -> Self {
        let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
        let opened = File::options().read(true).write(writable).custom_flags(flags).open(path).ok();
        // The path may lead elsewhere by now.
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

    /// Whether large requests are cut into several that are worked on at once.
    pub(crate) fn has_rings(&self) -> bool {
        !self.refused.load(Ordering::Relaxed) && self.nr_rings.load(Ordering::Relaxed) > 0
    }

    /// As where the kernel has no io_uring.
    #[cfg(test)]
    pub(crate) fn deny_rings(&self) {
        lock(&self.rings).clear();
        self.nr_rings.store(0, Ordering::Relaxed);
    }

    /// Writes from the start of `bufs`; how many bytes, which is 0 where this is not for direct I/O (I1).
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

    /// Reads into the start of `buf`; how many bytes, which is 0 where this is not for direct I/O (I1).
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        if !suits(offset, std::iter::once(&*buf)) {
            return Ok(0);
        }
        match self.with_ring(buf.len(), |ring, file| ring.io.read(file, offset, buf, PIECE_BYTES)) {
            0 => self.run(|file| rustix::io::pread(file, &mut *buf, offset)),
            read => Ok(read),
        }
    }

    /// Has `call` done with a ring, where one is free and `total` bytes are worth it; 0 where nothing was done: what the
    /// ring could not do is tried without one, which tells why.
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
    /// Joins the start of `bufs`, as much as a write of its own takes.
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

/// Whether all borders are where a device can take them, and it is worth a trip of its own.
fn suits<'b>(offset: u64, bufs: impl Iterator<Item = &'b [u8]> + Clone) -> bool {
    let aligned = |value: usize| value.is_multiple_of(AlignedBuf::ALIGN);
    let total: usize = bufs.clone().map(<[u8]>::len).sum();
    total >= MIN_BYTES
        && offset.is_multiple_of(AlignedBuf::ALIGN as u64)
        && bufs.into_iter().all(|buf| aligned(buf.len()) && aligned(buf.as_ptr().addr()))
}

/// Below this, the page cache is faster: it gathers neighbours.
const MIN_BYTES: usize = 64 << 10;
/// A request of a ring.
const PIECE_BYTES: usize = 1 << 20;
/// From here on it is worth a ring.
const RING_MIN_BYTES: usize = 2 * PIECE_BYTES;
/// Buffers shorter than this on average are joined.
const SMALL_BUF: usize = 5 << 10;
/// Of buffers shorter than this, a thread of ours makes requests with less work than one of the kernel's.
const LARGE_BUF: usize = 64 << 10;
/// Large reads and writes at a time: threads that write back, and that read ahead. Others go without.
const NR_RINGS: usize = 8;
/// What is joined from small buffers: a write.
const JOINED_BYTES: usize = RING_MIN_BYTES;
