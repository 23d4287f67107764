//! [`PendingChunks`]: new chunks that no tree records yet. A chunk is made when a kind of space runs out, and is
//! recorded in the chunk and device trees at the next commit. Its size and its place on the devices are chosen by
//! `volumes::allocation`.
//!
//! Also decides which empty block groups a commit removes ([`Engine::remove_empty_block_groups`]).
//!
//! A new chunk can be used immediately: its content is reachable only through a commit, and every commit records all
//! pending chunks before it writes its superblock. (While a chunk is pending, fsync commits instead of writing a log.)
//!
//! Invariant:
//! - C1. A commit records both a new chunk and its block group, or neither. Both become visible under the lock of the
//!   list of pending chunks, the block group first. In each round, the commit takes the dirty block groups, then locks
//!   the list and takes the pending chunks. So a commit that takes the group also takes the chunk. A round that finds a
//!   chunk is followed by another round, so a commit that takes the chunk also takes the group, in the next round at
//!   the latest.
//!
//! Owns the list of pending chunks and the lock under which chunks are made. Lock order: the making lock -> volumes,
//! the list -> space.

use std::collections::BTreeMap;

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_error::{Error, Result};
use ubtrfs_format::codec::{Field, Reader};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevExtent};
use ubtrfs_format::superblock::{Incompat, SYS_CHUNK_ARRAY_SIZE, Superblock};
use ubtrfs_format::{FormatError, Key, KeyType, Logical, LogicalRange, RootId, objectid};
use ubtrfs_space::{BlockGroup, Extent, Shortage, SpaceKind};
use ubtrfs_tree::Batch;

use crate::delayed::tree_view::Tree;
use crate::engine::Engine;
use crate::extents::block_group_claims::Emptying;
use crate::extents::free_space_tree;
use crate::handle::metadata_reservation::ReservationPurpose;

/// Chunks that are not in the chunk tree yet.
#[derive(Debug, Default)]
pub(crate) struct PendingChunks {
    list: Mutex<BTreeMap<Logical, ChunkItem>>,
    /// This lock is held while a chunk is made, so that two threads that run out of space at the same time make only
    /// one chunk.
    making: Mutex<()>,
}

impl PendingChunks {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.lock().is_empty()
    }

    /// Takes the making lock, which is held while device space for a chunk is planned and taken.
    pub(crate) fn lock_making(&self) -> MutexGuard<'_, ()> {
        self.making.lock()
    }

    pub(crate) fn contains(&self, logical: Logical) -> bool {
        self.list.lock().contains_key(&logical)
    }
}

impl Engine {
    /// Allocates space, and makes a chunk if there is no room. Returns `None` if the devices are full.
    pub(crate) fn allocate_or_make_chunk(
        &self,
        kind: SpaceKind,
        want: u64,
        min: u64,
        hint: Option<Logical>,
    ) -> Result<Option<Extent>> {
        // If a large request does not fit, accept a shorter extent rather than make another chunk, because a chunk of
        // one kind takes device space from the other kinds.
        let fair = want.min(FAIR_PIECE_BYTES).max(min);
        let allocate = || {
            let whole = self.space.allocate(kind, want, want, hint);
            whole.or_else(|| self.space.allocate(kind, want, fair, hint))
        };
        if let Some(extent) = allocate() {
            return Ok(Some(extent));
        }
        let _making = self.pending_chunks.making.lock();
        if let Some(extent) = allocate() {
            return Ok(Some(extent));
        }
        self.make_chunk(kind)?;
        Ok(self.space.allocate(kind, want, min, hint))
    }

    /// Makes a chunk for a reservation that did not fit, unless the reservation fits now, for example because another
    /// thread has made a chunk. Returns `false` if the devices have no room.
    pub(crate) fn add_chunk_for_promise(&self, shortage: Shortage) -> Result<bool> {
        let _making = self.pending_chunks.making.lock();
        if self.space.reserve(shortage.kind, shortage.want_bytes).is_ok() {
            return Ok(true);
        }
        self.make_chunk(shortage.kind)
    }

    /// Makes a chunk. Returns `false` if the devices have no room.
    pub(crate) fn add_chunk(&self, kind: SpaceKind) -> Result<bool> {
        let _making = self.pending_chunks.making.lock();
        self.make_chunk(kind)
    }

