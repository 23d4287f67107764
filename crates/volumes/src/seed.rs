//! Seed devices: devices of another filesystem, on which a filesystem builds.
//!
//! `btrfstune -S 1` makes a filesystem a seed: it is only read from then on. A *sprout* begins with the trees and chunks of its
//! seed, and has an fsid and at least one device of its own. Its chunk tree has the items of the seed devices, with the fsid
//! of the seed. Tree blocks on a seed device carry the fsid of the seed.
//!
//! ```text
//! seed ── open_sprouting, join_sprout ──▶ without superblock ── finish_sprout, commit: superblock ──▶ sprout
//!                                                                                                      │
//!                         filesystem without seeds ◀── the groups are emptied, the devices removed ────┘
//! ```
//!
//! Invariants:
//! - E1. Nothing is ever written to a seed device: a write to a chunk on one, and a superblock for one, fail an assertion.
//! - E2. A seed device is a member only if the chunk tree or the superblock of the sprout names its id and its UUID, and if
//!   its superblock has the generation of its device item: it was not changed since the sprout was made.
//! - E3. No chunk is placed on a seed device, and block groups there take no allocations.
//! - E4. Until the first superblock of a sprout is durable, its device has no superblock, and the seed is as it was. So a
//!   power cut leaves either the seed alone or also the sprout. The first superblock is written when no system chunk lies on
//!   the seed, because Linux learns of the seed devices from the chunk tree, and reads it through the system chunks.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, DevItem};
use ubtrfs_format::superblock::{Incompat, Superblock, flags};
use ubtrfs_format::{DevId, Generation, Logical, Profile};
use uuid::Uuid;

use crate::chunk_map::Chunk;
use crate::member::{Member, MemberState};
use crate::membership::{Membership, refuse_twins};
use crate::set::{DeviceSetOptions, Volumes};
use crate::superblock::FoundSuperblock;

/// A device of a seed filesystem.
#[derive(Clone, Debug)]
pub(crate) struct FoundSeed {
    superblock: Superblock,
    /// The device, until the members are known. It then belongs to its member, and is closed when that leaves.
    device: Arc<Mutex<Option<Arc<dyn Device>>>>,
}

impl FoundSeed {
    fn new(superblock: Superblock, device: Arc<dyn Device>) -> Self {
        Self { superblock, device: Arc::new(Mutex::new(Some(device))) }
    }

    fn is(&self, devid: DevId, uuid: Uuid) -> bool {
        let own = &self.superblock.dev_item;
        (own.devid, own.uuid) == (devid, uuid)
    }
}

/// Tells which of some superblocks are of seeds on which the filesystem of the others builds. If all are of seeds, those with
/// the most devices are the filesystem: a seed may build on another one.
pub(crate) fn are_of_seeds<'s>(superblocks: impl Iterator<Item = &'s Superblock> + Clone) -> Vec<bool> {
    let is_seed = |superblock: &Superblock| superblock.flags & flags::SEEDING != 0;
    let top = superblocks.clone().max_by_key(|superblock| (!is_seed(superblock), superblock.num_devices));
    superblocks.map(|own| is_seed(own) && top.is_some_and(|top| own.fsid != top.fsid)).collect()
}

/// Takes the devices of seeds out of the given ones.
///
/// # Errors
///
/// [`Error::Refused`] if two of them are the same device of one seed.
pub(crate) fn take_seeds(given: &mut Vec<(FoundSuperblock, Arc<dyn Device>)>) -> Result<Vec<FoundSeed>> {
    let mut are_of_seeds = are_of_seeds(given.iter().map(|(found, _)| &found.superblock)).into_iter();
    let (seeds, own): (Vec<_>, Vec<_>) =
        std::mem::take(given).into_iter().partition(|_| are_of_seeds.next().unwrap_or(false));
    *given = own;
    for (index, (found, device)) in seeds.iter().enumerate() {
        let same = seeds.iter().take(index).filter(|(other, _)| other.superblock.fsid == found.superblock.fsid);
        refuse_twins(&found.superblock, device.as_ref(), same)?;
    }
    Ok(seeds.into_iter().map(|(found, device)| FoundSeed::new(found.superblock, device)).collect())
}

impl Volumes {
    /// The UUIDs that tree blocks may carry besides the filesystem's: those of the given seed devices, and the new one if a
    /// change of the id was interrupted.
    pub fn seed_fsids(&self) -> Vec<Uuid> {
        let mut fsids: Vec<Uuid> = self.seeds.iter().map(|seed| seed.superblock.node_fsid()).collect();
        fsids.extend(self.interrupted_fsid());
        fsids.sort_unstable();
        fsids.dedup();
        fsids
    }

