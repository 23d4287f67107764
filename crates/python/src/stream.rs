//! Sends and receives. The work runs in a thread of its own, and a bounded channel joins it with the program: a send is
//! read, and a receive is written.
//!
//! Invariants:
//! - I1. At most [`NR_CHUNKS`] chunks wait in a channel.
//! - I2. The thread has ended when `close`, `finish` or `cancel` returns, or the object is dropped.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ubtrfs::{Filesystem, Job, ReceiveOptions, ReceiveReport, SendOptions};

use crate::errors::{DeviceExceptions, path};

/// Chunks that may wait in a channel.
const NR_CHUNKS: usize = 8;
/// Bytes that a send collects before it passes them on.
const CHUNK_BYTES: usize = 256 << 10;
/// The time after which a reader that waits for bytes looks whether the receive has ended.
const PATIENCE: Duration = Duration::from_millis(100);

/// A running send.
#[pyclass(name = "Send", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonSend {
    job: Arc<Job>,
    /// `None` after the send is closed. Locked only while the interpreter is detached.
    state: Mutex<Option<OutgoingStream>>,
    exceptions: DeviceExceptions,
}

/// The readable end of a send.
struct OutgoingStream {
    chunks: Receiver<Vec<u8>>,
    /// The last chunk, and how much of it was returned.
    chunk: Vec<u8>,
    at: usize,
    /// `None` after the thread has ended without an error.
    worker: Option<JoinHandle<ubtrfs::Result<()>>>,
}

/// Why a call on a stream failed.
enum StreamFailure {
    Closed,
    Failed(ubtrfs::Error),
    Panicked,
}

impl StreamFailure {
    fn raise(self, py: Python<'_>, exceptions: &DeviceExceptions) -> PyErr {
        match self {
            Self::Closed => PyValueError::new_err("I/O operation on closed stream."),
            Self::Failed(error) => exceptions.raise(py, &error),
            Self::Panicked => PyRuntimeError::new_err("the thread of the stream ended with a panic; please report it"),
        }
    }
}

/// Passes what is written to a channel, in chunks.
struct ChunkWriter {
    chunks: SyncSender<Vec<u8>>,
    collected: Vec<u8>,
}

impl Write for ChunkWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.collected.extend_from_slice(buf);
        if self.collected.len() >= CHUNK_BYTES {
            self.flush()?;
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let chunk = std::mem::take(&mut self.collected);
        if chunk.is_empty() {
            return Ok(());
        }
        self.chunks.send(chunk).map_err(|_closed| io::ErrorKind::BrokenPipe.into())
    }
}

impl PythonSend {
    pub(crate) fn start(
        fs: Filesystem,
        subvolume: Vec<u8>,
        options: SendOptions,
        exceptions: DeviceExceptions,
    ) -> PyResult<Self> {
        let (sender, chunks) = sync_channel(NR_CHUNKS);
        let job = Arc::new(Job::new());
        let watched = Arc::clone(&job);
        let worker = std::thread::Builder::new().name("send".to_owned()).spawn(move || {
            let mut writer = ChunkWriter { chunks: sender, collected: Vec::new() };
            fs.send(path(&subvolume), &options, &mut writer, &watched)
        })?;
        let stream = OutgoingStream { chunks, chunk: Vec::new(), at: 0, worker: Some(worker) };
        Ok(Self { job, state: Mutex::new(Some(stream)), exceptions })
    }

    fn end(&self) {
        self.job.cancel();
        if let Some(OutgoingStream { chunks, worker, .. }) = self.state.lock().take() {
            // A send that waits for room in the channel fails now.
            drop(chunks);
            // The result is that of a cancelled send.
            let _ = worker.map(JoinHandle::join);
        }
    }
}

impl OutgoingStream {
    /// Returns up to `size` bytes; none at the end of the stream.
    fn read(&mut self, size: usize) -> Result<&[u8], StreamFailure> {
        if self.at == self.chunk.len() {
            (self.chunk, self.at) = (Vec::new(), 0);
            match self.chunks.recv() {
                Ok(chunk) => self.chunk = chunk,
                // The thread has ended.
                Err(_) => {
                    if let Some(worker) = self.worker.take() {
                        worker.join().map_err(|_| StreamFailure::Panicked)?.map_err(StreamFailure::Failed)?;
                    }
                }
            }
        }
        let start = self.at;
        self.at = self.chunk.len().min(start.saturating_add(size));
        Ok(&self.chunk[start..self.at])
    }
}

#[pymethods]
impl PythonSend {
    /// Returns up to `size` bytes of the stream; none at its end.
    fn read<'py>(&self, py: Python<'py>, size: usize) -> PyResult<Bound<'py, PyBytes>> {
        let read = py.detach(|| {
            let mut state = self.state.lock();
            let stream = state.as_mut().ok_or(StreamFailure::Closed)?;
            let read = stream.read(size).map(<[u8]>::to_vec);
            if read.is_err() {
                // A later read must not look like the end of the stream.
                *state = None;
            }
            read
        });
        let read = self.exceptions.settle(py, read.map_err(|failure| failure.raise(py, &self.exceptions)))?;
        Ok(PyBytes::new(py, &read))
    }

    /// Ends the send, also before its end.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