    fn make_chunk(&self, kind: SpaceKind) -> Result<bool> {
        let flags = self.chunk_flags(kind);
        // The content of a group that is being emptied needs no more space than all groups of its kind have. So a balance
        // of a small filesystem, whose first groups are shorter than the usual length, gives no kind more space.
        let max_len = match self.claims.is_any_emptied() {
            true => self.space.info(kind).total,
            false => u64::MAX,
        };
        let Some((logical, chunk)) = self.volumes.plan_chunk(flags, max_len) else { return Ok(false) };
        // A chunk of a mixed block group takes no room from metadata, because it holds data and metadata.
        if kind == SpaceKind::Data && !self.geometry.mixed && !self.leaves_room_for_metadata(&chunk) {
            return Ok(false);
        }
        if kind == SpaceKind::System && !has_room_for_system_chunk(&self.superblock(), &chunk) {
            return Ok(false);
        }
        self.note_profile(chunk.flags);
        tracing::debug!(%logical, length = chunk.length, ?flags, "make chunk");
        match self.volumes.add_chunk(logical, chunk.clone()) {
            // The device is being shrunk: its limit was lowered after the chunk was planned.
            Err(Error::NoSpace) => return Ok(false),
            added => added?,
        }
        let group = BlockGroup { start: logical, len_bytes: chunk.length, flags, used: 0 };
        let range = LogicalRange::new("chunk", "length", logical, chunk.length)?;
        let reserved = self.volumes.reserved_ranges(logical);
        let whole = std::iter::once(logical.0..range.end().0).collect();
        // Under the list's lock, because the chunk and its block group must appear together (C1).
        let mut list = self.pending_chunks.list.lock();
        self.space.insert_block_group(group, whole, reserved)?;
        list.insert(logical, chunk);
        drop(list);
        self.update_unallocated();
        Ok(true)
    }

    /// Flags for a new chunk of this kind: the type, with the target profile of the current conversion. Without a
    /// conversion, a new chunk gets the profile of the last block group of its type. If that block group lies on a
    /// seed, and the filesystem has too few devices of its own for the profile, the chunk gets DUP, or SINGLE for data.
    pub(crate) fn chunk_flags(&self, kind: SpaceKind) -> BlockGroupFlags {
        let last = self.space.last_flags(kind).unwrap_or(kind.flags());
        let types = last.difference(BlockGroupFlags::PROFILES);
        match self.conversion.target(kind) {
            Some(profile) => types | profile,
            None if self.volumes.fits_own_devices(last) => last,
            None if types.contains(BlockGroupFlags::DATA) && !self.geometry.mixed => types,
            None => types | BlockGroupFlags::DUP,
        }
    }

    pub(crate) fn update_unallocated(&self) {
        let of = |kind| self.volumes.allocatable_bytes(self.chunk_flags(kind));
        self.space.set_unallocated(of(SpaceKind::Data), of(SpaceKind::Metadata));
    }

    /// Whether the trees still have the room that they need once this data chunk has been allocated on the devices.
    fn leaves_room_for_metadata(&self, chunk: &ChunkItem) -> bool {
        let lost = self.volumes.allocatable_bytes_lost(self.chunk_flags(SpaceKind::Metadata), chunk);
        self.has_room_for_metadata_and(lost, ReservationPurpose::Change)
    }

    /// Notes the feature bit that chunks of this profile need in the superblock.
    pub(crate) fn note_profile(&self, flags: BlockGroupFlags) {
        if flags.intersects(BlockGroupFlags::RAID1C3 | BlockGroupFlags::RAID1C4) {
            self.commit_state.note_incompat(Incompat::RAID1C34.bits());
        }
    }

