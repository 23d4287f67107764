//! The server's end of a connection while a command runs: its progress, and its stream.
//!
//! ```text
//! command's thread  --ByteQueue-->  connection's thread  --frames-->  client        send, usage
//! command's thread  <--ByteQueue--  connection's thread  <--frames--  client        receive
//! ```
//!
//! - N1. Only the connection's thread waits for the client. It does not hold the filesystem, so nothing that a client
//!   does with its end, or sends along with its bytes, holds up the end of a mount (K5 of `server`).
//! - N2. A stream from the client ends with an empty frame. A connection that closes earlier is a cancelled command.

use std::io;
use std::time::{Duration, Instant};

use ubtrfs_transaction::Job;

use crate::byte_queue::{ByteQueue, PAUSE, Taken};
use crate::message::{ProgressMessage, ServerMessage, encode_answer};
use crate::wire::{OutgoingFrame, STREAM_PIECE, Wire};

/// Sends the progress and the stream of a command.
pub(crate) struct Reporter<'r> {
    wire: &'r Wire,
    job: &'r Job,
    shown: ProgressMessage,
    /// When `shown` was sent.
    shown_at: Instant,
    last: Instant,
    /// The frame that is being sent.
    out: OutgoingFrame,
}

impl<'r> Reporter<'r> {
    pub(crate) fn new(wire: &'r Wire, job: &'r Job) -> Self {
        let now = Instant::now();
        Self { wire, job, shown: ProgressMessage::default(), shown_at: now, last: now, out: OutgoingFrame::nothing() }
    }

    /// Sends the progress if it changed, and repeats it for clients that wait only for a server that gives signs of life (L5
    /// of `connection`). A client that reads slowly misses some messages.
    pub(crate) fn report(&mut self) {
        let now = self.job.progress();
        let now = ProgressMessage { done: now.done, total: now.total, step: now.step };
        let is_due = now != self.shown || self.shown_at.elapsed() >= REPEAT_INTERVAL;
        if matches!(self.wire.push(&mut self.out, &[]), Ok(true)) && is_due {
            let _ = self.start(&ServerMessage::Progress(now.clone()));
            (self.shown, self.shown_at) = (now, Instant::now());
        }
        self.last = Instant::now();
    }

    fn report_now_and_then(&mut self) {
        if self.last.elapsed() >= PROGRESS_INTERVAL {
            self.report();
        }
    }

    /// Sends the rest of a frame that is partly sent, because the result comes next.
    pub(crate) fn finish(&mut self) {
        let _ = self.wire.finish(&mut self.out);
    }

    /// Begins a frame; the last one must be sent.
    fn start(&mut self, answer: &ServerMessage) -> io::Result<()> {
        let bytes = encode_answer(answer).map_err(io::Error::other)?;
        self.out = OutgoingFrame::new(&bytes)?;
        self.wire.push(&mut self.out, &[]).map(|_| ())
    }

    /// Sends the stream of a command until the command has ended it. Returns whether the client went away or cancelled
    /// the command.
    pub(crate) fn send_stream(&mut self, queue: &ByteQueue) -> bool {
        let mut piece = vec![0; STREAM_PIECE];
        let mut moved = Instant::now();
        loop {
            if self.wire.has_ended() {
                return true;
            }
            match self.wire.push(&mut self.out, &[]) {
                Err(_) => return true,
                Ok(false) if queue.has_ended() && moved.elapsed() > END_PATIENCE => return true,
                Ok(false) => {
                    let before = self.out.left();
                    let _ = self.wire.wait_writable(PAUSE);
                    let _ = self.wire.push(&mut self.out, &[]);
                    if self.out.left() != before {
                        moved = Instant::now();
                    }
                    continue;
                }
                Ok(true) => moved = Instant::now(),
            }
            match queue.take(&mut piece, PROGRESS_INTERVAL) {
                Taken::Bytes(count) => self.out = OutgoingFrame::data(&piece[..count]),
                Taken::Nothing => self.report(),
                Taken::End => return false,
            }
            if self.out.left() == 0 {
                self.report_now_and_then();
            }
        }
    }

