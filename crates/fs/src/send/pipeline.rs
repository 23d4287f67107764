//! [`Pipeline`]: turns commands and ranges of extents into a stream. Threads read the data ahead; the stream keeps the
//! order in which commands were given.
//!
//! ```text
//!  walk -- command, data --> queue --+--> readers: read, verify, decompress, encode --+--> writer --> output
//!                                    +-- commands, encoded already -------------------+
//! ```
//!
//! Commands and small runs of data are collected in batches, each of which is one job. Random writes of one file, and
//! new files, are often neighbors on disk, so a reader uses one request for data of its batch that lies side by side on
//! disk.
//!
//! - P1. The queue holds at most [`QUEUE_BYTES`] of data, read or still to be read, and at most [`QUEUE_JOBS`] jobs. If
//!   the part of this send in the memory for streams is smaller, the queue holds at most that, or one job.
//! - P2. After a failure nothing more is written, and no thread waits. The first failure is reported.
//! - P3. Data is verified against its checksums before it is written.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "lengths of pieces in memory; `decode_of` checks the numbers of extents"
)]

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::start_helper;
use ubtrfs_format::Logical;
use ubtrfs_format::item::Compression;
use ubtrfs_stream::{EncodeError, StreamCommand, StreamVersion, encode, encode_with};
use ubtrfs_transaction::{Engine, Job};

use crate::compression;
use crate::error::{Error, Result};
use crate::mount::stream_memory::StreamMemory;

/// A part of a data extent that will be sent as a file's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataSource {
    /// Address of the extent.
    pub(super) bytenr: Logical,
    /// Length of the extent on disk.
    pub(super) disk_len: u64,
    /// Length of the extent after decompression.
    pub(super) ram_len: u64,
    pub(super) compression: Compression,
    /// Offset of the part in the (decompressed) extent.
    pub(super) offset: u64,
    /// Whether the extent has checksums.
    pub(super) verify: bool,
}

/// Data of a file.
#[derive(Clone, Debug)]
pub(super) struct Data {
    pub(super) path: Arc<[u8]>,
    /// Offset in the file.
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) source: DataSource,
    /// Whether the extent is sent in its compressed form.
    pub(super) encoded: bool,
}

/// Data of one file without gaps, read together.
#[derive(Debug)]
struct SendRun {
    path: Arc<[u8]>,
    at: u64,
    len: u64,
    parts: Vec<Data>,
}

/// A part of the stream that one job makes.
#[derive(Debug, Default)]
struct StreamPart {
    /// Encoded commands, and the data that follows them.
    runs: Vec<(Vec<u8>, SendRun)>,
    nr_parts: usize,
    /// Number of bytes of the commands and of the data in `runs`.
    bytes: u64,
    /// Encoded commands that follow all data of the batch.
    end: Vec<u8>,
}

/// A range of addresses that one request reads. It holds the uncompressed data of several parts.
#[derive(Debug)]
struct Neighbors {
    start: u64,
    bytes: Vec<u8>,
}

enum SlotWork {
    Read(StreamPart),
    Ready(Vec<u8>),
    Failed(Error),
    Taken,
}

struct StreamSlot(Mutex<SlotWork>);

#[derive(Default)]
struct PipelineQueue {
    /// All slots in the order of the stream, each with its number of bytes.
    slots: VecDeque<(Arc<StreamSlot>, u64)>,
    /// Slots that no reader has taken yet.
    unread: VecDeque<Arc<StreamSlot>>,
    bytes: u64,
    ended: bool,
    failure: Option<Error>,
    failed: bool,
}

struct SendShared<'e> {
    engine: &'e Engine,
    memory: &'e StreamMemory,
    version: StreamVersion,
    queue: Mutex<PipelineQueue>,
    /// Notified when a slot can be read.
    unread: Condvar,
    /// Notified when the first slot is ready.
    ready: Condvar,
    /// Notified when the queue has room.
    room: Condvar,
}

/// The input end of the pipeline, which takes commands and data.
pub(super) struct Pipeline<'p, 'e> {
    shared: &'p SendShared<'e>,
    job: &'p Job,
    /// Encoded commands that follow `batch` and precede `run` in the stream.
    pending: Vec<u8>,
    run: Option<SendRun>,
    batch: StreamPart,
}

