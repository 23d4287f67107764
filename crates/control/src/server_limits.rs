//! [`ServerLimits`]: how much another user's server may send, and for how long it may be silent.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::failure::{CommandFailure, Result};
use crate::relay::ClientSide;
use crate::wire::{DATA, Frame, Wire};

/// The limits of another user's server (L5 of `connection`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits {
    /// Bytes of a message.
    pub(crate) len: usize,
    /// Messages of a command that bring no bytes of a stream.
    pub(crate) nr_messages: u32,
    /// Bytes of such messages of all commands of a channel: a list comes in pages, with one command for each.
    pub(crate) total: u64,
    /// The time without a message, and the time that a message takes to arrive.
    pub(crate) silence: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            len: FOREIGN_ANSWER_MAX,
            nr_messages: FOREIGN_MESSAGES_MAX,
            total: FOREIGN_BYTES_MAX,
            silence: FOREIGN_PATIENCE,
        }
    }
}

/// The use of [`ServerLimits`] by one command.
#[derive(Debug)]
pub(crate) struct Limited<'s> {
    limits: ServerLimits,
    side: ClientSide<'s>,
    /// The number of messages so far. Messages that bring bytes of a stream are not counted.
    pub(crate) nr_messages: u32,
    /// The number of bytes of these messages so far, of all commands of the channel.
    total: &'s AtomicU64,
    /// The time of the last message.
    heard_at: Instant,
}

impl<'s> Limited<'s> {
    pub(crate) fn new(limits: ServerLimits, side: ClientSide<'s>, total: &'s AtomicU64) -> Self {
        Self { limits, side, nr_messages: 0, total, heard_at: Instant::now() }
    }

    /// Receives a message within the limits. Fails with `WouldBlock` like [`Wire::receive_within`].
    pub(crate) fn receive(&mut self, wire: &Wire) -> Result<io::Result<Option<Frame>>> {
        let ServerLimits { len, nr_messages, total, silence } = self.limits;
        let silent = || Err(endless(&format!("has sent nothing complete for {} s", silence.as_secs_f32())));
        match wire.receive_all_within(len, CANCEL_CHECK_INTERVAL, silence) {
            Ok(Some(frame)) => {
                self.heard_at = Instant::now();
                if !matches!(&frame.bytes[..], [DATA, _, ..]) {
                    self.nr_messages += 1;
                    self.total.fetch_add(frame.bytes.len() as u64, Ordering::Relaxed);
                }
                match self.nr_messages > nr_messages || self.total.load(Ordering::Relaxed) > total {
                    true => Err(endless("sends messages without an end")),
                    false => Ok(Ok(Some(frame))),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // The server says nothing while it has no input.
                if self.side.waits_for_input() {
                    self.heard_at = Instant::now();
                }
                if self.heard_at.elapsed() >= silence { silent() } else { Ok(Err(error)) }
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => silent(),
            received => Ok(received),
        }
    }

    /// Notes that this process itself took its time.
    pub(crate) fn wait_anew(&mut self) {
        self.heard_at = Instant::now();
    }
}

/// Makes the failure for another user's server that exceeds its limits.
fn endless(what: &str) -> CommandFailure {
    let text = format!(
        "the mount's server, which belongs to another user, {what}; the command may or may not have been executed"
    );
    CommandFailure::new(Errno::CONNABORTED, text)
}

/// The greatest length of a message of another user's server. An answer of a real server is much shorter, and takes a
/// multiple of its length in memory.
const FOREIGN_ANSWER_MAX: usize = 16 << 20;
/// The largest number of messages of another user's server. A real server sends at most five in a second.
const FOREIGN_MESSAGES_MAX: u32 = 1_000_000;
/// The largest number of bytes in messages of another user's server, for all commands of a channel.
const FOREIGN_BYTES_MAX: u64 = 256 << 20;
/// How long another user's server may be silent. A real server repeats the progress of a long command sooner
/// (`server_stream`).
const FOREIGN_PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which a client checks whether it was cancelled.
pub(crate) const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(100);
