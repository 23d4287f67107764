//! [`FuseRing`]: a ring entry into which the kernel puts one FUSE request at a time (FUSE over io_uring, Linux 6.14).
//!
//! A server has a queue for every processor, and one or more entries in each queue. A single system call answers a
//! request and waits for the next one. This module does not interpret the bytes of requests and answers.
//!
//! ```text
//! [new] --enable--> [idle] --register--> [kernel owns] --a request--> [we own] --answer--> [kernel owns] ...
//! ```
//!
//! Invariants:
//! - I1. While the kernel owns the entry, this process has no reference to the entry's memory: [`FuseRing::buffers`]
//!   returns `None`.
//! - I2. The memory is unmapped only while this process owns it. If an entry is dropped while the kernel owns it, the
//!   entry's memory stays mapped forever, so a late request cannot overwrite other data.
//! - I3. The ring accepts only the io_uring operation `URING_CMD`, so an attacker who takes over the server cannot use
//!   the ring to open files.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::io_uring::IoringSetupFlags;
use zerocopy::{Immutable, IntoBytes};

use crate::queues::{Mapping, Queues};

/// Bytes of the header of requests and answers (`struct fuse_uring_req_header`).
pub const FUSE_RING_HEADER: usize = 288;

/// A ring with one entry, for one request at a time.
#[derive(Debug)]
pub struct FuseRing {
    queues: Queues<FuseSubmission>,
    memory: Option<Mapping>,
    payload_len: usize,
    owner: MemoryOwner,
    /// `struct iovec[2]` of header and payload, which the kernel reads when the entry is registered.
    places: Box<[[u64; 2]; 2]>,
    /// Makes the type `!Sync`, because a ring has one user at a time. The type is `Send`, because one thread makes the
    /// ring and another thread enables and uses it. The kernel accepts commands only from the thread that enabled the
    /// ring.
    not_sync: PhantomData<std::cell::Cell<()>>,
}

/// The side that may access the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryOwner {
    Us,
    Kernel,
}

impl FuseRing {
    /// Makes a ring with room for `payload_len` bytes besides the header; [`enable`](Self::enable) starts it. Memory
    /// that is never touched takes no physical pages. Fails if the kernel does not support such rings or denies them to
    /// this process.
    pub fn new(payload_len: usize) -> io::Result<Self> {
        let flags = IoringSetupFlags::SQE128
            | IoringSetupFlags::NO_SQARRAY
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN;
        let queues = Queues::new(1, flags, &[OP_URING_CMD])?;
        let memory = Mapping::anonymous(HEADER_ROOM + payload_len)?;
        let start = memory.start().as_ptr().expose_provenance() as u64;
        let places = Box::new([[start, FUSE_RING_HEADER as u64], [start + HEADER_ROOM as u64, payload_len as u64]]);
        let (memory, owner) = (Some(memory), MemoryOwner::Us);
        Ok(Self { queues, memory, payload_len, owner, places, not_sync: PhantomData })
    }

    /// Enables the ring for the calling thread, which alone may use it from now on.
    pub fn enable(&mut self) -> io::Result<()> {
        self.queues.enable()
    }

    /// Registers the entry with the connection `fuse` for requests of processor `queue`, and waits for the first
    /// request.
    pub fn register(&mut self, fuse: BorrowedFd<'_>, queue: u16) -> io::Result<()> {
        let mut command = FuseSubmission::new(fuse, CMD_REGISTER, queue, 0);
        command.addr = self.places.as_ptr().expose_provenance() as u64;
        command.len = 2;
        self.submit_and_wait(&command)
    }

    /// Answers the request with the content of [`buffers`](Self::buffers), and waits for the next request. `commit_id`
    /// is the number in the header of the answered request.
    pub fn answer(&mut self, fuse: BorrowedFd<'_>, queue: u16, commit_id: u64) -> io::Result<()> {
        self.submit_and_wait(&FuseSubmission::new(fuse, CMD_COMMIT_AND_FETCH, queue, commit_id))
    }

    /// The header and the payload of the arrived request, which the caller overwrites with its answer. `None` while the
    /// kernel owns the memory.
    #[allow(unsafe_code, reason = "the kernel writes to this memory between two calls")]
    pub fn buffers(&mut self) -> Option<(&mut [u8; FUSE_RING_HEADER], &mut [u8])> {
        let memory = self.memory.as_ref().filter(|_| self.owner == MemoryOwner::Us)?;
        // SAFETY: the mapping has HEADER_ROOM + payload_len bytes, which the kernel zeroed, and lives as long as
        // `self`, which the result borrows exclusively. The two parts do not overlap. By I1 the kernel does not write
        // to the memory until `submit_and_wait`, which borrows `self` again.
        let (header, payload) = unsafe {
            let payload = memory.start().as_ptr().add(HEADER_ROOM);
            (
                &mut *memory.start().as_ptr().cast::<[u8; FUSE_RING_HEADER]>(),
                std::slice::from_raw_parts_mut(payload, self.payload_len),
            )
        };
        Some((header, payload))
    }