impl<'p> Pipeline<'p, '_> {
    /// Runs `walk` with a pipeline that writes to `output`.
    pub(super) fn with<T>(
        (engine, memory): (&Engine, &StreamMemory),
        version: StreamVersion,
        output: &mut (dyn Write + Send),
        job: &Job,
        walk: impl FnOnce(&mut Pipeline<'_, '_>) -> Result<T>,
    ) -> Result<T> {
        let shared = SendShared {
            engine,
            memory,
            version,
            queue: Mutex::default(),
            unread: Condvar::new(),
            ready: Condvar::new(),
            room: Condvar::new(),
        };
        let nr_readers = thread::available_parallelism().map_or(2, usize::from).clamp(1, READERS_MAX);
        let walked = thread::scope(|scope| {
            let _end = EndPipeline(&shared);
            let readers = (0..nr_readers).map(|_| start_helper(scope, || shared.read_all()).is_thread());
            let has_readers = readers.fold(false, |one, other| one | other);
            if !has_readers || !start_helper(scope, || shared.write_all(output, job)).is_thread() {
                return Err(Error::NoThread);
            }
            let mut pipeline =
                Pipeline { shared: &shared, job, pending: Vec::new(), run: None, batch: StreamPart::default() };
            let walked = walk(&mut pipeline)?;
            pipeline.flush()?;
            Ok(walked)
        });
        match shared.queue.into_inner().failure {
            Some(error) => Err(error),
            None => walked,
        }
    }

    /// The version of the stream.
    pub(super) fn version(&self) -> StreamVersion {
        self.shared.version
    }

    /// Appends the header of a stream.
    pub(super) fn header(&mut self) {
        ubtrfs_stream::encode_header(self.shared.version, &mut self.pending);
    }

    /// Appends a command.
    pub(super) fn command(&mut self, command: &StreamCommand<'_>) -> Result<()> {
        self.end_run()?;
        encode(self.shared.version, command, &mut self.pending).map_err(not_encoded)?;
        if self.pending.len() >= READY_BYTES { self.push_batch() } else { Ok(()) }
    }

    /// Appends data of a file.
    pub(super) fn data(&mut self, data: Data) -> Result<()> {
        if let Some(run) = &mut self.run
            && run.at + run.len == data.at
            && run.len + data.len <= RUN_BYTES
            && run.parts.len() < RUN_PARTS
            && Arc::ptr_eq(&run.path, &data.path)
        {
            run.len += data.len;
            match run.parts.last_mut() {
                Some(last) if is_continued(last, &data) => {
                    last.len += data.len;
                    last.source.disk_len = last.source.disk_len.max(data.source.disk_len);
                }
                _ => run.parts.push(data),
            }
            return Ok(());
        }
        self.end_run()?;
        self.run = Some(SendRun { path: Arc::clone(&data.path), at: data.at, len: data.len, parts: vec![data] });
        Ok(())
    }

    fn end_run(&mut self) -> Result<()> {
        let Some(run) = self.run.take() else { return Ok(()) };
        let pending = std::mem::take(&mut self.pending);
        self.batch.bytes += run.len + pending.len() as u64;
        self.batch.nr_parts += run.parts.len();
        self.batch.runs.push((pending, run));
        let is_full = self.batch.bytes >= BATCH_BYTES || self.batch.nr_parts >= RUN_PARTS;
        if is_full { self.push_batch() } else { Ok(()) }
    }

    fn push_batch(&mut self) -> Result<()> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.end = std::mem::take(&mut self.pending);
        batch.bytes += batch.end.len() as u64;
        if batch.bytes == 0 {
            return Ok(());
        }
        let (bytes, is_read) = (batch.bytes, !batch.runs.is_empty());
        let work = if is_read { SlotWork::Read(batch) } else { SlotWork::Ready(batch.end) };
        self.push(Arc::new(StreamSlot(Mutex::new(work))), bytes, is_read)
    }

    /// Hands all collected commands and data to the other threads.
    fn flush(&mut self) -> Result<()> {
        self.end_run()?;
        self.push_batch()
    }

    /// Adds a slot to the queue, and waits while the queue is full (P1).
    fn push(&self, slot: Arc<StreamSlot>, bytes: u64, is_read: bool) -> Result<()> {
        self.job.check()?;
        let max_bytes = self.shared.memory.part_bytes().min(QUEUE_BYTES);
        let mut queue = self.shared.queue.lock();
        while !queue.failed && (queue.slots.len() >= QUEUE_JOBS || (queue.bytes + bytes > max_bytes && queue.bytes > 0))
        {
            self.shared.room.wait(&mut queue);
        }
        if queue.failed {
            // The failure itself is reported when the pipeline ends.
            return Err(Error::Engine(ubtrfs_error::Error::Cancelled));
        }
        if is_read {
            queue.unread.push_back(Arc::clone(&slot));
        }
        queue.slots.push_back((slot, bytes));
        queue.bytes += bytes;
        drop(queue);
        if is_read {
            self.shared.unread.notify_one()
        } else {
            self.shared.ready.notify_one()
        };
        Ok(())
    }
}

