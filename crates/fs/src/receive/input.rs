//! The thread that reads a stream: it cuts the input into commands and verifies their checksums, batch by batch.
//!
//! - I1. At most [`NR_BATCHES`] batches wait to be applied. A batch holds about [`BATCH_BYTES`], or one larger command.

use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use ubtrfs_stream::{CommandKind, FrameHeader, FrameReader, Position, Problem, StreamError};

/// Consecutive commands of the input.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    frames: Vec<(usize, FrameHeader)>,
}

impl Batch {
    /// The commands.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (&FrameHeader, &[u8])> {
        let ends = self.frames.iter().skip(1).map(|(start, _)| *start).chain([self.bytes.len()]);
        self.frames.iter().zip(ends).map(|((start, header), end)| (header, &self.bytes[*start..end]))
    }

    /// Bytes of the input.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.frames.clear();
    }
}

/// Sends all commands of an input, or of its first stream, to `batches`. If an error ends the input, the error is sent
/// last. `used` returns batches whose memory can be reused.
pub(crate) fn read_all(
    input: impl Read,
    only_first: bool,
    batches: &SyncSender<Result<Batch, StreamError>>,
    used: &Receiver<Batch>,
) {
    let mut reader = FrameReader::new(input);
    let mut nr_streams = 0;
    let failure = loop {
        match reader.stream() {
            Ok(Some(_)) => nr_streams = u64::saturating_add(nr_streams, 1),
            Ok(None) if nr_streams == 0 => {
                break Some(StreamError { position: Position::default(), problem: Problem::Empty });
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
        match read_stream(&mut reader, batches, used) {
            Ok(true) if only_first => break None,
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => break Some(error),
        }
    };
    if let Some(error) = failure {
        // If the receiver is gone, the error is not needed.
        let _ = batches.send(Err(error));
    }
}

/// Sends the commands of one stream. Returns false if the receiver is gone.
fn read_stream(
    reader: &mut FrameReader<impl Read>,
    batches: &SyncSender<Result<Batch, StreamError>>,
    used: &Receiver<Batch>,
) -> Result<bool, StreamError> {
    loop {
        let mut batch = used.try_recv().unwrap_or_default();
        batch.clear();
        // Free the memory that a large command needed.
        batch.bytes.shrink_to(2 * BATCH_BYTES);
        let mut result = Ok(false);
        let began = Instant::now();
        // The limit on time lets commands of a slow input be applied soon after they arrive.
        while batch.bytes.len() < BATCH_BYTES && began.elapsed() < BATCH_TIME {
            let start = batch.bytes.len();
            let frame = reader.command(&mut batch.bytes).and_then(|header| {
                let position = Position { offset: reader.offset(), ..Position::default() };
                let header = header.ok_or(StreamError { position, problem: Problem::NoEnd })?;
                header.verify(&batch.bytes[start..])?;
                Ok(header)
            });
            match frame {
                Ok(header) => {
                    batch.frames.push((start, header));
                    match header.position.kind {
                        Some(CommandKind::End) => {
                            result = Ok(true);
                            break;
                        }
                        // End the batch after a command that begins a subvolume, so that the caller soon sees whether
                        // the subvolume can be received.
                        Some(CommandKind::Subvol | CommandKind::Snapshot) => break,
                        _ => {}
                    }
                }
                Err(error) => {
                    batch.bytes.truncate(start);
                    result = Err(error);
                    break;
                }
            }
        }
        // The commands before an error are applied too: if the subvolume is kept, a later receive continues after these
        // commands.
        if batches.send(Ok(batch)).is_err() {
            return Ok(false);
        }
        match result {
            Ok(false) => {}
            other => return other,
        }
    }
}

/// Bytes after which a batch is sent.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_TIME: Duration = Duration::from_millis(50);
/// Number of batches that can wait to be applied.
pub(crate) const NR_BATCHES: usize = 16;
