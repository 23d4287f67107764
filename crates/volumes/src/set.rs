//! [`Volumes`]: the open devices of a filesystem, their items, chunks and superblocks.
//!
//! Invariants:
//! - I1. Device ids in the set are unique. A device that has a device item, but was not passed to [`Volumes::open`],
//!   has no backend.
//! - I2. A device item equals the device item in the chunk tree, or the device item that the running commit will
//!   store there; callers that record device extents update `bytes_used`. The chunk map may differ from the chunk
//!   tree: it includes chunks not recorded yet, and chunks whose removal is not durable yet.
//! - I3. Mirrors of a superblock are written after the primary is durable, so a valid durable superblock always exists.
//! - I4. The device item of a present device keeps the UUIDs of the superblock read from that device. A superblock that
//!   [`check_superblock`] would refuse is never written, so crafted items cannot make the next open fail.
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
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem, DevStatsItem};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{Corrupt, DevId, FormatError, Key, KeyType, Logical, Profile, check_superblock, objectid};
use uuid::Uuid;

use crate::allocation::{self, Place, Wish};
use crate::chunk_map::{Chunk, ChunkMap};
use crate::device_space::DeviceSpace;
use crate::ownership::{LastCheck, Primary};
use crate::superblock::{self, Found};
use crate::{features, profile};

/// Options for opening a filesystem's devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Whether nothing may be written, not even repairs.
    pub read_only: bool,
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
}

/// Indexes of the error counters in a `DevStatsItem`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stat {
    Write = 0,
    Read = 1,
    Flush = 2,
    Corruption = 3,
}

/// A device of the set.
#[derive(Debug)]
pub(crate) struct Member {
    /// The current device item. At open it is the superblock's item; after that it is the chunk tree's item, which
    /// commits change (I2).
    item: RwLock<DevItem>,
    /// The device, or `None` if it is missing.
    pub(crate) backend: Option<Arc<dyn Device>>,
    /// The primary superblock as last read or written (see `ownership`).
    pub(crate) primary: Mutex<Primary>,
    stats: [AtomicU64; 5],
    stats_changed: AtomicBool,
}

impl Member {
    fn new(item: DevItem, backend: Option<Arc<dyn Device>>) -> Self {
        let primary = Mutex::new(backend.as_deref().map(Primary::read).unwrap_or_default());
        let (stats, stats_changed) = (Default::default(), AtomicBool::new(false));
        Self { item: RwLock::new(item), backend, primary, stats, stats_changed }
    }

    pub(crate) fn count(&self, stat: Stat) {
        self.stats[stat as usize].fetch_add(1, Ordering::Relaxed);
        self.stats_changed.store(true, Ordering::Release);
    }

    fn stats_item(&self) -> DevStatsItem {
        DevStatsItem { values: std::array::from_fn(|n| self.stats[n].load(Ordering::Relaxed)) }
    }

    pub(crate) fn describe(&self) -> String {
        match &self.backend {
            Some(backend) => backend.describe(),
            None => format!("missing device {}", self.item.read().devid),
        }
    }
}

/// The devices of one filesystem.
#[derive(Debug)]
pub struct Volumes {
    superblock: Superblock,
    superblock_mirror: usize,
    write_refusal: Option<String>,
    /// Number of devices that were passed to [`Volumes::open`].
    nr_given: u64,
    /// Whether the caller or a device requires read-only access.
    read_only: bool,
    devices: RwLock<BTreeMap<u64, Arc<Member>>>,
    pub(crate) chunks: ChunkMap,
    /// This lock is held shared during a write and exclusively during a repair, because a repair must not overwrite
    /// newer content.
    pub(crate) repair_lock: RwLock<()>,
    /// The time of the last check of the superblocks (see `ownership`).
    pub(crate) last_look: LastCheck,
}