/// Whether `next` continues `last` in the extent, so that one read serves both.
fn is_continued(last: &Data, next: &Data) -> bool {
    let (one, other) = (&last.source, &next.source);
    let is_plain = |source: &DataSource| source.compression == Compression::None;
    let starts = |data: &Data| data.source.bytenr.0 + data.source.offset;
    is_plain(one) && is_plain(other) && one.verify == other.verify && starts(last) + last.len == starts(next)
}

impl SendShared<'_> {
    fn read_all(&self) {
        let _fail = FailPipeline(self);
        loop {
            let mut queue = self.queue.lock();
            let slot = loop {
                if queue.failed {
                    return;
                }
                if let Some(slot) = queue.unread.pop_front() {
                    break slot;
                }
                if queue.ended {
                    return;
                }
                self.unread.wait(&mut queue);
            };
            drop(queue);
            let work = std::mem::replace(&mut *slot.0.lock(), SlotWork::Taken);
            let done = match work {
                SlotWork::Read(batch) => match self.read(batch) {
                    Ok(bytes) => SlotWork::Ready(bytes),
                    Err(error) => SlotWork::Failed(error),
                },
                other => other,
            };
            *slot.0.lock() = done;
            // Lock the queue before notifying: the writer holds this lock from its check until it waits, so it cannot
            // miss the notification in between.
            let queue = self.queue.lock();
            if queue.slots.front().is_some_and(|(first, _)| Arc::ptr_eq(first, &slot)) {
                self.ready.notify_one();
            }
        }
    }

    /// Reads and encodes a batch (P3).
    fn read(&self, batch: StreamPart) -> Result<Vec<u8>> {
        let neighbors = self.read_neighbors(&batch)?;
        let mut out = Vec::with_capacity(batch.bytes as usize + batch.nr_parts * COMMAND_ROOM);
        let mut plain = Vec::new();
        for (commands, run) in &batch.runs {
            out.extend_from_slice(commands);
            plain.resize(run.len as usize, 0);
            // The range of `plain` that is read and not encoded yet.
            let (mut from, mut to) = (0, 0);
            for part in &run.parts {
                if part.encoded {
                    self.encode_plain(run, &plain, from..to, &mut out)?;
                    self.encode_compressed(part, &mut out)?;
                    to += part.len as usize;
                    from = to;
                } else {
                    let end = to + part.len as usize;
                    match Neighbors::part(&neighbors, &part.source, part.len as usize) {
                        Some(bytes) => plain[to..end].copy_from_slice(bytes),
                        None => self.read_part(&part.source, &mut plain[to..end])?,
                    }
                    to = end;
                }
            }
            self.encode_plain(run, &plain, from..to, &mut out)?;
        }
        out.extend_from_slice(&batch.end);
        Ok(out)
    }

    /// Reads the plain parts of a batch that are neighbors on disk.
    fn read_neighbors(&self, batch: &StreamPart) -> Result<Vec<Neighbors>> {
        let sector = u64::from(self.engine.geometry().sectorsize);
        let parts = batch.runs.iter().flat_map(|(_, run)| &run.parts);
        let is_plain = |part: &&Data| !part.encoded && part.source.compression == Compression::None;
        let mut ranges: Vec<(u64, u64, bool, usize)> = parts
            .filter(is_plain)
            .map(|part| {
                let start = part.source.bytenr.0 + part.source.offset;
                (start, start + part.len.next_multiple_of(sector), part.source.verify, 1)
            })
            .collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joins = next.0 <= last.1 && next.2 == last.2 && next.1.max(last.1) - last.0 <= RUN_BYTES;
            if joins {
                last.1 = last.1.max(next.1);
                last.3 += 1;
            }
            joins
        });
        let several = ranges.into_iter().filter(|(.., nr_parts)| *nr_parts > 1);
        several
            .map(|(start, end, verify, _)| {
                let mut bytes = vec![0; (end - start) as usize];
                self.engine.read_data(Logical(start), &mut bytes, verify)?;
                Ok(Neighbors { start, bytes })
            })
            .collect()
    }

    fn encode_plain(
        &self,
        run: &SendRun,
        plain: &[u8],
        range: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let most = match self.version {
            StreamVersion::V1 => ubtrfs_stream::WRITE_BYTES_V1,
            _ => ubtrfs_stream::WRITE_BYTES_V2,
        };
        let mut offset = run.at + range.start as u64;
        for data in plain[range].chunks(most) {
            encode(self.version, &StreamCommand::Write { path: &run.path, offset, data }, out).map_err(not_encoded)?;
            offset += data.len() as u64;
        }
        Ok(())
    }

    fn encode_compressed(&self, part: &Data, out: &mut Vec<u8>) -> Result<()> {
        let source = &part.source;
        let compression = stream_compression(source.compression, self.engine.geometry().sectorsize);
        let command = StreamCommand::EncodedWrite {
            path: &part.path,
            offset: part.at,
            unencoded_file_len: part.len,
            unencoded_len: source.ram_len,
            unencoded_offset: source.offset,
            compression,
            encryption: Some(0),
            data: &[],
        };
        encode_with(self.version, &command, source.disk_len as usize, out, |room| {
            self.engine.read_data(source.bytenr, room, source.verify).map_err(Encode::Read)
        })
        .map_err(|error| match error {
            Encode::Read(error) => error.into(),
            Encode::Encode(error) => not_encoded(error),
        })
    }

    /// Reads a part of an extent.
    fn read_part(&self, source: &DataSource, out: &mut [u8]) -> Result<()> {
        let sectorsize = self.engine.geometry().sectorsize as usize;
        if source.compression != Compression::None {
            let mut packed = vec![0; source.disk_len as usize];
            self.engine.read_data(source.bytenr, &mut packed, source.verify)?;
            let at = |cause| ubtrfs_error::Error::Corrupt(ubtrfs_format::Corrupt::new(cause).at(source.bytenr));
            if source.offset == 0 && out.len() as u64 == source.ram_len {
                return Ok(compression::decompress(source.compression, &packed, out, sectorsize).map_err(at)?);
            }
            let mut plain = vec![0; source.ram_len as usize];
            compression::decompress(source.compression, &packed, &mut plain, sectorsize).map_err(at)?;
            let from = plain.get(source.offset as usize..).unwrap_or_default();
            let len = from.len().min(out.len());
            out[..len].copy_from_slice(&from[..len]);
            out[len..].fill(0);
            return Ok(());
        }
        let start = Logical(source.bytenr.0 + source.offset);
        let whole = out.len() / sectorsize * sectorsize;
        let (sectors, tail) = out.split_at_mut(whole);
        if !sectors.is_empty() {
            self.engine.read_data(start, sectors, source.verify)?;
        }
        if !tail.is_empty() {
            let mut sector = vec![0; sectorsize];
            self.engine.read_data(Logical(start.0 + whole as u64), &mut sector, source.verify)?;
            tail.copy_from_slice(&sector[..tail.len()]);
        }
        Ok(())
    }

    fn write_all(&self, output: &mut (dyn Write + Send), job: &Job) {
        let _fail = FailPipeline(self);
        let mut joined: Vec<u8> = Vec::new();
        loop {
            let (next, is_last) = match self.next_ready() {
                Ok(next) => next,
                Err(error) => return self.fail(error),
            };
            if let Some(bytes) = next {
                if joined.is_empty() && bytes.len() >= WRITE_BYTES {
                    if let Err(error) = written(output, &bytes, job) {
                        return self.fail(error);
                    }
                    continue;
                }
                joined.extend_from_slice(&bytes);
            }
            if joined.len() >= WRITE_BYTES || is_last {
                if let Err(error) = written(output, &joined, job) {
                    return self.fail(error);
                }
                joined.clear();
            }
            if is_last {
                return;
            }
        }
    }

    /// Waits for the next bytes of the stream. Returns `None` and true at the end of the stream.
    fn next_ready(&self) -> Result<(Option<Vec<u8>>, bool)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.failed {
                return Err(Error::Engine(ubtrfs_error::Error::Cancelled));
            }
            if let Some((slot, bytes)) = queue.slots.front() {
                let bytes = *bytes;
                let mut work = slot.0.lock();
                match std::mem::replace(&mut *work, SlotWork::Taken) {
                    SlotWork::Ready(ready) => {
                        drop(work);
                        queue.slots.pop_front();
                        queue.bytes -= bytes;
                        drop(queue);
                        self.room.notify_one();
                        return Ok((Some(ready), false));
                    }
                    SlotWork::Failed(error) => return Err(error),
                    other => *work = other,
                }
            } else if queue.ended {
                return Ok((None, true));
            }
            self.ready.wait(&mut queue);
        }
    }

    fn notify_all(&self) {
        self.unread.notify_all();
        self.ready.notify_all();
        self.room.notify_all();
    }

    /// Records a failure, and makes all threads stop (P2).
    fn fail(&self, error: Error) {
        let mut queue = self.queue.lock();
        if !queue.failed {
            queue.failure = Some(error);
        }
        queue.failed = true;
        queue.slots.clear();
        queue.unread.clear();
        drop(queue);
        self.notify_all();
    }
}

