//! The thread that reads a stream: it cuts the input into commands and verifies their checksums, batch by batch.
//!
//! - I1. At most [`NR_BATCHES`] batches wait to be applied. A batch takes less than twice [`BATCH_BYTES`], or holds a
//!   single command that is larger.
//! - I2. The batches that wait or are being applied together take at most `Room::max_bytes`, unless there is only one
//!   batch. A large command is read only when the [`Room`] has space for it. It is read into memory of its exact size,
//!   which is freed after the command is applied.

use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ubtrfs_stream::{CommandKind, FrameHeader, FrameReader, Position, StreamError, StreamProblem};

/// Consecutive commands of the input.
#[derive(Debug, Default)]
pub(crate) struct CommandBatch {
    bytes: Vec<u8>,
    frames: Vec<(usize, FrameHeader)>,
}

impl CommandBatch {
    /// The commands.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (&FrameHeader, &[u8])> + Clone {
        let ends = self.frames.iter().skip(1).map(|(start, _)| *start).chain([self.bytes.len()]);
        self.frames.iter().zip(ends).map(|((start, header), end)| (header, &self.bytes[*start..end]))
    }

    /// Bytes of the input.
    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of memory that the commands take.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.bytes.len().saturating_add(self.frames.len().saturating_mul(size_of::<(usize, FrameHeader)>()))
    }

    /// Reads a command whose head was read.
    fn read(&mut self, reader: &mut FrameReader<impl Read>, header: FrameHeader) -> Result<(), StreamError> {
        let start = self.bytes.len();
        let done = reader.body(&header, &mut self.bytes).and_then(|()| header.verify(&self.bytes[start..]));
        match done {
            Ok(()) => self.frames.push((start, header)),
            Err(_) => self.bytes.truncate(start),
        }
        done
    }

    /// Removes the commands, and frees the memory that a large command needed (I2).
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.frames.clear();
        self.bytes.shrink_to(2 * BATCH_BYTES);
    }
}

/// Counts the memory of the batches that wait or are being applied (I2). The thread that reads waits for space in it.
/// When the [`ApplierRoom`] is dropped, the thread no longer waits.
#[derive(Debug)]
pub(crate) struct Room {
    max_bytes: usize,
    state: Mutex<RoomState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct RoomState {
    used: usize,
    is_closed: bool,
}

/// Gives room back, and closes it when dropped.
#[derive(Debug)]
pub(crate) struct ApplierRoom<'r>(pub(crate) &'r Room);

impl Room {
    /// Makes room for batches of `max_bytes` in all.
    pub(crate) fn new(max_bytes: u64) -> Self {
        let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX);
        Self { max_bytes, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until a batch of `len` bytes has room.
    fn take(&self, len: usize) {
        let mut state = self.state.lock();
        while state.used > 0 && state.used.saturating_add(len) > self.max_bytes && !state.is_closed {
            self.changed.wait(&mut state);
        }
        state.used = state.used.saturating_add(len);
    }
}

impl ApplierRoom<'_> {
    /// Gives back the room of a batch of `len` bytes.
    pub(crate) fn give_back(&self, len: usize) {
        let mut state = self.0.state.lock();
        state.used = state.used.saturating_sub(len);
        self.0.changed.notify_one();
    }
}

impl Drop for ApplierRoom<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.changed.notify_one();
    }
}

