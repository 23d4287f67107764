//! [`Queues`]: the submission and completion queue of an io_uring, in memory shared with the kernel. The modules
//! [`crate::fuse_ring`] and [`crate::io_ring`] define the commands.
//!
//! Invariants:
//! - I1. The kernel says where the queues lie in the shared memory. The offsets are checked against the mapping when
//!   the ring is made, and at each use.
//! - I2. This module accesses the memory of a [`Mapping`] only as atomic numbers. Callers of [`Mapping::start`] are
//!   responsible for accesses through the returned pointer.
//! - I3. This module never accesses the memory that commands name. Callers of [`Queues::enter`] are responsible for
//!   that memory.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::io_uring::{
    IoringEnterFlags, IoringFeatureFlags, IoringRegisterOp, IoringSetupFlags, io_uring_enter, io_uring_params,
    io_uring_register, io_uring_setup,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use zerocopy::{Immutable, IntoBytes};

/// An io_uring with commands of type `C`, a `struct io_uring_sqe` of 64 or 128 bytes.
#[derive(Debug)]
pub(crate) struct Queues<C> {
    ring: OwnedFd,
    shared: Mapping,
    commands: Mapping,
    at: Offsets,
    kind: PhantomData<C>,
}

/// Offsets of the counters and results in the shared memory.
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

impl<C: IntoBytes + Immutable> Queues<C> {
    /// Makes a ring with room for `nr_commands` (a power of two); [`enable`](Self::enable) starts it. The ring accepts
    /// only the `allowed` operations, so an attacker who takes over the process cannot use the ring to open files.
    /// Fails if the kernel does not support such rings or denies them to this process.
    pub(crate) fn new(nr_commands: u32, flags: IoringSetupFlags, allowed: &[u8]) -> io::Result<Self> {
        let mut params = io_uring_params::default();
        params.flags = flags | IoringSetupFlags::R_DISABLED;
        let ring = setup(nr_commands, &mut params)?;
        if !params.features.contains(IoringFeatureFlags::SINGLE_MMAP) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        restrict(&ring, allowed)?;
        let cq_len = params.cq_off.cqes as usize + params.cq_entries as usize * RESULT_LEN;
        let sq_len = params.sq_off.array as usize + params.sq_entries as usize * size_of::<u32>();
        let shared = Mapping::of_ring(&ring, cq_len.max(sq_len).max(4096), SQ_RING)?;
        let commands = Mapping::of_ring(&ring, params.sq_entries as usize * size_of::<C>(), SQES)?;
        if !flags.contains(IoringSetupFlags::NO_SQARRAY) {
            // Entry N of the indirection array is N, so the kernel takes commands in queue order.
            for (place, number) in
                shared.words(params.sq_off.array as usize, params.sq_entries as usize).iter().zip(0..)
            {
                place.store(number, Ordering::Relaxed);
            }
        }
        let at = Offsets {
            sq_head: params.sq_off.head as usize,
            sq_tail: params.sq_off.tail as usize,
            cq_head: params.cq_off.head as usize,
            cq_tail: params.cq_off.tail as usize,
            cqes: params.cq_off.cqes as usize,
            sq_mask: params.sq_entries - 1,
            cq_mask: params.cq_entries - 1,
        };
        // I1: these accesses check all offsets, before any command names memory.
        let _counters = [at.sq_head, at.sq_tail, at.cq_head, at.cq_tail].map(|offset| shared.word(offset));
        let _results = shared.words(at.cqes, params.cq_entries as usize * RESULT_LEN / size_of::<u32>());
        Ok(Self { ring, shared, commands, at, kind: PhantomData })
    }

