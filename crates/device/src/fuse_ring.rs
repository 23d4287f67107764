//! [`FuseRing`]: one place in which the kernel puts one FUSE request at a time (FUSE over io_uring, Linux 6.14).
//!
//! A server has a queue for every processor, and in each queue one place or more. A thread answers a request and waits for
//! the next one in a single system call. What the bytes mean is not known here.
//!
//! ```text
//! [new] --enable--> [idle] --register--> [with the kernel] --a request--> [with us] --answer--> [with the kernel] ...
//! ```
//!
//! Invariants:
//! - I1. While the place is with the kernel, nobody here has a reference to its memory: [`FuseRing::buffers`] refuses.
//! - I2. The memory is unmapped only when it is with us. A place that is dropped while it is with the kernel leaves its
//!   memory mapped for ever, so that a late request cannot be written over something else.
//! - I3. The ring takes the one command that it is for, on whatever descriptor, and nothing else: a program that takes over
//!   the server cannot open files with it.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::io_uring::{
    IoringEnterFlags, IoringRegisterOp, IoringSetupFlags, io_uring_enter, io_uring_params, io_uring_register,
    io_uring_setup,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use zerocopy::{Immutable, IntoBytes};

/// Bytes of the header that comes with a request and goes back with its answer (`struct fuse_uring_req_header`).
pub const FUSE_RING_HEADER: usize = 288;

/// A ring with one place for one request.
#[derive(Debug)]
pub struct FuseRing {
    ring: OwnedFd,
    queues: Mapping,
    commands: Mapping,
    at: Offsets,
    memory: Option<Mapping>,
    payload_len: usize,
    owner: Owner,
    /// `struct iovec[2]` of header and payload, which the kernel reads when the place is registered.
    places: Box<[[u64; 2]; 2]>,
    /// The kernel takes commands only of the thread that enabled the ring.
    not_sync: PhantomData<std::cell::Cell<()>>,
}

/// Who may touch the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Us,
    Kernel,
}

/// Where the shared counters lie.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    sq_head: usize,
    sq_tail: usize,
    cq_head: usize,
    cq_tail: usize,
    cqes: usize,
    sq_mask: u32,
    cq_mask: u32,
}

impl FuseRing {
    /// A ring that does nothing before it is [enabled](Self::enable), with room for `payload_len` bytes beside the header;
    /// memory that no request touches costs nothing. Fails where the kernel has no such rings or denies them to us.
    pub fn new(payload_len: usize) -> io::Result<Self> {
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::SQE128
            | IoringSetupFlags::NO_SQARRAY
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN
            | IoringSetupFlags::R_DISABLED;
        let ring = setup(&mut params)?;
        restrict(&ring)?;
        let cq_len = params.cq_off.cqes as usize + params.cq_entries as usize * size_of::<[u64; 2]>();
        let queues = Mapping::of_ring(&ring, cq_len.max(4096), SQ_RING)?;
        let commands = Mapping::of_ring(&ring, params.sq_entries as usize * size_of::<Command>(), SQES)?;
        let memory = Mapping::anonymous(HEADER_ROOM + payload_len)?;
        let start = memory.start.as_ptr().expose_provenance() as u64;
        let places = Box::new([[start, FUSE_RING_HEADER as u64], [start + HEADER_ROOM as u64, payload_len as u64]]);
        let at = Offsets {
            sq_head: params.sq_off.head as usize,
            sq_tail: params.sq_off.tail as usize,
            cq_head: params.cq_off.head as usize,
            cq_tail: params.cq_off.tail as usize,
            cqes: params.cq_off.cqes as usize,
            sq_mask: params.sq_entries - 1,
            cq_mask: params.cq_entries - 1,
        };
        let (memory, owner) = (Some(memory), Owner::Us);
        Ok(Self { ring, queues, commands, at, memory, payload_len, owner, places, not_sync: PhantomData })
    }

