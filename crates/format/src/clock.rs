//! The time and the UUIDs of what is made: those of the system, or fixed ones, so that the same work gives the same bytes.
//!
//! A program that makes images can fix them, once and for its whole process, with [`fix_clock`]. Source of the idea: the
//! specification of `SOURCE_DATE_EPOCH` (reproducible-builds.org).

use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

use crate::item::Timespec;

static FIXED: OnceLock<Timespec> = OnceLock::new();

/// Makes every time that this process sets from now on `time`, and every UUID that it makes one that follows from the
/// filesystem's id and from what it names. Filesystems that are opened later do all their work in the caller's threads, so
/// that blocks are allocated in one order. The first call counts. Must not be called in a process that serves a mount.
pub fn fix_clock(time: Timespec) {
    let _ = FIXED.set(time);
}

/// The time that [`fix_clock`] set.
pub fn fixed_clock() -> Option<Timespec> {
    FIXED.get().copied()
}

/// A UUID for a thing of the filesystem `fsid`: a random one, or with a fixed clock one that follows from `fsid` and the
/// name of the thing.
pub fn new_uuid(fsid: &Uuid, thing: &str) -> Uuid {
    if FIXED.get().is_some() { derived(fsid, thing) } else { Uuid::new_v4() }
}

/// The first bytes of SHA-256 over the id and the name, in the form of a random UUID.
fn derived(fsid: &Uuid, thing: &str) -> Uuid {
    let hash = Sha256::new().chain_update(fsid.as_bytes()).chain_update(thing).finalize();
    let bytes = hash.first_chunk().copied().unwrap_or_default();
    Builder::from_random_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_ids_differ_by_filesystem_and_thing() {
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!(derived(&a, "device 1"), derived(&a, "device 1"));
        assert_ne!(derived(&a, "device 1"), derived(&a, "device 2"));
        assert_ne!(derived(&a, "device 1"), derived(&b, "device 1"));
        assert_eq!(derived(&a, "device 1").get_version_num(), 4);
    }
}