    /// Enables the ring. With `SINGLE_ISSUER`, only the calling thread may use the ring from then on.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub(crate) fn enable(&mut self) -> io::Result<()> {
        // SAFETY: this operation gets no pointer to memory.
        unsafe { io_uring_register(&self.ring, IoringRegisterOp::RegisterEnableRings, null_mut(), 0) }?;
        Ok(())
    }

    /// Limits the kernel to one worker for each thread that uses the ring: several workers would start requests out of
    /// order and wait for each other's locks. Older kernels ignore the limit.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub(crate) fn limit_workers(&self) {
        // The first number limits the workers for bounded work, the second those for unbounded work; 0 keeps the
        // default.
        let mut most = [1u32, 0];
        // SAFETY: the kernel reads and writes two numbers and keeps no pointer to them.
        let _ = unsafe {
            io_uring_register(&self.ring, IoringRegisterOp::RegisterIowqMaxWorkers, most.as_mut_ptr().cast(), 2)
        };
    }

    /// Puts a command into the queue; returns false if the queue is full.
    pub(crate) fn push(&mut self, command: &C) -> bool {
        let tail = self.shared.word(self.at.sq_tail);
        let next = tail.load(Ordering::Relaxed);
        if next.wrapping_sub(self.shared.word(self.at.sq_head).load(Ordering::Acquire)) > self.at.sq_mask {
            return false;
        }
        let slot = (next & self.at.sq_mask) as usize;
        let words = self.commands.words(slot * size_of::<C>(), size_of::<C>() / size_of::<u32>());
        // The kernel reads this slot only after the tail has moved, and has finished with the slot's old command.
        for (place, bytes) in words.iter().zip(command.as_bytes().as_chunks::<4>().0) {
            place.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        tail.store(next.wrapping_add(1), Ordering::Release);
        true
    }

    /// The number of commands that the kernel has not taken yet.
    pub(crate) fn nr_unsent(&self) -> u32 {
        let head = self.shared.word(self.at.sq_head).load(Ordering::Acquire);
        self.shared.word(self.at.sq_tail).load(Ordering::Relaxed).wrapping_sub(head)
    }

    /// Takes back the commands that the kernel has not taken. The kernel reads the queue only during
    /// [`enter`](Self::enter).
    pub(crate) fn take_back(&mut self) {
        let head = self.shared.word(self.at.sq_head).load(Ordering::Acquire);
        self.shared.word(self.at.sq_tail).store(head, Ordering::Relaxed);
    }

    /// Submits the queued commands and waits for `nr_results` results. Fewer results may have arrived on return.
    ///
    /// # Safety
    ///
    /// The memory that the commands name must stay valid for their reads and writes until their results have arrived.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub(crate) unsafe fn enter(&self, nr_results: u32) -> Result<(), Errno> {
        // SAFETY: the caller guarantees that the memory stays valid.
        unsafe { io_uring_enter(&self.ring, self.nr_unsent(), nr_results, IoringEnterFlags::GETEVENTS) }.map(drop)
    }

    /// Removes the next result: the command's `user_data`, and its return value.
    pub(crate) fn pop(&mut self) -> Option<(u64, i32)> {
        let head = self.shared.word(self.at.cq_head);
        let next = head.load(Ordering::Relaxed);
        if next == self.shared.word(self.at.cq_tail).load(Ordering::Acquire) {
            return None;
        }
        // `struct io_uring_cqe`: user_data (8 bytes), res (4), flags (4). The kernel does not overwrite the
        // result until the head has moved past it.
        let words = self.shared.words(self.at.cqes + (next & self.at.cq_mask) as usize * RESULT_LEN, 4);
        let [first, second, result, _flags] = std::array::from_fn(|n| words[n].load(Ordering::Relaxed).to_ne_bytes());
        head.store(next.wrapping_add(1), Ordering::Release);
        let [a, b, c, d] = first;
        let [e, f, g, h] = second;
        Some((u64::from_ne_bytes([a, b, c, d, e, f, g, h]), i32::from_ne_bytes(result)))
    }
}

/// `IORING_OFF_SQ_RING`, the mmap offset of both queues.
const SQ_RING: u64 = 0;
/// `IORING_OFF_SQES`, the mmap offset of the array of commands.
const SQES: u64 = 0x1000_0000;
const RESULT_LEN: usize = 16;

#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
fn setup(nr_commands: u32, params: &mut io_uring_params) -> io::Result<OwnedFd> {
    // SAFETY: `params` names no memory or descriptor of this process.
    Ok(unsafe { io_uring_setup(nr_commands, params) }?)
}

/// Restricts the ring to these operations of the submission queue. The kernel accepts restrictions only before the ring
/// is enabled.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
fn restrict(ring: &OwnedFd, allowed: &[u8]) -> io::Result<()> {
    /// `struct io_uring_restriction` with `IORING_RESTRICTION_SQE_OP`.
    #[repr(C)]
    struct Restriction {
        opcode: u16,
        sqe_op: u8,
        resv: u8,
        resv2: [u32; 3],
    }
    let list: Vec<_> =
        allowed.iter().map(|&sqe_op| Restriction { opcode: 1, sqe_op, resv: 0, resv2: [0; 3] }).collect();
    let nr = u32::try_from(list.len()).unwrap_or_default();
    // SAFETY: the kernel reads an array of `nr` `struct io_uring_restriction` and keeps no pointer to it.
    unsafe { io_uring_register(ring, IoringRegisterOp::RegisterRestrictions, list.as_ptr().cast(), nr) }?;
    Ok(())
}

/// Mapped memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the value owns the memory, a mapping is not tied to a thread, and memory shared with the kernel is accessed
// as atomic numbers (I2).
#[allow(unsafe_code, reason = "the value owns memory through a pointer")]
unsafe impl Send for Mapping {}

impl Mapping {
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn of_ring(ring: &OwnedFd, len: usize, offset: u64) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: the kernel chooses the address, so the new mapping touches no existing memory.
        let start = unsafe { mmap(null_mut(), len, prot, flags, ring.as_fd(), offset) }?;
        Self::at(start.cast(), len)
    }

    /// Maps zeroed private memory. Memory that is never touched takes no physical pages.
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: as in `of_ring`.
        let start = unsafe { mmap_anonymous(null_mut(), len, prot, flags) }?;
        Self::at(start.cast(), len)
    }

    fn at(start: *mut u8, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The start address.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// A number shared with the kernel.
    fn word(&self, offset: usize) -> &AtomicU32 {
        &self.words(offset, 1)[0]
    }

    /// Consecutive numbers shared with the kernel.
    #[allow(unsafe_code, reason = "memory shared with the kernel")]
    fn words(&self, offset: usize, nr: usize) -> &[AtomicU32] {
        let end = offset.checked_add(nr * size_of::<u32>());
        assert!(
            end.is_some_and(|end| end <= self.len) && offset.is_multiple_of(4),
            "I1: the kernel's offsets lie inside the mapping"
        );
        // SAFETY: the range is inside the mapping, which is page-aligned, and `offset` is a multiple of 4; both are
        // checked above. Both sides access the memory as atomic numbers (I2).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset).cast::<AtomicU32>(), nr) }
    }

    /// Leaks the memory: keeps it mapped.
    pub(crate) fn leave(mut self) {
        self.len = 0;
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: this value owns the mapping, and references into it borrow the value.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}