    /// Returns the changes of the chunk tree and the device tree that record the pending chunks. Adds system chunks to
    /// `superblock`.
    pub(crate) fn record_pending_chunks(&self, superblock: &mut Superblock) -> Result<Option<(Batch, Batch)>> {
        let pending = std::mem::take(&mut *self.pending_chunks.list.lock());
        if pending.is_empty() {
            return Ok(None);
        }
        let (mut chunk_batch, mut dev_batch) = (Batch::new(), Batch::new());
        for (logical, chunk) in pending {
            let key = Key::new(objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, logical.0);
            let bytes = chunk.encode();
            if chunk.flags.contains(BlockGroupFlags::SYSTEM) {
                append_system_chunk(superblock, &key, &bytes)?;
            }
            chunk_batch.push((key, Some(bytes.into())));
            let length = chunk.device_extent_len();
            for stripe in &chunk.stripes {
                let extent = DevExtent {
                    chunk_tree: RootId::CHUNK_TREE.0,
                    chunk_objectid: objectid::FIRST_CHUNK_TREE,
                    chunk_offset: logical.0,
                    length,
                    chunk_tree_uuid: self.chunk_tree_uuid,
                };
                let key = Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0);
                dev_batch.push((key, Some(extent.encode().into())));
                if let Some(mut item) = self.volumes.dev_item(stripe.devid) {
                    item.bytes_used = item.bytes_used.checked_add(length).ok_or_else(|| {
                        let expected = "expected the bytes of the device's extents";
                        let (what, field, value) = ("DevItem", "bytes_used", item.bytes_used);
                        Error::from(FormatError::Value { what, field, value, expected }).in_tree(RootId::CHUNK_TREE)
                    })?;
                    self.volumes.set_dev_item(&item)?;
                }
            }
        }
        self.push_dev_items(&mut chunk_batch);
        chunk_batch.sort_by_key(|(key, _)| *key);
        dev_batch.sort_by_key(|(key, _)| *key);
        Ok(Some((chunk_batch, dev_batch)))
    }

    pub(crate) fn push_dev_items(&self, chunk_batch: &mut Batch) {
        for device in self.volumes.devices() {
            if let Some(item) = self.volumes.dev_item(device.devid) {
                let key = Key::new(objectid::DEV_ITEMS, KeyType::DEV_ITEM, item.devid.0);
                chunk_batch.push((key, Some(item.encode().into())));
            }
        }
    }

    /// Removes empty block groups from memory, and returns the changes that remove these groups from the trees. One
    /// empty group of each type and all system groups stay, unless they lie on a seed or a relocation has condemned
    /// them. A group whose free space is reserved for dirty data stays too. Until the commit is durable, the last
    /// superblock still maps the removed block groups, so their device space is not reused before
    /// [`Engine::forget_chunks`].
    pub(crate) fn remove_empty_block_groups(&self, free_space: Option<&Tree>) -> Result<Option<RemovedGroups>> {
        let mut removed = RemovedGroups::default();
        let mut spared = BlockGroupFlags::empty();
        for group in self.space.empty_groups() {
            let types = group.flags & BlockGroupFlags::TYPES;
            match self.claims.emptying(group.start) {
                Some(Emptying::Condemned) => self.remove_if_empty(&group, &mut removed, free_space)?,
                Some(Emptying::Moving) => {}
                // It can never be used again.
                None if self.space.is_on_seed(group.start) => {
                    self.remove_if_empty(&group, &mut removed, free_space)?;
                }
                None => {
                    if spared.contains(types) && !types.contains(BlockGroupFlags::SYSTEM) {
                        self.remove_if_empty(&group, &mut removed, free_space)?;
                    }
                    spared |= types;
                }
            }
        }
        if removed.chunks.is_empty() {
            return Ok(None);
        }
        self.push_dev_items(&mut removed.chunk_batch);
        for batch in
            [&mut removed.group_batch, &mut removed.free_space_batch, &mut removed.chunk_batch, &mut removed.dev_batch]
        {
            batch.sort_by_key(|(key, _)| *key);
        }
        Ok(Some(removed))
    }

    fn remove_if_empty(
        &self,
        group: &BlockGroup,
        removed: &mut RemovedGroups,
        free_space: Option<&Tree>,
    ) -> Result<()> {
        // A chunk cannot be removed from the trees before it is recorded, or while it is being moved.
        if self.pending_chunks.contains(group.start) || !self.claims.begin_removal(group.start) {
            return Ok(());
        }
        let was_read_only = self.space.is_read_only(group.start);
        // Make the group read-only, then check again that it is empty: a thread may have allocated in the group after
        // the first check.
        if !self.space.try_set_read_only(group.start) {
            self.claims.end_removal(group.start);
            return Ok(());
        }
        let still_empty = self.space.is_empty(group.start);
        let Some((logical, chunk)) = self.volumes.chunk_at(group.start).filter(|_| still_empty) else {
            if !was_read_only {
                self.space.set_writable(group.start);
            }
            self.claims.end_removal(group.start);
            return Ok(());
        };
        self.space.remove_block_group(group.start);
        removed.chunks.push(logical);
        removed.group_batch.push((Key::new(logical.0, KeyType::BLOCK_GROUP_ITEM, group.len_bytes), None));
        if let Some(tree) = free_space {
            let root = tree.root_ptr();
            let items = free_space_tree::remove_free_space(tree.source(), &root, logical, group.len_bytes)?;
            removed.free_space_batch.extend(items);
        }
        removed.has_system |= group.flags.contains(BlockGroupFlags::SYSTEM);
        removed.chunk_batch.push((Key::new(objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, logical.0), None));
        for stripe in &chunk.stripes {
            removed.dev_batch.push((Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0), None));
            if let Some(mut item) = self.volumes.dev_item(stripe.devid) {
                item.bytes_used = item.bytes_used.saturating_sub(chunk.device_extent_len());
                self.volumes.set_dev_item(&item)?;
            }
        }
        Ok(())
    }

    /// Drops chunks that a durable commit removed.
    pub(crate) fn forget_chunks(&self, chunks: &[Logical]) {
        for logical in chunks {
            self.volumes.remove_chunk(*logical);
            self.claims.end_removal(*logical);
        }
        self.update_unallocated();
    }
}

