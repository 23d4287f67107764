//! Format features that this program writes, reads, or refuses, and superblock flags that forbid writing.
//!
//! Invariants:
//! - I1. An unknown incompat bit is refused, and an unknown compat_ro bit forbids writing; the message has the bit's
//!   number.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{CompatRo, Incompat, Superblock};

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
    .union(Incompat::SIMPLE_QUOTA);

const READABLE: Incompat = WRITABLE.union(Incompat::RAID56).union(Incompat::RAID1C34);

const WRITABLE_COMPAT_RO: CompatRo =
    CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID).union(CompatRo::BLOCK_GROUP_TREE);

/// Superblock flags that forbid writing, and their meanings. The superblock check refuses unknown flags.
const REFUSED_FLAGS: [(u64, &str); 4] = [
    (1 << 2, "an error was recorded in the superblock"),
    (1 << 32, "it is a seed filesystem"),
    (1 << 33, "it is a metadata dump without data"),
    (1 << 34, "it is a metadata dump without data"),
];

/// Returns a list of these bits for messages, with the numbers of unknown bits: "RAID56, bit 15".
fn names(known: impl Iterator<Item = (&'static str, u64)>, bits: u64) -> String {
    let mut rest = bits;
    let mut names = Vec::new();
    for (name, bit) in known.filter(|&(_, bit)| bits & bit != 0) {
        names.push(name.to_owned());
        rest &= !bit;
    }
    let is_set = |shift: &u32| rest.checked_shr(*shift).is_some_and(|bits| bits & 1 == 1);
    names.extend((0..u64::BITS).filter(is_set).map(|shift| format!("bit {shift}")));
    names.join(", ")
}

fn incompat_names(bits: u64) -> String {
    names(Incompat::all().iter_names().map(|(name, bit)| (name, bit.bits())), bits)
}

fn compat_ro_names(bits: u64) -> String {
    names(CompatRo::all().iter_names().map(|(name, bit)| (name, bit.bits())), bits)
}

/// Refuses a filesystem with features that this program cannot read.
pub(crate) fn check_readable(sb: &Superblock) -> Result<()> {
    let unknown = sb.incompat_flags & !READABLE.bits();
    if unknown == 0 {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("the filesystem uses the incompat features {}", incompat_names(unknown)),
        hint: "mount it with a kernel that knows them",
    })
}

/// The reason why a filesystem with this superblock must not be written, if any.
pub(crate) fn write_refusal(sb: &Superblock) -> Option<String> {
    let incompat = sb.incompat_flags & !WRITABLE.bits();
    if incompat != 0 {
        return Some(format!("the features {} are supported for reading only", incompat_names(incompat)));
    }
    let compat_ro = sb.compat_ro_flags & !WRITABLE_COMPAT_RO.bits();
    if compat_ro != 0 {
        return Some(format!("the compat_ro features {} are supported for reading only", compat_ro_names(compat_ro)));
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
        assert_eq!(incompat_names(Incompat::ZONED.bits() | 1 << 40), "ZONED, bit 40");
        assert_eq!(compat_ro_names(CompatRo::VERITY.bits() | 1 << 63), "VERITY, bit 63");
    }
}
