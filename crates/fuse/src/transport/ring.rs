//! Requests through rings of io_uring: each processor has a queue, and each queue has threads that stay on that
//! processor. A request is handled on the processor that it came from. One system call sends an answer and waits for
//! the next request.
//!
//! - U1. Each thread has one slot in its queue, so the kernel never gives a request to a busy thread while another
//!   thread is free. Among free threads the kernel picks the thread that answered last. Idle threads cost nothing.
//! - U2. FORGET and INTERRUPT requests do not arrive in rings: one thread keeps reading /dev/fuse. It pauses after each
//!   FORGET, so that the kernel collects several FORGETs.
//! - U3. All threads exist from the start. A thread started later would not help, because a new slot gets none of the
//!   waiting requests. So the last thread of a queue never steps [aside](WorkerPlace::aside_for_kernel) for the kernel.
//! - U4. All rings are made before confinement takes away the right to make them.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::thread::CpuSet;
use ubtrfs_device::{FUSE_RING_HEADER, FuseRing, has_fuse_rings};
use zerocopy::{FromBytes, IntoBytes};

use super::{Handler, ThreadCounts, TransportState, WorkerPlace, answer, spawn};
use crate::protocol::{InHeader, InitLimits, OutHeader, Reply};

/// One ring for each thread.
#[derive(Debug, Default)]
pub(super) struct Rings {
    pub(super) rings: Vec<FuseRing>,
    pub(super) nr_queues: usize,
    pub(super) nr_in_queue: usize,
    pub(super) processors: Option<CpuSet>,
}

impl Rings {
    /// Makes the rings. `None` if the kernel supports or allows no rings. Lowers the limit on write requests if there
    /// are many processors, because each ring needs memory for the largest request.
    pub(super) fn new(limits: &mut InitLimits) -> Option<Self> {
        let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        let nr_queues = nr_processors(&possible).filter(|nr| *nr <= MAX_QUEUES)?;
        if !has_fuse_rings() {
            return None;
        }
        let nr_in_queue = NR_THREADS.div_ceil(nr_queues).max(2);
        let nr_threads = nr_queues * nr_in_queue;
        let max_write = limits.max_write.min(MEMORY / u32::try_from(nr_threads).ok()?.next_power_of_two());
        let len = super::dev_fuse::buffer_len(max_write as usize) + ROOM_FOR_ANSWER;
        let made: io::Result<Vec<_>> = (0..nr_threads).map(|_| FuseRing::new(len)).collect();
        let rings = made.inspect_err(|error| tracing::debug!("no rings of io_uring: {error}")).ok()?;
        limits.max_write = max_write;
        let processors = rustix::thread::sched_getaffinity(None).ok();
        Some(Self { rings, nr_queues, nr_in_queue, processors })
    }
}

/// Starts the threads of all queues, each with a ring.
pub(super) fn start<H: Handler>(shared: &Arc<TransportState<H>>, rings: Vec<FuseRing>) -> io::Result<()> {
    for (nr, ring) in rings.into_iter().enumerate() {
        let queue = nr % shared.queues.len();
        spawn(shared, &format!("fuse-{queue}"), move |shared| work(shared, queue, ring))?;
    }
    Ok(())
}

fn work<H: Handler>(shared: &Arc<TransportState<H>>, queue: usize, mut ring: FuseRing) -> io::Result<()> {
    stay_on(queue, shared.processors.as_ref());
    let (device, number) = (shared.device.as_fd(), u16::try_from(queue).unwrap_or(u16::MAX));
    // U3: no thread can be started later.
    let roam = |is_aside| match (is_aside, &shared.processors) {
        (true, Some(all)) => move_to(all),
        (true, None) => {}
        (false, allowed) => stay_on(queue, allowed.as_ref()),
    };
    let place = WorkerPlace { pool: &shared.queues[queue], grow: &|| false, roam: &roam };
    let counts = shared.counts.of_thread();
    let mut arrived = ring.enable().and_then(|()| ring.register(device, number));
    loop {
        match arrived {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => return Ok(()),
            Err(error) => return Err(error),
        }
        let Some((header, payload)) = ring.buffers() else {
            return Err(io::Error::other("a ring without a request"));
        };
        let commit_id = handle(shared, header, payload, (&place, &counts));
        arrived = ring.answer(device, number, commit_id);
    }
}