/// Block groups that the running commit removes.
#[derive(Debug, Default)]
pub(crate) struct RemovedGroups {
    pub(crate) chunks: Vec<Logical>,
    /// Whether the superblock lists the chunk of one of these block groups.
    pub(crate) has_system: bool,
    pub(crate) group_batch: Batch,
    pub(crate) free_space_batch: Batch,
    pub(crate) chunk_batch: Batch,
    pub(crate) dev_batch: Batch,
}

/// Whether the superblock has room for the items of a new system chunk and of one more like it, so that a chunk that is
/// made before the next commit fits too.
fn has_room_for_system_chunk(superblock: &Superblock, chunk: &ChunkItem) -> bool {
    let more = Key::SIZE.saturating_add(chunk.encode().len()).saturating_mul(2);
    let used = usize::try_from(superblock.sys_chunk_array_size).unwrap_or(usize::MAX);
    used.saturating_add(more) <= SYS_CHUNK_ARRAY_SIZE
}

fn append_system_chunk(superblock: &mut Superblock, key: &Key, chunk: &[u8]) -> Result<()> {
    let start = usize::try_from(superblock.sys_chunk_array_size).unwrap_or(usize::MAX);
    let end = start.saturating_add(Key::SIZE).saturating_add(chunk.len());
    if end > SYS_CHUNK_ARRAY_SIZE {
        return Err(Error::from(FormatError::Value {
            what: "Superblock",
            field: "sys_chunk_array_size",
            value: end as u64,
            expected: "no room for another system chunk",
        }));
    }
    let (key_bytes, chunk_bytes) = superblock.sys_chunk_array[start..end].split_at_mut(Key::SIZE);
    key_bytes.copy_from_slice(&key.encode());
    chunk_bytes.copy_from_slice(chunk);
    superblock.sys_chunk_array_size = u32::try_from(end).expect("at most SYS_CHUNK_ARRAY_SIZE");
    Ok(())
}

/// Replaces the item of a system chunk in the superblock's array.
pub(crate) fn replace_system_chunk(superblock: &mut Superblock, key: &Key, chunk: &[u8]) -> Result<()> {
    let array = superblock.sys_chunk_array.get(..superblock.sys_chunk_array_size as usize).unwrap_or_default().to_vec();
    superblock.sys_chunk_array_size = 0;
    superblock.sys_chunk_array.fill(0);
    let mut reader = Reader::new("sys_chunk_array", &array);
    while !reader.is_empty() {
        let found = Key::read(&mut reader)?;
        let other = ChunkItem::read(&mut reader)?;
        if found != *key {
            append_system_chunk(superblock, &found, &other.encode())?;
        }
    }
    append_system_chunk(superblock, key, chunk)
}

/// Removes chunks from the superblock's list of system chunks.
pub(crate) fn remove_system_chunks(superblock: &mut Superblock, chunks: &[Logical]) -> Result<()> {
    let len = usize::try_from(superblock.sys_chunk_array_size).unwrap_or(usize::MAX);
    let listed = superblock.sys_chunk_array.get(..len).unwrap_or_default().to_vec();
    superblock.sys_chunk_array_size = 0;
    superblock.sys_chunk_array.fill(0);
    let mut reader = Reader::new("sys_chunk_array", &listed);
    while !reader.is_empty() {
        let key = Key::read(&mut reader)?;
        let chunk = ChunkItem::read(&mut reader)?;
        if !chunks.contains(&Logical(key.offset)) {
            append_system_chunk(superblock, &key, &chunk.encode())?;
        }
    }
    Ok(())
}