    /// Makes the calling thread the one that uses the ring from now on.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub fn enable(&mut self) -> io::Result<()> {
        // SAFETY: this operation takes no memory.
        unsafe { io_uring_register(&self.ring, IoringRegisterOp::RegisterEnableRings, null_mut(), 0) }?;
        Ok(())
    }

    /// Offers the place to the connection `fuse` for requests of processor `queue`, and waits for the first one.
    pub fn register(&mut self, fuse: BorrowedFd<'_>, queue: u16) -> io::Result<()> {
        let mut command = Command::new(fuse, CMD_REGISTER, queue, 0);
        command.addr = self.places.as_ptr().expose_provenance() as u64;
        command.len = 2;
        self.submit_and_wait(&command)
    }

    /// Answers the request with what [`buffers`](Self::buffers) hold, and waits for the next one. `commit_id` comes with
    /// the request.
    pub fn answer(&mut self, fuse: BorrowedFd<'_>, queue: u16, commit_id: u64) -> io::Result<()> {
        self.submit_and_wait(&Command::new(fuse, CMD_COMMIT_AND_FETCH, queue, commit_id))
    }

    /// Header and payload of the request that has arrived, and of its answer.
    #[allow(unsafe_code, reason = "memory that the kernel writes to between two calls")]
    pub fn buffers(&mut self) -> Option<(&mut [u8; FUSE_RING_HEADER], &mut [u8])> {
        let memory = self.memory.as_ref().filter(|_| self.owner == Owner::Us)?;
        // SAFETY: the mapping is HEADER_ROOM + payload_len bytes long, zeroed by the kernel when it was made, and lives as
        // long as `self`, whose exclusive borrow is in the result; the two parts do not overlap, and by I1 the kernel does
        // not write to them before `submit_and_wait`, which needs `self` again.
        let (header, payload) = unsafe {
            let payload = memory.start.as_ptr().add(HEADER_ROOM);
            (
                &mut *memory.start.as_ptr().cast::<[u8; FUSE_RING_HEADER]>(),
                std::slice::from_raw_parts_mut(payload, self.payload_len),
            )
        };
        Some((header, payload))
    }

    fn submit_and_wait(&mut self, command: &Command) -> io::Result<()> {
        self.push(command);
        self.owner = Owner::Kernel;
        loop {
            self.enter()?;
            if let Some(result) = self.pop() {
                self.owner = Owner::Us;
                return if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) };
            }
        }
    }

    #[allow(unsafe_code, reason = "the queue is memory shared with the kernel")]
    fn push(&mut self, command: &Command) {
        let tail = self.queues.counter(self.at.sq_tail);
        let next = tail.load(Ordering::Relaxed);
        let slot = (next & self.at.sq_mask) as usize;
        // SAFETY: the slot is inside of the mapping, which has sq_entries commands; the kernel reads it after the tail has
        // moved, and is done with the one before it, because there is never more than one.
        unsafe { self.commands.start.as_ptr().cast::<Command>().add(slot).write(*command) };
        tail.store(next.wrapping_add(1), Ordering::Release);
    }

    /// Hands over what is in the queue and waits for a result.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn enter(&mut self) -> io::Result<()> {
        let head = self.queues.counter(self.at.sq_head).load(Ordering::Acquire);
        let unsent = self.queues.counter(self.at.sq_tail).load(Ordering::Relaxed).wrapping_sub(head);
        // SAFETY: the commands in the queue are `Command`s of this file: memory that they name is `places`, and through it
        // `memory`, which live as long as the kernel may use them (I2).
        match unsafe { io_uring_enter(&self.ring, unsent, 1, IoringEnterFlags::GETEVENTS) } {
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The next result.
    #[allow(unsafe_code, reason = "the queue is memory shared with the kernel")]
    fn pop(&mut self) -> Option<i32> {
        let head = self.queues.counter(self.at.cq_head);
        let next = head.load(Ordering::Relaxed);
        if next == self.queues.counter(self.at.cq_tail).load(Ordering::Acquire) {
            return None;
        }
        let at = self.at.cqes + (next & self.at.cq_mask) as usize * size_of::<[u64; 2]>();
        // SAFETY: `struct io_uring_cqe` is user_data (8 bytes), res (4), flags (4); the slot is inside of the mapping, and
        // the kernel leaves it alone until the head has moved past it.
        let result = unsafe { self.queues.start.as_ptr().add(at + 8).cast::<i32>().read() };
        head.store(next.wrapping_add(1), Ordering::Release);
        Some(result)
    }
}