    /// Passes the client's stream on until it or the command has ended. Returns whether the client went away or cancelled
    /// the command (N2).
    pub(crate) fn receive_stream(&mut self, queue: &ByteQueue) -> bool {
        if self.start(&ServerMessage::Ready).is_err() {
            return true;
        }
        let (mut frames, mut piece) = (FrameSplitter::default(), vec![0; STREAM_PIECE]);
        loop {
            self.report_now_and_then();
            match queue.has_room(PAUSE) {
                Err(_) => return false,
                Ok(false) if self.wire.is_closing() => return true,
                Ok(false) => continue,
                Ok(true) => {}
            }
            let mut rest = match self.wire.receive_some(&mut piece, PAUSE) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) | Ok(0) => return true,
                Ok(count) => &piece[..count],
            };
            while !rest.is_empty() {
                let Some(data) = frames.next(&mut rest) else {
                    queue.end();
                    return false;
                };
                match self.pass_on(data, queue) {
                    Some(false) => {}
                    Some(true) => return true,
                    None => return false,
                }
            }
        }
    }

    /// Adds bytes of the client to the queue. Returns whether the client went away; `None` if the command has ended.
    fn pass_on(&mut self, mut data: &[u8], queue: &ByteQueue) -> Option<bool> {
        while !data.is_empty() {
            match queue.put(data).ok()? {
                0 if self.wire.is_closing() => return Some(true),
                count => data = &data[count..],
            }
            self.report_now_and_then();
        }
        Some(false)
    }
}

/// Takes the frames of a stream apart: each is a length of four bytes, and that many bytes.
#[derive(Debug, Default)]
struct FrameSplitter {
    head: [u8; 4],
    head_len: usize,
    left: usize,
}

impl FrameSplitter {
    /// The next bytes of the stream, perhaps none yet; `None` at its end (N2).
    fn next<'r>(&mut self, rest: &mut &'r [u8]) -> Option<&'r [u8]> {
        if self.left == 0 {
            let count = rest.len().min(self.head.len() - self.head_len);
            let (head, after) = rest.split_at(count);
            self.head[self.head_len..self.head_len + count].copy_from_slice(head);
            (self.head_len, *rest) = (self.head_len + count, after);
            if self.head_len < self.head.len() {
                return Some(&[]);
            }
            self.head_len = 0;
            self.left = usize::try_from(u32::from_le_bytes(self.head)).unwrap_or(usize::MAX);
            if self.left == 0 {
                return None;
            }
        }
        let (data, after) = rest.split_at(rest.len().min(self.left));
        (self.left, *rest) = (self.left - data.len(), after);
        Some(data)
    }
}

/// The interval at which progress that has not changed is sent again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(15);
/// The interval at which progress is sent and a client that went away is noticed.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// How long the end of a stream waits for a client that reads nothing.
const END_PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::io::{self, Read};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn progress_is_sent_only_when_it_has_changed() {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let (wire, job) = (Wire::new(near).unwrap(), Job::new());
        let mut reporter = Reporter::new(&wire, &job);
        let mut is_told = || {
            reporter.report();
            match far.read(&mut [0; 4096]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
                read => read.unwrap() > 0,
            }
        };
        assert!(!is_told());
        job.add_total(7);
        assert!(is_told());
        assert!(!is_told());
    }

    #[test]
    fn a_client_that_sends_no_more_cancels_a_stream_that_is_sent_to_it() {
        let (near, far) = UnixStream::pair().unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let (wire, job, queue) = (Wire::new(near).unwrap(), Job::new(), ByteQueue::default());
        let (done, is_done) = mpsc::channel();
        let end = || queue.end();
        std::thread::scope(|scope| {
            // Ends the stream if the client is not noticed.
            scope.spawn(move || is_done.recv_timeout(Duration::from_secs(10)).unwrap_or_else(|_| end()));
            assert!(Reporter::new(&wire, &job).send_stream(&queue));
            done.send(()).unwrap();
        });
    }

    #[test]
    fn a_stream_is_taken_apart_wherever_it_is_cut() {
        let data: Vec<u8> = (0..200).collect();
        let frame = |bytes: &[u8]| [&u32::try_from(bytes.len()).unwrap().to_le_bytes(), bytes].concat();
        let sent = [frame(&data[..3]), frame(&data[3..150]), frame(&data[150..]), frame(b""), vec![9; 9]].concat();
        for step in 1..sent.len() {
            let (mut frames, mut got, mut has_ended) = (FrameSplitter::default(), Vec::<u8>::new(), false);
            'pieces: for mut piece in sent.chunks(step) {
                while !piece.is_empty() {
                    match frames.next(&mut piece) {
                        Some(bytes) => got.extend(bytes),
                        None => {
                            has_ended = true;
                            break 'pieces;
                        }
                    }
                }
            }
            assert!(has_ended && got == data, "{step}");
        }
    }
}
