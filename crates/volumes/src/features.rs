//! Format features that this program writes, reads, or refuses, and superblock flags that forbid writing.
//!
//! Invariants:
//! - I1. An unknown incompat bit is refused, and an unknown compat_ro bit forbids writing; the message has the bit's
//!   number.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{CompatRo, Incompat, Superblock, flags};

const WRITABLE: Incompat = Incompat::MIXED_BACKREF
    .union(Incompat::DEFAULT_SUBVOL)
    .union(Incompat::MIXED_GROUPS)
    .union(Incompat::COMPRESS_LZO)
    .union(Incompat::COMPRESS_ZSTD)
    .union(Incompat::BIG_METADATA)
    .union(Incompat::EXTENDED_IREF)
    .union(Incompat::SKINNY_METADATA)
    .union(Incompat::NO_HOLES)
    .union(Incompat::METADATA_UUID)
    .union(Incompat::RAID1C34)
    .union(Incompat::SIMPLE_QUOTA);

const READABLE: Incompat = WRITABLE.union(Incompat::RAID56);

const WRITABLE_COMPAT_RO: CompatRo =
    CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID).union(CompatRo::BLOCK_GROUP_TREE);

/// Superblock flags that forbid writing, and their meanings. The superblock check refuses unknown flags.
const REFUSED_FLAGS: [(u64, &str); 4] = [
    (flags::ERROR, "an error was recorded in the superblock"),
    (flags::SEEDING, "it is a seed filesystem"),
    (flags::METADUMP, "it is a metadata dump without data"),
    (flags::METADUMP_V2, "it is a metadata dump without data"),
];

/// Refuses a filesystem with features that this program cannot read.
pub(crate) fn check_readable(sb: &Superblock) -> Result<()> {
    let unknown = sb.incompat_flags & !READABLE.bits();
    if unknown == 0 {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("the filesystem uses the incompat features {}", Incompat::names_of(unknown)),
        hint: "mount it with a kernel that knows them",
    })
}

/// The reason why a filesystem with this superblock must not be written, if any.
pub(crate) fn write_refusal(sb: &Superblock) -> Option<String> {
    let incompat = sb.incompat_flags & !WRITABLE.bits();
    if incompat != 0 {
        return Some(format!("the features {} are supported for reading only", Incompat::names_of(incompat)));
    }
    let compat_ro = sb.compat_ro_flags & !WRITABLE_COMPAT_RO.bits();
    if compat_ro != 0 {
        return Some(format!(
            "the compat_ro features {} are supported for reading only",
            CompatRo::names_of(compat_ro)
        ));
    }
    if let Some((_, why)) = REFUSED_FLAGS.iter().find(|(bit, _)| sb.flags & bit != 0) {
        return Some((*why).to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_bits_are_named_by_number() {
        assert_eq!(Incompat::names_of(Incompat::ZONED.bits() | 1 << 40), "ZONED, bit 40");
        assert_eq!(CompatRo::names_of(CompatRo::VERITY.bits() | 1 << 63), "VERITY, bit 63");
    }
}
