//! Checks the chunk tree and the device tree: chunks, device items, device extents and device statistics. Compares the
//! device items with the given devices.

use std::collections::BTreeMap;

use ubtrfs_format::item::{ChunkItem, DevExtent, DevItem, DevStatsItem};
use ubtrfs_format::{Corrupt, Key, KeyType, Logical, Profile, RootId, objectid};

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::superblock;
use crate::walk::WalkEvent;

/// Device extents by device id and offset, and device items by device id.
#[derive(Debug, Default)]
pub(crate) struct DeviceExtents {
    extents: BTreeMap<(u64, u64), (u64, u64, Place)>,
    items: BTreeMap<u64, (DevItem, Place)>,
    read: bool,
}

impl<'a> Checker<'a> {
    /// Reads the chunk tree. Returns `false` if no part of the chunk tree can be read.
    pub(crate) fn chunk_tree(&mut self) -> bool {
        let root = self.super_root(RootId::CHUNK_TREE);
        // Collect all items before processing them, so that the whole chunk tree is read through the superblock's
        // system chunks.
        let mut found: Vec<(Key, Vec<u8>, Place)> = Vec::new();
        let complete = self.walk_tree(root, &mut |_, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            let wanted = |key: &Key| matches!(key.item_type, KeyType::CHUNK_ITEM | KeyType::DEV_ITEM);
            let items = leaf.items().filter(|(_, key, _)| wanted(key));
            found.extend(items.map(|(slot, key, data)| (key, data.to_vec(), leaf.place(slot))));
        });
        let system: BTreeMap<u64, ChunkItem> = superblock::system_chunks(&self.sb)
            .unwrap_or_default()
            .into_iter()
            .map(|(start, item)| (start.0, item))
            .collect();
        let mut nr_system: usize = 0;
        for (key, data, place) in &found {
            let result = match key.item_type {
                KeyType::DEV_ITEM => DevItem::decode(data).map(|item| {
                    self.device_extents.items.insert(item.devid.0, (item, *place));
                }),
                _ => ChunkItem::decode(data).and_then(|item| {
                    if let Some(other) = system.get(&key.offset) {
                        nr_system = nr_system.saturating_add(1);
                        if *other != item {
                            let text = format!("the superblock's copy of system chunk {} differs", key.offset);
                            self.sink.report(Code::Chunk, *place, text);
                        }
                    } else if item.flags.contains(ubtrfs_format::item::BlockGroupFlags::SYSTEM) {
                        let text = format!("system chunk {} is not in the superblock", key.offset);
                        self.sink.report(Code::Chunk, *place, text);
                    }
                    self.array.add_chunk(Logical(key.offset), item)
                }),
            };
            let result = result.map_err(|cause| Corrupt::new(cause).at(Logical(key.offset)));
            if let Err(error) = result {
                let code = if key.item_type == KeyType::DEV_ITEM { Code::Device } else { Code::Chunk };
                self.sink.report(code, *place, error.to_string());
            }
        }
        if complete && nr_system < system.len() {
            let text = "the superblock has a system chunk that the chunk tree lacks";
            self.sink.report(Code::Chunk, Place::tree(RootId::CHUNK_TREE), text);
        }
        self.spans = self.array.spans();
        if complete {
            self.compare_members();
        }
        !found.is_empty()
    }

    /// Compares the given devices with the device items. Reports devices that are missing, or that do not belong to the
    /// filesystem any more.
    fn compare_members(&mut self) {
        for (item, place) in self.device_extents.items.values() {
            let (devid, uuid) = (item.devid, item.uuid);
            let is_seed = item.fsid != self.sb.node_fsid() && self.array.is_seed_of(item);
            if self.array.remove_other(item) && !is_seed {
                let text = format!("the given device {devid} is not the filesystem's, which has the uuid {uuid}");
                self.sink.report(Code::Device, *place, text);
            }
            if item.fsid != self.sb.node_fsid() && self.array.has(devid) && !is_seed {
                let text = format!("device {devid} belongs to filesystem {}", item.fsid);
                self.sink.report(Code::Device, *place, text);
            }
            if !self.array.has(devid) {
                let text = format!("device {devid} (uuid {uuid}) was not given; its copies are not checked");
                self.sink.report(Code::DeviceMissing, *place, text);
            }
        }
        for (start, chunk) in self.array.chunks() {
            if !self.array.survives(&chunk) {
                let text = format!("chunk {start} has lost parts with the devices that were not given");
                self.sink.report(Code::ChunkLost, Place::tree(RootId::CHUNK_TREE), text);
            }
        }
        for member in self.array.members() {
            let own = &member.superblock.dev_item;
            let item = self.device_extents.items.get(&own.devid.0);
            if let Some((item, place)) = item.filter(|(item, _)| member.device.len_bytes() < item.total_bytes) {
                let (have, wanted) = (member.device.len_bytes(), item.total_bytes);
                let text = format!("device {} has {have} bytes, its item {wanted}", own.devid);
                self.sink.report(Code::Device, *place, text);
            }
            if member.is_seed {
                continue;
            }
            let Some((item, place)) = item else {
                let text = format!("{} is device {}, which has no device item", member.device.describe(), own.devid);
                self.sink.report(Code::Device, Place::tree(RootId::CHUNK_TREE), text);
                continue;
            };
            if own.uuid != item.uuid {
                let text = format!("device {} has the uuid {}, its item {}", own.devid, own.uuid, item.uuid);
                self.sink.report(Code::Device, *place, text);
            }
            let is_current = member.superblock.generation == self.sb.generation;
            if is_current && (own.total_bytes, own.bytes_used) != (item.total_bytes, item.bytes_used) {
                let text = format!("device {}: the superblock's device item differs", own.devid);
                self.sink.report(Code::Device, *place, text);
            }
        }
    }

    /// Reads the device extents and checks the device statistics.
    pub(crate) fn dev_tree(&mut self) {
        let Some(root) = self.needed_root(RootId::DEV_TREE) else { return };
        self.device_extents.read = self.walk_tree(root, &mut |checker, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items() {
                let place = leaf.place(slot);
                match key.item_type {
                    KeyType::DEV_EXTENT => {
                        let Ok(extent) = DevExtent::decode(data) else { continue };
                        let value = (extent.length, extent.chunk_offset, place);
                        checker.device_extents.extents.insert((key.objectid, key.offset), value);
                    }
                    KeyType::PERSISTENT_ITEM if key.objectid == objectid::DEV_STATS => {
                        checker.dev_stats(key.offset, data, place);
                    }
                    _ => {}
                }
            }
        });
    }

    fn dev_stats(&mut self, devid: u64, data: &[u8], place: Place) {
        // During a device replacement, Linux keeps the counters of the new device under device id 0.
        if devid != 0 && !self.device_extents.items.contains_key(&devid) {
            self.sink.report(Code::DevStats, place, format!("error counters of device {devid}, which does not exist"));
        } else if data.iter().take(DevStatsItem::SIZE).any(|&byte| byte != 0) {
            self.sink.report(Code::DevStats, place, format!("device {devid} has counted errors"));
        }
    }

    /// Compares chunk stripes with device extents, and device items with both.
    pub(crate) fn compare_chunks(&mut self) {
        if !self.device_extents.read {
            return;
        }
        let mut extents = std::mem::take(&mut self.device_extents.extents);
        self.compare_devices(&extents);
        self.compare_stripes();
        for (start, chunk) in self.array.chunks() {
            let len = chunk.device_extent_len();
            for stripe in &chunk.stripes {
                let place = Place { bytenr: Some(start.0), ..Place::tree(RootId::CHUNK_TREE) };
                let (devid, offset) = (stripe.devid.0, stripe.offset.0);
                match extents.remove(&(devid, offset)) {
                    None => {
                        let text =
                            format!("chunk {start}: the stripe at {offset} of device {devid} has no device extent");
                        self.sink.report(Code::DevExtent, place, text);
                    }
                    Some((length, chunk_offset, place)) if (length, chunk_offset) != (len, start.0) => {
                        let text = format!(
                            "device extent {offset} of device {devid} has length {length} and chunk {chunk_offset}, \
                             expected {len} and {start}"
                        );
                        self.sink.report(Code::DevExtent, place, text);
                    }
                    Some(_) => {}
                }
                let device = self.device_extents.items.get(&devid);
                if device.is_some_and(|(item, _)| item.uuid != stripe.dev_uuid) {
                    let text = format!("chunk {start}: a stripe has another UUID than device {devid}");
                    self.sink.report(Code::Chunk, place, text);
                }
            }
        }
        for ((devid, offset), (_, chunk, place)) in extents {
            let text = format!("device extent {offset} of device {devid} belongs to no stripe of its chunk {chunk}");
            self.sink.report(Code::DevExtent, place, text);
        }
    }

    /// Checks the places of stripes: inside their device, apart from other stripes, and on as many devices as the profile
    /// promises.
    fn compare_stripes(&mut self) {
        let mut places: Vec<(u64, u64, u64, Logical)> = Vec::new();
        for (start, chunk) in self.array.chunks() {
            let place = Place { bytenr: Some(start.0), ..Place::tree(RootId::CHUNK_TREE) };
            let len = chunk.device_extent_len();
            let mut devices = BTreeMap::<u64, u16>::new();
            for stripe in &chunk.stripes {
                let (devid, offset) = (stripe.devid, stripe.offset.0);
                places.push((devid.0, offset, offset.saturating_add(len), start));
                let on_device = devices.entry(devid.0).or_default();
                *on_device = on_device.saturating_add(1);
                match self.device_extents.items.get(&devid.0) {
                    None => {
                        let text = format!("chunk {start}: a stripe is on device {devid}, which has no device item");
                        self.sink.report(Code::Chunk, place, text);
                    }
                    Some((item, _)) if offset.saturating_add(len) > item.total_bytes => {
                        let text = format!("chunk {start}: the stripe at {offset} ends behind device {devid}");
                        self.sink.report(Code::Chunk, place, text);
                    }
                    Some(_) => {}
                }
            }
            let allowed = Profile::of(chunk.flags).map_or(1, |profile| profile.dev_stripes);
            if let Some((devid, nr_stripes)) = devices.into_iter().find(|(_, nr_stripes)| *nr_stripes > allowed) {
                let name = Profile::name_of(chunk.flags);
                let text =
                    format!("chunk {start}: {nr_stripes} stripes are on device {devid}, {name} allows {allowed}");
                self.sink.report(Code::Chunk, place, text);
            }
        }
        places.sort_unstable();
        for pair in places.windows(2) {
            let [(devid, _, end, first), (next_devid, next, _, second)] = pair else { continue };
            if devid == next_devid && next < end {
                let place = Place { bytenr: Some(second.0), ..Place::tree(RootId::CHUNK_TREE) };
                let text = format!("the stripes of chunks {first} and {second} overlap at {next} of device {devid}");
                self.sink.report(Code::Chunk, place, text);
            }
        }
    }

    fn compare_devices(&mut self, extents: &BTreeMap<(u64, u64), (u64, u64, Place)>) {
        let items = std::mem::take(&mut self.device_extents.items);
        let mut total: u64 = 0;
        for (item, place) in items.values() {
            let devid = item.devid;
            let mut used: u64 = 0;
            let mut end_before = 0;
            for (&(_, offset), &(length, _, place)) in extents.range((devid.0, 0)..=(devid.0, u64::MAX)) {
                used = used.saturating_add(length);
                if offset < end_before {
                    self.sink.report(Code::DevExtent, place, format!("device extents of device {devid} overlap"));
                }
                end_before = offset.saturating_add(length);
            }
            if end_before > item.total_bytes {
                let text =
                    format!("device {devid} has {} bytes, a device extent ends at {end_before}", item.total_bytes);
                self.sink.report(Code::Device, *place, text);
            }
            if used != item.bytes_used {
                let text = format!("device {devid} counts {} bytes used, its extents have {used}", item.bytes_used);
                self.sink.report(Code::Device, *place, text);
            }
            total = total.saturating_add(item.total_bytes);
        }
        if let Some(((devid, _), _)) = extents.iter().find(|((devid, _), _)| !items.contains_key(devid)) {
            let text = format!("device extents of device {devid}, which has no device item");
            self.sink.report(Code::DevExtent, Place::tree(RootId::DEV_TREE), text);
        }
        if items.len() as u64 != self.sb.num_devices {
            let text = format!("the superblock counts {} devices, the chunk tree {}", self.sb.num_devices, items.len());
            self.sink.report(Code::Device, Place::tree(RootId::CHUNK_TREE), text);
        }
        if total != self.sb.total_bytes {
            let text = format!("the superblock counts {} bytes, the devices have {total}", self.sb.total_bytes);
            self.sink.report(Code::Device, Place::tree(RootId::CHUNK_TREE), text);
        }
        self.device_extents.items = items;
    }
}
