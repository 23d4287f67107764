//! The chunk map: translates logical addresses to chunks, and records the device extents of their stripes.
//!
//! Invariants:
//! - I1. Chunks in the map overlap neither in logical addresses nor on a device, and each chunk passed
//!   [`ChunkGeometry::of`].
//! - I2. No chunk and no migration target is added past the limit of a device.
//! - I3. `next_logical` never decreases. The addresses of a removed chunk are not used again while the filesystem is
//!   open, so caches by address stay correct.
//!
//! Lock order: no other lock is taken under the map's lock.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::ChunkItem;
use ubtrfs_format::{Corrupt, DevId, FormatError, Logical, LogicalRange};

use crate::device_space::DeviceSpace;
use crate::migration::MigrationTarget;
use crate::profile::ChunkGeometry;

/// A chunk in the map.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) range: LogicalRange,
    pub(crate) geometry: ChunkGeometry,
    pub(crate) item: Arc<ChunkItem>,
    /// The migration's target, while the chunk is being migrated.
    pub(crate) target: Option<Arc<MigrationTarget>>,
    /// A token that all versions of the chunk share as long as the chunk's stripes lie in the same places. While a
    /// reader uses these places, it keeps a version of the chunk and so a reference to the token.
    place: Arc<()>,
}

impl Chunk {
    pub(crate) fn start(&self) -> Logical {
        self.range.start()
    }

    /// Whether the stripes lie on more than one device.
    pub(crate) fn is_on_several_devices(&self) -> bool {
        let first = self.item.stripes.first().map(|stripe| stripe.devid);
        self.item.stripes.iter().any(|stripe| Some(stripe.devid) != first)
    }

    /// The device extents of the chunk's stripes.
    fn device_extents(&self) -> impl Iterator<Item = (DevId, Range<u64>)> {
        let len = self.geometry.stripe_len_bytes();
        self.item.stripes.iter().map(move |stripe| (stripe.devid, stripe.offset.0..stripe.offset.advance(len).0))
    }
}

#[derive(Debug, Default)]
struct MappedChunks {
    chunks: BTreeMap<Logical, Arc<Chunk>>,
    /// Device extents and holes of each device: extents of chunks, of migration targets, and of old places that readers
    /// still use.
    spaces: BTreeMap<DevId, DeviceSpace>,
    next_logical: Logical,
    /// Old places of migrated chunks, which readers may still use.
    migrated: Vec<Migrated>,
    /// Limits of devices: new chunks and migration targets end below the limit of their device.
    limits: BTreeMap<DevId, u64>,
}

/// The old place of a migrated chunk.
#[derive(Debug)]
struct Migrated {
    /// The token that every version of the chunk in that place holds.
    place: Arc<()>,
    /// Devices and starts of the device extents to free when the place is unused.
    left: Vec<(DevId, u64)>,
}

impl MappedChunks {
    /// Registers device extents. The added extents must overlap no other device extent and end within the device's
    /// limit.
    fn add_device_extents(&mut self, logical: Logical, added: &[(DevId, Range<u64>)]) -> Result<()> {
        let is_behind =
            |(devid, extent): &(DevId, Range<u64>)| self.limits.get(devid).is_some_and(|end| extent.end > *end);
        if added.iter().any(is_behind) {
            return Err(Error::NoSpace);
        }
        for (nr_added, (devid, extent)) in added.iter().enumerate() {
            if !self.spaces.entry(*devid).or_default().insert(extent.clone()) {
                added.iter().take(nr_added).for_each(|(devid, extent)| self.remove_device_extent(*devid, extent.start));
                return Err(conflict(logical, "expected no overlap with another chunk on the device").into());
            }
        }
        Ok(())
    }

    fn remove_device_extent(&mut self, devid: DevId, start: u64) {
        if let Some(space) = self.spaces.get_mut(&devid) {
            space.remove(start);
        }
    }

