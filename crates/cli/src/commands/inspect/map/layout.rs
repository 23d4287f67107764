//! What lies where: the device extents of each device with the block group that they belong to, and the files whose data
//! lies in most pieces.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use ubtrfs_format::item::{
    BlockGroupFlags, BlockGroupItem, ChunkItem, DevItem, FileExtent, InodeExtref, InodeRef, RootRef,
};
use ubtrfs_format::{Ino, Key, KeyType, RootId};

use super::super::blocks::{Blocks, Pointer};
use super::super::dump_tree;
use crate::common::format_size;

/// A part of a device that belongs to a block group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExtentOfGroup {
    /// Offset on the device, in bytes.
    pub(super) start: u64,
    /// Length in bytes.
    pub(super) len: u64,
    pub(super) flags: BlockGroupFlags,
    /// The block group's address.
    pub(super) logical: u64,
    /// The block group's length in bytes, of which `used` are in use. Stripes and copies share these bytes.
    pub(super) group_len: u64,
    /// `None` if no item tells.
    pub(super) used: Option<u64>,
}

impl ExtentOfGroup {
    /// Which part of the block group is in use, from 0 to 1.
    pub(super) fn fill(&self) -> f64 {
        let used = self.used.unwrap_or_default().min(self.group_len);
        if self.group_len == 0 { 0.0 } else { used as f64 / self.group_len as f64 }
    }
}

/// A device, with its extents in order.
#[derive(Clone, Debug, Default)]
pub(super) struct MappedDevice {
    pub(super) devid: u64,
    /// The file or block device; `None` if it is missing.
    pub(super) path: Option<String>,
    /// Size in bytes, as the filesystem knows it.
    pub(super) size: u64,
    pub(super) extents: Vec<ExtentOfGroup>,
}

impl MappedDevice {
    /// The device, for people.
    pub(super) fn title(&self) -> String {
        format!("Device {}, {}: {}", self.devid, self.path.as_deref().unwrap_or("missing"), format_size(self.size))
    }
}

/// Nothing is allocated in the first MiB of a device, where boot loaders lie.
pub(super) const RESERVED: u64 = 1 << 20;

/// A file, and how its data lies on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MappedFile {
    /// The path from the top level, or from `<deleted>`.
    pub(super) path: Vec<u8>,
    pub(super) counts: FileCounts,
}

/// How the data of a file lies on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileCounts {
    /// Runs of bytes that follow each other in the file and on the disk. One is the best.
    pub(super) pieces: u64,
    /// Items of extents.
    pub(super) extents: u64,
    /// Bytes of the file that lie on the disk.
    pub(super) bytes: u64,
}

impl FileCounts {
    /// Adds the counts of another file. A crafted image may claim any number of bytes.
    fn add(&mut self, other: Self) {
        self.pieces += other.pieces;
        self.extents += other.extents;
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// The map of a filesystem.
#[derive(Clone, Debug, Default)]
pub(super) struct SpaceMap {
    pub(super) devices: Vec<MappedDevice>,
    /// The files with most pieces, the worst first. None has one piece only.
    pub(super) files: Vec<MappedFile>,
    /// All files whose data lies on the disk, together.
    pub(super) all_files: FileCounts,
    /// Number of these files.
    pub(super) nr_files: u64,
    /// Blocks that cannot be read, with the reason. What they hold is missing.
    pub(super) damage: Vec<String>,
}

impl SpaceMap {
    /// Reads the map, with the `nr_files` worst files.
    pub(super) fn read(blocks: &Blocks, nr_files: usize) -> Self {
        let mut map = Self::default();
        let roots = dump_tree::roots(blocks);
        map.read_devices(blocks, &roots);
        map.read_files(blocks, &roots, nr_files);
        map
    }

    fn read_devices(&mut self, blocks: &Blocks, roots: &[(RootId, &str, Pointer)]) {
        let mut used = HashMap::new();
        let has_groups = roots.iter().any(|(id, ..)| *id == RootId::BLOCK_GROUP_TREE);
        let tree = if has_groups { RootId::BLOCK_GROUP_TREE } else { RootId::EXTENT_TREE };
        for (.., root) in roots.iter().filter(|(id, ..)| *id == tree) {
            self.each_item(blocks, *root, &mut |key, data| {
                if key.item_type == KeyType::BLOCK_GROUP_ITEM
                    && let Ok(group) = BlockGroupItem::decode(data)
                {
                    used.insert(key.objectid, group.used);
                }
            });
        }
        let mut devices: BTreeMap<u64, MappedDevice> = BTreeMap::new();
        self.each_item(blocks, blocks.chunk_root(), &mut |key, data| match key.item_type {
            KeyType::DEV_ITEM => {
                if let Ok(item) = DevItem::decode(data) {
                    devices.entry(item.devid.0).or_default().size = item.total_bytes;
                }
            }
            KeyType::CHUNK_ITEM => {
                let Ok(chunk) = ChunkItem::decode(data) else { return };
                for stripe in &chunk.stripes {
                    devices.entry(stripe.devid.0).or_default().extents.push(ExtentOfGroup {
                        start: stripe.offset.0,
                        len: chunk.device_extent_len(),
                        flags: chunk.flags,
                        logical: key.offset,
                        group_len: chunk.length,
                        used: used.get(&key.offset).copied(),
                    });
                }
            }
            _ => {}
        });
        let paths = blocks.device_paths();
        for (devid, mut device) in devices {
            device.devid = devid;
            device.path = paths.get(&devid).cloned();
            device.extents.sort_by_key(|extent| extent.start);
            self.devices.push(device);
        }
    }

    fn read_files(&mut self, blocks: &Blocks, roots: &[(RootId, &str, Pointer)], nr_files: usize) {
        let mut places: HashMap<RootId, NameInDir> = HashMap::new();
        self.each_item(blocks, blocks.root_tree(), &mut |key, data| {
            if key.item_type == KeyType::ROOT_BACKREF
                && let Ok(backref) = RootRef::decode(data)
            {
                let place = NameInDir { root: RootId(key.offset), dir: backref.dirid, name: backref.name };
                places.insert(RootId(key.objectid), place);
            }
        });
        let mut worst = Worst { limit: nr_files, heap: BinaryHeap::new() };
        let mut dirs: HashMap<(RootId, u64), NameInDir> = HashMap::new();
        for (id, _, root) in roots.iter().filter(|(id, ..)| id.is_subvolume()) {
            let mut file = WalkedFile::default();
            let mut sums = (self.all_files, self.nr_files);
            let mut done = |file: WalkedFile| {
                if file.counts.extents > 0 {
                    sums.0.add(file.counts);
                    sums.1 += 1;
                }
                if file.counts.pieces > 1 {
                    worst.add(*id, file);
                }
            };
            self.each_item(blocks, *root, &mut |key, data| {
                if key.objectid != file.ino {
                    done(std::mem::take(&mut file));
                    file.ino = key.objectid;
                }
                match key.item_type {
                    KeyType::INODE_REF if file.name.is_none() => {
                        let first = InodeRef::decode_all(data).unwrap_or_default().into_iter().next();
                        file.name = first.map(|name| NameInDir { root: *id, dir: key.offset, name: name.name });
                    }
                    KeyType::INODE_EXTREF if file.name.is_none() => {
                        let first = InodeExtref::decode_all(data).unwrap_or_default().into_iter().next();
                        file.name = first.map(|name| NameInDir { root: *id, dir: name.parent, name: name.name });
                    }
                    // Only directories have these.
                    KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
                        if let Some(place) = file.name.take() {
                            dirs.insert((*id, file.ino), place);
                        }
                    }
                    KeyType::EXTENT_DATA => file.add(key.offset, data),
                    _ => {}
                }
            });
            done(file);
            (self.all_files, self.nr_files) = sums;
        }
        self.files = worst.take(|place| path_of(place, &dirs, &places));
    }

    /// Calls `visit` for each item of a tree, in the order of the keys, and notes damage.
    fn each_item(&mut self, blocks: &Blocks, root: Pointer, visit: &mut dyn FnMut(Key, &[u8])) {
        self.damage.extend(blocks.each_item(root, visit));
    }
}

/// A name in a directory of a subvolume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NameInDir {
    root: RootId,
    dir: u64,
    name: Vec<u8>,
}

