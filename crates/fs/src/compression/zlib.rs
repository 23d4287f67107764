//! zlib: one zlib stream (header, deflate data, Adler-32) per extent.

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use ubtrfs_format::error::FormatError;

use super::bad_stream;

const DEFAULT_LEVEL: u32 = 3;

/// The contexts for compressing and decompressing, which are reset between extents.
#[derive(Default)]
pub(super) struct ZlibWorkspace {
    deflate: Option<(u32, Compress)>,
    inflate: Option<Decompress>,
}

impl ZlibWorkspace {
    pub(super) fn compress(&mut self, level: i32, input: &[u8], max_len: usize) -> Option<Vec<u8>> {
        let level = match u32::try_from(level) {
            Ok(level @ 1..=9) => level,
            Ok(10..) => 9,
            _ => DEFAULT_LEVEL,
        };
        let deflate = match &mut self.deflate {
            Some((at, deflate)) if *at == level => {
                deflate.reset();
                deflate
            }
            other => &mut other.insert((level, Compress::new(flate2::Compression::new(level), true))).1,
        };
        let mut out = vec![0; max_len];
        let status = deflate.compress(input, &mut out, FlushCompress::Finish).ok()?;
        if status != Status::StreamEnd {
            return None;
        }
        out.truncate(usize::try_from(deflate.total_out()).ok()?);
        Some(out)
    }

    /// Decompresses one stream. Returns the number of bytes written.
    pub(super) fn decompress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize, FormatError> {
        let inflate = match &mut self.inflate {
            Some(inflate) => {
                inflate.reset(true);
                inflate
            }
            none => none.insert(Decompress::new(true)),
        };
        let position = |total: u64| usize::try_from(total).unwrap_or(usize::MAX);
        let result = inflate.decompress(input, out, FlushDecompress::Finish);
        let filled = position(inflate.total_out());
        match result {
            Ok(Status::StreamEnd) => Ok(filled),
            // The extent holds more data than the caller wants.
            Ok(_) if filled == out.len() => Ok(filled),
            Ok(_) | Err(_) => Err(bad_stream("zlib", position(inflate.total_in()))),
        }
    }
}