impl Volumes {
    /// Opens a filesystem on these devices. Fails if a device has no valid superblock, is truncated or belongs to
    /// another filesystem, or if the filesystem has features that this program cannot read. [`Volumes::write_refusal`]
    /// says whether the filesystem can be written.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: OpenOptions) -> Result<Self> {
        let mut found: Vec<(Found, Arc<dyn Device>)> = Vec::with_capacity(devices.len());
        for device in devices {
            found.push((superblock::find(device.as_ref())?, device));
        }
        let Some(newest) = found.iter().map(|(found, _)| found).max_by_key(|found| found.superblock.generation) else {
            return Err(Error::Refused { what: "no device was given".to_owned(), hint: "give at least one device" });
        };
        let newest = newest.clone();
        features::check_readable(&newest.superblock)?;
        let mut members = BTreeMap::new();
        for (Found { superblock, .. }, device) in &found {
            check_member(superblock, &newest.superblock, device.as_ref())?;
            let item = superblock.dev_item.clone();
            let devid = item.devid.0;
            let member = Arc::new(Member::new(item, Some(device.clone())));
            if let Some(other) = members.insert(devid, member) {
                return Err(Error::Refused {
                    what: format!("{} and {} are both device {devid}", other.describe(), device.describe()),
                    hint: "give only one of them",
                });
            }
        }
        let write_refusal = write_refusal(&newest, &found);
        let volumes = Self {
            superblock_mirror: newest.mirror,
            superblock: newest.superblock,
            write_refusal,
            nr_given: found.len() as u64,
            read_only: options.read_only || found.iter().any(|(_, device)| device.is_read_only()),
            devices: RwLock::new(members),
            chunks: ChunkMap::default(),
            repair_lock: RwLock::new(()),
            last_look: LastCheck::default(),
        };
        volumes.add_system_chunks()?;
        Ok(volumes)
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
            self.add_chunk(Logical(key.offset), ChunkItem::read(&mut reader)?)?;
        }
        if self.chunks.get(sb.chunk_root).is_none() {
            return Err(unmapped(sb.chunk_root));
        }
        Ok(())
    }

    /// The reason why the filesystem cannot be written, if any, such as unsupported features or profiles, or several
    /// devices. The reason also names missing devices. The result is final once all device items and chunks are added.
    /// The result does not depend on [`OpenOptions::read_only`].
    pub fn write_refusal(&self) -> Option<String> {
        let reason = self.write_refusal.clone().or_else(|| {
            let is_other = |chunk: &&Arc<Chunk>| allocation::nr_stripes(chunk.item.flags).is_none();
            let chunks = self.chunks.all();
            let other = chunks.iter().find(is_other)?;
            Some(format!("{} chunks are supported for reading only", Profile::name_of(other.item.flags)))
        })?;
        Some(match self.missing_devices() {
            Some(missing) => format!("{reason}; {missing}"),
            None => reason,
        })
    }

    /// A text with the number of given devices and, once the device items are loaded, the names of the missing devices.
    /// `None` if no device is missing.
    fn missing_devices(&self) -> Option<String> {
        if !self.may_lack_devices() {
            return None;
        }
        let counted = format!("{} of its {} devices were given", self.nr_given, self.superblock.num_devices);
        let devices = self.devices.read();
        let missing = devices.values().filter(|member| member.backend.is_none());
        let named: Vec<String> = missing
            .map(|member| {
                let item = member.item.read();
                format!("device {} (uuid {})", item.devid, item.uuid)
            })
            .collect();
        Some(if named.is_empty() { counted } else { format!("{counted}; missing: {}", named.join(", ")) })
    }

    /// The superblock read at open.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The mirror from which the superblock was read; 0 is the primary at 64 KiB.
    pub fn superblock_mirror(&self) -> usize {
        self.superblock_mirror
    }

    /// Whether fewer devices were passed to [`Volumes::open`] than the superblock says that the filesystem has. A
    /// filesystem without all of its devices is never written.
    fn may_lack_devices(&self) -> bool {
        self.superblock.num_devices > self.nr_given
    }

    /// Fails unless writing is allowed.
    pub(crate) fn check_writable(&self) -> Result<()> {
        let reason = match &self.write_refusal {
            Some(reason) => reason.clone(),
            None if self.read_only => "opened read-only".to_owned(),
            None => return Ok(()),
        };
        Err(Error::ReadOnly { reason })
    }

    /// Adds a chunk of the chunk tree. Adding an equal chunk again is allowed. A chunk that overlaps another,
    /// contradicts itself or ends past its device is corrupt.
    pub fn add_chunk(&self, logical: Logical, chunk: ChunkItem) -> Result<()> {
        let stripe_len = profile::Geometry::of(logical, &chunk, self.superblock.sectorsize)
            .map_err(|cause| Corrupt::new(cause).at(logical))?
            .stripe_len_bytes();
        for stripe in &chunk.stripes {
            let Some(member) = self.member(stripe.devid) else {
                if self.may_lack_devices() {
                    continue;
                }
                let cause = FormatError::Value {
                    what: "chunk",
                    field: "stripe devid",
                    value: stripe.devid.0,
                    expected: "expected a device of the filesystem",
                };
                return Err(Corrupt::new(cause).at(logical).into());
            };
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
        let present = self.present();
        let ends = present.iter().map(|device| self.with_space(device, DeviceSpace::end));
        let total_bytes = ends.fold(0, u64::saturating_add);
        let wish = Wish::new(flags, total_bytes, max_len)?;
        let place = |device: &PresentDevice| {
            self.with_space(device, |space| {
                Some(Place {
                    devid: device.devid,
                    uuid: device.uuid,
                    hole: space.best_hole(wish.device_bytes())?,
                    unallocated_bytes: space.unallocated_bytes(),
                })
            })
        };
        let places = present.iter().filter_map(place);
        allocation::plan(places, &wish, self.superblock.sectorsize, self.chunks.next_logical())
    }

    /// Device bytes available to new chunks.
    pub fn unallocated_bytes(&self) -> u64 {
        self.present().iter().map(|device| self.with_space(device, DeviceSpace::unallocated_bytes)).sum()
    }

    /// Ranges of the devices that belong to no chunk, without superblock mirrors.
    pub fn unallocated_ranges(&self) -> Vec<(DevId, Range<u64>)> {
        let holes = |device: &PresentDevice| -> Vec<(DevId, Range<u64>)> {
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
        let backend = self.member(devid).and_then(|member| member.backend.clone());
        let Some(backend) = backend.filter(|_| is_free) else { return Ok(0) };
        let len_bytes = range.end.saturating_sub(range.start);
        let discarded = backend.discard(range.start, len_bytes);
        discarded.map_err(|source| Error::io("discard", backend.describe(), range.start, len_bytes, source))?;
        Ok(len_bytes)
    }

    /// Logical bytes that new chunks of this type and profile can hold on the devices.
    pub fn allocatable_bytes(&self, flags: BlockGroupFlags) -> u64 {
        let Some(nr_stripes) = allocation::nr_stripes(flags) else { return 0 };
        let of = |device: &PresentDevice| self.with_space(device, |space| space.allocatable_bytes(nr_stripes.get()));
        self.present().iter().map(of).sum()
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
                path: member.backend.as_ref().map(|backend| backend.location()),
            }
        };
        self.members().into_iter().map(summary).collect()
    }

    /// The current device item, which [`Volumes::write_superblock`] also puts into the device's superblock.
    pub fn dev_item(&self, devid: DevId) -> Option<DevItem> {
        Some(self.member(devid)?.item.read().clone())
    }

    /// Sets a device item from the chunk tree. An unknown device id adds a missing device. An item that contradicts its
    /// device is corrupt (I4).
    pub fn set_dev_item(&self, item: &DevItem) -> Result<()> {
        let mut devices = self.devices.write();
        let Some(member) = devices.get(&item.devid.0) else {
            if !self.may_lack_devices() {
                let expected = "expected a device that the superblock counts";
                let cause = FormatError::Value { what: "DevItem", field: "devid", value: item.devid.0, expected };
                return Err(Corrupt::new(cause).in_tree(ubtrfs_format::RootId::CHUNK_TREE).into());
            }
            devices.insert(item.devid.0, Arc::new(Member::new(item.clone(), None)));
            return Ok(());
        };
        let mut known = member.item.write();
        let wrong = |field, expected| {
            let cause = FormatError::Value { what: "DevItem", field, value: item.devid.0, expected };
            Err(Corrupt::new(cause).in_tree(ubtrfs_format::RootId::CHUNK_TREE).into())
        };
        let mismatch = |field, found: Uuid, expected: Uuid| {
            let (found, expected) = (found.to_string().into(), expected.to_string().into());
            let cause = FormatError::Mismatch { what: "DevItem", field, found, expected };
            Err(Corrupt::new(cause).in_tree(ubtrfs_format::RootId::CHUNK_TREE).into())
        };
        if known.uuid != item.uuid {
            return mismatch("uuid", item.uuid, known.uuid);
        }
        if known.fsid != item.fsid {
            return mismatch("fsid", item.fsid, known.fsid);
        }
        if member.backend.as_ref().is_some_and(|backend| backend.len_bytes() < item.total_bytes) {
            return wrong("total_bytes", "expected at most the device's size");
        }
        *known = item.clone();
        Ok(())
    }

    /// Extends a present device to its end ([`ubtrfs_device::Device::grow_to_end`]), and returns its size in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device; [`Error::Io`] if the device's size cannot be read.
    pub fn device_len(&self, devid: DevId) -> Result<u64> {
        let member = self.member(devid);
        let Some(backend) = member.as_ref().and_then(|member| member.backend.as_ref()) else {
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
        self.devices.read().values().any(|member| member.stats_changed.load(Ordering::Acquire))
    }

    /// Takes the counters that changed since the last call. The next commit stores the taken counters in the device
    /// tree.
    pub fn take_changed_stats(&self) -> Vec<(DevId, DevStatsItem)> {
        let devices = self.devices.read();
        let changed = devices.iter().filter(|(_, member)| member.stats_changed.swap(false, Ordering::AcqRel));
        changed.map(|(&devid, member)| (DevId(devid), member.stats_item())).collect()
    }

    /// Adds the error counts from the device tree to the counters of a device.
    pub fn set_stats(&self, devid: DevId, stats: &DevStatsItem) {
        let Some(member) = self.member(devid) else { return };
        for (counter, value) in member.stats.iter().zip(stats.values) {
            counter.fetch_add(value, Ordering::Relaxed);
        }
    }

    /// Sets the error counters of all devices to 0, and returns the counters before.
    pub fn reset_stats(&self) -> Vec<(DevId, DevStatsItem)> {
        let devices = self.devices.read();
        let reset = |(&devid, member): (&u64, &Arc<Member>)| {
            let values = std::array::from_fn(|n| member.stats[n].swap(0, Ordering::Relaxed));
            member.stats_changed.store(true, Ordering::Release);
            (DevId(devid), DevStatsItem { values })
        };
        devices.iter().map(reset).collect()
    }

    /// Whether any device supports discards.
    pub fn can_discard(&self) -> bool {
        self.members().iter().filter_map(|member| member.backend.as_ref()).any(|backend| backend.can_discard())
    }

    /// Whether any device uses io_uring for large reads and writes.
    pub fn has_io_uring(&self) -> bool {
        self.members().iter().filter_map(|member| member.backend.as_ref()).any(|backend| backend.has_io_uring())
    }

    /// Makes all completed writes durable on every device.
    pub fn flush(&self) -> Result<()> {
        for member in self.members() {
            let Some(backend) = &member.backend else { continue };
            backend.flush().map_err(|source| {
                member.count(Stat::Flush);
                Error::io("flush", backend.describe(), 0, 0, source)
            })?;
        }
        Ok(())
    }

    /// Writes the superblock to all devices, and fills in `bytenr`, `dev_item` and `csum` for each mirror.
    ///
    /// Call [`Volumes::flush`] first, because everything the superblock refers to must be durable. After `Ok`, the
    /// primary superblocks are durable (I3); the mirrors become durable with the next flush. After an error, a later
    /// mount may find the old or the new superblock.
    pub fn write_superblock(&self, sb: &Superblock) -> Result<()> {
        self.check_writable()?;
        self.check_superblocks_are_ours()?;
        let members: Vec<Arc<Member>> = self.members();
        for member in &members {
            self.write_mirror(sb, member, SUPERBLOCK_OFFSETS[0])?;
        }
        self.flush()?;
        for member in &members {
            for offset in &SUPERBLOCK_OFFSETS[1..] {
                // The commit is durable already, so a failed write of a mirror is only counted.
                let _counted = self.write_mirror(sb, member, *offset);
            }
        }
        Ok(())
    }

    /// Writes `sb`, which differs from the last written superblock in its log root, to the primary superblocks only.
    /// The primary superblocks are durable on return. The mirrors stay at the last commit.
    pub fn write_log_superblock(&self, sb: &Superblock) -> Result<()> {
        self.check_writable()?;
        self.check_superblocks_are_ours()?;
        for member in &self.members() {
            self.write_mirror(sb, member, SUPERBLOCK_OFFSETS[0])?;
        }
        self.flush()
    }

    fn write_mirror(&self, sb: &Superblock, member: &Member, offset: u64) -> Result<()> {
        let Some(backend) = &member.backend else { return Ok(()) };
        let devid = member.item.read().devid;
        let Some(dev_item) = self.dev_item(devid) else { return Ok(()) };
        if !superblock::fits(offset, dev_item.total_bytes) {
            // Without a primary superblock, the commit would be lost.
            return if offset == SUPERBLOCK_OFFSETS[0] { Err(too_small(&dev_item)) } else { Ok(()) };
        }
        let own = Superblock { bytenr: offset, dev_item, ..sb.clone() };
        let raw = own.encode_with_csum();
        check_superblock(&own, &raw)?;
        let is_primary = offset == SUPERBLOCK_OFFSETS[0];
        let mut primary = is_primary.then(|| member.primary.lock());
        if let Some(primary) = &mut primary {
            primary.begin_write();
        }
        backend.write_at(offset, &raw).map_err(|source| {
            member.count(Stat::Write);
            let len_bytes = SUPERBLOCK_SIZE as u64;
            Error::io("write", backend.describe(), offset, len_bytes, source)
        })?;
        if let Some(primary) = &mut primary {
            primary.wrote(&raw);
        }
        Ok(())
    }

    pub(crate) fn sectorsize(&self) -> u32 {
        self.superblock.sectorsize
    }

    pub(crate) fn member(&self, devid: DevId) -> Option<Arc<Member>> {
        self.devices.read().get(&devid.0).cloned()
    }

    pub(crate) fn members(&self) -> Vec<Arc<Member>> {
        self.devices.read().values().cloned().collect()
    }

    /// The devices that are not missing.
    pub(crate) fn present(&self) -> Vec<PresentDevice> {
        let members = self.members();
        let present = members.iter().filter(|member| member.backend.is_some()).map(|member| {
            let item = member.item.read();
            PresentDevice { devid: item.devid, uuid: item.uuid, total_bytes: item.total_bytes }
        });
        present.collect()
    }

    /// Calls `look` with the space of a device, up to the device's limit.
    pub(crate) fn with_space<T>(&self, device: &PresentDevice, look: impl FnOnce(&DeviceSpace) -> T) -> T {
        self.chunks.with_space(device.devid, device.total_bytes, look)
    }
}

