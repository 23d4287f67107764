//! Compression of file data: zlib, LZO and zstd in btrfs's on-disk forms.
//!
//! Data is compressed in pieces of at most [`MAX_UNCOMPRESSED`] bytes, and each piece becomes an extent. On disk the
//! compressed bytes are padded with zeros to whole sectors, so every decoder stops at the end of its stream.
//!
//! Invariants:
//! - I1: input and output are at most [`MAX_UNCOMPRESSED`] bytes, regardless of the lengths on disk.
//! - I2: a decoder fills the whole output: bytes past the end of the stream become zeros.
//! - I3: corrupt input gives an error, never a panic.
//!
//! Setting up a compression context is expensive (hundreds of KiB for zstd), so all threads share a pool of contexts.
//!
//! This folder has the algorithms, and in `heuristic` the estimate whether data is compressible. `writeback/policy.rs`
//! decides whether a file is compressed. `writeback/ordered_data.rs` decides when an attempt is skipped or given up.

mod heuristic;
mod lzo;
mod zlib;
mod zstd;

use parking_lot::Mutex;
use ubtrfs_format::error::FormatError;
use ubtrfs_format::item::Compression;

pub(crate) use heuristic::looks_compressible;

/// Maximum length of the data in one compressed extent, and of its compressed bytes.
pub(crate) const MAX_UNCOMPRESSED: usize = 128 << 10;

/// How to compress: the algorithm and its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompressionMethod {
    /// zlib, LZO or zstd.
    pub kind: Compression,
    /// zlib 1 to 9, zstd -15 to 15; 0 is the default (3). LZO has no levels.
    pub level: i32,
}

/// Compression contexts of every algorithm. The contexts for zlib and zstd are made when they are first needed.
#[derive(Default)]
struct CompressionWorkspace {
    zlib: zlib::ZlibWorkspace,
    lzo: lzo::LzoWorkspace,
    zstd: zstd::ZstdWorkspace,
}

#[expect(clippy::vec_box, reason = "a workspace is moved in and out of the pool")]
static WORKSPACES: Mutex<Vec<Box<CompressionWorkspace>>> = Mutex::new(Vec::new());

/// Maximum number of idle workspaces. If more threads compress at once, they make further workspaces, which are dropped
/// after use.
const IDLE_WORKSPACES: usize = 8;

fn with_workspace<R>(work: impl FnOnce(&mut CompressionWorkspace) -> R) -> R {
    let mut workspace = WORKSPACES.lock().pop().unwrap_or_default();
    let result = work(&mut workspace);
    let mut idle = WORKSPACES.lock();
    if idle.len() < IDLE_WORKSPACES {
        idle.push(workspace);
    }
    result
}

/// Compresses `input` into at most `max_len` bytes. Returns `None` if the compressed bytes do not fit, or if the input
/// is too large: the caller then writes the data uncompressed.
pub(crate) fn compress(method: CompressionMethod, input: &[u8], max_len: usize, sectorsize: usize) -> Option<Vec<u8>> {
    if input.is_empty() || input.len() > MAX_UNCOMPRESSED {
        return None;
    }
    let max_len = max_len.min(MAX_UNCOMPRESSED);
    with_workspace(|workspace| match method.kind {
        Compression::None => None,
        Compression::Zlib => workspace.zlib.compress(method.level, input, max_len),
        Compression::Lzo => workspace.lzo.compress(input, max_len, sectorsize),
        Compression::Zstd => workspace.zstd.compress(method.level, input, max_len),
    })
}

/// Decompresses a whole extent into `out`, of at most 128 KiB. Padding may follow the stream in `input`. Bytes of `out`
/// that the stream does not fill become zeros. `sectorsize` matters for LZO only, whose segments depend on it.
pub fn decompress(kind: Compression, input: &[u8], out: &mut [u8], sectorsize: usize) -> Result<(), FormatError> {
    if out.len() > MAX_UNCOMPRESSED || input.len() > MAX_UNCOMPRESSED {
        return Err(FormatError::Value {
            what: "compressed extent",
            field: "length",
            value: out.len().max(input.len()) as u64,
            expected: "expected at most 131072",
        });
    }
    let filled = match kind {
        Compression::None => {
            let len = input.len().min(out.len());
            out[..len].copy_from_slice(&input[..len]);
            len
        }
        Compression::Zlib => with_workspace(|workspace| workspace.zlib.decompress(input, out))?,
        Compression::Lzo => lzo::decompress(input, out, sectorsize)?,
        Compression::Zstd => with_workspace(|workspace| workspace.zstd.decompress(input, out))?,
    };
    out[filled..].fill(0);
    Ok(())
}

