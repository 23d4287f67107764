//! One part between a stream and a store: checksums, compression, encryption.

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::{PartRecord, PartTag, SnapshotManifest, Sum, sum};

/// A part of a stream, with what identifies it.
#[derive(Debug)]
pub(crate) struct PlainPart {
    pub(crate) bytes: Vec<u8>,
    pub(crate) sha256: Sum,
    pub(crate) tag: PartTag,
}

impl PlainPart {
    pub(crate) fn new(bytes: Vec<u8>, keys: &RemoteKeys) -> Self {
        let sha256 = sum(&bytes);
        Self { tag: keys.tag(&sha256), bytes, sha256 }
    }

    /// Compresses and encrypts the part. Returns its record and the bytes for the store.
    pub(crate) fn pack(self, keys: &RemoteKeys, level: i32) -> Result<(PartRecord, Vec<u8>)> {
        let bytes = self.bytes.len() as u64;
        let compressed = match level != 0 && is_compressible(&self.bytes) {
            // A part that does not become smaller is stored as it is.
            true => zstd::bulk::compress(&self.bytes, level).ok().filter(|out| out.len() < self.bytes.len()),
            false => None,
        };
        let zstd = compressed.is_some();
        let stored = keys.encrypt(compressed.unwrap_or(self.bytes))?;
        let stored_sha256 = if zstd || keys.encrypts() { sum(&stored) } else { self.sha256 };
        let stored_bytes = stored.len() as u64;
        Ok((PartRecord { bytes, sha256: self.sha256, zstd, stored_bytes, stored_sha256, tag: self.tag }, stored))
    }
}

/// Whether samples of the bytes become smaller. Streams of compressed extents do not, and trying costs time.
fn is_compressible(bytes: &[u8]) -> bool {
    let len = bytes.len();
    if len <= SAMPLE * SAMPLES {
        return true;
    }
    let samples = (0..SAMPLES).map(|nr| &bytes[(len - SAMPLE) / (SAMPLES - 1) * nr..][..SAMPLE]);
    let packed: usize = samples.map(|sample| zstd::bulk::compress(sample, 1).map_or(SAMPLE, |out| out.len())).sum();
    packed < SAMPLE * SAMPLES / 100 * WORTH_PERCENT
}

/// Verifies the bytes of a store and makes them a part of the stream (P2).
pub(crate) fn unpack(manifest: &SnapshotManifest, index: usize, stored: Vec<u8>, keys: &RemoteKeys) -> Result<Vec<u8>> {
    let object = manifest.part_object(index);
    let damaged = |what: String| RemoteError::damaged(&object, what);
    let Some(part) = manifest.parts.get(index) else { return Err(damaged("there is no such part".to_owned())) };
    if stored.len() as u64 != part.stored_bytes {
        return Err(damaged(format!("it has {} bytes instead of {}", stored.len(), part.stored_bytes)));
    }
    let found = sum(&stored);
    if found != part.stored_sha256 {
        let other = manifest.parts.iter().position(|other| other.stored_sha256 == found);
        return Err(damaged(match other {
            Some(other) => format!("it holds part {other} in place of part {index}"),
            None => format!("its SHA-256 is {found} instead of {}", part.stored_sha256),
        }));
    }
    let is_stored_plain = !part.zstd && !keys.encrypts();
    let clear = match keys.encrypts() {
        true => keys.decrypt(&object, &stored, part.bytes)?,
        false => stored,
    };
    let len = usize::try_from(part.bytes).map_err(|_| damaged("it is too large for this machine".to_owned()))?;
    let bytes = match part.zstd {
        true => zstd::bulk::decompress(&clear, len)
            .map_err(|error| damaged(format!("it cannot be decompressed: {error}")))?,
        false => clear,
    };
    if bytes.len() != len {
        return Err(damaged(format!("its content has {} bytes instead of {len}", bytes.len())));
    }
    let found = if is_stored_plain { part.stored_sha256 } else { sum(&bytes) };
    if found != part.sha256 {
        return Err(damaged(format!("the SHA-256 of its content is {found} instead of {}", part.sha256)));
    }
    Ok(bytes)
}

const SAMPLE: usize = 64 << 10;
const SAMPLES: usize = 4;
/// Compression to a larger share of the size is not worth its time.
const WORTH_PERCENT: usize = 95;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::new_keys;
    use crate::manifest::tests::manifest;

    #[test]
    fn parts_come_back() {
        let noise: Vec<u8> = (0_u32..200_000).flat_map(|nr| sum(&nr.to_le_bytes()).0.into_iter().take(4)).collect();
        for keys in [RemoteKeys::none(), new_keys()] {
            for (plain, is_small) in [(vec![7; 500_000], true), (noise.clone(), false), (vec![1], false)] {
                let part = PlainPart::new(plain.clone(), &keys);
                let (record, stored) = part.pack(&keys, 3).unwrap();
                assert_eq!(record.zstd, is_small);
                let whole = SnapshotManifest { parts: vec![record], ..manifest() };
                assert_eq!(unpack(&whole, 0, stored.clone(), &keys).unwrap(), plain);
                let mut bad = stored;
                bad[0] ^= 1;
                assert!(matches!(unpack(&whole, 0, bad, &keys), Err(RemoteError::Damaged { .. })));
            }
        }
    }

    #[test]
    fn a_manifest_that_lies_about_sizes_takes_no_memory() {
        let keys = RemoteKeys::none();
        let (record, stored) = PlainPart::new(vec![0; 1 << 20], &keys).pack(&keys, 3).unwrap();
        for bytes in [1, 1 << 19, (1 << 20) + 1] {
            let whole = SnapshotManifest { parts: vec![PartRecord { bytes, ..record.clone() }], ..manifest() };
            assert!(matches!(unpack(&whole, 0, stored.clone(), &keys), Err(RemoteError::Damaged { .. })));
        }
    }
}