/// The fields of a device item that the placing of chunks needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PresentDevice {
    pub(crate) devid: DevId,
    pub(crate) uuid: Uuid,
    pub(crate) total_bytes: u64,
}

fn too_small(item: &DevItem) -> Error {
    let (what, field, value) = ("DevItem", "total_bytes", item.total_bytes);
    FormatError::Value { what, field, value, expected: "expected room for a superblock" }.into()
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

/// Checks that a device belongs to the filesystem with this superblock and is not truncated.
fn check_member(own: &Superblock, newest: &Superblock, device: &dyn Device) -> Result<()> {
    if own.fsid != newest.fsid {
        return Err(Error::Refused {
            what: format!("{} belongs to filesystem {}, not {}", device.describe(), own.fsid, newest.fsid),
            hint: "give the devices of one filesystem",
        });
    }
    let (wanted, have) = (own.dev_item.total_bytes, device.len_bytes());
    if have < wanted {
        return Err(Error::Refused {
            what: format!("{} is truncated: it has {have} bytes, and the filesystem needs {wanted}", device.describe()),
            hint: "restore the whole image; ubtrfs changed nothing",
        });
    }
    Ok(())
}

fn write_refusal(newest: &Found, found: &[(Found, Arc<dyn Device>)]) -> Option<String> {
    let sb = &newest.superblock;
    if let Some(reason) = features::write_refusal(sb) {
        return Some(reason);
    }
    if let Some((_, device)) = found.iter().find(|(found, _)| found.primary_lost) {
        return Some(format!(
            "the primary superblock of {0} was overwritten, and a mirror was used; if {0} is this filesystem, write it anew with: \
             ubtrfs rescue super-recover {0}",
            device.describe()
        ));
    }
    if sb.num_devices > found.len() as u64 {
        return Some("a filesystem with missing devices is supported for reading only".to_owned());
    }
    if found.len() > 1 {
        return Some("filesystems of several devices are supported for reading only".to_owned());
    }
    None
}