/// Minimum length of an extent that is accepted instead of a longer extent, to avoid making a chunk.
const FAIR_PIECE_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use ubtrfs_device::MemoryDevice;
    use ubtrfs_format::item::Stripe;

    use super::*;
    use crate::EngineOptions;

    fn starts(engine: &Engine, tree: RootId, key_type: KeyType) -> Vec<u64> {
        let tree = engine.own_tree(tree).expect("there");
        let all = tree.range(&Key::MIN, &Key::MAX, usize::MAX).expect("readable");
        let keys = all.into_iter().map(|(key, _)| key).filter(|key| key.item_type == key_type);
        keys.map(|key| if key_type == KeyType::CHUNK_ITEM { key.offset } else { key.objectid }).collect()
    }

    /// Commits while another thread makes chunks. Further threads compete for the processors, so that the making of a
    /// chunk is interrupted at arbitrary points.
    #[test]
    fn every_commit_records_a_chunk_together_with_its_block_group() {
        for round in 0..20 {
            let device = Arc::new(MemoryDevice::new(1 << 40));
            ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
            let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while engine.add_chunk(SpaceKind::Metadata).expect("made") {}
                    done.store(true, Ordering::Relaxed);
                });
                for _ in 0..3 {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    });
                }
                while !done.load(Ordering::Relaxed) {
                    engine.commit().expect("committed");
                    let chunks = starts(&engine, RootId::CHUNK_TREE, KeyType::CHUNK_ITEM);
                    let tree = engine.block_group_tree().expect("there").id();
                    assert_eq!(chunks, starts(&engine, tree, KeyType::BLOCK_GROUP_ITEM), "round {round}");
                }
            });
        }
    }

    #[test]
    fn only_profiles_of_three_and_four_copies_need_their_feature() {
        let engine = engine_with_chunks(0);
        let has_feature = |flags| {
            engine.note_profile(BlockGroupFlags::METADATA | flags);
            // A commit needs a change.
            assert!(engine.add_chunk(SpaceKind::Data).expect("made"));
            engine.commit().expect("committed");
            engine.superblock().incompat().contains(Incompat::RAID1C34)
        };
        assert!(!has_feature(BlockGroupFlags::DUP) && !has_feature(BlockGroupFlags::RAID1));
        assert!(has_feature(BlockGroupFlags::RAID1C4));
    }

    /// Block groups, chunks and device extents that `work` walks.
    fn walked(engine: &Engine, work: impl FnOnce()) -> u64 {
        let now = || engine.space.nr_walked() + engine.volumes.nr_walked() + engine.trees.nr_walked();
        let before = now();
        work();
        now() - before
    }

    /// An engine with this many full chunks of data.
    fn engine_with_chunks(number: usize) -> Arc<Engine> {
        let device = Arc::new(MemoryDevice::new(1 << 41));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
        for _ in 0..number {
            assert!(engine.add_chunk(SpaceKind::Data).expect("made"));
            engine.space.allocate(SpaceKind::Data, 1 << 30, 1 << 30, None).expect("an empty chunk");
        }
        engine
    }

    #[test]
    fn work_for_one_chunk_walks_no_other_chunks() {
        let engine = engine_with_chunks(100);
        let make = || assert!(engine.add_chunk(SpaceKind::Data).expect("made"));
        let usage = || {
            let _ = engine.usage();
        };
        let commit = || {
            make();
            engine.commit().expect("committed");
        };
        let works: [(&str, &dyn Fn()); 3] = [("make", &make), ("usage", &usage), ("commit", &commit)];
        for (name, work) in works {
            assert_eq!(walked(&engine, work), 0, "{name}");
        }
    }

    #[test]
    fn trim_walks_each_block_group_and_each_hole_once() {
        let engine = engine_with_chunks(100);
        engine.commit().expect("committed");
        let nr_walked = walked(&engine, || {
            engine.trim(&(0..u64::MAX), 0, &crate::job::Job::new()).expect("trimmed");
        });
        assert!(nr_walked <= 2 * engine.volumes.chunks().len() as u64 + 10, "{nr_walked}");
    }

    /// Adds a RAID0 chunk with two stripes on the only device, whose last row has only one element, and commits it with
    /// device extents of this length.
    fn image_with_half_a_row(extent_len: impl Fn(&ChunkItem) -> u64) -> ubtrfs_testkit::Image {
        let image = ubtrfs_testkit::Image::empty(256 << 20).expect("an image");
        let open = || -> Arc<dyn ubtrfs_device::Device> {
            Arc::new(ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite).expect("free"))
        };
        ubtrfs_mkfs::make(&*open(), &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let engine = Engine::open(vec![open()], EngineOptions::default()).expect("opened");
        let (logical, planned) = engine.volumes.plan_chunk(BlockGroupFlags::DATA, 8 << 20).expect("room");
        let first = planned.stripes[0];
        let second = Stripe { offset: first.offset.advance(4 << 20), ..first };
        let flags = BlockGroupFlags::DATA | BlockGroupFlags::RAID0;
        let chunk = ChunkItem { length: 33 * ChunkItem::STRIPE_LEN, flags, stripes: vec![first, second], ..planned };
        engine.volumes.add_chunk(logical, chunk.clone()).expect("added");
        let group = BlockGroup { start: logical, len_bytes: chunk.length, flags, used: 0 };
        let whole = std::iter::once(logical.0..logical.advance(chunk.length).0).collect();
        engine.space.insert_block_group(group, whole, Vec::new()).expect("inserted");
        // A commit removes empty block groups.
        assert!(engine.space.allocate_exact(Extent::new(logical, 4096)));
        engine.pending_chunks.list.lock().insert(logical, chunk.clone());
        engine.commit().expect("committed");
        // Correct the device extents afterwards, in a commit of their own.
        let tree = engine.own_tree(RootId::DEV_TREE).expect("there");
        let op = engine.begin(engine.reserve(8).expect("room"));
        for stripe in &chunk.stripes {
            let key = Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0);
            let mut extent = DevExtent::decode(&tree.get(&key).expect("read").expect("there")).expect("valid");
            extent.length = extent_len(&chunk);
            op.put(&tree, key, extent.encode());
        }
        drop(op);
        engine.commit().expect("committed");
        for stripe in &chunk.stripes {
            let key = Key::new(stripe.devid.0, KeyType::DEV_EXTENT, stripe.offset.0);
            let found = DevExtent::decode(&tree.get(&key).expect("read").expect("there")).expect("valid");
            assert_eq!(found.length, extent_len(&chunk));
        }
        engine.close().expect("closed");
        image
    }

    /// When it mounts, Linux compares the lengths of device extents with the lengths of chunks.
    #[test]
    fn linux_requires_the_stripe_length_of_the_table() {
        if !ubtrfs_testkit::capability::kernel_oracle() {
            return;
        }
        let right = image_with_half_a_row(ChunkItem::device_extent_len);
        ubtrfs_testkit::LoopMount::new(right.path(), "ro").expect("Linux accepts the quotient, rounded down");
        let rounded_up =
            image_with_half_a_row(|chunk| chunk.length.div_ceil(2).next_multiple_of(ChunkItem::STRIPE_LEN));
        let refused = ubtrfs_testkit::LoopMount::new(rounded_up.path(), "ro");
        assert!(refused.is_err(), "Linux refuses whole elements");
        // To the checker, both stripes on one device are a mistake, but not their length.
        let opinion = |image: &ubtrfs_testkit::Image| {
            format!("{:#}", ubtrfs_testkit::second_opinion(image.path()).expect_err("RAID0"))
        };
        let (of_right, of_other) = (opinion(&right), opinion(&rounded_up));
        assert!(of_right.contains("stripes are on device 1") && !of_right.contains("E-DEV-EXTENT"), "{of_right}");
        assert!(of_other.contains("E-DEV-EXTENT"), "{of_other}");
        // The chunk map keeps other chunks out of the whole last row, to which the chunk's last bytes are mapped.
        let device = ubtrfs_device::FileDevice::open(right.path(), ubtrfs_device::Access::ReadOnly).expect("free");
        let engine =
            Engine::open(vec![Arc::new(device)], EngineOptions { read_only: true, ..EngineOptions::default() });
        assert!(engine.is_ok(), "{:?}", engine.err());
    }
}