/// Handles the request in a slot, and writes the answer into the same slot.
fn handle<H: Handler>(
    shared: &TransportState<H>,
    header: &mut [u8; FUSE_RING_HEADER],
    payload: &mut [u8],
    place: (&WorkerPlace<'_>, &ThreadCounts),
) -> u64 {
    let Ok((entry, _)) = RingEntry::read_from_prefix(&header[RING_ENTRY..]) else { return 0 };
    let Ok((request, _)) = InHeader::read_from_prefix(&header[..]) else { return 0 };
    let in_len = payload.len().min(entry.payload_len as usize);
    let (rest, room) = payload.split_at_mut(in_len);
    let mut reply = Reply::new(room);
    let error = answer(shared, &request, (&header[FIXED..RING_ENTRY], rest), &mut reply, place);
    let len = if error == 0 { reply.len() } else { 0 };
    // The answer was written after the request's body, so move it to the start of the buffer.
    payload.copy_within(in_len..in_len + len, 0);
    let payload_len = u32::try_from(len).unwrap_or_default();
    let total = payload_len + size_of::<OutHeader>() as u32;
    let out = OutHeader { len: total, error, unique: request.unique };
    header[..size_of::<OutHeader>()].copy_from_slice(out.as_bytes());
    header[RING_ENTRY..].copy_from_slice(RingEntry { payload_len, ..entry }.as_bytes());
    entry.commit_id
}

/// `struct fuse_uring_ent_in_out`.
#[derive(Clone, Copy, FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C)]
struct RingEntry {
    flags: u64,
    commit_id: u64,
    payload_len: u32,
    padding: u32,
    reserved: u64,
}

/// Offset of a request's fixed part in the header.
const FIXED: usize = 128;
/// Offset of [`RingEntry`] in the header.
const RING_ENTRY: usize = 256;
const _: () = assert!(RING_ENTRY + size_of::<RingEntry>() == FUSE_RING_HEADER);

/// Binds the calling thread to a processor, if the process may run there.
fn stay_on(processor: usize, allowed: Option<&CpuSet>) {
    if processor >= CpuSet::MAX_CPU || !allowed.is_some_and(|set| set.is_set(processor)) {
        return;
    }
    let mut set = CpuSet::new();
    set.set(processor);
    move_to(&set);
}

fn move_to(processors: &CpuSet) {
    if let Err(errno) = rustix::thread::sched_setaffinity(None, processors) {
        tracing::debug!("a thread stays on its processors: {errno}");
    }
}

/// The number of processors in a list like `0-7`; `None` unless the processors are numbered from 0 without a gap.
fn nr_processors(list: &str) -> Option<usize> {
    match list.trim().split_once('-') {
        None => (list.trim() == "0").then_some(1),
        Some(("0", last)) => last.parse::<usize>().ok().map(|last| last + 1),
        Some(_) => None,
    }
}

/// Minimum number of threads in all queues together: at least this many fsyncs can run at once.
const NR_THREADS: usize = 32;
/// Memory for the largest requests in all queues at once. The memory is allocated as requests arrive.
const MEMORY: u32 = 64 << 20;
/// Largest number of processors for which rings are used: with more processors, most threads would stay idle.
const MAX_QUEUES: usize = 128;
/// Room for an answer after the request's body in the buffer. The longest answer to a request with a body is the value
/// of an extended attribute; the body is the attribute's name.
const ROOM_FOR_ANSWER: usize = 68 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        assert_eq!(
            ["0\n", "0-1\n", "0-127", "1-2", "0-1,4", ""].map(nr_processors),
            [Some(1), Some(2), Some(128), None, None, None]
        );
    }
}
