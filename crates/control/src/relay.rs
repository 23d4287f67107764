//! Streams between a command's input or output and a server. This process copies between the input or output and the
//! connection.
//!
//! ```text
//! input  --copying thread-->  connection  -->  server                             receive
//! server  -->  connection  --talking thread-->  ByteQueue  --copying thread-->  output      send, usage
//! ```
//!
//! - Y1. A server never holds a file, a pipe or a terminal of the user, so it can neither change nor keep it.
//! - Y2. The talking thread never waits for the input or output, so a command can be cancelled at any time.
//! - Y3. A copy from the input ends as soon as the command ends, even if the input never delivers another byte.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use ubtrfs_stream::{CommandKind, FrameReader};
use ubtrfs_transaction::Job;

use crate::byte_queue::{ByteQueue, PAUSE, Taken};
use crate::failure::{CommandFailure, Result};
use crate::message::Response;
use crate::wire::{OutgoingFrame, STREAM_PIECE, Wire};

/// The client's side of a command's stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClientSide<'s> {
    /// The command has no stream.
    None,
    /// The command reads this.
    Input(&'s Feeder),
    /// The command writes to this.
    Output(&'s ByteQueue, &'s Job),
}

/// A message about a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Heard<'h> {
    /// The server wants the stream.
    Ready,
    /// The next bytes of the stream.
    Bytes(&'h [u8]),
}

impl ClientSide<'_> {
    /// Whether the command reads an input that delivers nothing at the moment.
    pub(crate) fn waits_for_input(self) -> bool {
        matches!(self, Self::Input(feeder) if feeder.waits_for_input.load(Ordering::Relaxed))
    }

    /// Runs `talk`, which receives messages on this connection and passes those about the stream on. Its argument returns
    /// whether the command is still of use.
    pub(crate) fn talk<T>(self, wire: &Wire, talk: impl FnOnce(&mut dyn FnMut(Heard<'_>) -> bool) -> T) -> T {
        match self {
            Self::None => talk(&mut |_| false),
            Self::Output(queue, job) => talk(&mut |heard| match heard {
                Heard::Bytes(bytes) => put_all(queue, bytes, job),
                Heard::Ready => false,
            }),
            Self::Input(feeder) => thread::scope(|scope| {
                let mut has_begun = false;
                let answered = talk(&mut |heard| {
                    if matches!(heard, Heard::Ready) && !std::mem::replace(&mut has_begun, true) {
                        scope.spawn(|| feeder.feed(wire));
                    }
                    has_begun
                });
                feeder.stop();
                answered
            }),
        }
    }
}

/// Adds all bytes to a queue; `false` if nobody takes them, or if the command is cancelled.
fn put_all(queue: &ByteQueue, mut bytes: &[u8], job: &Job) -> bool {
    while !bytes.is_empty() {
        match queue.put(bytes) {
            Ok(_) if job.progress().is_cancelled => return false,
            Ok(count) => bytes = &bytes[count..],
            Err(_) => return false,
        }
    }
    true
}

/// Calls a command that reads `input`. With `only_first`, nothing after the first end command of the stream is taken from
/// the input.
pub(crate) fn with_input(
    input: BorrowedFd<'_>,
    only_first: bool,
    call: impl FnOnce(&Feeder) -> Result<Response>,
) -> Result<Response> {
    let file = File::from(input.try_clone_to_owned().map_err(no_pipe)?);
    let (stopped, stop) = io::pipe().map_err(no_pipe)?;
    let feeder = Feeder {
        file,
        only_first,
        stopped: stopped.into(),
        stop: Mutex::new(Some(stop.into())),
        fed: Mutex::new(Ok(())),
        waits_for_input: AtomicBool::new(false),
    };
    let called = call(&feeder);
    let fed = feeder.fed.into_inner();
    finish(Ok(fed), called, "read")
}

/// Calls a command that writes to a queue, from which everything is copied to `output`. With `replaces`, `output` is
/// truncated when the first bytes arrive; if none arrive, it keeps its content.
pub(crate) fn with_output(
    output: BorrowedFd<'_>,
    replaces: bool,
    call: impl FnOnce(&ByteQueue) -> Result<Response>,
) -> Result<Response> {
    let mut output = File::from(output.try_clone_to_owned().map_err(no_pipe)?);
    let queue = ByteQueue::default();
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let copied = copy_out(&queue, &mut output, replaces);
            // If the output failed, the command gets an error.
            queue.close();
            copied
        });
        let called = call(&queue);
        queue.end();
        finish(copying.join(), called, "write")
    })
}

