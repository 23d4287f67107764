//! Output of commands that write a stream. A mount's server writes to a pipe, and this process copies from the pipe to
//! the output. So the server waits for nothing except this process, and never writes to a file of the user.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_control::{Channel, Failure, Request, Response};
use ubtrfs_fs::Job;

/// Runs a command that writes a stream to `output`. With `replaces`, `output` is a file whose old content is replaced.
/// The file is truncated when the first bytes of the stream arrive, so it keeps its content if the command is refused.
pub(crate) fn call_with_output(
    channel: &Channel<'_>,
    request: Request,
    output: BorrowedFd<'_>,
    replaces: bool,
    job: &Job,
) -> Result<Response, Failure> {
    if !channel.is_mount() && !replaces {
        return channel.call_with_stream(request, &[], output, job);
    }
    let failed = |error: io::Error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        Failure::new(errno, format!("cannot make a pipe: {error}"))
    };
    let (from, to) = output_pipe().map_err(failed)?;
    let mut output = File::from(output.try_clone_to_owned().map_err(failed)?);
    thread::scope(|scope| {
        // If the output fails, the relay closes `from`, and the server gets a broken pipe.
        let relay = scope.spawn(move || relay(File::from(OwnedFd::from(from)), &mut output, replaces));
        let called = channel.call_with_stream(request, &[], to.as_fd(), job);
        drop(to);
        match relay.join() {
            Ok(Ok(())) => called,
            Ok(Err(error)) => {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                Err(Failure::new(errno, format!("cannot write the stream: {error}")))
            }
            Err(_) => Err(Failure::new(Errno::IO, "the relay of the stream failed: this is a bug of ubtrfs")),
        }
    })
}

/// Returns the reading end and the writing end of a pipe. The writing end is non-blocking, because the server waits for
/// its clients with a timeout.
pub(crate) fn output_pipe() -> io::Result<(io::PipeReader, io::PipeWriter)> {
    let (from, to) = io::pipe()?;
    let flags = rustix::fs::fcntl_getfl(&to)?;
    rustix::fs::fcntl_setfl(&to, flags | OFlags::NONBLOCK)?;
    Ok((from, to))
}

/// Copies everything from a pipe to an output, which may be non-blocking. With `replaces`, the output is truncated when
/// the first bytes arrive from the pipe; if none arrive, the output keeps its content.
fn relay(mut from: File, to: &mut File, mut replaces: bool) -> io::Result<()> {
    let mut buf = vec![0; BUFFER];
    loop {
        let len = match from.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if std::mem::take(&mut replaces) {
            to.set_len(0)?;
        }
        let mut rest = &buf[..len];
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(done) => rest = &rest[done..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for(to.as_fd())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Waits until an output can be written to.
fn wait_for(to: BorrowedFd<'_>) -> io::Result<()> {
    match poll(&mut [PollFd::new(&to, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

const BUFFER: usize = 256 << 10;