    /// Frees the old places that no reader uses any more (G3 of `migration`).
    fn free_migrated(&mut self) {
        let is_used = |old: &mut Migrated| Arc::strong_count(&old.place) > 1;
        let unused: Vec<Migrated> = self.migrated.extract_if(.., |old| !is_used(old)).collect();
        for (devid, start) in unused.into_iter().flat_map(|old| old.left) {
            self.remove_device_extent(devid, start);
        }
    }
}

/// All chunks, by start address.
#[derive(Debug, Default)]
pub(crate) struct ChunkMap {
    inner: RwLock<MappedChunks>,
    /// Chunks and device extents visited by walks of all of them.
    walked: AtomicU64,
}

fn conflict(logical: Logical, expected: &'static str) -> Corrupt {
    let cause = FormatError::Value { what: "chunk", field: "logical", value: logical.0, expected };
    Corrupt::new(cause).at(logical)
}

impl ChunkMap {
    /// Adds a chunk (I1). Adding an equal chunk again is allowed; a chunk that overlaps another is an error.
    pub(crate) fn add(&self, logical: Logical, item: ChunkItem, sectorsize: u32) -> Result<()> {
        let corrupt = |cause| Corrupt::new(cause).at(logical);
        let geometry = ChunkGeometry::of(logical, &item, sectorsize).map_err(corrupt)?;
        let range = LogicalRange::new("chunk", "length", logical, item.length).map_err(corrupt)?;
        let chunk = Chunk { range, geometry, item: Arc::new(item), target: None, place: Arc::new(()) };
        let end = range.end();
        let mut inner = self.inner.write();
        if let Some(before) = inner.chunks.range(..end).next_back().map(|(_, before)| before) {
            if before.start() == logical && before.item == chunk.item {
                return Ok(());
            }
            if before.range.end() > logical {
                return Err(conflict(logical, "expected no overlap with another chunk").into());
            }
        }
        inner.free_migrated();
        inner.add_device_extents(logical, &chunk.device_extents().collect::<Vec<_>>())?;
        debug_assert!(
            inner.chunks.range(logical..end).next().is_none(),
            "I1: the chunk at {logical} overlaps another one"
        );
        inner.next_logical = inner.next_logical.max(end);
        inner.chunks.insert(logical, Arc::new(chunk));
        Ok(())
    }

    pub(crate) fn remove(&self, logical: Logical) -> Option<Arc<Chunk>> {
        let mut inner = self.inner.write();
        let chunk = inner.chunks.remove(&logical)?;
        for (devid, extent) in chunk.device_extents().chain(chunk.fresh_extents()) {
            inner.remove_device_extent(devid, extent.start);
        }
        Some(chunk)
    }

    /// Gives a chunk a target and reserves the device space of the target's fresh stripes.
    pub(crate) fn begin_migration(&self, logical: Logical, target: ChunkItem, sectorsize: u32) -> Result<()> {
        let geometry =
            ChunkGeometry::of(logical, &target, sectorsize).map_err(|cause| Corrupt::new(cause).at(logical))?;
        let mut inner = self.inner.write();
        let chunk = inner.chunks.get(&logical).filter(|chunk| chunk.target.is_none());
        let chunk = chunk.ok_or_else(|| conflict(logical, "expected a chunk that is not being migrated"))?;
        if !geometry.is_mirrored() || !chunk.geometry.is_mirrored() || target.length != chunk.item.length {
            return Err(conflict(logical, "expected mirrored chunks of one length").into());
        }
        let migrating = Chunk {
            range: chunk.range,
            geometry: chunk.geometry,
            item: Arc::clone(&chunk.item),
            target: Some(Arc::new(MigrationTarget::new(&chunk.item, target))),
            place: Arc::clone(&chunk.place),
        };
        inner.free_migrated();
        inner.add_device_extents(logical, &migrating.fresh_extents())?;
        inner.chunks.insert(logical, Arc::new(migrating));
        Ok(())
    }

