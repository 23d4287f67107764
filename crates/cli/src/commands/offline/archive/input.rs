//! The bytes of an archive, decompressed on a thread of their own while the caller works on what came before.
//!
//! Invariants:
//! - I1. At most `QUEUE_LEN` buffers are under way, so memory is bounded; buffers go back and are used again.
//! - I2. When the input is dropped, the thread ends at its next send.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use anyhow::{Context, bail};

/// Decompressed bytes, in order.
pub(in super::super) struct Input {
    full: Receiver<io::Result<Vec<u8>>>,
    empty: Sender<Vec<u8>>,
    current: Vec<u8>,
    at: usize,
    /// Bytes taken from the file, before decompression.
    taken: Arc<AtomicU64>,
    total: Option<u64>,
}

impl Input {
    /// Opens a file, or standard input for `-`, and begins to read it.
    pub(in super::super) fn open(path: &Path) -> anyhow::Result<Self> {
        let (source, total): (Box<dyn Read + Send>, _) = if path == Path::new("-") {
            (Box::new(io::stdin()), None)
        } else {
            let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let meta = file.metadata().with_context(|| format!("cannot open {}", path.display()))?;
            if meta.is_dir() {
                bail!("{} is a directory; give a tar archive, or make one: tar c . | ubtrfs import -", path.display());
            }
            (Box::new(file), meta.is_file().then_some(meta.len()))
        };
        Self::start(source, total, path)
    }

    fn start(mut source: Box<dyn Read + Send>, total: Option<u64>, path: &Path) -> anyhow::Result<Self> {
        let mut magic = Vec::new();
        source.by_ref().take(6).read_to_end(&mut magic).with_context(|| format!("cannot read {}", path.display()))?;
        let method = method_of(&magic);
        if let Method::Foreign(name, program) = method {
            bail!("{} is compressed with {name}; decompress it: {program} | ubtrfs import - IMAGE:/", path.display());
        }
        let taken = Arc::new(AtomicU64::new(0));
        let counted = Counted { source: io::Cursor::new(magic).chain(source), taken: Arc::clone(&taken) };
        let (to_full, full) = sync_channel(QUEUE_LEN);
        let (empty, from_empty) = channel();
        std::thread::Builder::new()
            .name("archive".to_owned())
            .spawn(move || match decoder(method, counted) {
                Ok(decoder) => pump(decoder, &to_full, &from_empty),
                Err(error) => drop(to_full.send(Err(error))),
            })
            .context("cannot start a thread")?;
        Ok(Self { full, empty, current: Vec::new(), at: 0, taken, total })
    }

    /// Bytes taken from the file so far.
    pub(in super::super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Bytes of the file, where known.
    pub(in super::super) fn total(&self) -> Option<u64> {
        self.total
    }

    /// What comes next, at most `max` bytes; nothing at the end.
    pub(in super::super) fn next_piece(&mut self, max: u64) -> io::Result<&[u8]> {
        while self.at == self.current.len() {
            let Ok(buffer) = self.full.recv() else { return Ok(&[]) };
            let used = std::mem::replace(&mut self.current, buffer?);
            self.at = 0;
            // The thread may have ended already.
            let _ = self.empty.send(used);
        }
        let len = (self.current.len() - self.at).min(usize::try_from(max).unwrap_or(usize::MAX));
        let start = self.at;
        self.at += len;
        Ok(&self.current[start..start + len])
    }

    /// Fills a block; `false` at the end of the input, an error in the middle of a block.
    pub(in super::super) fn read_block<const N: usize>(&mut self, block: &mut [u8; N]) -> io::Result<bool> {
        let mut have = 0;
        while have < N {
            let piece = self.next_piece((N - have) as u64)?;
            if piece.is_empty() {
                return if have == 0 { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            block[have..have + piece.len()].copy_from_slice(piece);
            have += piece.len();
        }
        Ok(true)
    }

    /// Passes over bytes.
    pub(in super::super) fn skip(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let piece = self.next_piece(len)?.len();
            if piece == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            len -= piece as u64;
        }
        Ok(())
    }

    /// Reads to the end: what is behind the archive must decompress, too, and a writer of a pipe can finish.
    pub(in super::super) fn drain(&mut self) -> io::Result<()> {
        while !self.next_piece(u64::MAX)?.is_empty() {}
        Ok(())
    }
}

/// How an archive is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Plain,
    Gzip,
    Xz,
    Zstd,
    /// Known and not read here: its name and the program for it.
    Foreign(&'static str, &'static str),
}

fn method_of(magic: &[u8]) -> Method {
    match magic {
        [0x1f, 0x8b, ..] => Method::Gzip,
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Method::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Method::Zstd,
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Method::Foreign("bzip2", "bzip2 -dc FILE"),
        [0x04, 0x22, 0x4d, 0x18, ..] => Method::Foreign("lz4", "lz4 -dc FILE"),
        [0x1f, 0x9d, ..] => Method::Foreign("compress", "gzip -dc FILE"),
        [b'P', b'K', 3, 4, ..] => Method::Foreign("zip", "bsdtar cf - @FILE"),
        _ => Method::Plain,
    }
}

fn decoder<R: Read + Send + 'static>(method: Method, source: R) -> io::Result<Box<dyn Read>> {
    Ok(match method {
        Method::Plain | Method::Foreign(..) => Box::new(source),
        Method::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered(source))),
        Method::Xz => Box::new(liblzma::bufread::XzDecoder::new_multi_decoder(buffered(source))),
        Method::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(buffered(source))?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Box::new(decoder)
        }
    })
}

fn buffered<R: Read>(source: R) -> io::BufReader<R> {
    io::BufReader::with_capacity(256 << 10, source)
}

/// Fills buffers until the end, an error, or until nobody wants them any more.
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
/// 2 GiB, as `zstd --long=31` makes them.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

#[cfg(test)]
impl Input {
    /// An input of bytes in memory.
    pub(super) fn of(bytes: Vec<u8>) -> anyhow::Result<Self> {
        Self::start(Box::new(io::Cursor::new(bytes)), None, Path::new("test"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn all(bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut input = Input::of(bytes).unwrap();
        let mut out = Vec::new();
        loop {
            let piece = input.next_piece(100_000)?;
            if piece.is_empty() {
                return Ok(out);
            }
            out.extend_from_slice(piece);
        }
    }

    #[test]
    fn every_method_is_found_by_its_magic() {
        let text: Vec<u8> = (0..3_000_000u32).flat_map(|number| (number / 7).to_le_bytes()).collect();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&text).unwrap();
        let gz = gz.finish().unwrap();
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 0);
        xz.write_all(&text).unwrap();
        let xz = xz.finish().unwrap();
        let zst = zstd::stream::encode_all(&text[..], 1).unwrap();
        for bytes in [text.clone(), gz.clone(), xz.clone(), zst.clone()] {
            assert!(all(bytes).unwrap() == text);
        }
        for bytes in [gz, xz, zst] {
            // Two in a row are one; a torn one is an error.
            let twice = [&bytes[..], &bytes[..]].concat();
            assert_eq!(all(twice).unwrap().len(), 2 * text.len());
            assert!(all(bytes[..bytes.len() - 20].to_vec()).is_err());
        }
        assert!(all(Vec::new()).unwrap().is_empty());
        assert!(Input::of(b"BZh91AY".to_vec()).is_err());
    }
}
