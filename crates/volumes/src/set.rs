//! [`Volumes`]: the open devices of a filesystem, their items, chunks and superblocks.
//!
//! Invariants:
//! - I1. Device ids in the set are unique. A device that has a device item, but was not passed to [`Volumes::open`],
//!   has no backend.
//! - I2. A device item equals the device item in the chunk tree, or the device item that the running commit will
//!   store there; callers that record device extents update `bytes_used`. The chunk map may differ from the chunk
//!   tree: it includes chunks not recorded yet, and chunks whose removal is not durable yet.
//! - I3. A given device without a device item is left out: it was removed, and a power cut kept its superblock, or it was
//!   being added. Nothing is read from it or written to it.
//! - I4. The device item of a present device keeps the UUIDs of the superblock read from that device. A superblock that
//!   [`check_superblock`](ubtrfs_format::check_superblock) would refuse is never written, so crafted items cannot make
//!   the next open fail.
//!
//! Lock order: `devices` is locked before the `item` and `primary` of a device.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::codec::{Field, Reader};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem, DevStatsItem, DeviceRecord, Stripe};
use ubtrfs_format::superblock::{Superblock, flags};
use ubtrfs_format::{Corrupt, DevId, FormatError, Generation, Key, KeyType, Logical, Profile, RootId, objectid};
use uuid::Uuid;

use crate::allocation::{self, CandidateDevice, Wish};
use crate::chunk_map::{Chunk, ChunkMap};
use crate::commit_super::Kicks;
use crate::device_space::DeviceSpace;
use crate::fan_out::ReadyThreads;
use crate::io::RangeLocks;
use crate::member::{Member, MemberState};
use crate::membership::{self, FoundTarget, Membership};
use crate::ownership::LastCheck;
use crate::seed::FoundSeed;
use crate::{features, profile};

/// Options for opening a filesystem's devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceSetOptions {
    /// Whether nothing may be written, not even repairs.
    pub read_only: bool,
    /// Whether the filesystem may be written without some of its devices, if every chunk tolerates their loss.
    pub degraded: bool,
    /// Whether a superblock may have unknown flags, or flags of an interrupted conversion. Only for reading.
    pub ignore_super_flags: bool,
}

/// Facts about a device, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// Device id.
    pub devid: DevId,
    /// Device UUID.
    pub uuid: Uuid,
    /// Size of the device in bytes, according to its device item.
    pub total_bytes: u64,
    /// Bytes in device extents.
    pub bytes_used: u64,
    /// Path of the device, or `None` if it is missing.
    pub path: Option<String>,
    /// Whether the device has everything that was committed.
    pub state: MemberState,
    /// Whether it is a device of a seed, which is never written.
    pub is_seed: bool,
}

/// The devices of one filesystem.
#[derive(Debug)]
pub struct Volumes {
    superblock: Superblock,
    superblock_mirror: usize,
    write_refusal: Option<String>,
    logs: Vec<(Logical, u8)>,
    /// Whether the caller or a device requires read-only access.
    read_only: bool,
    degraded: bool,
    /// Number of devices that the filesystem has, as the superblock counts them.
    pub(crate) nr_devices: AtomicU64,
    pub(crate) devices: RwLock<BTreeMap<u64, Arc<Member>>>,
    /// The new device of a replacement that was begun before, until it is used (T7 of `twin`).
    pub(crate) target: Mutex<Option<FoundTarget>>,
    /// Devices of other filesystems that this one may build on.
    pub(crate) seeds: Vec<FoundSeed>,
    /// Why given devices are not used.
    pub(crate) not_used: Mutex<Vec<String>>,
    /// The filesystem on which this one begins to build, until it has a device of its own.
    pub(crate) sprouts_from: Option<Uuid>,
    /// Whether superblocks are held back, because it only begins to build on the seed.
    pub(crate) holds_superblocks: AtomicBool,
    pub(crate) chunks: ChunkMap,
    /// This lock is held shared during a write, and exclusively while the copies to which writes go change (see
    /// `migration`).
    pub(crate) layout_lock: RwLock<()>,
    pub(crate) range_locks: RangeLocks,
    /// The time of the last check of the superblocks (see `ownership`).
    pub(crate) last_look: LastCheck,
    pub(crate) kicks: Kicks,
    /// Threads for flushes and superblocks of several devices.
    pub(crate) flush_threads: ReadyThreads,
    /// The number of the next log (I4 of `membership`).
    pub(crate) log_number: AtomicU64,
}

