//! The bytes of an archive, from a file or a stream.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};

use super::in_place::InPlace;
use super::stream::DecompressedStream;
use crate::walk::shown;

/// The bytes of an archive, in order.
pub(crate) struct ArchiveInput {
    source: InputSource,
    total: Option<u64>,
}

enum InputSource {
    InPlace(InPlace),
    Stream(DecompressedStream),
}

impl ArchiveInput {
    /// Opens a file and starts to read it.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let mut file = File::open(path).with_context(|| format!("cannot open {}", shown(path)))?;
        let meta = file.metadata().with_context(|| format!("cannot open {}", shown(path)))?;
        if meta.is_dir() {
            bail!("{} is a directory; give a tar archive, or make one: tar c . | ubtrfs import -", shown(path));
        }
        if !meta.is_file() {
            return Self::stream(file, path);
        }
        let (magic, method) = begin(&mut file, path)?;
        let source = match method {
            InputCompression::Plain => InputSource::InPlace(InPlace::new(file, meta.len())),
            method => InputSource::Stream(DecompressedStream::start(io::Cursor::new(magic).chain(file), method)?),
        };
        Ok(Self { source, total: Some(meta.len()) })
    }

    /// Starts to read a stream. `path` names it in messages.
    pub(crate) fn stream(mut source: impl Read + Send + 'static, path: &Path) -> anyhow::Result<Self> {
        let (magic, method) = begin(&mut source, path)?;
        Ok(Self {
            source: InputSource::Stream(DecompressedStream::start(io::Cursor::new(magic).chain(source), method)?),
            total: None,
        })
    }

    /// Bytes read from the file so far, before decompression.
    pub(crate) fn taken(&self) -> u64 {
        match &self.source {
            InputSource::InPlace(file) => file.taken(),
            InputSource::Stream(stream) => stream.taken(),
        }
    }

    /// Length of the archive file, if it is known.
    pub(crate) fn total(&self) -> Option<u64> {
        self.total
    }

    /// Returns the file and the offset of the next bytes in it, if the archive is not compressed.
    pub(crate) fn place(&self) -> Option<(Arc<File>, u64)> {
        match &self.source {
            InputSource::InPlace(file) => Some(file.place()),
            InputSource::Stream(_) => None,
        }
    }

    /// Returns the next bytes, at most `max`; an empty slice at the end.
    pub(crate) fn next_piece(&mut self, max: u64) -> io::Result<&[u8]> {
        match &mut self.source {
            InputSource::InPlace(file) => file.next_piece(max),
            InputSource::Stream(stream) => stream.next_piece(max),
        }
    }

    /// Skips `len` bytes. Fails if the input ends within these bytes.
    pub(crate) fn skip(&mut self, len: u64) -> io::Result<()> {
        match &mut self.source {
            InputSource::InPlace(file) => file.skip(len),
            InputSource::Stream(stream) => stream.skip(len),
        }
    }

    /// Fills a block; `false` at the end of the input, an error if the input ends within the block.
    pub(crate) fn read_block<const N: usize>(&mut self, block: &mut [u8; N]) -> io::Result<bool> {
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

    /// Reads to the end of the input, so that damage in compressed bytes after the archive is found, and a program
    /// that writes the archive into a pipe can finish.
    pub(crate) fn drain(&mut self) -> io::Result<()> {
        if let InputSource::Stream(stream) = &mut self.source {
            while !stream.next_piece(u64::MAX)?.is_empty() {}
        }
        Ok(())
    }
}

/// How an archive is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputCompression {
    Plain,
    Gzip,
    Xz,
    Zstd,
    Bzip2,
    Lz4,
    /// A compression that is recognized but not supported: its name, and a program that decompresses it.
    Foreign(&'static str, &'static str),
}

/// Reads the first bytes and determines the compression from them.
fn begin(source: &mut impl Read, path: &Path) -> anyhow::Result<(Vec<u8>, InputCompression)> {
    let mut magic = Vec::new();
    source.by_ref().take(MAGIC_LEN).read_to_end(&mut magic).with_context(|| format!("cannot read {}", shown(path)))?;
    let method = method_of(&magic);
    if let InputCompression::Foreign(name, program) = method {
        bail!("{} is compressed with {name}; decompress it: {program} | ubtrfs import - IMAGE:/", shown(path));
    }
    Ok((magic, method))
}

fn method_of(magic: &[u8]) -> InputCompression {
    match magic {
        [0x1f, 0x8b, ..] => InputCompression::Gzip,
        [0xfd, b'7', b'z', b'X', b'Z', 0] => InputCompression::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => InputCompression::Zstd,
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => InputCompression::Bzip2,
        [0x04, 0x22, 0x4d, 0x18, ..] => InputCompression::Lz4,
        [0x1f, 0x9d, ..] => InputCompression::Foreign("compress", "gzip -dc FILE"),
        [b'P', b'K', 3, 4, ..] => InputCompression::Foreign("zip", "bsdtar cf - @FILE"),
        _ => InputCompression::Plain,
    }
}

const MAGIC_LEN: u64 = 6;

#[cfg(test)]
impl ArchiveInput {
    /// Makes a stream of these bytes.
    pub(crate) fn of(bytes: Vec<u8>) -> anyhow::Result<Self> {
        Self::stream(io::Cursor::new(bytes), Path::new("test"))
    }

    /// Makes a file with these bytes.
    pub(crate) fn of_file(bytes: &[u8]) -> anyhow::Result<Self> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), bytes)?;
        Self::open(file.path())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn all(bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut input = ArchiveInput::of(bytes).unwrap();
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
        let mut bz2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        bz2.write_all(&text).unwrap();
        let bz2 = bz2.finish().unwrap();
        let mut lz4 = lz4_flex::frame::FrameEncoder::new(Vec::new());
        lz4.write_all(&text).unwrap();
        let lz4 = lz4.finish().unwrap();
        assert!(all(text.clone()).unwrap() == text);
        for bytes in [gz, xz, zst, bz2, lz4] {
            assert!(all(bytes.clone()).unwrap() == text);
            // Two compressed streams in a row are one input; a truncated stream is an error.
            let twice = [&bytes[..], &bytes[..]].concat();
            assert_eq!(all(twice).unwrap().len(), 2 * text.len());
            assert!(all(bytes[..bytes.len() - 20].to_vec()).is_err());
        }
        assert!(all(Vec::new()).unwrap().is_empty());
        assert!(ArchiveInput::of(b"PK\x03\x04zip".to_vec()).is_err());
    }
}
