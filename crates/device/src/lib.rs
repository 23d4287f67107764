//! Devices store the bytes of a filesystem: image files, block devices, exports of NBD servers, and memory for tests.
//!
//! This crate offers positioned, exact I/O on one device, a durability barrier, and locks against a second writer. It
//! depends on no other crates of the workspace but `format`, which escapes paths in messages, and `nbd`.
//!
//! Invariants:
//! - I1. A read or write completes in full or fails, and never touches anything past the device's end.
//! - I2. When [`Device::flush`] returns `Ok`, all data written before the call is durable.
//! - I3. A [`FileDevice`] opened read-write is the only user of its file: no other ubtrfs process has the file open,
//!   and the kernel has not mounted it (see [`open`](FileDevice::open)). The exception is a mount that this process
//!   serves ([`Device::release_claim`]).
//! - I4. After a failed flush every later flush fails, because data may be lost. The same holds after a connection to an NBD
//!   server was lost.
//! - I5. An image file that was truncated while it was open takes no more writes: a write would extend it again, with
//!   zeros in place of the lost content.
//!
//! `unsafe` is allowed in seven files: `discard.rs` and `mount_ioctl.rs` for ioctls, `mount_calls.rs` for system calls on
//! mounts, `stdio.rs` for code that runs before `main` and for inherited files, `queues.rs` for memory shared with the
//! kernel, and `fuse_ring.rs` and `io_ring.rs` for io_uring commands that name memory for the kernel to read and write.

#![deny(unsafe_code)]

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};

mod aligned_buf;
mod direct;
mod discard;
mod exclusive_use;
mod file;
mod fuse_ring;
mod io_priority;
mod io_ring;
mod loop_watch;
mod members;
mod memory;
mod mount_calls;
mod mount_ioctl;
mod mounted;
mod named_device;
mod nbd_device;
mod open_error;
mod queues;
mod stdio;
mod write_gate;

pub use aligned_buf::AlignedBuf;
pub use exclusive_use::{claim_block_device, lock_order, refuse_in_use};
pub use file::{Access, FileDevice};
pub use fuse_ring::{FUSE_RING_HEADER, FuseRing, fuse_rings_are_off, has_fuse_rings};
pub use io_priority::IoPriority;
pub use loop_watch::{LoopEvent, LoopWatch, TellLoopEvent};
pub use members::{
    DeviceOfOther, FoundMembers, MissedChanges, PossibleSeed, ambiguous_seeds, block_devices, find_members, is_seed,
};
pub use memory::MemoryDevice;
pub use mount_calls::{change_mount_flags, open_fuse_root};
pub use mount_ioctl::{ASK_MOUNT, ASK_MOUNT_LEN, ask_mount};
pub use mounted::{find_server, is_being_mounted, is_served_here, is_unlocked, lock_holders, loop_file};
pub use named_device::NamedDevice;
pub use nbd_device::{NbdDevice, has_relative_path, is_object_url, is_url};
pub use open_error::OpenError;
pub use stdio::{keep_files_from_children, stdin_was_closed, stdout_was_closed};
pub use ubtrfs_nbd::{Content as NbdContent, serve as serve_nbd, set_object_opener};

/// A device of fixed size with positioned I/O. Only [`Device::grow_to_end`] changes the size.
///
/// Threads may call all methods concurrently. After overlapping concurrent writes, each byte comes from one of the
/// writes.
pub trait Device: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `buf` from `offset`. Fails with [`io::ErrorKind::UnexpectedEof`] past the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills `bufs` consecutively, from `offset` on.
    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            self.read_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Writes all of `buf` at `offset`. Never extends the device.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Writes all of `bufs` consecutively, from `offset` on.
    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            self.write_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Writes all of `buf` at `offset`, so that it is durable afterwards. `None`, and nothing was written, if the device has
    /// no such writes: a write and a flush do the same. Unlike [`Device::flush`], this makes no other writes durable.
    fn write_durable_at(&self, _offset: u64, _buf: &[u8]) -> Option<io::Result<()>> {
        None
    }

    /// Makes all completed writes durable.
    fn flush(&self) -> io::Result<()>;

    /// Tells the device that a range is no longer needed. The range's content is undefined afterwards. A device without
    /// support for discards is no error.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()>;

    /// Whether the device supports discards, as far as that is known.
    fn can_discard(&self) -> bool {
        true
    }

    /// The name for messages: the path.
    fn describe(&self) -> String;

    /// The absolute path, for programs with other working directories.
    fn location(&self) -> String {
        self.describe()
    }

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Whether the device was only found, and nobody has named it. It may be a backup, so it is not brought up to date if
    /// it missed changes. A degraded filesystem is opened without it if it cannot be used.
    fn is_found(&self) -> bool {
        false
    }

    /// Whether large reads and writes use io_uring, as several concurrent requests.
    fn has_io_uring(&self) -> bool {
        false
    }

    /// Extends the device to the current end of the image file or block device, which may have grown since it was
    /// opened. Returns the size in bytes, which never decreases.
    fn grow_to_end(&self) -> io::Result<u64> {
        Ok(self.len_bytes())
    }

    /// Takes the kernel's exclusive claim on a block device, at open and after [`Device::release_claim`]. Does nothing
    /// if the claim is held already, if the device is read-only, or if it is not a block device.
    fn claim(&self) -> io::Result<()> {
        Ok(())
    }

    /// Gives up the kernel's exclusive claim on a block device, so that the kernel can claim the device for a mount
    /// whose server is this process. The lock against other ubtrfs processes stays.
    fn release_claim(&self) {}

    /// Makes writes and discards wait until [`Device::resume_writes`]. After [`Device::release_claim`], the kernel's
    /// mount has the claim. This method is called when the mount may have ended, because another program may have
    /// claimed the device since then.
    fn pause_writes(&self) {}

    /// Ends the pause of [`Device::pause_writes`]. If the argument is false, all further writes and discards are
    /// refused, because another program has the device.
    fn resume_writes(&self, _permitted: bool) {}

    /// Watches for loop devices over this image file, which is open for writing ([`LoopWatch`]). The watch ends when this
    /// [`Device`] is closed.
    /// Calls `tell` in a thread of the watch. A second call does nothing.
    fn watch_loops(&self, _tell: TellLoopEvent) -> io::Result<()> {
        Ok(())
    }

    /// Fails if the image file was removed, replaced or truncated since it was opened.
    fn check_in_place(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes the error for a range that ends past the device.
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