    /// Replaces a chunk by its target.
    pub(crate) fn finish_migration(&self, logical: Logical, sectorsize: u32) -> Result<()> {
        let mut inner = self.inner.write();
        let Some((chunk, target)) =
            inner.chunks.get(&logical).and_then(|chunk| Some((Arc::clone(chunk), chunk.target.clone()?)))
        else {
            return Ok(());
        };
        let geometry =
            ChunkGeometry::of(logical, &target.item, sectorsize).map_err(|cause| Corrupt::new(cause).at(logical))?;
        let moved =
            Chunk { range: chunk.range, geometry, item: Arc::clone(&target.item), target: None, place: Arc::new(()) };
        let stays =
            |place: &(DevId, u64)| target.item.stripes.iter().any(|stripe| (stripe.devid, stripe.offset.0) == *place);
        let places = chunk.device_extents().map(|(devid, extent)| (devid, extent.start));
        let left = places.filter(|place| !stays(place)).collect();
        inner.chunks.insert(logical, Arc::new(moved));
        inner.migrated.push(Migrated { place: Arc::clone(&chunk.place), left });
        drop(chunk);
        inner.free_migrated();
        Ok(())
    }

    /// Removes the target of a chunk.
    pub(crate) fn cancel_migration(&self, logical: Logical) {
        let mut inner = self.inner.write();
        let Some(chunk) = inner.chunks.get(&logical).filter(|chunk| chunk.target.is_some()).cloned() else { return };
        for (devid, extent) in chunk.fresh_extents() {
            inner.remove_device_extent(devid, extent.start);
        }
        let (range, geometry, item) = (chunk.range, chunk.geometry, Arc::clone(&chunk.item));
        let place = Arc::clone(&chunk.place);
        inner.chunks.insert(logical, Arc::new(Chunk { range, geometry, item, target: None, place }));
    }

    /// Sets the limit of a device for new chunks and targets (I2), or removes the limit. Existing chunks stay.
    pub(crate) fn limit(&self, devid: DevId, end: Option<u64>) {
        let limits = &mut self.inner.write().limits;
        match end {
            Some(end) => limits.insert(devid, end),
            None => limits.remove(&devid),
        };
    }

    /// The chunks with a stripe, or a stripe of their target, that ends past `end` on a device.
    pub(crate) fn behind(&self, devid: DevId, end: u64) -> Vec<Logical> {
        let inner = self.inner.read();
        self.count_walked(inner.chunks.len());
        let is_behind = |chunk: &&Arc<Chunk>| {
            let mut extents = chunk.device_extents().chain(chunk.fresh_extents());
            extents.any(|(device, extent)| device == devid && extent.end > end)
        };
        inner.chunks.values().filter(is_behind).map(|chunk| chunk.start()).collect()
    }

    /// Whether a stripe of a chunk begins before `end` on a device and ends past it.
    pub(crate) fn crosses(&self, start: Logical, devid: DevId, end: u64) -> bool {
        let crosses =
            |(device, extent): (DevId, Range<u64>)| device == devid && (extent.start..extent.end).contains(&end);
        self.get(start).is_some_and(|chunk| chunk.device_extents().any(crosses))
    }

    /// Calls `look` with the space of a device of `total_bytes`, up to the device's limit.
    pub(crate) fn with_space<T>(&self, devid: DevId, total_bytes: u64, look: impl FnOnce(&DeviceSpace) -> T) -> T {
        let mut inner = self.inner.write();
        inner.free_migrated();
        let end = inner.limits.get(&devid).map_or(total_bytes, |limit| total_bytes.min(*limit));
        let space = inner.spaces.entry(devid).or_default();
        space.set_end(end);
        look(space)
    }

    /// Bytes of all device extents of a device.
    pub(crate) fn used_bytes(&self, devid: DevId) -> u64 {
        self.inner.read().spaces.get(&devid).map_or(0, DeviceSpace::used_bytes)
    }

    /// The chunk that covers this address.
    pub(crate) fn get(&self, logical: Logical) -> Option<Arc<Chunk>> {
        let inner = self.inner.read();
        let (_, chunk) = inner.chunks.range(..=logical).next_back()?;
        chunk.range.contains(logical).then(|| chunk.clone())
    }

    pub(crate) fn all(&self) -> Vec<Arc<Chunk>> {
        let inner = self.inner.read();
        self.count_walked(inner.chunks.len());
        inner.chunks.values().cloned().collect()
    }