impl Drop for FuseRing {
    fn drop(&mut self) {
        if self.owner == Owner::Kernel
            && let Some(memory) = self.memory.take()
        {
            // I2
            memory.leave();
        }
    }
}

/// What goes into the submission queue: `struct io_uring_sqe` of 128 bytes with `struct fuse_uring_cmd_req` in its last 80.
#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct Command {
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

impl Command {
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

const _: () = assert!(size_of::<Command>() == 128);

const OP_URING_CMD: u8 = 46;
/// `FUSE_IO_URING_CMD_REGISTER`, `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`.
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;
/// `IORING_OFF_SQ_RING`, where the completion queue lies too, and `IORING_OFF_SQES`.
const SQ_RING: u64 = 0;
const SQES: u64 = 0x1000_0000;
/// The header's part of the memory; the payload begins on a page.
const HEADER_ROOM: usize = 4096;

#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
fn setup(params: &mut io_uring_params) -> io::Result<OwnedFd> {
    // SAFETY: `params` asks for no memory or descriptor of ours to be used.
    Ok(unsafe { io_uring_setup(1, params) }?)
}

/// I3: one operation of the submission queue is allowed, before the ring is enabled.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
fn restrict(ring: &OwnedFd) -> io::Result<()> {
    /// `struct io_uring_restriction` with `IORING_RESTRICTION_SQE_OP`.
    #[repr(C)]
    struct Restriction {
        opcode: u16,
        sqe_op: u8,
        resv: u8,
        resv2: [u32; 3],
    }
    let allowed = [Restriction { opcode: 1, sqe_op: OP_URING_CMD, resv: 0, resv2: [0; 3] }];
    // SAFETY: the kernel reads one `struct io_uring_restriction` and keeps no pointer to it.
    unsafe { io_uring_register(ring, IoringRegisterOp::RegisterRestrictions, allowed.as_ptr().cast(), 1) }?;
    Ok(())
}

/// Mapped memory.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value, wherever that goes; nothing about a mapping is of one thread.
#[allow(unsafe_code, reason = "memory that is owned through a pointer")]
unsafe impl Send for Mapping {}

impl Mapping {
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn of_ring(ring: &OwnedFd, len: usize, offset: u64) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let start = unsafe { mmap(null_mut(), len, prot, flags, ring.as_fd(), offset) }?;
        Self::at(start.cast(), len)
    }

    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn anonymous(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: as above.
        let start = unsafe { mmap_anonymous(null_mut(), len, prot, flags) }?;
        Self::at(start.cast(), len)
    }

    fn at(start: *mut u8, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// A counter that the kernel shares.
    #[allow(unsafe_code, reason = "memory shared with the kernel")]
    fn counter(&self, offset: usize) -> &AtomicU32 {
        assert!(offset + size_of::<u32>() <= self.len && offset.is_multiple_of(4), "the kernel's offsets are inside");
        // SAFETY: inside of the mapping and aligned, checked above; both sides access it as an atomic number.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// Gives up the memory without unmapping it.
    fn leave(mut self) {
        self.len = 0;
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is this value's own, and references into it borrow the value.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// Whether the kernel's FUSE lets servers use rings: a switch of the module, off by default.
pub fn has_fuse_rings() -> bool {
    let mut switch = [0];
    let read = File::open("/sys/module/fuse/parameters/enable_uring")
        .and_then(|mut file| io::Read::read_exact(&mut file, &mut switch));
    read.is_ok() && switch == *b"Y"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_takes_its_own_command_and_fails_on_what_is_not_fuse() {
        let mut ring = match FuseRing::new(1 << 16) {
            Ok(ring) => ring,
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "CI needs io_uring: {error}");
                eprintln!("SKIPPED: this test needs io_uring: {error}");
                return;
            }
        };
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
    fn nothing_else_can_be_done_with_the_ring() {
        let Ok(mut ring) = FuseRing::new(4096) else {
            eprintln!("SKIPPED: this test needs io_uring");
            return;
        };
        ring.enable().unwrap();
        let null = File::open("/dev/null").unwrap();
        let mut command = Command::new(null.as_fd(), 0, 0, 0);
        // IORING_OP_OPENAT
        command.opcode = 18;
        let error = ring.submit_and_wait(&command).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ACCESS.raw_os_error()), "{error}");
    }
}
