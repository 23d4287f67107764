//! [`IoRing`]: performs a large read or write as several concurrent requests, through io_uring.
//!
//! With a single request at a time, the device idles between requests, and the filesystem below an image file keeps the
//! file locked during a whole synchronous write. A ring submits several requests in one system call, and the file is
//! locked only while each request starts.
//!
//! Invariants:
//! - I1. A call returns only after the kernel has finished all requests that the kernel took, because requests use the
//!   caller's memory.
//! - I2. The returned count is the length of a prefix: all bytes before it were read or written. The caller reads or
//!   writes the rest without a ring. If the rest has an error, the call without a ring returns the error.
//! - I3. A ring accepts only reads and writes.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::sync::MutexGuard;
use std::time::Duration;

use rustix::io::Errno;
use rustix::io_uring::IoringSetupFlags;
use zerocopy::{Immutable, IntoBytes};

use crate::file::NR_BUFS_MAX;
use crate::queues::Queues;

/// A ring for the requests of one call at a time.
#[derive(Debug)]
pub(crate) struct IoRing {
    queues: Queues<IoSubmission>,
    is_denied: bool,
}

impl IoRing {
    /// Maximum number of requests of a call.
    pub(crate) const NR_REQUESTS: usize = 16;

    /// Makes a ring. Fails if the kernel does not support io_uring or denies it to this process.
    pub(crate) fn new() -> io::Result<Self> {
        let nr_commands = Self::NR_REQUESTS as u32;
        let mut queues = Queues::new(nr_commands, IoringSetupFlags::empty(), &[OP_WRITEV, OP_READ])?;
        queues.limit_workers();
        queues.enable()?;
        Ok(Self { queues, is_denied: false })
    }

    /// Whether the kernel refuses further requests.
    pub(crate) fn is_denied(&self) -> bool {
        self.is_denied
    }

    /// Writes a prefix of `bufs` in pieces of about `piece_bytes`, and returns its length (I2). Releases `turn`, which
    /// lets the next large write start, when half of the requests are done.
    #[allow(unsafe_code, reason = "the kernel uses the memory that commands name")]
    pub(crate) fn write(
        &mut self,
        file: &File,
        offset: u64,
        bufs: &[IoSlice<'_>],
        piece_bytes: usize,
        turn: MutexGuard<'_, ()>,
    ) -> usize {
        let pieces = cut(bufs, piece_bytes, Self::NR_REQUESTS);
        let mut at = offset;
        let mut requests = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let len = piece.iter().map(|buf| buf.len()).sum();
            let command = IoSubmission::new(OP_WRITEV, file, at, piece.as_ptr().expose_provenance(), piece.len());
            requests.push(SplitRequest { command, len, done: None });
            at += len as u64;
        }
        // SAFETY: the commands name `pieces`, each an array of `struct iovec` (the layout of `IoSlice`), and through
        // them bytes of the caller. The bytes are borrowed until `write` returns, and the kernel only reads them.
        unsafe { self.run(&mut requests, Some(turn)) };
        done_from_start(&requests)
    }

    /// Reads into a prefix of `buf` in pieces of `piece_bytes`, and returns its length (I2).
    #[allow(unsafe_code, reason = "the kernel uses the memory that commands name")]
    pub(crate) fn read(&mut self, file: &File, offset: u64, buf: &mut [u8], piece_bytes: usize) -> usize {
        let mut at = offset;
        let mut requests = Vec::with_capacity(Self::NR_REQUESTS);
        for piece in buf.chunks_mut(piece_bytes).take(Self::NR_REQUESTS) {
            let command = IoSubmission::new(OP_READ, file, at, piece.as_mut_ptr().expose_provenance(), piece.len());
            requests.push(SplitRequest { command, len: piece.len(), done: None });
            at += piece.len() as u64;
        }
        // SAFETY: the commands name disjoint parts of `buf`, which is borrowed exclusively until this returns.
        unsafe { self.run(&mut requests, None) };
        done_from_start(&requests)
    }