impl Drop for PythonSend {
    fn drop(&mut self) {
        if self.state.get_mut().is_some() {
            Python::attach(|py| py.detach(|| self.end()));
        }
    }
}

/// A running receive.
#[pyclass(name = "Receive", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonReceive {
    job: Arc<Job>,
    /// `None` after the receive has ended. Locked only while the interpreter is detached.
    state: Mutex<Option<IncomingStream>>,
    exceptions: DeviceExceptions,
}

/// The writable end of a receive.
struct IncomingStream {
    chunks: SyncSender<Vec<u8>>,
    worker: JoinHandle<ubtrfs::Result<ReceiveReport>>,
}

impl IncomingStream {
    fn end(self) -> Result<ReceiveReport, StreamFailure> {
        drop(self.chunks);
        self.worker.join().map_err(|_| StreamFailure::Panicked)?.map_err(StreamFailure::Failed)
    }
}

/// Reads what a channel brings, until the receive has ended.
struct ChunkReader {
    chunks: Receiver<Vec<u8>>,
    chunk: io::Cursor<Vec<u8>>,
    ended: Arc<AtomicBool>,
}

impl Read for ChunkReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.chunk.read(buf)?;
            if count > 0 || buf.is_empty() {
                return Ok(count);
            }
            match self.chunks.recv_timeout(PATIENCE) {
                Ok(chunk) => self.chunk = io::Cursor::new(chunk),
                Err(RecvTimeoutError::Timeout) if !self.ended.load(Ordering::SeqCst) => {}
                Err(_) => return Ok(0),
            }
        }
    }
}

/// A received subvolume: its path below the directory, its id, the UUID of the sent subvolume, whether it began as a
/// snapshot.
type ReceivedWords = (Vec<u8>, u64, String, bool);
/// The received subvolumes, the numbers of commands and of bytes, and the errors that were passed over.
type ReportWords = (Vec<ReceivedWords>, u64, u64, Vec<String>);

impl PythonReceive {
    pub(crate) fn start(
        fs: Filesystem,
        to: Vec<u8>,
        options: ReceiveOptions,
        exceptions: DeviceExceptions,
    ) -> PyResult<Self> {
        let (chunks, receiver) = sync_channel(NR_CHUNKS);
        let job = Arc::new(Job::new());
        let watched = Arc::clone(&job);
        let worker = std::thread::Builder::new().name("receive".to_owned()).spawn(move || {
            let ended = Arc::clone(&options.ended);
            let reader = ChunkReader { chunks: receiver, chunk: io::Cursor::default(), ended };
            fs.receive(path(&to), reader, &options, &watched)
        })?;
        Ok(Self { job, state: Mutex::new(Some(IncomingStream { chunks, worker })), exceptions })
    }

    fn end_cancelled(&self) {
        self.job.cancel();
        if let Some(stream) = self.state.lock().take() {
            // The result is that of a cancelled receive.
            let _ = stream.end();
        }
    }
}

#[pymethods]
impl PythonReceive {
    /// Passes bytes to the receive. Raises its error if it has failed.
    fn write(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        let written = py.detach(|| {
            let mut state = self.state.lock();
            let stream = state.as_ref().ok_or(StreamFailure::Closed)?;
            if stream.chunks.send(data.to_vec()).is_ok() {
                return Ok(());
            }
            // The thread has ended before the end of the input.
            let stream = state.take().ok_or(StreamFailure::Closed)?;
            stream.end().map(drop)
        });
        self.exceptions.settle(py, written.map_err(|failure| failure.raise(py, &self.exceptions)))
    }

    /// Ends the input, waits for the receive, and returns its report.
    fn finish(&self, py: Python<'_>) -> PyResult<ReportWords> {
        let done = py.detach(|| {
            let stream = self.state.lock().take().ok_or(StreamFailure::Closed)?;
            stream.end()
        });
        let report = self.exceptions.settle(py, done.map_err(|failure| failure.raise(py, &self.exceptions)))?;
        let subvolumes = report.subvolumes.into_iter();
        let subvolumes = subvolumes.map(|one| (one.path, one.id.0, one.uuid.to_string(), one.is_snapshot)).collect();
        let errors = report.errors.iter().map(ToString::to_string).collect();
        Ok((subvolumes, report.nr_commands, report.nr_bytes, errors))
    }

    /// Ends the receive, and deletes an incomplete subvolume.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.end_cancelled());
    }
}

impl Drop for PythonReceive {
    fn drop(&mut self) {
        if self.state.get_mut().is_some() {
            Python::attach(|py| py.detach(|| self.end_cancelled()));
        }
    }
}