    pub(crate) fn count_walked(&self, number: usize) {
        self.walked.fetch_add(number as u64, Ordering::Relaxed);
    }

    /// Number of chunks and device extents that walks of all of them have visited.
    pub(crate) fn nr_walked(&self) -> u64 {
        self.walked.load(Ordering::Relaxed)
    }

    /// The logical address for a new chunk: after every chunk that was ever in the map (I3).
    pub(crate) fn next_logical(&self) -> Logical {
        self.inner.read().next_logical
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_format::item::{BlockGroupFlags, Stripe};
    use ubtrfs_format::{DevId, Physical};
    use uuid::Uuid;

    /// A chunk whose stripe lies at `physical`.
    fn item_at(length: u64, physical: u64) -> ChunkItem {
        ChunkItem {
            length,
            owner: 2,
            stripe_len: 65536,
            flags: BlockGroupFlags::DATA,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: 1,
            stripes: vec![Stripe { devid: DevId(1), offset: Physical(physical), dev_uuid: Uuid::nil() }],
        }
    }

    fn add(map: &ChunkMap, logical: u64, length: u64) -> Result<()> {
        map.add(Logical(logical), item_at(length, (1 << 40) + logical), 4096)
    }

    #[test]
    fn a_map_finds_the_covering_chunk_and_refuses_overlap() {
        let map = ChunkMap::default();
        add(&map, 1 << 20, 1 << 20).unwrap();
        add(&map, 1 << 20, 1 << 20).unwrap();
        add(&map, 4 << 20, 1 << 20).unwrap();
        for overlap in [(1 << 20, 2 << 20), (0, 2 << 20), (1 << 20, 4096), (3 << 20, 2 << 20), (0, 1 << 30)] {
            assert!(add(&map, overlap.0, overlap.1).is_err(), "{overlap:?}");
        }
        add(&map, 2 << 20, 2 << 20).unwrap();
        let start = |logical| map.get(Logical(logical)).map(|chunk| chunk.start().0);
        assert_eq!(start(0), None);
        assert_eq!(start(1 << 20), Some(1 << 20));
        assert_eq!(start((4 << 20) - 1), Some(2 << 20));
        assert_eq!(start(5 << 20), None);
    }

    #[test]
    fn chunks_that_share_device_space_are_refused() {
        let map = ChunkMap::default();
        map.add(Logical(1 << 30), item_at(1 << 20, 8 << 20), 4096).unwrap();
        for physical in [7 << 20, (7 << 20) + 4096, 8 << 20, (9 << 20) - 4096] {
            let mut overlap = item_at(2 << 20, physical);
            overlap.flags |= BlockGroupFlags::DUP;
            overlap.stripes.insert(0, Stripe { offset: Physical(20 << 20), ..overlap.stripes[0] });
            assert!(map.add(Logical(2 << 30), overlap, 4096).is_err(), "{physical}");
        }
        let mut on_itself = item_at(2 << 20, 20 << 20);
        on_itself.flags |= BlockGroupFlags::DUP;
        on_itself.stripes.push(on_itself.stripes[0]);
        assert!(map.add(Logical(2 << 30), on_itself, 4096).is_err());
        assert_eq!(map.with_space(DevId(1), 1 << 40, DeviceSpace::nr_extents), 1);
        let mut elsewhere = item_at(1 << 20, 8 << 20);
        elsewhere.stripes[0].devid = DevId(2);
        map.add(Logical(3 << 30), elsewhere, 4096).unwrap();
        map.remove(Logical(1 << 30)).unwrap();
        assert_eq!(map.with_space(DevId(1), 1 << 40, DeviceSpace::nr_extents), 0);
    }

    #[test]
    fn addresses_of_removed_chunks_are_not_used_again() {
        let map = ChunkMap::default();
        add(&map, 1 << 20, 1 << 20).unwrap();
        map.remove(Logical(1 << 20)).unwrap();
        assert_eq!(map.next_logical(), Logical(2 << 20));
        assert!(map.all().is_empty());
    }
}
