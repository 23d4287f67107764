//! zstd: one frame per extent, with a window of at most 128 KiB, the limit of the kernel's decoder.

use ubtrfs_format::error::FormatError;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective};

use super::bad_stream;

/// The kernel refuses frames with a larger window.
const MAX_WINDOW_LOG: u32 = 17;
const DEFAULT_LEVEL: i32 = 3;
const MIN_LEVEL: i32 = -15;
const MAX_LEVEL: i32 = 15;

/// The contexts for compressing and decompressing, which are reset between extents.
#[derive(Default)]
pub(super) struct ZstdWorkspace {
    compress: Option<(i32, CCtx<'static>)>,
    decompress: Option<DCtx<'static>>,
}

impl ZstdWorkspace {
    pub(super) fn compress(&mut self, level: i32, input: &[u8], max_len: usize) -> Option<Vec<u8>> {
        let level = if level == 0 { DEFAULT_LEVEL } else { level.clamp(MIN_LEVEL, MAX_LEVEL) };
        let context = match &mut self.compress {
            Some((at, context)) if *at == level => context,
            other => {
                let mut context = CCtx::try_create()?;
                context.set_parameter(CParameter::CompressionLevel(level)).ok()?;
                context.set_parameter(CParameter::WindowLog(MAX_WINDOW_LOG)).ok()?;
                &mut other.insert((level, context)).1
            }
        };
        let mut out = Vec::with_capacity(max_len);
        // Compression fails if the frame does not fit into `out`. Then the context is reset for the next frame; the
        // reset keeps the parameters.
        let written = context.compress2(&mut out, input);
        if written.is_err() {
            context.reset(ResetDirective::SessionOnly).ok()?;
            return None;
        }
        Some(out)
    }

    /// Decompresses one frame and ignores bytes after it. Returns the number of bytes written.
    pub(super) fn decompress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize, FormatError> {
        let context = match &mut self.decompress {
            Some(context) => context,
            none => {
                let mut context = DCtx::create();
                context.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG)).map_err(|_| bad_stream("zstd", 0))?;
                none.insert(context)
            }
        };
        context.reset(ResetDirective::SessionOnly).map_err(|_| bad_stream("zstd", 0))?;
        let capacity = out.len();
        let mut source = InBuffer::around(input);
        let mut target = OutBuffer::around(out);
        loop {
            let before = (source.pos(), target.pos());
            let hint =
                context.decompress_stream(&mut target, &mut source).map_err(|_| bad_stream("zstd", source.pos()))?;
            if hint == 0 || target.pos() == capacity {
                return Ok(target.pos());
            }
            if (source.pos(), target.pos()) == before {
                return Err(bad_stream("zstd", source.pos()));
            }
        }
    }
}