/// Sends all commands of an input, or of its first stream, to `batches`. If an error ends the input, the error is sent
/// last. `used` returns empty batches whose memory can be reused.
pub(crate) fn read_all(
    input: impl Read,
    only_first: bool,
    batches: &SyncSender<Result<CommandBatch, StreamError>>,
    used: &Receiver<CommandBatch>,
    room: &Room,
) {
    let mut reader = FrameReader::new(input);
    let mut nr_streams = 0;
    let failure = loop {
        match reader.stream() {
            Ok(Some(_)) => nr_streams = u64::saturating_add(nr_streams, 1),
            Ok(None) if nr_streams == 0 => {
                break Some(StreamError { position: Position::default(), problem: StreamProblem::Empty });
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
        match read_stream(&mut reader, batches, used, room) {
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
    batches: &SyncSender<Result<CommandBatch, StreamError>>,
    used: &Receiver<CommandBatch>,
    room: &Room,
) -> Result<bool, StreamError> {
    // The head of a large command, which gets a batch of its own.
    let mut large = None;
    loop {
        let mut batch = used.try_recv().unwrap_or_default();
        let result = match large.take() {
            Some(header) => read_large(reader, header, &mut batch, room),
            None => {
                let result = read_batch(reader, &mut batch, &mut large);
                room.take(batch.memory_bytes());
                result
            }
        };
        // The commands before an error are applied too: if the subvolume is kept, a later receive continues after these
        // commands.
        if !batch.frames.is_empty() && batches.send(Ok(batch)).is_err() {
            return Ok(false);
        }
        match result {
            Ok(false) => {}
            other => return other,
        }
    }
}

/// Reads commands into a batch until the batch is full, or until a large command follows, whose head is put into
/// `large`. Returns whether the stream ended.
fn read_batch(
    reader: &mut FrameReader<impl Read>,
    batch: &mut CommandBatch,
    large: &mut Option<FrameHeader>,
) -> Result<bool, StreamError> {
    let began = Instant::now();
    // The limit on time lets commands of a slow input be applied soon after they arrive.
    while batch.memory_bytes() < BATCH_BYTES && began.elapsed() < BATCH_TIME {
        let position = Position { offset: reader.offset(), ..Position::default() };
        let header = reader.head()?.ok_or(StreamError { position, problem: StreamProblem::NoEnd })?;
        if header.whole_len() > BATCH_BYTES {
            *large = Some(header);
            return Ok(false);
        }
        batch.read(reader, header)?;
        match header.position.kind {
            Some(CommandKind::End) => return Ok(true),
            // End the batch after a command that begins a subvolume, so that the caller soon sees whether the subvolume
            // can be received.
            Some(CommandKind::Subvol | CommandKind::Snapshot) => return Ok(false),
            _ => {}
        }
    }
    Ok(false)
}

/// Reads a command whose head was read, into an empty batch, as soon as it has room (I2). Returns whether the stream
/// ended.
fn read_large(
    reader: &mut FrameReader<impl Read>,
    header: FrameHeader,
    batch: &mut CommandBatch,
    room: &Room,
) -> Result<bool, StreamError> {
    room.take(header.whole_len().saturating_add(size_of::<(usize, FrameHeader)>()));
    // This memory is used only as bytes arrive.
    batch.bytes.reserve_exact(header.whole_len());
    batch.read(reader, header)?;
    Ok(header.position.kind == Some(CommandKind::End))
}

/// Bytes after which a batch is sent.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_TIME: Duration = Duration::from_millis(50);
/// Number of batches that can wait to be applied.
pub(crate) const NR_BATCHES: usize = 16;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::sync_channel;

    use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};

    use super::*;

    /// Counts the bytes that were read.
    struct Counted<'c>(&'c [u8], &'c AtomicUsize);

    impl Read for Counted<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let read = self.0.read(out)?;
            self.1.fetch_add(read, Ordering::SeqCst);
            Ok(read)
        }
    }

    #[test]
    fn large_commands_do_not_pile_up() {
        let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V2).unwrap();
        let data = vec![7; 6 << 20];
        (0..12).for_each(|_| writer.command(&StreamCommand::Write { path: b"f", offset: 0, data: &data }).unwrap());
        writer.command(&StreamCommand::End).unwrap();
        let input = writer.into_inner();
        let (count, room) = (&AtomicUsize::new(0), &Room::new(8 << 20));
        let input = &input[..];
        let (send, batches) = sync_channel(NR_BATCHES);
        let (give_back, used) = sync_channel(NR_BATCHES);
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || read_all(Counted(input, count), false, &send, &used, room));
            let applier = ApplierRoom(room);
            for nr in 0..4 {
                let mut before = usize::MAX;
                while before != count.load(Ordering::SeqCst) {
                    before = count.load(Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(200));
                }
                // Two of the commands do not fit into the room.
                assert!(before < (nr + 1) * (data.len() + 100), "{before} bytes were read, {nr} commands applied");
                let mut batch = batches.recv().unwrap().unwrap();
                let (len, capacity) = (batch.memory_bytes(), batch.bytes.capacity());
                assert!(len >= data.len() && capacity == batch.len_bytes(), "{len} bytes, {capacity} of them taken");
                batch.clear();
                assert!(batch.bytes.capacity() <= 2 * BATCH_BYTES);
                applier.give_back(len);
                give_back.try_send(batch).unwrap();
            }
            // The reader ends when nobody applies batches.
            drop(batches);
            drop(applier);
            reader.join().unwrap();
            assert!(count.load(Ordering::SeqCst) < input.len(), "the rest is not read");
        });
    }
}