/// Combines the results of a copy and of the command. A failed copy is the cause of the command's failure.
fn finish(copied: thread::Result<io::Result<()>>, called: Result<Response>, verb: &str) -> Result<Response> {
    match copied {
        Ok(Ok(())) => called,
        Ok(Err(error)) => {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Err(CommandFailure::new(errno, format!("cannot {verb} the stream: {error}")))
        }
        Err(_) => Err(CommandFailure::new(Errno::IO, "the relay of the stream failed: this is a bug of ubtrfs")),
    }
}

fn no_pipe(error: io::Error) -> CommandFailure {
    CommandFailure::new(Errno::from_io_error(&error).unwrap_or(Errno::IO), format!("cannot copy the stream: {error}"))
}

/// Sends an input to a server.
#[derive(Debug)]
pub(crate) struct Feeder {
    file: File,
    only_first: bool,
    /// Readable once `stop` is closed.
    stopped: OwnedFd,
    stop: Mutex<Option<OwnedFd>>,
    fed: Mutex<io::Result<()>>,
    waits_for_input: AtomicBool,
}

impl Feeder {
    /// Copies the input to the server until the input ends, or [`Self::stop`] is called (Y3).
    fn feed(&self, wire: &Wire) {
        let (mut input, mut to) = (CommandInput(self), FrameSender { wire, feeder: self });
        let copied = if self.only_first { copy_first_stream(&mut input, &mut to) } else { copy(&mut input, &mut to) };
        let sent = copied.and_then(|()| to.send(OutgoingFrame::new(b"")?));
        *self.fed.lock() = match sent {
            // The command has ended, and its answer says why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            sent => sent,
        };
    }

    fn stop(&self) {
        self.stop.lock().take();
    }

    /// Waits until a file is ready; fails with `BrokenPipe` if the command has ended.
    fn wait_for(&self, file: impl AsFd, events: PollFlags) -> io::Result<()> {
        loop {
            let mut ready = [PollFd::new(&file, events), PollFd::new(&self.stopped, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) if !ready[1].revents().is_empty() => return Err(io::ErrorKind::BrokenPipe.into()),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// The input of a command. Reading fails with `BrokenPipe` when the command has ended.
struct CommandInput<'i>(&'i Feeder);

impl Read for CommandInput<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0.waits_for_input.store(true, Ordering::Relaxed);
            let ready = self.0.wait_for(&self.0.file, PollFlags::IN);
            self.0.waits_for_input.store(false, Ordering::Relaxed);
            ready?;
            match (&self.0.file).read(out) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                done => return done,
            }
        }
    }
}

/// Sends bytes to a server, in frames.
struct FrameSender<'f> {
    wire: &'f Wire,
    feeder: &'f Feeder,
}

impl FrameSender<'_> {
    fn send(&mut self, mut frame: OutgoingFrame) -> io::Result<()> {
        while !self.wire.push(&mut frame, &[])? {
            self.feeder.wait_for(self.wire, PollFlags::OUT)?;
        }
        Ok(())
    }
}

impl Write for FrameSender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // An empty frame would end the stream.
        let piece = &bytes[..bytes.len().min(STREAM_PIECE)];
        if !piece.is_empty() {
            self.send(OutgoingFrame::new(piece)?)?;
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies everything.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buf = vec![0; BUFFER];
    loop {
        match from.read(&mut buf)? {
            0 => return Ok(()),
            len => to.write_all(&buf[..len])?,
        }
    }
}

/// Copies everything to a file that may be non-blocking. With `replaces`, truncates it when the first bytes arrive.
fn copy_out(from: &ByteQueue, to: &mut File, mut replaces: bool) -> io::Result<()> {
    let mut buf = vec![0; BUFFER];
    loop {
        match from.take(&mut buf, PAUSE) {
            Taken::Nothing => {}
            Taken::End => return Ok(()),
            Taken::Bytes(len) => {
                if std::mem::take(&mut replaces) {
                    to.set_len(0)?;
                }
                write_all(to, &buf[..len])?;
            }
        }
    }
}

/// Copies one send stream, and reads nothing after its end command. If the bytes are no stream, copying ends, and the
/// server names the problem.
fn copy_first_stream(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
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

/// Writes what is read through it.
struct Tap<'t, R, W> {
    from: &'t mut R,
    to: &'t mut W,
    failed: Option<io::Error>,
}

