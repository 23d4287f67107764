//! Devices: where the bytes of a filesystem are kept. Image files, block devices, and memory for tests.
//!
//! Second floor of the house, above `format` (which it does not need): positioned, exact I/O on one device, its
//! durability barrier, and the locks that keep a second writer out.
//!
//! Invariants:
//! - I1. A read or write is done in full or fails; nothing past the device's end is touched.
//! - I2. Data written before [`Device::flush`] was called is durable when it returns `Ok`.
//! - I3. A [`FileDevice`] that was opened read-write is the only user of its file: no other process of ours has it
//!   open, and the kernel has not mounted it (see [`open`](FileDevice::open)).
//! - I4. After a failed flush every later flush fails too: what the failed one lost will never become durable.
//!
//! `unsafe` is allowed in five places: the ioctl in `discard.rs`, what runs before `main` in `stdio.rs`, and io_uring: `queues.rs`, whose memory the kernel shares,
//! and `fuse_ring.rs` and `io_ring.rs`, whose commands name memory for it to read and write.

#![deny(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice};

mod aligned_buf;
mod direct;
mod discard;
mod file;
mod fuse_ring;
mod io_ring;
mod memory;
mod mounted;
mod queues;
mod stdio;

pub use aligned_buf::AlignedBuf;
pub use file::{Access, FileDevice, OpenError, refuse_in_use};
pub use fuse_ring::{FUSE_RING_HEADER, FuseRing, has_fuse_rings};
pub use memory::MemoryDevice;
pub use stdio::{stdin_was_closed, stdout_was_closed};

/// One device: a fixed number of bytes with positioned I/O.
///
/// All methods take `&self` and may be called from any thread at once; overlapping concurrent writes give either
/// content.
pub trait Device: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `buf` from `offset`. Fails with [`io::ErrorKind::UnexpectedEof`] past the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all of `buf` at `offset`. Never extends the device.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Writes all of `bufs`, one behind the other, at `offset`.
    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            self.write_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    fn flush(&self) -> io::Result<()>;

    /// Tells the device that a range is not needed any more: best effort; its content is undefined afterwards.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()>;

    /// A name for messages: the path.
    fn describe(&self) -> String;

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Whether large reads and writes are handed over as several requests at once, through io_uring.
    fn has_io_uring(&self) -> bool {
        false
    }
}

/// The error for a range that ends past the device.
pub(crate) fn past_end(offset: u64, len_bytes: usize, device_len: u64, kind: io::ErrorKind) -> io::Error {
    io::Error::new(kind, format!("{len_bytes} bytes at {offset} end past the device's {device_len} bytes"))
}

/// Checks that `len_bytes` at `offset` lie inside a device of `device_len` bytes (I1).
pub(crate) fn check_range(offset: u64, len_bytes: usize, device_len: u64, kind: io::ErrorKind) -> io::Result<()> {
    match offset.checked_add(len_bytes as u64) {
        Some(end) if end <= device_len => Ok(()),
        _ => Err(past_end(offset, len_bytes, device_len, kind)),
    }
}
