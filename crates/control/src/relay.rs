//! Streams between a command's input or output and a server. The server gets one end of a pipe that was made for the
//! command, and this process copies between the pipe and the input or output.
//!
//! - Y1. A server never holds a file, a pipe or a terminal of the user, so it can neither change nor keep it.
//! - Y2. A server waits for nothing except this process, and its end of the pipe is non-blocking.
//! - Y3. A copy from the input ends as soon as the command ends, even if the input never delivers another byte.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use ubtrfs_stream::{CommandKind, FrameReader};

use crate::failure::{Failure, Result};
use crate::message::Response;

/// One end of a pipe that was made for a command. Only this module makes it.
#[derive(Debug)]
pub(crate) struct StreamPipe(OwnedFd);

impl AsFd for StreamPipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Calls a command that reads from a pipe, into which `input` is copied. With `only_first`, nothing after the first end
/// command of the stream is taken from the input.
pub(crate) fn with_input(
    input: BorrowedFd<'_>,
    only_first: bool,
    call: impl FnOnce(&StreamPipe) -> Result<Response>,
) -> Result<Response> {
    let (from, to) = pipe()?;
    // When `ended` is dropped, the copy ends (Y3).
    let (end, ended) = pipe()?;
    let mut input = Input { file: File::from(input.try_clone_to_owned().map_err(no_pipe)?), end };
    thread::scope(|scope| {
        let copying = scope.spawn(move || {
            let mut to = File::from(to);
            if only_first { copy_first_stream(&mut input, &mut to) } else { copy(&mut input, &mut to, false) }
        });
        let called = call(&StreamPipe(from));
        drop(ended);
        let copied = copying.join().map(|copied| match copied {
            // The server has closed the pipe, and its answer says why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            copied => copied,
        });
        finish(copied, called, "read")
    })
}

/// Calls a command that writes to a pipe, from which everything is copied to `output`. With `replaces`, `output` is
/// truncated when the first bytes arrive; if none arrive, it keeps its content.
pub(crate) fn with_output(
    output: BorrowedFd<'_>,
    replaces: bool,
    call: impl FnOnce(&StreamPipe) -> Result<Response>,
) -> Result<Response> {
    let (from, to) = pipe()?;
    let mut output = File::from(output.try_clone_to_owned().map_err(no_pipe)?);
    thread::scope(|scope| {
        // If the output fails, `from` is closed, and the server gets a broken pipe.
        let copying = scope.spawn(move || copy(&mut Blocking(File::from(from)), &mut output, replaces));
        let to = StreamPipe(to);
        let called = call(&to);
        drop(to);
        finish(copying.join(), called, "write")
    })
}

/// Combines the results of a copy and of the command. A failed copy is the cause of the command's failure.
fn finish(copied: thread::Result<io::Result<()>>, called: Result<Response>, verb: &str) -> Result<Response> {
    match copied {
        Ok(Ok(())) => called,
        Ok(Err(error)) => {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Err(Failure::new(errno, format!("cannot {verb} the stream: {error}")))
        }
        Err(_) => Err(Failure::new(Errno::IO, "the relay of the stream failed: this is a bug of ubtrfs")),
    }
}

/// The reading end and the writing end of a new pipe, both non-blocking (Y2).
fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (from, to) = io::pipe().map_err(no_pipe)?;
    let [from, to] = [OwnedFd::from(from), OwnedFd::from(to)];
    for end in [&from, &to] {
        let set = fcntl_getfl(end).and_then(|flags| fcntl_setfl(end, flags | OFlags::NONBLOCK));
        set.map_err(|errno| no_pipe(errno.into()))?;
    }
    Ok((from, to))
}

fn no_pipe(error: io::Error) -> Failure {
    Failure::new(Errno::from_io_error(&error).unwrap_or(Errno::IO), format!("cannot make a pipe: {error}"))
}

/// The input of a command. Reading ends when the command ends (Y3).
struct Input {
    file: File,
    end: OwnedFd,
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = [PollFd::new(&self.file, PollFlags::IN), PollFd::new(&self.end, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) if !ready[1].revents().is_empty() => return Ok(0),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            match self.file.read(out) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                done => return done,
            }
        }
    }
}

/// A non-blocking file whose reads wait.
struct Blocking(File);

impl Read for Blocking {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for(&self.0, PollFlags::IN)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}

/// Copies everything. With `replaces`, the output is truncated when the first bytes arrive.
fn copy(from: &mut impl Read, to: &mut File, mut replaces: bool) -> io::Result<()> {
    let mut buf = vec![0; BUFFER];
    loop {
        let len = from.read(&mut buf)?;
        if len == 0 {
            return Ok(());
        }
        if std::mem::take(&mut replaces) {
            to.set_len(0)?;
        }
        write_all(to, &buf[..len])?;
    }
}