impl Neighbors {
    /// The bytes of a part, if they are among `all`, which are sorted by address.
    fn part<'n>(all: &'n [Self], source: &DataSource, len: usize) -> Option<&'n [u8]> {
        let plain = (source.compression == Compression::None).then_some(source.bytenr.0 + source.offset)?;
        let read = all.get(all.partition_point(|read| read.start <= plain).checked_sub(1)?)?;
        let at = usize::try_from(plain - read.start).ok()?;
        read.bytes.get(at..at.checked_add(len)?)
    }
}

fn written(output: &mut (dyn Write + Send), bytes: &[u8], job: &Job) -> Result<()> {
    output.write_all(bytes).map_err(Error::Output)?;
    job.advance(bytes.len() as u64);
    Ok(())
}

/// The number of a compression method in a stream; `None` if the stream format has no number for the method.
pub(super) fn stream_compression(compression: Compression, sectorsize: u32) -> Option<u32> {
    use ubtrfs_stream::EncodedCompression as Stream;
    match compression {
        Compression::None => Stream::None,
        Compression::Zlib => Stream::Zlib,
        Compression::Zstd => Stream::Zstd,
        Compression::Lzo => Stream::Lzo { sectorsize },
    }
    .number()
}

enum Encode {
    Encode(EncodeError),
    Read(ubtrfs_error::Error),
}