    #[allow(unsafe_code, reason = "the kernel uses the memory that commands name")]
    fn submit_and_wait(&mut self, command: &FuseSubmission) -> io::Result<()> {
        if !self.queues.push(command) {
            return Err(Errno::BUSY.into());
        }
        self.owner = MemoryOwner::Kernel;
        loop {
            // SAFETY: the queue holds only `FuseSubmission`s of this file. The commands name `places`, and through it
            // `memory`; both live as long as the kernel may use them (I2).
            match unsafe { self.queues.enter(1) } {
                Ok(()) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(errno.into()),
            }
            if let Some((_, result)) = self.queues.pop() {
                self.owner = MemoryOwner::Us;
                return if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) };
            }
        }
    }
}

impl Drop for FuseRing {
    fn drop(&mut self) {
        if self.owner == MemoryOwner::Kernel
            && let Some(memory) = self.memory.take()
        {
            // The kernel may still write to the memory, so keep it mapped (I2).
            memory.leave();
        }
    }
}

/// An entry of the submission queue: `struct io_uring_sqe` of 128 bytes with `struct fuse_uring_cmd_req` in its last 80
/// bytes.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct FuseSubmission {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    cmd_op: u32,
    pad: u32,
    addr: u64,
    len: u32,
    uring_cmd_flags: u32,
    user_data: u64,
    buf_index: u16,
    personality: u16,
    file_index: u32,
    request_flags: u64,
    commit_id: u64,
    queue: u16,
    rest: [u8; 62],
}

impl FuseSubmission {
    fn new(fuse: BorrowedFd<'_>, cmd_op: u32, queue: u16, commit_id: u64) -> Self {
        Self {
            opcode: OP_URING_CMD,
            flags: 0,
            ioprio: 0,
            fd: fuse.as_raw_fd(),
            cmd_op,
            pad: 0,
            addr: 0,
            len: 0,
            uring_cmd_flags: 0,
            user_data: 0,
            buf_index: 0,
            personality: 0,
            file_index: 0,
            request_flags: 0,
            commit_id,
            queue,
            rest: [0; 62],
        }
    }
}

const _: () = assert!(size_of::<FuseSubmission>() == 128);

const OP_URING_CMD: u8 = 46;
/// `FUSE_IO_URING_CMD_REGISTER`, `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`.
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;
/// Bytes of memory for the header; the payload starts on the next page.
const HEADER_ROOM: usize = 4096;

/// Whether the kernel lets FUSE servers use rings: a parameter of the fuse module, off by default.
pub fn has_fuse_rings() -> bool {
    rings_switch() == Some(b'Y')
}

/// Whether the kernel supports rings for FUSE servers but does not let servers use rings. Root can switch rings on.
pub fn fuse_rings_are_off() -> bool {
    rings_switch() == Some(b'N')
}

fn rings_switch() -> Option<u8> {
    let mut switch = [0];
    let mut file = File::open("/sys/module/fuse/parameters/enable_uring").ok()?;
    io::Read::read_exact(&mut file, &mut switch).ok()?;
    Some(switch[0])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Makes a ring; `None` if the kernel has no io_uring.
    fn ring_of(payload_len: usize) -> Option<FuseRing> {
        match FuseRing::new(payload_len) {
            Ok(ring) => Some(ring),
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "CI needs io_uring: {error}");
                eprintln!("SKIPPED: this test needs io_uring: {error}");
                None
            }
        }
    }

    #[test]
    fn a_ring_takes_its_own_command_and_fails_on_other_files() {
        let Some(mut ring) = ring_of(1 << 16) else { return };
        let (header, payload) = ring.buffers().unwrap();
        assert_eq!((header.len(), payload.len()), (FUSE_RING_HEADER, 1 << 16));
        payload[(1 << 16) - 1] = 7;
        ring.enable().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        let error = ring.register(zero.as_fd(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::OPNOTSUPP.raw_os_error()), "{error}");
        assert!(ring.buffers().is_some(), "a failed command leaves the memory with us");
    }

    #[test]
    fn a_ring_denies_other_operations() {
        let Some(mut ring) = ring_of(4096) else { return };
        ring.enable().unwrap();
        let null = File::open("/dev/null").unwrap();
        let mut command = FuseSubmission::new(null.as_fd(), 0, 0, 0);
        // IORING_OP_OPENAT
        command.opcode = 18;
        let error = ring.submit_and_wait(&command).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ACCESS.raw_os_error()), "{error}");
    }
}
