//! Presents the devices of a filesystem as one logical address space: superblock mirrors, chunk map, profiles, copies.
//!
//! This crate is above `device`. This crate knows chunks and superblocks, but reads no tree. System chunks come from
//! the superblock; the reader of the chunk tree adds the other chunks ([`Volumes::add_chunk`]).
//!
//! ```text
//! logical --chunk_map--> chunk --profile--> (stripe, offset) --set--> device, physical
//! ```
//!
//! Invariants (each file adds more):
//! - I1. A filesystem that is read-only gets no writes, not even repairs.
//! - I2. Every piece that [`Volumes::read`] returns passed its check. A piece may come from any copy.
//! - I3. A repair writes only content that passed the check, only over content that failed the check or could not be
//!   read, and only while no other write to the same bytes runs.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod allocation;
mod chunk_map;
mod commit_super;
mod device_change;
mod device_space;
mod fan_out;
mod features;
mod io;
mod member;
mod membership;
mod migration;
mod ownership;
mod profile;
mod recovery;
mod rewrite_id;
mod seed;
mod set;
mod signature;
mod superblock;
mod tune;
mod twin;

pub use allocation::DEVICE_RESERVED;
pub use commit_super::LogPromise;
pub use device_change::{RemovedDevice, no_device};
pub use io::{BadUnit, DeviceStripe, Refreshed, StripePart, Verify};
pub use member::MemberState;
pub use membership::check_superblocks;
pub use migration::{ChunkPlacement, MIGRATION_PIECE_BYTES};
pub use profile::copies_of;
pub use recovery::{SuperCopies, SuperCopy};
pub use rewrite_id::IdRewrite;
pub use set::{DeviceSetOptions, DeviceSummary, Volumes};
pub use signature::{detect, wipe};
pub use tune::{TUNABLE, Tuning, tune};
pub use twin::{GivenUpTwin, unfinished_replacement};

/// Logical ranges of a chunk at `logical` that cover superblock mirrors, sorted. Nothing is allocated in these
/// ranges. This function serves chunks that are not in a map yet; it fails if the chunk's fields contradict each
/// other.
pub fn reserved_ranges(
    logical: ubtrfs_format::Logical,
    chunk: &ubtrfs_format::item::ChunkItem,
    sectorsize: u32,
) -> Result<Vec<std::ops::Range<u64>>, ubtrfs_format::FormatError> {
    let geometry = profile::ChunkGeometry::of(logical, chunk, sectorsize)?;
    Ok(profile::reserved_ranges(logical, chunk, &geometry))
}
