//! Compression of a written archive, chosen by the file's suffix.

use std::io::{self, Write};
use std::path::Path;

use anyhow::bail;

use crate::walk::shown;

/// How to compress an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveCompression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// xz.
    Xz,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
    /// lz4.
    Lz4,
}

impl ArchiveCompression {
    /// Chooses the compression by a file's suffix. Fails for suffixes of methods that cannot be written.
    pub fn of(path: &Path) -> anyhow::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let ends_in = |suffixes: &[&str]| suffixes.iter().any(|suffix| name.ends_with(suffix));
        Ok(match () {
            () if ends_in(&[".gz", ".tgz", ".taz"]) => Self::Gzip,
            () if ends_in(&[".xz", ".txz"]) => Self::Xz,
            () if ends_in(&[".zst", ".tzst"]) => Self::Zstd,
            () if ends_in(&[".bz2", ".tbz", ".tbz2", ".tb2", ".tz2"]) => Self::Bzip2,
            () if ends_in(&[".lz4"]) => Self::Lz4,
            () if ends_in(&[".lz", ".lzma", ".lzo", ".z", ".br"]) => bail!(
                "cannot compress as {} asks; give it a suffix .tar or .tar. with gz, xz, zst, bz2 or lz4, or use a pipe",
                shown(path)
            ),
            () => Self::None,
        })
    }
}

/// A writer that compresses.
pub enum Compressor<W: Write> {
    /// No compression.
    None(W),
    /// gzip.
    Gzip(flate2::write::GzEncoder<W>),
    /// xz.
    Xz(liblzma::write::XzEncoder<W>),
    /// Zstandard.
    Zstd(zstd::stream::write::Encoder<'static, W>),
    /// bzip2.
    Bzip2(bzip2::write::BzEncoder<W>),
    /// lz4.
    Lz4(Box<lz4_flex::frame::FrameEncoder<W>>),
}

impl<W: Write> Compressor<W> {
    /// Starts to compress into `out`.
    pub fn new(out: W, compression: ArchiveCompression) -> io::Result<Self> {
        Ok(match compression {
            ArchiveCompression::None => Self::None(out),
            ArchiveCompression::Gzip => Self::Gzip(flate2::write::GzEncoder::new(out, flate2::Compression::default())),
            ArchiveCompression::Xz => Self::Xz(liblzma::write::XzEncoder::new(out, XZ_LEVEL)),
            ArchiveCompression::Zstd => {
                Self::Zstd(zstd::stream::write::Encoder::new(out, zstd::DEFAULT_COMPRESSION_LEVEL)?)
            }
            ArchiveCompression::Bzip2 => Self::Bzip2(bzip2::write::BzEncoder::new(out, bzip2::Compression::best())),
            ArchiveCompression::Lz4 => Self::Lz4(Box::new(lz4_flex::frame::FrameEncoder::new(out))),
        })
    }

    /// Writes the remaining bytes, and returns the inner writer.
    pub fn finish(self) -> io::Result<W> {
        match self {
            Self::None(out) => Ok(out),
            Self::Gzip(out) => out.finish(),
            Self::Xz(out) => out.finish(),
            Self::Zstd(out) => out.finish(),
            Self::Bzip2(out) => out.finish(),
            Self::Lz4(out) => out.finish().map_err(io::Error::other),
        }
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::None(out) => out.write(bytes),
            Self::Gzip(out) => out.write(bytes),
            Self::Xz(out) => out.write(bytes),
            Self::Zstd(out) => out.write(bytes),
            Self::Bzip2(out) => out.write(bytes),
            Self::Lz4(out) => out.write(bytes),
        }
    }

    /// Flushes only an uncompressed archive, because a flush in the middle makes compressed output
    /// larger.
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::None(out) => out.flush(),
            _ => Ok(()),
        }
    }
}

/// The default level of xz.
const XZ_LEVEL: u32 = 6;
