//! The devices of one filesystem as one logical address space: superblock mirrors, chunk map, profiles, copies.
//!
//! Third floor of the house, above `device`. Knows chunks and superblocks, but reads no tree: whoever reads the chunk
//! tree adds its chunks here ([`Volumes::add_chunk`]); the system chunks come from the superblock.
//!
//! ```text
//! logical --chunk_map--> chunk --profile--> (stripe, offset) --set--> device, physical
//! ```
//!
//! Invariants (each file has its own besides):
//! - I1. Nothing is written to a device that was opened read-only, not even a repair.
//! - I2. A piece that was handed out passed its check, whichever copy it came from.
//! - I3. A repair writes only what passed the check, over what failed it, while no other write runs.

#![forbid(unsafe_code)]

mod allocation;
mod chunk_map;
mod features;
mod io;
mod ownership;
mod profile;
mod recovery;
mod set;
mod superblock;

pub use allocation::DEVICE_RESERVED;
pub use profile::profile_name;
pub use recovery::{SuperCopies, SuperCopy};
pub use set::{DeviceSummary, OpenOptions, Volumes};

/// Logical ranges of a chunk at `logical` that cover superblock mirrors, sorted: nothing is allocated there. For chunks
/// that are not in a map yet; an error if the chunk contradicts itself.
pub fn reserved_ranges(
    logical: ubtrfs_format::Logical,
    chunk: &ubtrfs_format::item::ChunkItem,
    sectorsize: u32,
) -> Result<Vec<std::ops::Range<u64>>, ubtrfs_format::FormatError> {
    let geometry = profile::Geometry::of(logical.0, chunk, sectorsize)?;
    Ok(profile::reserved_ranges(logical.0, chunk, &geometry))
}
