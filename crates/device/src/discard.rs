//! Discards ranges: punches holes into image files, and calls BLKDISCARD on block devices.

use std::fs::File;
use std::io;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::ioctl;

/// Punches a hole into an image file. A filesystem without support for holes is no error.
pub(crate) fn punch_hole(file: &File, offset: u64, len_bytes: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    best_effort(rustix::fs::fallocate(file, mode, offset, len_bytes))
}

/// Discards a range of a block device, shrunk to whole sectors of 4096 bytes. A device without support for discards is
/// no error.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
pub(crate) fn discard_blocks(file: &File, offset: u64, len_bytes: u64) -> io::Result<()> {
    const ALIGN: u64 = 4096;
    // `_IO(0x12, 119)` of linux/fs.h.
    const BLKDISCARD: ioctl::Opcode = ioctl::opcode::none(0x12, 119);
    let start = offset.next_multiple_of(ALIGN);
    let end = offset.saturating_add(len_bytes) / ALIGN * ALIGN;
    if start >= end {
        return Ok(());
    }
    let range = [start, end - start];
    // SAFETY: BLKDISCARD reads two u64, start and length, from the pointer it is given; `Setter` passes a pointer to
    // its copy of `range`, which lives until the call returns, and the kernel writes nothing to it.
    let done = unsafe { ioctl::ioctl(file, ioctl::Setter::<BLKDISCARD, [u64; 2]>::new(range)) };
    best_effort(done)
}

fn best_effort(done: Result<(), Errno>) -> io::Result<()> {
    match done {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY) | Ok(()) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
