//! Frames: a length (4 bytes, little-endian), followed by that many bytes. Descriptors are sent with the first byte of
//! a frame.
//!
//! - W1. The server does not wait for a client forever: reading a request has a deadline, and writing gives up if the
//!   other end reads nothing for [`WRITE_PATIENCE`]. A client waits for its answer until the server closes the
//!   connection, and for that of another user's server for a limited time (L5 of `connection`).
//! - W2. Memory grows with the bytes that have arrived, not with the length that the other end announces.
//! - W3. A frame that is too long or has too many descriptors is an error, and its descriptors are closed.
//! - W4. A client receives no descriptors, nor does a server from a stranger (S1 of `sent_files`). Reading the attributes
//!   of a descriptor, and closing it, can wait forever: a file of a FUSE mount answers when its server does. Even a killed
//!   process waits for that, and keeps its other files open. A descriptor that is not received is not closed by the
//!   receiver.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::sent_files::SentFiles;

/// The greatest length of a request.
pub(crate) const REQUEST_MAX: usize = 64 << 10;
/// The greatest length of an answer.
pub(crate) const ANSWER_MAX: usize = 64 << 20;
/// The largest number of descriptors in a request.
pub(crate) const FILES_MAX: usize = 4;
/// The first byte of a frame with bytes of a stream.
pub(crate) const DATA: u8 = 0;
/// The largest number of bytes of a stream in one frame.
pub(crate) const STREAM_PIECE: usize = 64 << 10;
/// A writer gives up if the other end reads nothing for this long.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes read at once.
const PIECE: usize = 16 << 10;

/// One end of a connection. The socket is non-blocking; waiting is done by `poll`, with time limits.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    takes_files: bool,
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A frame and its files.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    pub(crate) bytes: Vec<u8>,
    pub(crate) files: SentFiles,
}