    /// Opens a seed filesystem as the beginning of a sprout: with a new fsid, and without a device of its own. Nothing can
    /// be committed before [`Volumes::join_sprout`], and commits write no superblock before [`Volumes::finish_sprout`].
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if it is not a seed, lacks devices, or has another id in its tree blocks than in its superblock; the
    /// errors of [`Volumes::open`].
    pub fn open_sprouting(seed: Vec<Arc<dyn Device>>, options: DeviceSetOptions) -> Result<Self> {
        let mut found = Membership::find(seed, options.ignore_super_flags)?;
        let superblock = &mut found.newest.superblock;
        let refused = |what: &str, hint| Err(Error::Refused { what: what.to_owned(), hint });
        if superblock.flags & flags::SEEDING == 0 {
            return refused("the filesystem is not a seed", "make it one first: ubtrfs tune -S 1");
        }
        if superblock.incompat().contains(Incompat::METADATA_UUID) {
            return refused(
                "the id of the seed was changed without its tree blocks",
                "give it its first id again: ubtrfs tune -M UUID",
            );
        }
        if superblock.log_root.0 != 0 || found.target.is_some() {
            return refused(
                "the seed has a log or a replacement that is not complete",
                "clear the seeding flag, mount it once, and set the flag again: ubtrfs tune -S",
            );
        }
        if found.members.iter().any(|member| member.state() != MemberState::InSync) {
            return refused("devices of the seed have different generations", "give its devices of the newest one");
        }
        let of_seed = superblock.clone();
        superblock.fsid = Uuid::new_v4();
        superblock.flags &= !flags::SEEDING;
        let of = |member: Arc<Member>| {
            let superblock = Superblock { dev_item: member.item.read().clone(), ..of_seed.clone() };
            Some(FoundSeed::new(superblock, Arc::clone(member.device()?)))
        };
        found.seeds.extend(std::mem::take(&mut found.members).into_iter().filter_map(of));
        found.has_read_only = false;
        Self::of_members(found, options, Some(of_seed.fsid))
    }

    /// Makes a device, which was wiped, the first own device of a sprout. The caller stores its item, and those of
    /// the seed devices, which have the generation of the seed from now on (E2).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a device of the seed is missing.
    pub fn join_sprout(&self, device: Arc<dyn Device>, item: &DevItem) -> Result<()> {
        if let Some(missing) = self.members().iter().find(|member| member.device().is_none()) {
            return Err(Error::Refused {
                what: format!("{} of the seed was not given", missing.describe()),
                hint: "give all devices of the seed",
            });
        }
        for seed in &self.seeds {
            let own = &seed.superblock.dev_item;
            if let Some(member) = self.member(own.devid).filter(|_| self.sprouts_from == Some(own.fsid)) {
                member.item.write().generation = seed.superblock.generation.0;
            }
        }
        let generation = self.superblock().generation;
        let member = Member::given(item.clone(), device, (Logical(0), generation), generation);
        member.set_known();
        let before = self.devices.write().insert(item.devid.0, Arc::new(member));
        debug_assert!(before.is_none(), "I1 of `set`: device {} exists", item.devid);
        self.nr_devices.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Ends the making of a sprout: the next commit writes its first superblock (E4).
    pub fn finish_sprout(&self) {
        self.holds_superblocks.store(false, Ordering::Release);
    }

    /// Whether the filesystem builds on a seed.
    pub fn has_seed(&self) -> bool {
        self.members().iter().any(|member| member.is_seed())
    }

    /// Whether the filesystem has enough devices of its own for this profile. True for filesystems without seeds.
    pub fn fits_own_devices(&self, flags: BlockGroupFlags) -> bool {
        let fits = |profile: &Profile| usize::from(profile.devs_min) <= self.placeable().len();
        !self.has_seed() || Profile::of(flags).is_none_or(fits)
    }

    /// The devices that were given, also those of seeds.
    pub fn given_devices(&self) -> Vec<Arc<dyn Device>> {
        self.members().iter().filter_map(|member| member.device().cloned()).collect()
    }

    /// Whether a device is a seed device.
    pub fn is_seed(&self, devid: DevId) -> bool {
        self.member(devid).is_some_and(|member| member.is_seed())
    }

    /// Whether the chunk at this address lies on a seed device.
    pub fn is_seed_chunk(&self, logical: Logical) -> bool {
        let chunk = self.chunks.get(logical);
        chunk.is_some_and(|chunk| chunk.item.stripes.iter().any(|stripe| self.is_seed(stripe.devid)))
    }

    /// Whether a chunk lies on a seed device that is present.
    pub(crate) fn is_on_seed(&self, chunk: &Chunk) -> bool {
        !self.seeds.is_empty() && chunk.item.stripes.iter().any(|stripe| self.is_seed(stripe.devid))
    }

    /// Fails if a seed device was changed since the sprout was made (E2).
    pub(crate) fn check_seed_is_unchanged(&self, member: &Member, item: &DevItem) -> Result<()> {
        let is_new = self.sprouts_from == Some(item.fsid);
        let seed = self.seeds.iter().find(|seed| member.is_seed() && seed.is(item.devid, item.uuid));
        let Some(seed) = seed.filter(|seed| !is_new && seed.superblock.generation.0 != item.generation) else {
            return Ok(());
        };
        Err(Error::Refused {
            what: format!(
                "{} is a seed device that was changed: its superblock has generation {}, and this filesystem builds on {}",
                member.describe(),
                seed.superblock.generation,
                item.generation
            ),
            hint: "give an unchanged copy of the seed device",
        })
    }

    /// Leaves the seed devices to the members.
    pub(crate) fn release_seeds(&self) {
        self.seeds.iter().for_each(|seed| drop(seed.device.lock().take()));
    }

    /// The seed device with this id and UUID as a member, if it was given (E2).
    pub(crate) fn seed_member(&self, devid: DevId, uuid: Uuid) -> Option<Member> {
        let seed = self.seeds.iter().find(|seed| seed.is(devid, uuid))?;
        let device = Arc::new(WriteProtected(seed.device.lock().clone()?));
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
