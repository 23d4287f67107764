//! The btrfs on-disk format: structures, keys, items, superblock, checksums, hashes and the tree checker.
//!
//! This crate is the lowest layer: it does no I/O and decides no policy. Disk bytes are untrusted, and no function here
//! panics on them.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::as_conversions,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

pub mod check;
pub mod clock;
pub mod codec;
pub mod csum;
pub mod error;
pub mod hash;
pub mod ids;
pub mod item;
pub mod key;
pub mod node;
pub mod print;
mod profile;
mod range;
pub mod superblock;
pub mod superblock_check;

pub use check::{CheckContext, ExpectedBlock, check_node};
pub use csum::CsumType;
pub use error::{Corrupt, FormatError};
pub use ids::{DevId, Generation, Ino, Logical, Physical, RootId, objectid};
pub use key::{Key, KeyType};
pub use profile::Profile;
pub use range::LogicalRange;
pub use superblock_check::{check_superblock, check_superblock_but_flags};