impl<R: Read, W: Write> Read for Tap<'_, R, W> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let copied = self.from.read(out).and_then(|len| self.to.write_all(&out[..len]).map(|()| len));
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
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};

    use super::*;
    use crate::byte_queue::QueueWriter;

    fn done() -> Result<Response> {
        Ok(Response::Unmounted)
    }

    /// Calls a command whose server does this with its end of the connection, after it has asked for the stream.
    fn feed_to(feeder: &Feeder, server: impl FnOnce(UnixStream) -> Result<Response>) -> Result<Response> {
        let (near, far) = UnixStream::pair().unwrap();
        let wire = Wire::without_files(near).unwrap();
        ClientSide::Input(feeder).talk(&wire, |heard| {
            assert!(heard(Heard::Ready));
            server(far)
        })
    }

    /// The bytes of all frames up to the empty one.
    fn read_all(mut from: UnixStream) -> Vec<u8> {
        let (mut all, mut head) = (Vec::new(), [0; 4]);
        loop {
            from.read_exact(&mut head).unwrap();
            let len = u32::from_le_bytes(head) as usize;
            if len == 0 {
                return all;
            }
            let at = all.len();
            all.resize(at + len, 0);
            from.read_exact(&mut all[at..]).unwrap();
        }
    }

    #[test]
    fn input_arrives_in_frames_and_ends_with_an_empty_one() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes = vec![7; 3 * BUFFER + 5];
        file.write_all(&bytes).unwrap();
        file.rewind().unwrap();
        let read = |far| {
            assert!(read_all(far) == bytes);
            done()
        };
        with_input(file.as_fd(), false, |feeder| feed_to(feeder, read)).unwrap();
    }

    #[test]
    fn an_input_that_delivers_nothing_ends_with_the_command() {
        let (silent, _writer) = io::pipe().unwrap();
        let began = Instant::now();
        for only_first in [false, true] {
            with_input(silent.as_fd(), only_first, |_| done()).unwrap();
            let mut ended = None;
            let answer = |far| {
                ended = Some(far);
                done()
            };
            with_input(silent.as_fd(), only_first, |feeder| feed_to(feeder, answer)).unwrap();
            let mut rest = Vec::new();
            ended.unwrap().read_to_end(&mut rest).unwrap();
            assert!(rest.is_empty(), "a stream that is cut has no end: {rest:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_command_that_reads_nothing_leaves_no_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 8 * BUFFER]).unwrap();
        let mut call = |server: &dyn Fn(UnixStream) -> Result<Response>| {
            file.rewind().unwrap();
            with_input(file.as_fd(), false, |feeder| feed_to(feeder, server))
        };
        call(&|far| {
            drop(far);
            done()
        })
        .unwrap();
        let refused = call(&|_far| Err(CommandFailure::new(Errno::NOSPC, "full")));
        assert_eq!(refused.unwrap_err().text, "full");
    }

    #[test]
    fn bytes_after_the_first_stream_stay_in_the_input() {
        let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V1).unwrap();
        writer.command(&StreamCommand::Mkdir { path: b"d", ino: 300 }).unwrap();
        writer.command(&StreamCommand::End).unwrap();
        let stream = writer.into_inner();
        let (from, mut to) = io::pipe().unwrap();
        to.write_all(&[&stream[..], b"the next stream"].concat()).unwrap();
        drop(to);
        let read = |far| {
            assert_eq!(read_all(far), stream);
            done()
        };
        with_input(from.as_fd(), true, |feeder| feed_to(feeder, read)).unwrap();
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
        let refused = with_output(file.as_fd(), true, |_| Err(CommandFailure::new(Errno::INVAL, "no")));
        assert_eq!((refused.unwrap_err().text.as_str(), content(&file)), ("no", b"old content".to_vec()));
        let write = |queue: &ByteQueue| {
            QueueWriter(queue).write_all(b"new").unwrap();
            done()
        };
        with_output(file.as_fd(), true, write).unwrap();
        assert_eq!(content(&file), b"new");
    }

    #[test]
    fn an_output_that_accepts_nothing_does_not_keep_a_cancelled_command_talking() {
        let (from, to) = io::pipe().unwrap();
        let job = Job::new();
        let began = Instant::now();
        let talked = with_output(to.as_fd(), false, |queue| {
            job.cancel();
            let bytes = vec![7; 1 << 20];
            let (near, _far) = UnixStream::pair().unwrap();
            let goes_on = ClientSide::Output(queue, &job)
                .talk(&Wire::without_files(near).unwrap(), |heard| heard(Heard::Bytes(&bytes)));
            drop(from);
            assert!(!goes_on && began.elapsed() < Duration::from_secs(5), "Y2");
            Err(CommandFailure::new(Errno::CANCELED, "cancelled"))
        });
        assert!(talked.is_err());
    }
}