/// The file whose items are read.
#[derive(Clone, Debug, Default)]
struct WalkedFile {
    ino: u64,
    name: Option<NameInDir>,
    counts: FileCounts,
    /// The offset in the file and the address on the disk that continue the last piece.
    next: (u64, u64),
}

impl WalkedFile {
    fn add(&mut self, offset: u64, data: &[u8]) {
        let Ok(item) = FileExtent::decode(data) else { return };
        let Some(extent) = item.disk_extent() else { return };
        // The data of a compressed extent has no place of its own in it.
        let within = if item.compression.to_disk() == 0 { extent.offset } else { 0 };
        let at = (offset, extent.disk_bytenr.0.saturating_add(within));
        let len_on_disk = if item.compression.to_disk() == 0 { extent.num_bytes } else { extent.disk_num_bytes };
        self.counts.pieces += u64::from(self.counts.extents == 0 || self.next != at);
        self.counts.extents += 1;
        self.counts.bytes = self.counts.bytes.saturating_add(extent.num_bytes);
        self.next = (offset.saturating_add(extent.num_bytes), at.1.saturating_add(len_on_disk));
    }
}

/// The counts, the subvolume, the inode and the name of a file.
type Kept = (FileCounts, RootId, u64, Option<NameInDir>);

/// The files with most pieces so far.
struct Worst {
    limit: usize,
    heap: BinaryHeap<Reverse<Kept>>,
}

impl Worst {
    fn add(&mut self, root: RootId, file: WalkedFile) {
        self.heap.push(Reverse((file.counts, root, file.ino, file.name)));
        if self.heap.len() > self.limit {
            self.heap.pop();
        }
    }

    fn take(self, path_of: impl Fn(Option<NameInDir>) -> Vec<u8>) -> Vec<MappedFile> {
        let sorted = self.heap.into_sorted_vec();
        sorted.into_iter().map(|Reverse((counts, _, _, place))| MappedFile { path: path_of(place), counts }).collect()
    }
}

/// The path of a name from the top level. Parents that are not found, or lead back, end it.
fn path_of(
    place: Option<NameInDir>,
    dirs: &HashMap<(RootId, u64), NameInDir>,
    subvolumes: &HashMap<RootId, NameInDir>,
) -> Vec<u8> {
    /// More than Linux's limit for a path.
    const DEPTH_MAX: usize = 4096;
    let mut names = Vec::new();
    let mut at = place.as_ref();
    let mut is_whole = false;
    while let Some(place) = at.filter(|_| names.len() < DEPTH_MAX) {
        names.push(&place.name[..]);
        is_whole = place.dir == Ino::ROOT_DIR.0 && place.root == RootId::FS_TREE;
        at = match place.dir {
            _ if is_whole => None,
            dir if dir == Ino::ROOT_DIR.0 => subvolumes.get(&place.root),
            dir => dirs.get(&(place.root, dir)),
        };
    }
    if !is_whole {
        names.push(b"<deleted>");
    }
    names.reverse();
    names.join(&b'/')
}
