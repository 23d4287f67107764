//! Seed devices: devices of another filesystem, on which a filesystem builds.
//!
//! `btrfstune -S 1` makes a filesystem a seed: it is only read from then on. A *sprout* begins with the trees and chunks of its
//! seed, and has an fsid and at least one device of its own. Its chunk tree has the items of the seed devices, with the fsid
//! of the seed. Tree blocks on a seed device carry the fsid of the seed.
//!
//! Invariants:
//! - E1. Nothing is ever written to a seed device: a write fails an assertion in debug builds, and fails otherwise.
//! - E2. A seed device is a member only if the chunk tree or the superblock of the sprout names its id and its UUID.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::{Superblock, flags};
use ubtrfs_format::{DevId, Generation, Logical};
use uuid::Uuid;

use crate::member::Member;
use crate::set::Volumes;
use crate::superblock::Found;

/// A device of a seed filesystem.
#[derive(Clone, Debug)]
pub(crate) struct FoundSeed {
    superblock: Superblock,
    device: Arc<dyn Device>,
}

impl FoundSeed {
    fn is(&self, devid: DevId, uuid: Uuid) -> bool {
        let own = &self.superblock.dev_item;
        (own.devid, own.uuid) == (devid, uuid)
    }
}

/// Takes the devices of seeds out of the given ones. If all are of seeds, those with the most devices are the filesystem: a
/// seed may build on another one.
pub(crate) fn take_seeds(given: &mut Vec<(Found, Arc<dyn Device>)>) -> Vec<FoundSeed> {
    let is_seed = |found: &Found| found.superblock.flags & flags::SEEDING != 0;
    let top = given.iter().max_by_key(|(found, _)| (!is_seed(found), found.superblock.num_devices));
    let Some(top) = top.map(|(found, _)| found.superblock.fsid) else { return Vec::new() };
    let (seeds, own): (Vec<_>, Vec<_>) =
        std::mem::take(given).into_iter().partition(|(found, _)| is_seed(found) && found.superblock.fsid != top);
    *given = own;
    seeds.into_iter().map(|(found, device)| FoundSeed { superblock: found.superblock, device }).collect()
}

impl Volumes {
    /// The UUIDs that tree blocks on the given seed devices carry.
    pub fn seed_fsids(&self) -> Vec<Uuid> {
        let mut fsids: Vec<Uuid> = self.seeds.iter().map(|seed| seed.superblock.node_fsid()).collect();
        fsids.sort_unstable();
        fsids.dedup();
        fsids
    }

    /// Whether the filesystem builds on a seed.
    pub fn has_seed(&self) -> bool {
        let own = self.superblock().node_fsid();
        self.members().iter().any(|member| member.is_seed() || member.item.read().fsid != own)
    }

    /// The seed device with this id and UUID as a member, if it was given (E2).
    pub(crate) fn seed_member(&self, devid: DevId, uuid: Uuid) -> Option<Member> {
        let seed = self.seeds.iter().find(|seed| seed.is(devid, uuid))?;
        let device = Arc::new(WriteProtected(Arc::clone(&seed.device)));
        let item: DevItem = seed.superblock.dev_item.clone();
        // Its generation says nothing about this filesystem.
        Some(Member::given(item, device, (Logical(0), Generation(0)), Generation(0)).into_seed())
    }
}

/// A device that is never written (E1).
#[derive(Debug)]
struct WriteProtected(Arc<dyn Device>);

impl WriteProtected {
    fn refuse(&self) -> io::Result<()> {
        debug_assert!(false, "E1: {} is a seed device, and is written", self.0.describe());
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "it is a seed device"))
    }
}

impl Device for WriteProtected {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.0.read_vectored_at(offset, bufs)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        self.refuse()
    }

    fn write_vectored_at(&self, _: u64, _: &[IoSlice<'_>]) -> io::Result<()> {
        self.refuse()
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        self.refuse()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn location(&self) -> String {
        self.0.location()
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn is_found(&self) -> bool {
        self.0.is_found()
    }

    fn has_io_uring(&self) -> bool {
        self.0.has_io_uring()
    }

    fn grow_to_end(&self) -> io::Result<u64> {
        Ok(self.0.len_bytes())
    }

    fn claim(&self) -> io::Result<()> {
        self.0.claim()
    }

    fn release_claim(&self) {
        self.0.release_claim();
    }

    fn check_in_place(&self) -> io::Result<()> {
        self.0.check_in_place()
    }
}