impl Volumes {
    /// Opens a filesystem on these devices. Fails if a device has no valid superblock, is truncated, belongs to another
    /// filesystem or was written apart from the others, or if the filesystem has features that this program cannot
    /// read. [`Volumes::write_refusal`] says whether the filesystem can be written.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: DeviceSetOptions) -> Result<Self> {
        let found = Membership::find(devices, options.ignore_super_flags)?;
        Self::of_members(found, options, None)
    }

    /// Makes the set of these members. `sprouts_from`: see [`Volumes::open_sprouting`].
    pub(crate) fn of_members(found: Membership, options: DeviceSetOptions, sprouts_from: Option<Uuid>) -> Result<Self> {
        let Membership { newest, members, target, seeds, logs, primary_lost, has_read_only } = found;
        features::check_readable(&newest.superblock)?;
        let write_refusal = write_refusal(&newest.superblock, primary_lost.as_deref());
        let nr_devices = newest.superblock.num_devices;
        let is_degraded = nr_devices > members.len().saturating_add(seeds.len()) as u64
            || members.iter().any(|member| !member.is_complete());
        let volumes = Self {
            superblock_mirror: newest.mirror,
            superblock: newest.superblock,
            write_refusal,
            logs,
            read_only: options.read_only || has_read_only,
            degraded: options.degraded,
            nr_devices: AtomicU64::new(nr_devices),
            devices: RwLock::new(members.into_iter().map(|member| (member.devid().0, member)).collect()),
            target: Mutex::new(target),
            seeds,
            not_used: Mutex::default(),
            sprouts_from,
            holds_superblocks: AtomicBool::new(sprouts_from.is_some()),
            chunks: ChunkMap::default(),
            layout_lock: RwLock::new(()),
            range_locks: RangeLocks::default(),
            last_look: LastCheck::default(),
            kicks: Kicks::new(is_degraded),
            flush_threads: ReadyThreads::default(),
            log_number: AtomicU64::new(1),
        };
        volumes.add_system_chunks()?;
        Ok(volumes)
    }

    /// The roots and levels of the logs that the newest superblocks name. After a power cut while a log was written,
    /// they may name several; the latest comes first. Each log that can be read may be replayed.
    pub fn logs(&self) -> &[(Logical, u8)] {
        &self.logs
    }

    fn add_system_chunks(&self) -> Result<()> {
        let sb = &self.superblock;
        let array = sb.sys_chunk_array.get(..sb.sys_chunk_array_size as usize).unwrap_or_default();
        let mut reader = Reader::new("sys_chunk_array", array);
        while !reader.is_empty() {
            let key = Key::read(&mut reader)?;
            if (key.objectid, key.item_type) != (objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM) {
                return Err(FormatError::Value {
                    what: "sys_chunk_array",
                    field: "key type",
                    value: key.item_type.0.into(),
                    expected: "expected a chunk item",
                }
                .into());
            }
            let chunk = ChunkItem::read(&mut reader)?;
            for stripe in &chunk.stripes {
                self.add_seed(stripe.devid, stripe.dev_uuid);
            }
            self.add_chunk(Logical(key.offset), chunk)?;
        }
        if self.chunks.get(sb.chunk_root).is_none() {
            return Err(unmapped(sb.chunk_root));
        }
        Ok(())
    }

    /// The reason why the filesystem cannot be written, if any, such as unsupported features or profiles, or missing
    /// devices, which it names. The result is final once all device items and chunks are added. The result does not
    /// depend on [`DeviceSetOptions::read_only`].
    pub fn write_refusal(&self) -> Option<String> {
        let missing = self.missing_devices();
        let by_chunk = || {
            let chunks = self.chunks.all();
            let is_other = |chunk: &&Arc<Chunk>| allocation::writable_profile(chunk.item.flags).is_none();
            if let Some(other) = chunks.iter().find(is_other) {
                return Some(format!("{} chunks are supported for reading only", Profile::name_of(other.item.flags)));
            }
            missing.as_ref()?;
            if !self.degraded {
                return Some(
                    "devices are missing: name them with -o device=, or write without them with -o degraded".to_owned(),
                );
            }
            let lost = chunks.iter().find(|chunk| !self.survives(chunk, None))?;
            let name = Profile::name_of(lost.item.flags);
            Some(format!("the {name} chunk at {} does not survive the loss of the missing devices", lost.start()))
        };
        let reason = self.write_refusal.clone().or_else(by_chunk)?;
        Some(match missing {
            Some(missing) => format!("{reason}; {missing}"),
            None => reason,
        })
    }

    /// A text with the number of given devices and, once the device items are loaded, the names of the missing devices.
    /// `None` if no device is missing.
    fn missing_devices(&self) -> Option<String> {
        if !self.lacks_devices() {
            return None;
        }
        let devices = self.devices.read();
        let nr_given = devices.values().filter(|member| member.device().is_some()).count();
        let were = if nr_given == 1 { "was" } else { "were" };
        let counted = format!("{nr_given} of its {} devices {were} given", self.superblock.num_devices);
        let missing = devices.values().filter(|member| member.state() == MemberState::Missing);
        let mut named: BTreeMap<u64, String> = missing
            .map(|member| {
                let item = member.item.read();
                let text = match member.is_seed() {
                    false => format!("device {} (uuid {})", item.devid, item.uuid),
                    true => format!("seed device {} (uuid {}) of {}", item.devid, item.uuid, item.fsid),
                };
                (item.devid.0, text)
            })
            .collect();
        // Before the device items are loaded, the chunks of the superblock name some of the devices.
        for chunk in self.chunks.all() {
            for stripe in chunk.item.stripes.iter().filter(|stripe| !devices.contains_key(&stripe.devid.0)) {
                let text = || format!("device {} (uuid {})", stripe.devid, stripe.dev_uuid);
                named.entry(stripe.devid.0).or_insert_with(text);
            }
        }
        let named: Vec<String> = named.into_values().collect();
        Some(if named.is_empty() { counted } else { format!("{counted}; missing: {}", named.join(", ")) })
    }

    /// Adds the names of the missing devices to the failure of a read.
    pub fn naming_missing(&self, error: Error) -> Error {
        match (error, self.missing_devices()) {
            (Error::Io { op, device, offset, len_bytes, source }, Some(missing)) => {
                let source = std::io::Error::new(source.kind(), format!("{source}; {missing}"));
                Error::io(op, device, offset, len_bytes, source)
            }
            (error, _) => error,
        }
    }

    /// The superblock read at open.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The mirror from which the superblock was read; 0 is the primary at 64 KiB.
    pub fn superblock_mirror(&self) -> usize {
        self.superblock_mirror
    }

    /// Whether fewer devices were given than the filesystem has.
    fn lacks_devices(&self) -> bool {
        let devices = self.devices.read();
        let nr_given = devices.values().filter(|member| member.device().is_some()).count();
        nr_given < devices.len() || (nr_given as u64) < self.nr_devices.load(Ordering::Acquire)
    }

    /// Fails unless writing is allowed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        let reason = match &self.write_refusal {
            Some(reason) => reason.clone(),
            None if self.read_only => "opened read-only".to_owned(),
            None if self.lacks_devices() && !self.degraded => "opened without all devices".to_owned(),
            None => return Ok(()),
        };
        Err(Error::ReadOnly { reason })
    }

    /// Adds a chunk of the chunk tree. Adding an equal chunk again is allowed. A chunk that overlaps another,
    /// contradicts itself or ends past its device is corrupt. [`Volumes::settle_members`] checks its devices.
    pub fn add_chunk(&self, logical: Logical, chunk: ChunkItem) -> Result<()> {
        let stripe_len = profile::ChunkGeometry::of(logical, &chunk, self.superblock.sectorsize)
            .map_err(|cause| Corrupt::new(cause).at(logical))?
            .stripe_len_bytes();
        for stripe in &chunk.stripes {
            // `settle_members` checks that the device exists.
            let Some(member) = self.member(stripe.devid) else { continue };
            let total_bytes = member.item.read().total_bytes;
            if stripe.offset.checked_add(stripe_len).is_none_or(|end| end.0 > total_bytes) {
                let cause = FormatError::Value {
                    what: "chunk",
                    field: "stripe offset",
                    value: stripe.offset.0,
                    expected: "expected the stripe to end inside its device",
                };
                return Err(Corrupt::new(cause).at(logical).into());
            }
        }
        self.chunks.add(logical, chunk, self.superblock.sectorsize)
    }

    /// Removes a chunk from the map. The chunk's device space is free immediately, so call this function after the
    /// removal is committed. The chunk's logical addresses are not used again while the filesystem is open.
    pub fn remove_chunk(&self, logical: Logical) {
        self.chunks.remove(logical);
    }

    /// The start and item of the chunk that covers an address.
    pub fn chunk_at(&self, logical: Logical) -> Option<(Logical, Arc<ChunkItem>)> {
        self.chunks.get(logical).map(|chunk| (chunk.start(), chunk.item.clone()))
    }

    /// All chunks, by ascending address.
    pub fn chunks(&self) -> Vec<(Logical, Arc<ChunkItem>)> {
        self.chunks.all().iter().map(|chunk| (chunk.start(), chunk.item.clone())).collect()
    }

    /// Number of chunks and device extents that walks of all of them have visited. Work for one chunk must not need
    /// such a walk.
    pub fn nr_walked(&self) -> u64 {
        self.chunks.nr_walked()
    }

    /// Plans a new chunk of this type and profile with at most `max_len` logical bytes, without adding it to the map.
    /// Returns `None` if no device has a hole for even the shortest chunk, or if the profile is not supported for
    /// writing.
    pub fn plan_chunk(&self, flags: BlockGroupFlags, max_len: u64) -> Option<(Logical, ChunkItem)> {
        let devices = self.placeable();
        let wish = self.wish(&devices, flags, max_len)?;
        let place = |device: &PlaceableDevice| {
            self.with_space(device, |space| {
                Some(CandidateDevice {
                    devid: device.devid,
                    uuid: device.uuid,
                    hole: space.best_hole(wish.device_bytes())?,
                    unallocated_bytes: space.unallocated_bytes(),
                    is_missing: device.is_missing,
                })
            })
        };
        let places = devices.iter().filter_map(place);
        allocation::plan(places, &wish, self.superblock.sectorsize, self.chunks.next_logical())
    }

    fn wish(&self, devices: &[PlaceableDevice], flags: BlockGroupFlags, max_len: u64) -> Option<Wish> {
        let present = devices.iter().filter(|device| !device.is_missing);
        let ends = present.map(|device| self.with_space(device, DeviceSpace::end));
        Wish::new(flags, ends.fold(0, u64::saturating_add), max_len, self.superblock.nodesize)
    }

    /// Device bytes available to new chunks.
    pub fn unallocated_bytes(&self) -> u64 {
        self.present().iter().map(|device| self.with_space(device, DeviceSpace::unallocated_bytes)).sum()
    }

    /// Ranges of the devices that belong to no chunk, without superblock mirrors.
    pub fn unallocated_ranges(&self) -> Vec<(DevId, Range<u64>)> {
        let holes = |device: &PlaceableDevice| -> Vec<(DevId, Range<u64>)> {
            self.with_space(device, |space| {
                self.chunks.count_walked(space.nr_holes());
                space.holes_without_mirrors().map(|hole| (device.devid, hole)).collect()
            })
        };
        self.present().iter().flat_map(holes).collect()
    }

    /// Tells a device that a range is not needed. Does nothing if a part of the range belongs to a chunk or a
    /// superblock mirror. The caller prevents chunks from being placed in the range. Returns the number of bytes
    /// discarded.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the device fails. A device without support for discards is no error.
    pub fn discard_unallocated(&self, devid: DevId, range: Range<u64>) -> Result<u64> {
        self.check_writable()?;
        let present = self.present();
        let device = present.iter().find(|device| device.devid == devid);
        let is_free = device.is_some_and(|device| self.with_space(device, |space| space.is_unallocated(&range)));
        let backend = self.member(devid).and_then(|member| member.backend().cloned());
        let Some(backend) = backend.filter(|_| is_free) else { return Ok(0) };
        let len_bytes = range.end.saturating_sub(range.start);
        let discarded = backend.discard(range.start, len_bytes);
        discarded.map_err(|source| Error::io("discard", backend.describe(), range.start, len_bytes, source))?;
        Ok(len_bytes)
    }

    /// Logical bytes that new chunks of this type and profile can hold on the devices.
    pub fn allocatable_bytes(&self, flags: BlockGroupFlags) -> u64 {
        let Some(profile) = allocation::writable_profile(flags) else { return 0 };
        let devices = self.placeable();
        if profile.fits_one_device() {
            let nr_stripes = profile.dev_stripes.into();
            let of = |device: &PlaceableDevice| self.with_space(device, |space| space.allocatable_bytes(nr_stripes));
            return devices.iter().filter(|device| !device.is_missing).map(of).fold(0, u64::saturating_add);
        }
        self.allocatable_on_several(&devices, flags, None)
    }

    /// Logical bytes that chunks of this type and profile can hold at most if the devices have nothing else.
    pub fn capacity_bytes(&self, flags: BlockGroupFlags) -> u64 {
        let devices = self.present();
        let free = |device: &PlaceableDevice| device.total_bytes.saturating_sub(allocation::DEVICE_RESERVED);
        self.capacity_of(&devices, devices.iter().map(free).collect(), flags)
    }

    /// Logical bytes that chunks of this type and profile can hold on the devices without `leaving`, if these chunks are
    /// gone from the devices that stay.
    pub fn capacity_without(&self, leaving: &[DevId], flags: BlockGroupFlags, gone: &[Arc<ChunkItem>]) -> u64 {
        let devices: Vec<_> = self.present().into_iter().filter(|device| !leaving.contains(&device.devid)).collect();
        let mut free: Vec<u64> =
            devices.iter().map(|device| self.with_space(device, DeviceSpace::unallocated_bytes)).collect();
        for chunk in gone {
            for stripe in &chunk.stripes {
                if let Some(at) = devices.iter().position(|device| device.devid == stripe.devid) {
                    free[at] = free[at].saturating_add(chunk.device_extent_len());
                }
            }
        }
        self.capacity_of(&devices, free, flags)
    }

    /// Logical bytes that chunks of this type and profile can hold in the free bytes of each of these devices.
    fn capacity_of(&self, devices: &[PlaceableDevice], free: Vec<u64>, flags: BlockGroupFlags) -> u64 {
        let (Some(profile), Some(wish)) = (allocation::writable_profile(flags), self.wish(devices, flags, u64::MAX))
        else {
            return 0;
        };
        match profile.fits_one_device() {
            true => {
                let all = free.into_iter().fold(0, u64::saturating_add);
                all.checked_div(u64::from(profile.dev_stripes)).unwrap_or(0)
            }
            false => allocation::allocatable_bytes(free, &wish),
        }
    }

    /// Logical bytes that new chunks of this type and profile can hold less, once this chunk is placed on the devices.
    pub fn allocatable_bytes_lost(&self, flags: BlockGroupFlags, chunk: &ChunkItem) -> u64 {
        let Some(profile) = allocation::writable_profile(flags) else { return 0 };
        if profile.fits_one_device() {
            let nr_stripes = chunk.stripes.len() as u64;
            let device_bytes = chunk.device_extent_len().saturating_mul(nr_stripes);
            return device_bytes.div_ceil(u64::from(profile.dev_stripes).max(1));
        }
        let devices = self.placeable();
        let now = self.allocatable_on_several(&devices, flags, None);
        now.saturating_sub(self.allocatable_on_several(&devices, flags, Some(chunk)))
    }

    /// Logical bytes that new chunks of a profile of several devices can hold, if `placed` is placed first.
    fn allocatable_on_several(
        &self,
        devices: &[PlaceableDevice],
        flags: BlockGroupFlags,
        placed: Option<&ChunkItem>,
    ) -> u64 {
        let Some(wish) = self.wish(devices, flags, u64::MAX) else { return 0 };
        let Some(profile) = allocation::writable_profile(flags) else { return 0 };
        let (missing, present): (Vec<&PlaceableDevice>, Vec<&PlaceableDevice>) =
            devices.iter().partition(|device| device.is_missing);
        let free = |device: &&PlaceableDevice| {
            let own =
                |chunk: &ChunkItem| chunk.stripes.iter().filter(|stripe| stripe.devid == device.devid).count() as u64;
            let taken = placed.map_or(0, |chunk| own(chunk).saturating_mul(chunk.device_extent_len()));
            self.with_space(device, DeviceSpace::unallocated_bytes).saturating_sub(taken)
        };
        let mut frees: Vec<u64> = present.iter().map(free).collect();
        let nr_lacking = usize::from(profile.devs_min).saturating_sub(frees.len());
        if nr_lacking <= usize::from(profile.tolerated_failures) {
            frees.extend(missing.iter().map(free).take(nr_lacking));
        }
        allocation::allocatable_bytes(frees, &wish)
    }

    /// Logical ranges of the chunk at this address that cover superblock mirrors: see
    /// [`reserved_ranges`](crate::reserved_ranges).
    pub fn reserved_ranges(&self, logical: Logical) -> Vec<Range<u64>> {
        let chunk = self.chunks.get(logical);
        chunk.map(|chunk| profile::reserved_ranges(chunk.start(), &chunk.item, &chunk.geometry)).unwrap_or_default()
    }

    /// Number of readable copies at this address; 0 outside chunks.
    pub fn num_copies(&self, logical: Logical) -> usize {
        self.chunks.get(logical).map_or(0, |chunk| chunk.geometry.nr_copies())
    }

    /// All devices, including missing ones.
    pub fn devices(&self) -> Vec<DeviceSummary> {
        let summary = |member: Arc<Member>| {
            let item = member.item.read();
            DeviceSummary {
                devid: item.devid,
                uuid: item.uuid,
                total_bytes: item.total_bytes,
                bytes_used: self.chunks.used_bytes(item.devid),
                path: member.device().map(|device| device.location()),
                state: member.state(),
                is_seed: member.is_seed(),
            }
        };
        self.members().into_iter().map(summary).collect()
    }

    /// The current device item, which [`Volumes::write_superblock`] also puts into the device's superblock.
    pub fn dev_item(&self, devid: DevId) -> Option<DevItem> {
        Some(self.member(devid)?.item.read().clone())
    }

    /// Makes a seed device a member, if no other member has its id (E2 of `seed`).
    fn add_seed(&self, devid: DevId, uuid: Uuid) {
        if self.member(devid).is_some() {
            return;
        }
        if let Some(seed) = self.seed_member(devid, uuid) {
            self.devices.write().entry(devid.0).or_insert_with(|| Arc::new(seed));
        }
    }

    /// Sets a device item from the chunk tree. An unknown device id adds a missing device. An item that contradicts its
    /// device is corrupt (I4).
    pub fn set_dev_item(&self, item: &DevItem) -> Result<()> {
        self.add_seed(item.devid, item.uuid);
        let mut devices = self.devices.write();
        let Some(member) = devices.get(&item.devid.0) else {
            if devices.values().filter(|member| member.is_known()).count() as u64 >= self.superblock.num_devices {
                let expected = "expected a device that the superblock counts";
                let cause = FormatError::Value { what: "DevItem", field: "devid", value: item.devid.0, expected };
                return Err(Corrupt::new(cause).in_tree(RootId::CHUNK_TREE).into());
            }
            let missing = Member::missing(item.clone());
            let is_seed = item.fsid != self.superblock.node_fsid();
            devices.insert(item.devid.0, Arc::new(if is_seed { missing.into_seed() } else { missing }));
            return Ok(());
        };
        let mut known = member.item.write();
        let wrong = |field, expected| {
            let cause = FormatError::Value { what: "DevItem", field, value: item.devid.0, expected };
            Err(Corrupt::new(cause).in_tree(RootId::CHUNK_TREE).into())
        };
        let mismatch = |field, found: Uuid, expected: Uuid| {
            let (found, expected) = (found.to_string().into(), expected.to_string().into());
            let cause = FormatError::Mismatch { what: "DevItem", field, found, expected };
            Err(Corrupt::new(cause).in_tree(RootId::CHUNK_TREE).into())
        };
        if known.uuid != item.uuid && member.state().behind_at().is_some() {
            return Err(Error::Refused {
                what: format!("{} was replaced: device {} has another UUID now", member.describe(), item.devid),
                hint: "do not give it",
            });
        }
        if known.uuid != item.uuid {
            return mismatch("uuid", item.uuid, known.uuid);
        }
        if known.fsid != item.fsid && self.interrupted_fsid() != Some(item.fsid) {
            return mismatch("fsid", item.fsid, known.fsid);
        }
        if let Some(device) = member.device().filter(|device| device.len_bytes() < item.total_bytes)
            && member.is_seed()
        {
            return Err(membership::truncated(
                device.as_ref(),
                item.total_bytes,
                "restore the whole seed; ubtrfs changed nothing",
            ));
        }
        if member.device().is_some_and(|device| device.len_bytes() < item.total_bytes) {
            return wrong("total_bytes", "expected at most the device's size");
        }
        self.check_seed_is_unchanged(member, item)?;
        member.set_known();
        *known = item.clone();
        Ok(())
    }

    /// The new filesystem id, if a change of it was interrupted (R4 of `rewrite_id`): then tree blocks and device items may
    /// have either.
    pub fn interrupted_fsid(&self) -> Option<Uuid> {
        (self.superblock.flags & flags::CHANGING_FSID != 0).then_some(self.superblock.fsid)
    }

    /// Extends a present device to its end ([`ubtrfs_device::Device::grow_to_end`]), and returns its size in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device; [`Error::Io`] if the device's size cannot be read.
    pub fn device_len(&self, devid: DevId) -> Result<u64> {
        let member = self.member(devid);
        let Some(backend) = member.as_ref().and_then(|member| member.backend()) else {
            return Err(Error::Refused {
                what: format!("device {devid} does not exist or was not given"),
                hint: "see: ubtrfs filesystem show",
            });
        };
        backend.grow_to_end().map_err(|source| Error::io("find the size", backend.describe(), 0, 0, source))
    }

    /// Restricts new chunks, and new places of chunks, to the part of a device below `end`. `None` removes the limit.
    pub fn limit_device(&self, devid: DevId, end: Option<u64>) {
        self.chunks.limit(devid, end);
    }

    /// The chunks with a stripe that ends past `end` on a device, or that a migration is moving past `end`.
    pub fn chunks_past(&self, devid: DevId, end: u64) -> Vec<Logical> {
        self.chunks.behind(devid, end)
    }

    /// Whether the chunk of a block group lies partly below `end` on a device and partly past it.
    pub fn chunk_crosses(&self, start: Logical, devid: DevId, end: u64) -> bool {
        self.chunks.crosses(start, devid, end)
    }

    /// Error counters of each device, in this order: write, read, flush, corruption, generation.
    pub fn stats(&self) -> Vec<(DevId, DevStatsItem)> {
        self.devices.read().iter().map(|(&devid, member)| (DevId(devid), member.stats_item())).collect()
    }

    /// Whether counters changed since they were last taken.
    pub fn have_stats_changed(&self) -> bool {
        self.devices.read().values().any(|member| member.have_stats_changed())
    }

    /// Takes the records of devices that changed since the last call. The running commit stores them in the device tree; `committed` is the generation of the commit
    /// before.
    pub fn take_changed_records(&self, committed: Generation) -> Vec<(DevId, DeviceRecord)> {
        let taken = |member: Arc<Member>| Some((member.devid(), member.take_changed_record(committed)?));
        self.members().into_iter().filter_map(taken).collect()
    }

    /// Takes over the record of a device from the device tree: adds its error counts to the counters of the device.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the device is behind by more than one commit, and the record proves that it was written apart
    /// (M4 of `member`). Also if it missed a commit and was not named (I5 there).
    pub fn add_record(&self, devid: DevId, record: &DeviceRecord) -> Result<()> {
        let Some(member) = self.member(devid) else { return Ok(()) };
        let (found, newest) = (member.found_root.1, self.superblock.generation);
        let was_complete = member.is_complete();
        let is_apart = member.add_record(record, newest);
        if was_complete && !member.is_complete() {
            self.kicks.count();
            if found < newest && member.device().is_some_and(|device| device.is_found()) {
                return Err(membership::unnamed(&member.describe()));
            }
        }
        match is_apart {
            true => Err(membership::split_brain(&member.describe(), "the newest device", found)),
            false => Ok(()),
        }
    }

    /// Sets the error counters of all devices, or of one, to 0, and returns the counters before.
    pub fn reset_stats(&self, of: Option<DevId>) -> Vec<(DevId, DevStatsItem)> {
        let devices = self.devices.read();
        let wanted = devices.iter().filter(|(devid, _)| of.is_none_or(|of| of.0 == **devid));
        wanted.map(|(&devid, member)| (DevId(devid), member.reset_stats())).collect()
    }

    /// Whether any device supports discards.
    pub fn can_discard(&self) -> bool {
        self.members().iter().filter_map(|member| member.backend()).any(|backend| backend.can_discard())
    }

    /// Whether any device uses io_uring for large reads and writes.
    pub fn has_io_uring(&self) -> bool {
        self.members().iter().filter_map(|member| member.backend()).any(|backend| backend.has_io_uring())
    }

    pub(crate) fn sectorsize(&self) -> u32 {
        self.superblock.sectorsize
    }

    /// Whether the filesystem has several devices, missing ones included.
    pub fn has_several_devices(&self) -> bool {
        self.devices.read().len() > 1
    }

    pub(crate) fn member(&self, devid: DevId) -> Option<Arc<Member>> {
        self.devices.read().get(&devid.0).cloned()
    }

    pub(crate) fn members(&self) -> Vec<Arc<Member>> {
        self.devices.read().values().cloned().collect()
    }

    /// The devices that are not of a seed: those that have this filesystem's superblock, and are written (E1 of `seed`).
    pub(crate) fn own_members(&self) -> Vec<Arc<Member>> {
        self.devices.read().values().filter(|member| !member.is_seed()).cloned().collect()
    }

    /// The devices on which chunks can have stripes: all but those of seeds (E3 of `seed`).
    pub(crate) fn placeable(&self) -> Vec<PlaceableDevice> {
        self.own_members().iter().map(|member| PlaceableDevice::of(member)).collect()
    }

    /// The devices that can be written.
    pub(crate) fn present(&self) -> Vec<PlaceableDevice> {
        self.placeable().into_iter().filter(|device| !device.is_missing).collect()
    }

    /// Ends the loading of the chunk tree: leaves out given devices that have no device item (I3), and checks that the
    /// devices of all chunks exist.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no given device has an item; [`Error::Corrupt`] if a chunk names an unknown device.
    pub fn settle_members(&self) -> Result<()> {
        self.release_seeds();
        let unknown: Vec<Arc<Member>> = self.members().into_iter().filter(|member| !member.is_known()).collect();
        for member in &unknown {
            self.devices.write().remove(&member.devid().0);
            let why = "it was removed from this filesystem, or it was not added to the end";
            self.not_used.lock().push(format!("{} is not used: {why}", member.describe()));
        }
        if self.sprouts_from.is_none() && self.own_members().iter().all(|member| member.device().is_none()) {
            let names: Vec<String> = unknown.iter().map(|member| member.describe()).collect();
            return Err(Error::Refused {
                what: format!("{} was removed from this filesystem", names.join(", ")),
                hint: "give the devices that it has",
            });
        }
        if self.members().iter().any(|member| member.state() == MemberState::Missing) {
            // C4 of `commit_super`, also if as many devices were given as the filesystem has.
            self.kicks.count();
            return Ok(());
        }
        for chunk in self.chunks.all() {
            let is_unknown = |stripe: &&Stripe| self.member(stripe.devid).is_none();
            if let Some(stripe) = chunk.item.stripes.iter().find(is_unknown) {
                let cause = FormatError::Value {
                    what: "chunk",
                    field: "stripe devid",
                    value: stripe.devid.0,
                    expected: "expected a device of the filesystem",
                };
                return Err(Corrupt::new(cause).at(chunk.start()).into());
            }
        }
        Ok(())
    }

    /// Calls `look` with the space of a device, up to the device's limit.
    pub(crate) fn with_space<T>(&self, device: &PlaceableDevice, look: impl FnOnce(&DeviceSpace) -> T) -> T {
        self.chunks.with_space(device.devid, device.total_bytes, look)
    }
}

/// The fields of a device item that the placing of chunks needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceableDevice {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    pub(crate) total_bytes: u64,
    /// Whether nothing can be written to the device now.
    pub(crate) is_missing: bool,
}

impl PlaceableDevice {
    pub(crate) fn of(member: &Member) -> Self {
        let is_missing = member.backend().is_none();
        let item = member.item.read();
        Self { devid: item.devid, uuid: item.uuid, total_bytes: item.total_bytes, is_missing }
    }
}

/// Makes the error for an address outside all chunks.
pub(crate) fn unmapped(logical: Logical) -> Error {
    let cause = FormatError::Value {
        what: "address",
        field: "bytenr",
        value: logical.0,
        expected: "expected an address in a chunk",
    };
    Corrupt::new(cause).at(logical).into()
}

fn write_refusal(newest: &Superblock, primary_lost: Option<&str>) -> Option<String> {
    features::write_refusal(newest).or_else(|| {
        primary_lost.map(|device| {
            format!(
                "the primary superblock of {device} was overwritten, and a mirror was used; if {device} is this filesystem, write \
                 it anew with: ubtrfs rescue super-recover {device}"
            )
        })
    })
}
