//! [`ByteQueue`]: the bytes of a stream, between the thread of a command and the thread that talks to the other program.
//!
//! - Q1. The queue holds at most [`QUEUE_MAX`] bytes, so a fast writer waits for a slow reader.
//! - Q2. Every wait is short ([`PAUSE`]), so both threads notice in between when they should stop. No wait depends on
//!   another program.
//! - Q3. After [`ByteQueue::close`] the writer gets an error, and after [`ByteQueue::end`] the reader gets the end.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The bytes of a stream, between two threads.
#[derive(Debug, Default)]
pub struct ByteQueue {
    state: Mutex<QueuedBytes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueuedBytes {
    bytes: VecDeque<u8>,
    /// No more bytes will be added.
    has_ended: bool,
    /// No more bytes will be taken.
    is_closed: bool,
}

/// What [`ByteQueue::take`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// This many bytes.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The end of the stream.
    End,
}

impl ByteQueue {
    /// Adds as many bytes as fit. Returns how many; 0 if the queue stayed full for [`PAUSE`] (Q2).
    ///
    /// # Errors
    /// `BrokenPipe` if nobody takes the bytes any more (Q3).
    pub(crate) fn put(&self, bytes: &[u8]) -> io::Result<usize> {
        if !self.has_room(PAUSE)? {
            return Ok(0);
        }
        let mut state = self.state.lock();
        let count = bytes.len().min(QUEUE_MAX.saturating_sub(state.bytes.len()));
        state.bytes.extend(&bytes[..count]);
        drop(state);
        self.changed.notify_all();
        Ok(count)
    }

    /// Whether there is room, now or within `patience`.
    ///
    /// # Errors
    /// `BrokenPipe` if nobody takes the bytes any more (Q3).
    pub(crate) fn has_room(&self, patience: Duration) -> io::Result<bool> {
        let mut state = self.state.lock();
        if state.bytes.len() >= QUEUE_MAX && !state.is_closed {
            let _ = self.changed.wait_for(&mut state, patience);
        }
        if state.is_closed { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(state.bytes.len() < QUEUE_MAX) }
    }

    /// Takes bytes. Waits at most for `patience` (Q2).
    pub(crate) fn take(&self, out: &mut [u8], patience: Duration) -> Taken {
        let mut state = self.state.lock();
        if state.bytes.is_empty() && !state.has_ended {
            let _ = self.changed.wait_for(&mut state, patience);
        }
        let count = out.len().min(state.bytes.len());
        if count == 0 && !out.is_empty() {
            return if state.has_ended { Taken::End } else { Taken::Nothing };
        }
        let (front, back) = state.bytes.as_slices();
        let of_front = count.min(front.len());
        out[..of_front].copy_from_slice(&front[..of_front]);
        out[of_front..count].copy_from_slice(&back[..count - of_front]);
        state.bytes.drain(..count);
        drop(state);
        self.changed.notify_all();
        Taken::Bytes(count)
    }

    /// Tells the reader that no more bytes come (Q3).
    pub(crate) fn end(&self) {
        self.state.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Whether no more bytes come. Some may still be in the queue.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// Tells the writer that no more bytes are taken (Q3).
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

/// Writes everything to a queue, unless its reader closes it.
#[cfg(test)]
pub(crate) struct QueueWriter<'q>(pub(crate) &'q ByteQueue);

#[cfg(test)]
impl io::Write for QueueWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.put(bytes)? {
                0 if !bytes.is_empty() => {}
                count => return Ok(count),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The largest number of bytes in a queue.
const QUEUE_MAX: usize = 128 << 10;
/// The longest wait.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Instant;

    use super::*;

    #[test]
    fn bytes_arrive_in_order_and_then_the_end() {
        let queue = ByteQueue::default();
        let sent: Vec<u8> = (0..5 * QUEUE_MAX + 7).map(|nr| (nr % 251) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                QueueWriter(&queue).write_all(&sent).unwrap();
                queue.end();
            });
            let (mut all, mut piece) = (Vec::<u8>::new(), vec![0; 10_007]);
            loop {
                match queue.take(&mut piece, PAUSE) {
                    Taken::Bytes(count) => all.extend(&piece[..count]),
                    Taken::Nothing => {}
                    Taken::End => break,
                }
            }
            assert!(all == sent && queue.has_ended());
        });
    }

    #[test]
    fn a_full_queue_takes_nothing_and_a_closed_one_is_an_error() {
        let queue = ByteQueue::default();
        assert_eq!(queue.put(&vec![1; QUEUE_MAX + 1]).unwrap(), QUEUE_MAX, "Q1");
        assert_eq!(queue.put(&[1]).unwrap(), 0, "Q2");
        queue.close();
        assert_eq!(queue.put(&[1]).unwrap_err().kind(), io::ErrorKind::BrokenPipe, "Q3");
        assert_eq!(queue.take(&mut [], PAUSE), Taken::Bytes(0));
    }

    #[test]
    fn a_writer_waits_for_room_only_if_the_queue_is_full() {
        let queue = ByteQueue::default();
        let begun = Instant::now();
        assert!(queue.has_room(Duration::from_secs(60)).unwrap());
        assert!(begun.elapsed() < Duration::from_secs(30));
        queue.put(&vec![1; QUEUE_MAX]).unwrap();
        let begun = Instant::now();
        assert!(!queue.has_room(PAUSE).unwrap());
        assert!(begun.elapsed() >= PAUSE);
    }
}
