//! The checksums that a filesystem can use for metadata and data.

use std::fmt;

use sha2::Digest;

/// A filesystem's checksum algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum CsumType {
    /// crc32c, 4 bytes.
    #[default]
    Crc32c = 0,
    /// xxhash64, 8 bytes.
    Xxhash = 1,
    /// SHA-256, 32 bytes.
    Sha256 = 2,
    /// BLAKE2b-256, 32 bytes.
    Blake2 = 3,
}

/// Size in bytes of the checksum field, which is the first field of superblocks and nodes.
pub const CSUM_SIZE_MAX: usize = 32;

impl CsumType {
    /// The algorithm for a value of the superblock's field `csum_type`; `None` for an unknown value.
    pub fn from_disk(value: u16) -> Option<Self> {
        Some(match value {
            0 => Self::Crc32c,
            1 => Self::Xxhash,
            2 => Self::Sha256,
            3 => Self::Blake2,
            _ => return None,
        })
    }

    /// Size of one checksum in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Crc32c => 4,
            Self::Xxhash => 8,
            Self::Sha256 | Self::Blake2 => 32,
        }
    }

    /// The name that `mkfs.btrfs --csum` accepts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32c => "crc32c",
            Self::Xxhash => "xxhash64",
            Self::Sha256 => "sha256",
            Self::Blake2 => "blake2",
        }
    }

    /// Computes the checksum of `data`: [`CsumType::size`] bytes, padded with zeros to 32.
    pub fn compute(self, data: &[u8]) -> [u8; CSUM_SIZE_MAX] {
        let mut out = [0; CSUM_SIZE_MAX];
        match self {
            Self::Crc32c => out[..4].copy_from_slice(&crc32c::crc32c(data).to_le_bytes()),
            Self::Xxhash => out[..8].copy_from_slice(&xxhash_rust::xxh64::xxh64(data, 0).to_le_bytes()),
            Self::Sha256 => out.copy_from_slice(&sha2::Sha256::digest(data)),
            Self::Blake2 => {
                out.copy_from_slice(blake2b_simd::Params::new().hash_length(32).hash(data).as_bytes());
            }
        }
        out
    }

    /// Appends one checksum for each `sectorsize` bytes of `data` (the last sector may be short).
    pub fn compute_sectors(self, data: &[u8], sectorsize: usize, out: &mut Vec<u8>) {
        for sector in data.chunks(sectorsize) {
            out.extend_from_slice(self.compute(sector).get(..self.size()).unwrap_or_default());
        }
    }
}

impl fmt::Display for CsumType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