/// Copies one send stream, and reads nothing after its end command. If the bytes are no stream, copying ends, and the
/// server names the problem.
fn copy_first_stream(from: &mut impl Read, to: &mut File) -> io::Result<()> {
    let mut tap = Tap { from, to, failed: None };
    let mut frames = FrameReader::new(&mut tap);
    let mut command = Vec::new();
    let mut goes_on = frames.stream().is_ok_and(|version| version.is_some());
    while goes_on {
        command.clear();
        let head = frames.command(&mut command).ok().flatten();
        goes_on = head.is_some_and(|head| head.number != CommandKind::End.number());
    }
    tap.failed.map_or(Ok(()), Err)
}

/// Writes to a file what is read through it.
struct Tap<'t, R> {
    from: &'t mut R,
    to: &'t mut File,
    failed: Option<io::Error>,
}

impl<R: Read> Read for Tap<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let copied = self.from.read(out).and_then(|len| write_all(self.to, &out[..len]).map(|()| len));
        copied.map_err(|error| {
            let kind = error.kind();
            self.failed = Some(error);
            kind.into()
        })
    }
}

/// Writes all bytes to a file that may be non-blocking.
fn write_all(to: &mut File, mut rest: &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        match to.write(rest) {
            Ok(done) => rest = &rest[done..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for(&*to, PollFlags::OUT)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for(file: &impl AsFd, events: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(file, events)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

const BUFFER: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use std::io::Seek;
    use std::time::{Duration, Instant};

    use ubtrfs_stream::{Command, Version, Writer};

    use super::*;

    fn done() -> Result<Response> {
        Ok(Response::Unmounted)
    }

    fn read_all(pipe: &StreamPipe) -> Vec<u8> {
        let mut all = Vec::new();
        Blocking(File::from(pipe.0.try_clone().unwrap())).read_to_end(&mut all).unwrap();
        all
    }

    #[test]
    fn input_arrives_through_a_pipe_of_its_own() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes = vec![7; 3 * BUFFER + 5];
        file.write_all(&bytes).unwrap();
        file.rewind().unwrap();
        let read = |pipe: &StreamPipe| {
            assert_ne!(rustix::fs::fstat(pipe).unwrap().st_dev, rustix::fs::fstat(&file).unwrap().st_dev);
            assert!(read_all(pipe) == bytes);
            done()
        };
        with_input(file.as_fd(), false, read).unwrap();
    }

    #[test]
    fn an_input_that_delivers_nothing_ends_with_the_command() {
        let (silent, _writer) = io::pipe().unwrap();
        let began = Instant::now();
        with_input(silent.as_fd(), false, |_| done()).unwrap();
        with_input(silent.as_fd(), true, |_| done()).unwrap();
        assert!(began.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_command_that_reads_nothing_leaves_no_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 8 * BUFFER]).unwrap();
        file.rewind().unwrap();
        with_input(file.as_fd(), false, |_| done()).unwrap();
        let refused = with_input(file.as_fd(), false, |_| Err(Failure::new(Errno::NOSPC, "full")));
        assert_eq!(refused.unwrap_err().text, "full");
    }

    #[test]
    fn bytes_after_the_first_stream_stay_in_the_input() {
        let mut writer = Writer::new(Vec::new(), Version::V1).unwrap();
        writer.command(&Command::Mkdir { path: b"d", ino: 300 }).unwrap();
        writer.command(&Command::End).unwrap();
        let stream = writer.into_inner();
        let (from, mut to) = io::pipe().unwrap();
        to.write_all(&[&stream[..], b"the next stream"].concat()).unwrap();
        drop(to);
        let read = |pipe: &StreamPipe| {
            assert_eq!(read_all(pipe), stream);
            done()
        };
        with_input(from.as_fd(), true, read).unwrap();
        let mut rest = Vec::new();
        File::from(OwnedFd::from(from)).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"the next stream");
    }

    #[test]
    fn an_output_keeps_its_content_until_bytes_arrive() {
        let content = |mut file: &File| {
            let mut all = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut all).unwrap();
            file.rewind().unwrap();
            all
        };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"old content").unwrap();
        file.rewind().unwrap();
        let refused = with_output(file.as_fd(), true, |_| Err(Failure::new(Errno::INVAL, "no")));
        assert_eq!((refused.unwrap_err().text.as_str(), content(&file)), ("no", b"old content".to_vec()));
        let write = |pipe: &StreamPipe| {
            File::from(pipe.0.try_clone().unwrap()).write_all(b"new").unwrap();
            done()
        };
        with_output(file.as_fd(), true, write).unwrap();
        assert_eq!(content(&file), b"new");
    }
}