    /// Submits the requests, at most [`Self::NR_REQUESTS`], and waits for all requests that the kernel takes (I1). Does
    /// not panic while the kernel has any of the requests.
    ///
    /// # Safety
    ///
    /// The memory that the commands name must stay valid for their reads and writes until this returns.
    #[allow(unsafe_code, reason = "the kernel uses the memory that commands name")]
    unsafe fn run(&mut self, requests: &mut [SplitRequest], mut turn: Option<MutexGuard<'_, ()>>) {
        let mut nr_waiting = 0u32;
        for (request, number) in requests.iter_mut().zip(0..) {
            request.command.user_data = number;
            if !self.queues.push(&request.command) {
                break;
            }
            nr_waiting += 1;
        }
        let half = nr_waiting / 2;
        while nr_waiting > 0 {
            if nr_waiting <= half {
                turn = None;
            }
            let nr_results = if turn.is_some() { nr_waiting - half } else { nr_waiting };
            // SAFETY: the caller guarantees that the memory stays valid until this function returns. The function
            // returns after the results of all requests that the kernel took have arrived.
            match unsafe { self.queues.enter(nr_results) } {
                Ok(()) | Err(Errno::INTR) => {}
                // The kernel has no memory for a request, or has begun to deny the call. Requests that the kernel has
                // not taken are abandoned. Requests that it has taken complete without further calls.
                Err(errno) => {
                    self.is_denied |= !matches!(errno, Errno::AGAIN | Errno::BUSY | Errno::NOMEM);
                    nr_waiting -= self.queues.nr_unsent().min(nr_waiting);
                    self.queues.take_back();
                    if nr_waiting > 0 {
                        std::thread::sleep(PAUSE);
                    }
                }
            }
            while let Some((number, result)) = self.queues.pop() {
                nr_waiting = nr_waiting.saturating_sub(1);
                let request = usize::try_from(number).ok().and_then(|number| requests.get_mut(number));
                if let Some(request) = request {
                    request.done = usize::try_from(result).ok();
                }
            }
        }
    }
}

/// One of the requests into which a read or write is split.
#[derive(Debug)]
struct SplitRequest {
    command: IoSubmission,
    len: usize,
    /// Transferred bytes; `None` if the request failed or was not completed.
    done: Option<usize>,
}

/// Transferred bytes up to the first request that was not completed in full.
fn done_from_start(requests: &[SplitRequest]) -> usize {
    let mut total = 0;
    for request in requests {
        let done = request.done.unwrap_or(0).min(request.len);
        total += done;
        if done < request.len {
            break;
        }
    }
    total
}