/// The error for a stream that its decoder does not accept, at `position` of the compressed bytes.
fn bad_stream(what: &'static str, position: usize) -> FormatError {
    FormatError::Value { what, field: "stream at", value: position as u64, expected: "expected a valid stream" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Compression; 3] = [Compression::Zlib, Compression::Lzo, Compression::Zstd];

    fn round_trip(method: CompressionMethod, data: &[u8], sectorsize: usize) -> Option<usize> {
        let mut packed = compress(method, data, MAX_UNCOMPRESSED, sectorsize)?;
        let len = packed.len();
        packed.resize(len.next_multiple_of(sectorsize).min(MAX_UNCOMPRESSED), 0);
        let mut out = vec![0xaa; data.len()];
        decompress(method.kind, &packed, &mut out, sectorsize).unwrap();
        assert!(out == data, "{method:?} of {} bytes", data.len());
        let mut longer = vec![0xaa; (data.len() + 500).min(MAX_UNCOMPRESSED)];
        decompress(method.kind, &packed, &mut longer, sectorsize).unwrap();
        assert!(longer[..data.len()] == *data && longer[data.len()..].iter().all(|b| *b == 0));
        let mut shorter = vec![0xaa; data.len() / 2];
        decompress(method.kind, &packed, &mut shorter, sectorsize).unwrap();
        assert!(shorter == data[..data.len() / 2]);
        Some(len)
    }

    fn text(len: usize) -> Vec<u8> {
        let mut state = 1u32;
        let words = ["tree", "extent", "inode ", "block\n", "0123", "the ", "of ", "a", "transaction", ";;"];
        let mut out = Vec::new();
        while out.len() < len {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            out.extend_from_slice(words[(state >> 20) as usize % words.len()].as_bytes());
        }
        out.truncate(len);
        out
    }

    #[test]
    fn every_kind_and_level_round_trips() {
        for kind in KINDS {
            for level in [-15, -1, 0, 1, 3, 6, 9, 15] {
                let method = CompressionMethod { kind, level };
                for len in [1, 2, 3, 7, 100, 2048, 4095, 4096, 4097, 65536, 100_000, MAX_UNCOMPRESSED] {
                    round_trip(method, &vec![0; len], 4096);
                    let len_packed = round_trip(method, &text(len), 4096).unwrap();
                    assert!(len < 4096 || len_packed < len / 2 + 64, "{method:?} {len} -> {len_packed}");
                }
            }
        }
    }

    #[test]
    fn large_sectors_round_trip() {
        for sectorsize in [8192, 16384, 65536] {
            for kind in KINDS {
                round_trip(CompressionMethod { kind, level: 0 }, &text(MAX_UNCOMPRESSED), sectorsize).unwrap();
            }
        }
    }

    #[test]
    fn random_data_does_not_fit() {
        let mut state = 7u64;
        let data: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(MAX_UNCOMPRESSED)
        .collect();
        for kind in KINDS {
            assert!(compress(CompressionMethod { kind, level: 0 }, &data, MAX_UNCOMPRESSED - 4096, 4096).is_none());
        }
        assert!(!looks_compressible(&data));
        assert!(looks_compressible(&text(MAX_UNCOMPRESSED)));
        assert!(looks_compressible(&vec![0; MAX_UNCOMPRESSED]));
    }

    proptest! {
        #[test]
        fn any_mix_round_trips(pieces in prop::collection::vec((any::<u8>(), 1usize..300, any::<bool>()), 1..400)) {
            let mut data = Vec::new();
            for (byte, len, repeat) in pieces {
                if repeat {
                    data.extend(std::iter::repeat_n(byte, len));
                } else {
                    data.extend((0..len).map(|i| (i as u8).wrapping_mul(byte).wrapping_add(byte >> 3)));
                }
            }
            data.truncate(MAX_UNCOMPRESSED);
            for kind in KINDS {
                round_trip(CompressionMethod { kind, level: 0 }, &data, 4096);
            }
        }

        #[test]
        fn garbage_never_panics(data in prop::collection::vec(any::<u8>(), 0..3000), len in 0usize..9000) {
            let mut out = vec![0; len];
            for kind in KINDS {
                let _ = decompress(kind, &data, &mut out, 4096);
            }
        }

        #[test]
        fn damage_never_panics(at in 0usize..2000, with in any::<u8>()) {
            let data = text(20_000);
            for kind in KINDS {
                let mut packed = compress(CompressionMethod { kind, level: 0 }, &data, MAX_UNCOMPRESSED, 4096).unwrap();
                let at = at % packed.len();
                packed[at] = with;
                let mut out = vec![0; data.len()];
                let _ = decompress(kind, &packed, &mut out, 4096);
            }
        }
    }
}