impl From<EncodeError> for Encode {
    fn from(error: EncodeError) -> Self {
        Self::Encode(error)
    }
}

fn not_encoded(error: EncodeError) -> Error {
    Error::Unsendable(error.to_string())
}

/// Ends the pipeline when dropped, also after a panic or an error of the walk.
struct EndPipeline<'p, 'e>(&'p SendShared<'e>);

impl Drop for EndPipeline<'_, '_> {
    fn drop(&mut self) {
        self.0.queue.lock().ended = true;
        self.0.notify_all();
    }
}

/// Fails the pipeline if the thread that holds this guard panics, so that no thread waits for it.
struct FailPipeline<'p, 'e>(&'p SendShared<'e>);

impl Drop for FailPipeline<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(Error::Engine(ubtrfs_error::Error::Cancelled));
        }
    }
}

/// Maximum number of threads that read.
const READERS_MAX: usize = 4;
const QUEUE_BYTES: u64 = 16 << 20;
const QUEUE_JOBS: usize = 4096;
/// Maximum number of bytes of a file's data that are read together.
const RUN_BYTES: u64 = 1 << 20;
const RUN_PARTS: usize = 256;
/// Bytes that are collected in a batch before it is queued.
const BATCH_BYTES: u64 = 256 << 10;
/// Bytes of commands without data that are collected before they are queued.
const READY_BYTES: usize = 128 << 10;
/// Bytes written to the output at once.
const WRITE_BYTES: usize = 256 << 10;
/// Approximate number of bytes of a command besides its data.
const COMMAND_ROOM: usize = 256;
