//! Requests read from /dev/fuse.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::placement::{JoinedThread, RequestShare};
use super::{Handler, ThreadCounts, TransportState, WorkerPlace, answer, forget, spawn};
use crate::protocol::{InHeader, OutHeader, Reply, fixed_len, opcode};

/// Starts the threads that read /dev/fuse.
pub(super) fn start<H: Handler>(shared: &Arc<TransportState<H>>, nr_threads: usize) -> io::Result<()> {
    (0..nr_threads).try_for_each(|_| start_one(shared))
}

fn start_one<H: Handler>(shared: &Arc<TransportState<H>>) -> io::Result<()> {
    spawn(shared, "fuse", |shared| {
        let counts = shared.counts.of_thread();
        // In a connection with rings, only FORGET requests arrive here.
        let joined = shared.queues.is_empty().then(|| shared.placement.join());
        let done = work(shared, &counts, joined.as_ref());
        drop(joined);
        counts.thread_ends();
        shared.dev.close();
        done
    })
}

fn work<H: Handler>(
    shared: &Arc<TransportState<H>>,
    counts: &ThreadCounts,
    joined: Option<&JoinedThread<'_>>,
) -> io::Result<()> {
    let mut request = vec![0; buffer_len(shared.max_write)];
    let mut body = vec![0; buffer_len(shared.max_write)];
    let grow = || start_one(shared).is_ok();
    let roam = |is_aside| match (is_aside, joined) {
        (true, Some(joined)) => joined.step_aside(),
        (false, Some(joined)) => joined.step_back(),
        (_, None) => {}
    };
    let place = WorkerPlace { pool: &shared.dev, grow: &grow, roam: &roam };
    let mut share = RequestShare::default();
    loop {
        let len = match read(shared.device.as_fd(), &mut request) {
            Ok(len) => len,
            Err(error) => {
                shared.handler.disconnected();
                let is_unmounted = error.raw_os_error() == Some(Errno::NODEV.raw_os_error());
                return if is_unmounted { Ok(()) } else { Err(error) };
            }
        };
        let Ok((header, rest)) = InHeader::read_from_prefix(&request[..len]) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a FUSE request without a header"));
        };
        if matches!(header.opcode, opcode::FORGET | opcode::BATCH_FORGET) {
            forget(&shared.handler, &header, rest, counts);
            if joined.is_none() {
                // Nothing waits for FORGET. After a pause, the kernel sends those that came meanwhile in one request,
                // and this thread does not take the processor from the clients for each.
                std::thread::sleep(FORGET_PAUSE);
            }
            continue;
        }
        let parts = rest.split_at_checked(fixed_len(header.opcode)).unwrap_or((rest, &[]));
        let mut reply = Reply::new(&mut body);
        let error = answer(shared, &header, parts, &mut reply, (&place, counts));
        let len = if error == 0 { reply.len() } else { 0 };
        send(shared.device.as_fd(), header.unique, error, &body[..len])?;
        if joined.is_some() {
            let of_client = || shared.handler.processor_of(header.pid);
            shared.placement.note_request(&mut share, header.pid, of_client, || shared.counts.waited());
        }
        if header.opcode == opcode::DESTROY || !shared.dev.goes_on() {
            return Ok(());
        }
    }
}

/// Reads a request; fails with `ENODEV` when the mount is gone.
pub(super) fn read(device: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(device, &mut *buffer) {
            Ok(len) => return Ok(len),
            // The request was cancelled before it was read, or a signal arrived.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn send(device: BorrowedFd<'_>, unique: u64, error: i32, body: &[u8]) -> io::Result<()> {
    let len = u32::try_from(size_of::<OutHeader>() + body.len()).unwrap_or(u32::MAX);
    let header = OutHeader { len, error, unique };
    match rustix::io::writev(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(body)]) {
        // These errors need no handling: either the request's caller no longer waits, or the mount is gone. If the
        // mount is gone, the next read fails.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV) => Ok(()),
        Err(errno) => {
            tracing::debug!("the kernel does not take the answer {unique}: {errno}");
            Ok(())
        }
    }
}

/// The pause after a FORGET in a connection with rings. An INTERRUPT, which comes the same way, may wait so long.
const FORGET_PAUSE: Duration = Duration::from_millis(1);

/// The length of a buffer for one request or one answer. The largest request is a write. The largest answer has the
/// data of an equal read, or an extended attribute.
pub(super) fn buffer_len(max_write: usize) -> usize {
    max_write.max(64 << 10) + 4096
}