/// Splits a list of buffers into at most `nr_most` lists of `piece_bytes` each. A list with [`NR_BUFS_MAX`] buffers,
/// and the last list, may have fewer bytes. Bytes that do not fit in `nr_most` lists are left out.
fn cut<'b>(bufs: &'b [IoSlice<'_>], piece_bytes: usize, nr_most: usize) -> Vec<Vec<IoSlice<'b>>> {
    let mut pieces = Vec::new();
    let mut piece = Vec::new();
    let mut room = piece_bytes;
    for buf in bufs {
        let mut rest: &[u8] = buf;
        while !rest.is_empty() {
            let (here, behind) = rest.split_at(room.min(rest.len()));
            piece.push(IoSlice::new(here));
            room -= here.len();
            rest = behind;
            if room == 0 || piece.len() == NR_BUFS_MAX {
                pieces.push(std::mem::take(&mut piece));
                room = piece_bytes;
                if pieces.len() == nr_most {
                    return pieces;
                }
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

/// An entry of the submission queue: `struct io_uring_sqe`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct IoSubmission {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    offset: u64,
    addr: u64,
    len: u32,
    rw_flags: u32,
    user_data: u64,
    buf_index: u16,
    personality: u16,
    file_index: u32,
    rest: [u64; 2],
}

impl IoSubmission {
    /// Makes a command. `len` is the number of bytes at `addr`. If `addr` is the address of an array of buffers, `len`
    /// is the number of buffers.
    fn new(opcode: u8, file: &File, offset: u64, addr: usize, len: usize) -> Self {
        Self {
            opcode,
            flags: 0,
            ioprio: 0,
            fd: file.as_raw_fd(),
            offset,
            addr: addr as u64,
            len: u32::try_from(len).unwrap_or_default(),
            rw_flags: 0,
            user_data: 0,
            buf_index: 0,
            personality: 0,
            file_index: 0,
            rest: [0; 2],
        }
    }
}

const _: () = assert!(size_of::<IoSubmission>() == 64);

const OP_WRITEV: u8 = 2;
const OP_READ: u8 = 22;
/// Interval for polling when the kernel denies waiting.
const PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;

    use super::*;

    fn ring() -> Option<IoRing> {
        IoRing::new()
            .inspect_err(|error| {
                assert!(std::env::var_os("CI").is_none(), "CI needs io_uring: {error}");
                eprintln!("SKIPPED: this test needs io_uring: {error}");
            })
            .ok()
    }

    fn pattern(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|at| ((at + seed) % 251) as u8).collect()
    }

    fn write(ring: &mut IoRing, file: &File, offset: u64, bufs: &[IoSlice<'_>], piece_bytes: usize) -> usize {
        let turn = Mutex::new(());
        let written = ring.write(file, offset, bufs, piece_bytes, turn.lock().unwrap());
        assert!(turn.try_lock().is_ok(), "the turn was released");
        written
    }

    #[test]
    fn pieces_arrive_in_their_places() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().unwrap();
        // Buffers of different lengths, which do not end where pieces end.
        let parts: Vec<Vec<u8>> = (1..60).map(|nr| pattern(nr * 37, nr)).collect();
        let bufs: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let whole = parts.concat();
        for piece_bytes in [1, 4096, 5000, 1 << 20] {
            file.set_len(0).unwrap();
            let most = whole.len().min(piece_bytes * IoRing::NR_REQUESTS);
            assert_eq!(write(&mut ring, &file, 77, &bufs, piece_bytes), most, "{piece_bytes}");
            let mut found = vec![0; most];
            file.read_exact_at(&mut found, 77).unwrap();
            assert_eq!(found, whole[..most], "{piece_bytes}");
            let mut read = vec![0; most];
            assert_eq!(ring.read(&file, 77, &mut read, piece_bytes), most, "{piece_bytes}");
            assert_eq!(read, whole[..most], "{piece_bytes}");
        }
    }

    #[test]
    fn a_request_has_at_most_iov_max_buffers() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().unwrap();
        let parts: Vec<Vec<u8>> = (0..3000).map(|nr| pattern(3, nr)).collect();
        let bufs: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        assert_eq!(write(&mut ring, &file, 0, &bufs, 1 << 20), 9000);
        let mut found = vec![0; 9000];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, parts.concat());
    }

    #[test]
    fn reads_end_at_the_end_of_the_file() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&pattern(10_000, 0), 0).unwrap();
        let mut buf = vec![0; 16_384];
        assert_eq!(ring.read(&file, 0, &mut buf, 4096), 10_000);
        assert_eq!(buf[..10_000], pattern(10_000, 0));
        assert_eq!(ring.read(&file, 20_000, &mut buf, 4096), 0);
        assert!(!ring.is_denied());
    }

    #[test]
    fn only_the_prefix_before_a_failed_request_counts() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let Some(mut ring) = ring() else { return };
        let file = File::from(rustix::fs::memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(3 * 4096).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let data = pattern(4 * 4096, 5);
        // The last request fails, because the seal forbids that the file grows.
        assert_eq!(write(&mut ring, &file, 0, &[IoSlice::new(&data)], 4096), 3 * 4096);
        // After this seal, every write fails.
        rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        assert_eq!(write(&mut ring, &file, 0, &[IoSlice::new(&data)], 4096), 0);
        let mut found = vec![0; 3 * 4096];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, data[..3 * 4096]);
    }

    #[test]
    fn requests_after_a_failed_one_do_not_count() {
        let mut requests: Vec<SplitRequest> = (0..4)
            .map(|_| SplitRequest {
                command: IoSubmission::new(OP_READ, &File::open("/dev/null").unwrap(), 0, 0, 0),
                len: 10,
                done: Some(10),
            })
            .collect();
        assert_eq!(done_from_start(&requests), 40);
        requests[2].done = Some(3);
        assert_eq!(done_from_start(&requests), 23, "a short request ends the prefix");
        requests[1].done = None;
        assert_eq!(done_from_start(&requests), 10, "a failed request ends the prefix");
        requests[0].done = Some(11);
        assert_eq!(done_from_start(&requests), 10, "no more than asked for");
    }

    #[test]
    fn failed_requests_leave_the_ring_usable() {
        let Some(mut ring) = ring() else { return };
        let read_only = File::open("/dev/zero").unwrap();
        assert_eq!(write(&mut ring, &read_only, 0, &[IoSlice::new(&[1; 9000])], 4096), 0, "no right to write");
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(write(&mut ring, &full, 0, &[IoSlice::new(&[1; 9000])], 4096), 0, "no space");
        let mut buf = [7; 9000];
        assert_eq!(ring.read(&read_only, 0, &mut buf, 4096), 9000);
        assert_eq!(buf, [0; 9000]);
        assert!(!ring.is_denied());
    }

    #[test]
    fn a_ring_denies_other_operations() {
        let Some(mut ring) = ring() else { return };
        let null = File::open("/dev/null").unwrap();
        // IORING_OP_OPENAT
        let command = IoSubmission::new(18, &null, 0, 0, 0);
        assert!(ring.queues.push(&command));
        // SAFETY: the command names no memory.
        #[allow(unsafe_code, reason = "the system call has no safe wrapper")]
        unsafe {
            ring.queues.enter(1).unwrap();
        }
        let (_, result) = ring.queues.pop().unwrap();
        assert_eq!(-result, Errno::ACCESS.raw_os_error());
    }

    #[test]
    fn many_threads_use_separate_rings() {
        let file = tempfile::tempfile().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let file = &file;
                scope.spawn(move || {
                    let Some(mut ring) = ring() else { return };
                    let data = pattern(1 << 20, thread);
                    let offset = (thread << 20) as u64;
                    assert_eq!(write(&mut ring, file, offset, &[IoSlice::new(&data)], 1 << 16), 1 << 20);
                    let mut found = vec![0; 1 << 20];
                    assert_eq!(ring.read(file, offset, &mut found, 1 << 16), 1 << 20);
                    assert!(found == data);
                });
            }
        });
    }
}
