//! Large aligned reads and writes past the page cache (`O_DIRECT`): the device works on the engine's buffers.
//!
//! A copy into the page cache, and the memory for it, cost more than everything else that a large write does. Small or
//! unaligned writes go through the page cache, where neighbours meet. Linux keeps the two coherent: a direct write writes
//! out and drops what the page cache holds of its range.
//!
//! Invariants:
//! - I1. What does not suit is left to the caller; nothing was written then.
//! - I2. A filesystem that refuses direct I/O is asked once.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::AlignedBuf;

/// A second handle of an image file or block device, for direct I/O.
#[derive(Debug)]
pub(crate) struct Direct {
    file: Option<File>,
    refused: AtomicBool,
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
        Self { file: opened.filter(same), refused: AtomicBool::new(false) }
    }

    /// Writes from the start of `bufs`; how many bytes, which is 0 where this is not for direct I/O (I1).
    pub(crate) fn write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match suits(offset, bufs.iter().map(|buf| &**buf)) {
            true => self.run(|file| rustix::io::pwritev(file, bufs, offset)),
            false => Ok(0),
        }
    }

    /// Reads into the start of `buf`; how many bytes, which is 0 where this is not for direct I/O (I1).
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match suits(offset, std::iter::once(&*buf)) {
            true => self.run(|file| rustix::io::pread(file, &mut *buf, offset)),
            false => Ok(0),
        }
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
