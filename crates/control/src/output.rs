//! [`Output`]: a stream that a client receives through a pipe.
//!
//! - O1. The client may stop reading. So the server writes only when the pipe accepts bytes, and notices in between when
//!   its command is cancelled. In a mount, the descriptor has to be a pipe that does not block.

use std::io::{self, Write};
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use ubtrfs_transaction::Job;

use crate::execute::Context;
use crate::failure::{Failure, Result};

/// Writes to a descriptor only when it accepts bytes (O1).
pub(crate) struct Output<'o> {
    stream: BorrowedFd<'o>,
    job: &'o Job,
    bytes: u64,
}

impl<'o> Output<'o> {
    /// The stream of a request. In a mount, fails unless the stream is a pipe that does not block (O1).
    pub(crate) fn of(context: &Context<'o>) -> Result<Self> {
        let stream = context.stream.ok_or_else(|| Failure::new(Errno::BADF, "the request lacks its stream"))?;
        let is_image = context.host.owner().is_none();
        if !is_image {
            check_pipe(stream)?;
        }
        Ok(Self { stream, job: context.job, bytes: 0 })
    }

    /// Number of bytes written.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn check_pipe(stream: BorrowedFd<'_>) -> Result<()> {
    let is_pipe = fstat(stream).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    let is_open = fcntl_getfl(stream).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
    if is_pipe && is_open {
        return Ok(());
    }
    Err(Failure::new(Errno::BADF, "the stream of the request is not a pipe that does not block"))
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if self.job.progress().is_cancelled {
                return Err(io::Error::other("the command was cancelled"));
            }
            let mut files = [PollFd::new(&self.stream, PollFlags::OUT)];
            match poll(&mut files, Some(&PAUSE)) {
                Ok(0) | Err(Errno::INTR) => continue,
                // poll also reports files that do not support polling, and files with an error, as ready. The next
                // write then succeeds or returns the error.
                Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
            match rustix::io::write(self.stream, bytes) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Ok(done) => {
                    self.bytes = self.bytes.saturating_add(done as u64);
                    return Ok(done);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