impl Wire {
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, takes_files: true })
    }

    /// An end that receives no descriptors (W4).
    pub(crate) fn without_files(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { takes_files: false, ..Self::new(stream)? })
    }

    #[cfg(test)]
    fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(crate) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Waits for the first byte of a frame, then receives the frame as [`Self::receive`] does. Fails with `WouldBlock`
    /// if no byte arrives within `patience`.
    pub(crate) fn receive_within(&self, max: usize, patience: Duration) -> io::Result<Option<Frame>> {
        match self.wait(PollFlags::IN, Some(Instant::now() + patience)) {
            Ok(()) if self.has_ended() => self.receive(max, None),
            Ok(()) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error),
        }
    }

    /// Works like [`Self::receive_within`], but the whole frame must arrive within `whole` after its first byte. Otherwise
    /// fails with `TimedOut`.
    pub(crate) fn receive_all_within(
        &self,
        max: usize,
        patience: Duration,
        whole: Duration,
    ) -> io::Result<Option<Frame>> {
        self.wait(PollFlags::IN, Some(Instant::now() + patience))?;
        match self.has_ended() {
            true => self.receive(max, Some(Instant::now() + whole)),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Receives a frame of at most `max` bytes; `None` if the other end has closed before the frame's first byte.
    pub(crate) fn receive(&self, max: usize, until: Option<Instant>) -> io::Result<Option<Frame>> {
        self.receive_with(SentFiles::default(), max, until)
    }

    /// Works like [`Self::receive`]; the files of the frame are added to `files`.
    pub(crate) fn receive_with(
        &self,
        files: SentFiles,
        max: usize,
        until: Option<Instant>,
    ) -> io::Result<Option<Frame>> {
        let mut frame = Frame { bytes: Vec::new(), files };
        let mut head = [0; 4];
        if !self.fill(&mut head, &mut frame.files, until)? {
            return Ok(None);
        }
        let len = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
        if len > max {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
        }
        while frame.bytes.len() < len {
            let at = frame.bytes.len();
            frame.bytes.resize(len.min(at + PIECE), 0);
            if !self.fill(&mut frame.bytes[at..], &mut frame.files, until)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(Some(frame))
    }

    /// Reads exactly this many bytes; `false` if the other end closed before the first byte.
    fn fill(&self, bytes: &mut [u8], files: &mut SentFiles, until: Option<Instant>) -> io::Result<bool> {
        let mut at = 0;
        while at < bytes.len() {
            let mut space = [const { MaybeUninit::<u8>::uninit() }; rustix::cmsg_space!(ScmRights(FILES_MAX))];
            // Without room for descriptors, the kernel drops them.
            let space = if self.takes_files { &mut space[..] } else { &mut [] };
            let mut control = RecvAncillaryBuffer::new(space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            match recvmsg(&self.stream, &mut [IoSliceMut::new(&mut bytes[at..])], &mut control, flags) {
                Ok(got) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(received) = message {
                            files.extend(received);
                        }
                    }
                    let is_cut = self.takes_files && got.flags.contains(rustix::net::ReturnFlags::CTRUNC);
                    if files.len() > FILES_MAX || is_cut {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many files come with the message"));
                    }
                    match got.bytes {
                        0 if at == 0 => return Ok(false),
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        count => at += count,
                    }
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, until)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Sends a frame with files.
    pub(crate) fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut out = OutgoingFrame::new(bytes)?;
        while !self.push(&mut out, files)? {
            self.wait(PollFlags::OUT, Some(Instant::now() + WRITE_PATIENCE))?;
        }
        Ok(())
    }

    /// Sends the rest of a frame.
    pub(crate) fn finish(&self, out: &mut OutgoingFrame) -> io::Result<()> {
        while !self.push(out, &[])? {
            self.wait(PollFlags::OUT, Some(Instant::now() + WRITE_PATIENCE))?;
        }
        Ok(())
    }

    /// Sends as much of a frame as fits without waiting. Returns whether the whole frame is sent.
    pub(crate) fn push(&self, out: &mut OutgoingFrame, files: &[BorrowedFd<'_>]) -> io::Result<bool> {
        while out.sent < out.bytes.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let rest = &out.bytes[out.sent..];
            // A confined server, which sends no files, may not call sendmsg: its argument can name another socket.
            let sent = match out.sent > 0 || files.is_empty() {
                true => rustix::net::send(&self.stream, rest, flags),
                false => {
                    let mut space = [const { MaybeUninit::<u8>::uninit() }; rustix::cmsg_space!(ScmRights(FILES_MAX))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    if !control.push(SendAncillaryMessage::ScmRights(files)) {
                        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many files"));
                    }
                    sendmsg(&self.stream, &[IoSlice::new(rest)], &mut control, flags)
                }
            };
            match sent {
                Ok(count) => out.sent += count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Receives some bytes that are no frame of their own, and no files: the kernel drops those that come along. Fails with
    /// `WouldBlock` if nothing arrives within `patience`. 0 bytes are the end.
    pub(crate) fn receive_some(&self, bytes: &mut [u8], patience: Duration) -> io::Result<usize> {
        let receive = |bytes: &mut [u8]| match rustix::net::recv(&self.stream, bytes, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            received => received.map(|(count, _)| Some(count)),
        };
        if let Some(count) = receive(bytes)? {
            return Ok(count);
        }
        self.wait(PollFlags::IN, Some(Instant::now() + patience))?;
        receive(bytes)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Waits until bytes can be sent, at most for `patience`.
    pub(crate) fn wait_writable(&self, patience: Duration) -> io::Result<()> {
        self.wait(PollFlags::OUT, Some(Instant::now() + patience))
    }

    /// Tells the other end that no more bytes come. A client cancels its command by it.
    pub(crate) fn close_writing(&self) {
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write);
    }

    /// Whether the other end sends no more bytes. Bytes that it sent before may not have been received yet.
    pub(crate) fn is_closing(&self) -> bool {
        let mut files = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        matches!(poll(&mut files, Some(&Timespec::default())), Ok(count) if count > 0)
    }

    /// Whether the other end has closed the connection or sent something. After its request, a client sends nothing but
    /// the stream of its command, so this ends the command.
    pub(crate) fn has_ended(&self) -> bool {
        let mut byte = [0];
        !matches!(
            rustix::net::recv(&self.stream, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK),
            Err(Errno::AGAIN | Errno::INTR)
        )
    }

    /// Waits until the stream is ready or the time `until` has come. Fails with `TimedOut` if `until` has passed before
    /// the call.
    fn wait(&self, events: PollFlags, until: Option<Instant>) -> io::Result<()> {
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        if timeout.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A timeout that is too long to represent means no timeout.
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), events)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A frame that may be partly sent.
#[derive(Debug)]
pub(crate) struct OutgoingFrame {
    bytes: Vec<u8>,
    sent: usize,
}

impl OutgoingFrame {
    /// An empty frame: nothing is left to send.
    pub(crate) fn nothing() -> Self {
        Self { bytes: Vec::new(), sent: 0 }
    }

    /// A frame with bytes of a stream. Its first byte, 0, tells it from an answer, which is JSON.
    ///
    /// # Panics
    /// There are 4 GiB or more.
    pub(crate) fn data(bytes: &[u8]) -> Self {
        let len = u32::try_from(bytes.len() + 1).expect("the caller sends pieces of some KiB");
        Self { bytes: [&len.to_le_bytes()[..], &[DATA], bytes].concat(), sent: 0 }
    }

    /// The number of bytes that are not sent yet.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.sent
    }

    pub(crate) fn new(bytes: &[u8]) -> io::Result<Self> {
        let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "the message is too long");
        let len = u32::try_from(bytes.len()).map_err(too_long)?;
        Ok(Self { bytes: [&len.to_le_bytes(), bytes].concat(), sent: 0 })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pair() -> (Wire, Wire) {
        let (one, other) = UnixStream::pair().unwrap();
        (Wire::new(one).unwrap(), Wire::new(other).unwrap())
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(5))
    }

    #[test]
    fn frames_arrive_with_their_files() {
        let (near, far) = pair();
        let big = vec![7; 3 << 20];
        let file = std::fs::File::open("/dev/null").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                near.send(b"first", &[file.as_fd()]).unwrap();
                near.send(&big, &[]).unwrap();
            });
            let first = far.receive(REQUEST_MAX, soon()).unwrap().unwrap();
            assert_eq!((first.bytes.as_slice(), first.files.len()), (&b"first"[..], 1));
            let second = far.receive(ANSWER_MAX, soon()).unwrap().unwrap();
            assert!(second.bytes == big && second.files.len() == 0);
        });
        assert!(!far.has_ended());
        drop(near);
        assert!(far.has_ended() && far.receive(REQUEST_MAX, soon()).unwrap().is_none());
    }

    #[test]
    fn a_long_frame_is_refused_before_it_is_read() {
        let (near, far) = pair();
        near.stream().write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert_eq!(far.receive(REQUEST_MAX, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    /// Sends bytes with `count` files in one message.
    fn send_with_files(wire: &Wire, bytes: &[u8], count: usize) {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![file.as_fd(); count];
        let mut space = [const { MaybeUninit::<u8>::uninit() }; rustix::cmsg_space!(ScmRights(FILES_MAX + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        assert_eq!(sendmsg(wire.stream(), &[IoSlice::new(bytes)], &mut control, SendFlags::empty()), Ok(bytes.len()));
    }

    #[test]
    fn too_many_files_in_several_messages_are_refused() {
        for count in [FILES_MAX, FILES_MAX + 1] {
            let (near, far) = pair();
            // One frame, whose length and bytes each come with a file.
            let len = u32::try_from(count - 1).unwrap();
            send_with_files(&near, &len.to_le_bytes(), 1);
            (1..count).for_each(|_| send_with_files(&near, b"x", 1));
            let received = far.receive(REQUEST_MAX, soon());
            if count <= FILES_MAX {
                assert_eq!(received.unwrap().unwrap().files.len(), count, "W3");
            } else {
                assert_eq!(received.unwrap_err().kind(), io::ErrorKind::InvalidData, "W3");
            }
        }
    }

    #[test]
    fn too_many_files_in_one_message_are_refused() {
        for count in [FILES_MAX, FILES_MAX + 1] {
            let (near, far) = pair();
            send_with_files(&near, &[1, 0, 0, 0, b'x'], count);
            let received = far.receive(REQUEST_MAX, soon());
            if count <= FILES_MAX {
                assert_eq!(received.unwrap().unwrap().files.len(), count, "W3");
            } else {
                assert_eq!(received.unwrap_err().kind(), io::ErrorKind::InvalidData, "W3");
            }
        }
    }

    #[test]
    fn a_client_receives_no_files() {
        let (near, far) = UnixStream::pair().unwrap();
        let (server, client) = (Wire::new(near).unwrap(), Wire::without_files(far).unwrap());
        let (mut read, write) = io::pipe().unwrap();
        server.send(b"answer", &[write.as_fd()]).unwrap();
        drop(write);
        let frame = client.receive(ANSWER_MAX, soon()).unwrap().unwrap();
        assert_eq!((frame.bytes.as_slice(), frame.files.len()), (&b"answer"[..], 0));
        // Nobody has the writing end open any more.
        assert_eq!(io::Read::read(&mut read, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_message_whose_files_the_kernel_dropped_is_refused() {
        let (near, far) = pair();
        // The sender's credentials take the room of the files.
        rustix::net::sockopt::set_socket_passcred(far.stream(), true).unwrap();
        send_with_files(&near, &[1, 0, 0, 0, b'x'], FILES_MAX);
        assert_eq!(far.receive(REQUEST_MAX, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData, "W3");
    }

    #[test]
    fn an_end_that_says_nothing_is_not_waited_for() {
        let (near, far) = pair();
        near.stream().write_all(&[1]).unwrap();
        let begun = Instant::now();
        let until = Some(begun + Duration::from_millis(50));
        assert_eq!(far.receive(REQUEST_MAX, until).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}
