//! An archive that arrives as a stream. A separate thread decompresses bytes while the caller works on earlier bytes.
//!
//! Invariants:
//! - I1. At most `QUEUE_LEN` filled buffers wait, and each of the two threads uses one more, so memory is bounded.
//!   Buffers are reused.
//! - I2. When the stream is dropped, the separate thread ends as soon as it tries to send the next buffer.

use std::io::{self, BufRead, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use anyhow::Context;

use super::input::InputCompression;

/// Decompressed bytes, in order.
pub(crate) struct DecompressedStream {
    full: Receiver<io::Result<Vec<u8>>>,
    empty: Sender<Vec<u8>>,
    current: Vec<u8>,
    at: usize,
    /// Bytes read from the source, before decompression.
    taken: Arc<AtomicU64>,
}

impl DecompressedStream {
    pub(crate) fn start(source: impl Read + Send + 'static, method: InputCompression) -> anyhow::Result<Self> {
        let taken = Arc::new(AtomicU64::new(0));
        let counted = Counted { source, taken: Arc::clone(&taken) };
        let (to_full, full) = sync_channel(QUEUE_LEN);
        let (empty, from_empty) = channel();
        std::thread::Builder::new()
            .name("archive".to_owned())
            .spawn(move || match decoder(method, counted) {
                Ok(decoder) => pump(decoder, &to_full, &from_empty),
                Err(error) => drop(to_full.send(Err(error))),
            })
            .context("cannot start a thread")?;
        Ok(Self { full, empty, current: Vec::new(), at: 0, taken })
    }

    /// See [`super::input::ArchiveInput::taken`].
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// See [`super::input::ArchiveInput::next_piece`].
    pub(crate) fn next_piece(&mut self, max: u64) -> io::Result<&[u8]> {
        while self.at == self.current.len() {
            let Ok(buffer) = self.full.recv() else { return Ok(&[]) };
            let used = std::mem::replace(&mut self.current, buffer?);
            self.at = 0;
            // The thread may have ended already. Then it needs no more buffers, so the error of sending is ignored.
            let _ = self.empty.send(used);
        }
        let len = (self.current.len() - self.at).min(usize::try_from(max).unwrap_or(usize::MAX));
        let start = self.at;
        self.at += len;
        Ok(&self.current[start..start + len])
    }

    /// See [`super::input::ArchiveInput::skip`].
    pub(crate) fn skip(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let piece = self.next_piece(len)?.len();
            if piece == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            len -= piece as u64;
        }
        Ok(())
    }
}

fn decoder<R: Read + Send + 'static>(method: InputCompression, source: R) -> io::Result<Box<dyn Read>> {
    Ok(match method {
        InputCompression::Plain | InputCompression::Foreign(..) => Box::new(source),
        InputCompression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered(source))),
        InputCompression::Xz => {
            let flags = liblzma::stream::CONCATENATED;
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_MAX, flags)?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(buffered(source), stream))
        }
        InputCompression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(buffered(source))?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Box::new(decoder)
        }
        InputCompression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(buffered(source))),
        InputCompression::Lz4 => Box::new(Lz4Frames(lz4_flex::frame::FrameDecoder::new(buffered(source)))),
    })
}

/// Frames of lz4, one after the other.
struct Lz4Frames<R: Read>(lz4_flex::frame::FrameDecoder<io::BufReader<R>>);

impl<R: Read> Read for Lz4Frames<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.0.read(buf)?;
            if count > 0 || buf.is_empty() || self.0.get_mut().fill_buf()?.is_empty() {
                return Ok(count);
            }
        }
    }
}

fn buffered<R: Read>(source: R) -> io::BufReader<R> {
    io::BufReader::with_capacity(256 << 10, source)
}

/// Fills buffers until the end of the input, an error, or the drop of the stream.
fn pump(mut decoder: Box<dyn Read>, full: &SyncSender<io::Result<Vec<u8>>>, empty: &Receiver<Vec<u8>>) {
    loop {
        let mut buffer = empty.try_recv().unwrap_or_default();
        buffer.resize(BUFFER_LEN, 0);
        let mut have = 0;
        let error = loop {
            match decoder.read(&mut buffer[have..]) {
                Ok(0) => break None,
                Ok(count) => have += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Some(error),
            }
            if have == buffer.len() {
                break None;
            }
        };
        let at_end = have < BUFFER_LEN;
        buffer.truncate(have);
        if have > 0 && full.send(Ok(buffer)).is_err() {
            return;
        }
        if let Some(error) = error {
            let _ = full.send(Err(error));
            return;
        }
        if at_end {
            return;
        }
    }
}

struct Counted<R> {
    source: R,
    taken: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buf)?;
        self.taken.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

const QUEUE_LEN: usize = 4;
const BUFFER_LEN: usize = 1 << 20;
/// Limits the window of zstd to 128 MiB, the default limit of the program zstd. Even a small archive can demand a large
/// window.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// Limit of memory for decompressing xz. An archive made by `xz -9` takes 65 MiB.
const XZ_MEMORY_MAX: u64 = 256 << 20;
