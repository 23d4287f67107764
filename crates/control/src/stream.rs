//! [`CommandStream`]: the stream that a command reads or writes, such as a send stream.
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
use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};

/// The stream that a command reads or writes.
#[derive(Clone, Copy, Debug)]
pub enum CommandStream<'s> {
    /// A file, pipe or terminal of this process, for a command that runs in this process.
    File(BorrowedFd<'s>),
    /// The stream of a command that another program sent (O2).
    Queue(&'s ByteQueue),
}

impl<'s> CommandStream<'s> {
    fn of(context: &CommandContext<'s>) -> Result<Self> {
        context.stream.ok_or_else(|| CommandFailure::new(Errno::BADF, "the request lacks its stream"))
    }
}

/// Writes to a stream as it accepts bytes (O1).
pub(crate) struct StreamOutput<'o> {
    stream: CommandStream<'o>,
    job: &'o Job,
    bytes: u64,
}

impl<'o> StreamOutput<'o> {
    /// Makes the output for the stream of a request.
    pub(crate) fn of(context: &CommandContext<'o>) -> Result<Self> {
        Ok(Self { stream: CommandStream::of(context)?, job: context.job, bytes: 0 })
    }

    /// Number of bytes written.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Write for StreamOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if self.job.progress().is_cancelled {
                return Err(io::Error::other("the command was cancelled"));
            }
            let done = match self.stream {
                CommandStream::Queue(queue) => queue.put(bytes)?,
                CommandStream::File(file) if is_ready(file, PollFlags::OUT)? => match rustix::io::write(file, bytes) {
                    Err(Errno::INTR | Errno::AGAIN) => continue,
                    done => done?,
                },
                CommandStream::File(_) => continue,
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
pub(crate) struct StreamInput<'i, E> {
    stream: CommandStream<'i>,
    has_ended: E,
}

impl<'i, E: Fn() -> bool> StreamInput<'i, E> {
    /// The stream of a request. `has_ended` tells that the command has ended, so that nothing needs to be read any more.
    pub(crate) fn of(context: &CommandContext<'i>, has_ended: E) -> Result<Self> {
        Ok(Self { stream: CommandStream::of(context)?, has_ended })
    }
}

impl<E: Fn() -> bool> Read for StreamInput<'_, E> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if (self.has_ended)() {
                return Err(io::Error::other("the receive has ended"));
            }
            match self.stream {
                CommandStream::Queue(queue) => match queue.take(out, PAUSE) {
                    Taken::Bytes(count) => return Ok(count),
                    Taken::End => return Ok(0),
                    Taken::Nothing => {}
                },
                CommandStream::File(file) if is_ready(file, PollFlags::IN)? => {
                    match rustix::io::read(file, &mut *out) {
                        Err(Errno::INTR | Errno::AGAIN) => {}
                        done => return Ok(done?),
                    }
                }
                CommandStream::File(_) => {}
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
