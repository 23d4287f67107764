//! [`Stream`]: the stream that a command reads or writes, such as a send stream.
//!
//! - O1. The other end of a stream may stop. So a command notices in between when it is cancelled.
//! - O2. A command of another program gets a [`ByteQueue`], whose other end the connection's thread has. It never reads,
//!   writes or closes a descriptor of the other program: that can block in ways that the other program chooses, whatever
//!   flags the descriptor has at some moment.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use ubtrfs_transaction::Job;

use crate::byte_queue::{ByteQueue, PAUSE, Taken};
use crate::execute::Context;
use crate::failure::{Failure, Result};

/// The stream that a command reads or writes.
#[derive(Clone, Copy, Debug)]
pub enum Stream<'s> {
    /// A file, pipe or terminal of this process, for a command that runs in this process.
    File(BorrowedFd<'s>),
    /// The stream of a command that another program sent (O2).
    Queue(&'s ByteQueue),
}

impl<'s> Stream<'s> {
    fn of(context: &Context<'s>) -> Result<Self> {
        context.stream.ok_or_else(|| Failure::new(Errno::BADF, "the request lacks its stream"))
    }
}

/// Writes to a stream as it accepts bytes (O1).
pub(crate) struct Output<'o> {
    stream: Stream<'o>,
    job: &'o Job,
    bytes: u64,
}

impl<'o> Output<'o> {
    /// The stream of a request.
    pub(crate) fn of(context: &Context<'o>) -> Result<Self> {
        Ok(Self { stream: Stream::of(context)?, job: context.job, bytes: 0 })
    }

    /// Number of bytes written.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if self.job.progress().is_cancelled {
                return Err(io::Error::other("the command was cancelled"));
            }
            let done = match self.stream {
                Stream::Queue(queue) => queue.put(bytes)?,
                Stream::File(file) if is_ready(file, PollFlags::OUT)? => match rustix::io::write(file, bytes) {
                    Err(Errno::INTR | Errno::AGAIN) => continue,
                    done => done?,
                },
                Stream::File(_) => continue,
            };
            if done > 0 || bytes.is_empty() {
                self.bytes = self.bytes.saturating_add(done as u64);
                return Ok(done);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads from a stream as bytes arrive (O1).
pub(crate) struct Input<'i, E> {
    stream: Stream<'i>,
    has_ended: E,
}

impl<'i, E: Fn() -> bool> Input<'i, E> {
    /// The stream of a request. `has_ended` tells that the command has ended, so that nothing needs to be read any more.
    pub(crate) fn of(context: &Context<'i>, has_ended: E) -> Result<Self> {
        Ok(Self { stream: Stream::of(context)?, has_ended })
    }
}

impl<E: Fn() -> bool> Read for Input<'_, E> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if (self.has_ended)() {
                return Err(io::Error::other("the receive has ended"));
            }
            match self.stream {
                Stream::Queue(queue) => match queue.take(out, PAUSE) {
                    Taken::Bytes(count) => return Ok(count),
                    Taken::End => return Ok(0),
                    Taken::Nothing => {}
                },
                Stream::File(file) if is_ready(file, PollFlags::IN)? => match rustix::io::read(file, &mut *out) {
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    done => return Ok(done?),
                },
                Stream::File(_) => {}
            }
        }
    }
}

/// Waits a moment until a file of this process is ready. Files that do not support polling, and files with an error,
/// count as ready; the next access then succeeds or returns the error.
fn is_ready(file: BorrowedFd<'_>, events: PollFlags) -> io::Result<bool> {
    match poll(&mut [PollFd::from_borrowed_fd(file, events)], Some(&POLL_PAUSE)) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

const POLL_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
