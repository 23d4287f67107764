//! Opening a filesystem: from superblock to chunk map, root tree and block groups.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::check::CheckContext;
use ubtrfs_format::item::{BlockGroupItem, ChunkItem, DevItem, DevReplaceItem, DeviceRecord, RootItem};
use ubtrfs_format::node::{LEVEL_MAX, NodeView};
use ubtrfs_format::superblock::{CompatRo, Incompat, RootBackup, Superblock};
use ubtrfs_format::{CsumType, DevId, FormatError, Generation, Key, KeyType, Logical, RootId, objectid};
use ubtrfs_space::{BlockGroup, Space, SpaceConfig};
use ubtrfs_tree::{Cursor, NodeSource, RootPtr};
use ubtrfs_volumes::Volumes;
use uuid::Uuid;

use crate::commit::dev_stats;
use crate::delayed::loaded_trees::missing_tree;
use crate::delayed::tree_view::{RootState, Tree};
use crate::engine::{CACHE_PART, Engine, EngineOptions, FilesystemGeometry, Parts};
use crate::extents::free_space_tree;
use crate::extents::replacing::SuspendedReplacement;
use crate::nodes::store::NodeStore;
use crate::rescue::{earlier_roots, go_back};
use crate::tree_log::{self, FoundLog};

impl Engine {
    /// Opens the filesystem on these devices.
    ///
    /// A filesystem that ubtrfs cannot write (for example with RAID5 or RAID6 chunks, or unknown compat_ro features)
    /// opens read-only. A filesystem whose log the caller does not replay opens read-only too. [`Engine::read_only`]
    /// gives the reason.
    ///
    /// # Errors
    ///
    /// Fails on unknown incompat features, on damaged superblocks, if a tree that opening reads (chunk, root, device,
    /// extent or block group, free space, log) is corrupt or unreadable, and if the tree with the block groups or the
    /// extent tree is missing.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: EngineOptions) -> Result<Arc<Self>> {
        assert!(
            options.read_only || !options.rescue.needs_read_only(),
            "R1 of rescue: damage is ignored only for reading"
        );
        let loaded = Loaded::of(devices, &options, options.memory_part(CACHE_PART))?;
        Self::of_loaded(loaded, options)
    }

    /// Loads the block groups and the log, and makes the engine.
    pub(crate) fn of_loaded(loaded: Loaded, options: EngineOptions) -> Result<Arc<Self>> {
        let Loaded { volumes, store, geometry, chunk_tree_uuid, mut superblock, trees, mut refusal, replacement } =
            loaded;
        let compat_ro = superblock.compat_ro();
        if compat_ro.contains(CompatRo::FREE_SPACE_TREE) && !compat_ro.contains(CompatRo::FREE_SPACE_TREE_VALID) {
            refusal.get_or_insert_with(|| "its free space tree is not valid".to_owned());
        }
        if superblock.generation > GENERATION_MAX {
            let reason =
                format!("its generation {} leaves too few generations for new transactions", superblock.generation);
            refusal.get_or_insert(reason);
        }
        if superblock.log_root.0 != 0 && !options.replay_log {
            refusal.get_or_insert_with(|| "its log was not replayed".to_owned());
        }
        let writable = refusal.is_none() && !options.read_only;
        let space = match load_block_groups(geometry, &volumes, &store, &trees, &superblock, writable) {
            Err(error) if options.rescue.ignore_bad_roots => {
                tracing::warn!("all space counts as used, because the block groups cannot be read: {error}");
                space_in_use(geometry, &volumes)?
            }
            loaded => loaded?,
        };
        let found_log = match superblock.log_root.0 != 0 && options.replay_log {
            true => Some(load_log(&volumes, &store, &mut superblock)?),
            false => None,
        };
        let engine = Self::assemble(Parts {
            volumes,
            store,
            space,
            geometry,
            options,
            chunk_tree_uuid,
            trees,
            superblock,
            refusal,
            found_log,
        });
        if let Some(replacement) = replacement {
            engine.device_changes.replacing.found(replacement);
        }
        engine.protect_found_log()?;
        match engine.load_quotas() {
            Err(error) if engine.options.rescue.ignore_bad_roots => {
                tracing::warn!("quotas are unavailable, because the root tree is damaged: {error}");
            }
            loaded => loaded?,
        }
        // Without the highest subvolume id, only the creation of subvolumes fails.
        if engine.read_only().is_none()
            && let Err(error) = engine.note_highest_root_id()
        {
            tracing::warn!("subvolumes cannot be created: reading the highest subvolume id failed: {error}");
        }
        if engine.read_only().is_none()
            && let Err(error) = engine.note_snapshots()
        {
            tracing::warn!("assuming that subvolumes share blocks, because some root items cannot be read: {error}");
        }
        Ok(engine)
    }
}

/// The replacement that the device tree records, if it is not complete. With `is_writable`, its new device gets all
/// writes from now on (T7 of `volumes::twin`).
fn find_replacement(volumes: &Volumes, dev_tree: &Tree, is_writable: bool) -> Result<Option<SuspendedReplacement>> {
    let item = dev_tree.get(&Key::new(0, KeyType::DEV_REPLACE, 0))?;
    let item = item.map(|item| DevReplaceItem::decode(&item)).transpose();
    let item = item.map_err(|cause| Error::from(cause).in_tree(RootId::DEV_TREE))?;
    let Some(item) = item.filter(DevReplaceItem::is_unfinished) else {
        volumes.leave_out_target();
        return Ok(None);
    };
    if !is_writable {
        return Ok(None);
    }
    let has_target = volumes.resume_twin(item.src_devid)?;
    if !has_target {
        tracing::warn!("the replacement of device {} is suspended: its new device was not given", item.src_devid);
    }
    // Everything is copied anew (P3 of `devices::replace`).
    let item = DevReplaceItem { cursor_left: 0, cursor_right: 0, ..item };
    Ok(Some(SuspendedReplacement { item, has_target }))
}

/// The devices and trees that are read before the content of the filesystem. Bad copies are repaired unless the devices are
/// opened read-only.
pub(crate) struct Loaded {
    volumes: Arc<Volumes>,
    store: Arc<NodeStore>,
    geometry: FilesystemGeometry,
    chunk_tree_uuid: Uuid,
    superblock: Superblock,
    trees: HashMap<RootId, Arc<Tree>>,
    /// The reason why the filesystem cannot be written.
    refusal: Option<String>,
    replacement: Option<SuspendedReplacement>,
}

impl Loaded {
    /// Reads the superblocks, the chunk map, and the roots of the filesystem's own trees, and checks that the devices belong
    /// together.
    pub(crate) fn of(devices: Vec<Arc<dyn Device>>, options: &EngineOptions, cache_bytes: u64) -> Result<Self> {
        if !options.rescue.use_backup_root {
            return Self::from_roots(devices, options, cache_bytes, None);
        }
        let load = |backup: Option<&RootBackup>| {
            let loaded = Self::from_roots(devices.clone(), options, cache_bytes, backup)?;
            // Other trees show their damage later, where an error says so.
            loaded.trees.values().try_for_each(|tree| loaded.store.read_node(&tree.root_ptr().node_ptr()).map(drop))?;
            Ok(loaded)
        };
        let newest = match load(None) {
            Err(error @ (Error::Corrupt(_) | Error::Io { .. })) => error,
            loaded => return loaded,
        };
        tracing::warn!("the roots of the last commit are damaged: {newest}");
        let volumes = Volumes::open(devices.clone(), options.of_volumes())?;
        for backup in earlier_roots(volumes.superblock()) {
            match load(Some(&backup)) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => tracing::warn!("the roots of generation {} are damaged: {error}", backup.tree_root_gen),
            }
        }
        Err(newest)
    }

    /// Reads the trees of the last commit, or of `backup`.
    fn from_roots(
        devices: Vec<Arc<dyn Device>>,
        options: &EngineOptions,
        cache_bytes: u64,
        backup: Option<&RootBackup>,
    ) -> Result<Self> {
        Self::of_volumes(Volumes::open(devices, options.of_volumes())?, options, cache_bytes, backup)
    }

    /// Reads the trees on these devices: of the last commit, or of `backup`.
    pub(crate) fn of_volumes(
        volumes: Volumes,
        options: &EngineOptions,
        cache_bytes: u64,
        backup: Option<&RootBackup>,
    ) -> Result<Self> {
        let volumes = Arc::new(volumes);
        let mut superblock = volumes.superblock().clone();
        let went_back = backup.map(|backup| go_back(&mut superblock, backup));
        let rescue = options.rescue;
        let geometry = geometry_of(&superblock)?;
        let nodesize = usize::try_from(geometry.nodesize).unwrap_or(usize::MAX);
        let check =
            CheckContext::new(&superblock).with_seeds(&volumes.seed_fsids()).with_csum(!rescue.ignore_meta_csums);
        let store = Arc::new(NodeStore::new(Arc::clone(&volumes), check, nodesize, cache_bytes));
        let missing = |error| volumes.naming_missing(error);
        let chunk_tree_uuid = load_chunk_tree(&volumes, &store, &superblock).map_err(missing)?;
        volumes.count_devices(&mut superblock);
        // Profiles and missing devices are known now, because the chunk map is loaded.
        let refusal = went_back.or_else(|| volumes.write_refusal());
        check_one_history(&volumes, geometry.csum_type)?;
        check_own_records(&volumes, geometry.csum_type)?;
        let trees = load_own_trees(&store, &superblock).map_err(missing)?;
        let mut replacement = None;
        if let Some(dev_tree) = trees.get(&RootId::DEV_TREE) {
            let is_writable = refusal.is_none() && !options.read_only;
            let records = dev_stats::load(&volumes, dev_tree);
            replacement = match records.and_then(|()| find_replacement(&volumes, dev_tree, is_writable)) {
                Err(error) if rescue.ignore_bad_roots => {
                    tracing::warn!("the records of the devices cannot be read: {error}");
                    None
                }
                found => found?,
            };
        }
        Ok(Self { volumes, store, geometry, chunk_tree_uuid, superblock, trees, refusal, replacement })
    }
}

/// Refuses devices that were written apart: compares their copies of the first nodes that the last commits wrote.
fn check_one_history(volumes: &Volumes, csum_type: CsumType) -> Result<()> {
    // While the filesystem id changes, the copies of a node may have different ids.
    if volumes.devices().len() < 2 || volumes.interrupted_fsid().is_some() {
        return Ok(());
    }
    let found = volumes.found_roots().into_iter();
    let mut nodes: VecDeque<(Logical, Generation)> = found.map(|(_, root, of)| (root, of)).collect();
    let mut seen = HashSet::new();
    while let Some((at, generation)) = nodes.pop_front() {
        if seen.len() >= COMPARED_NODES_MAX {
            break;
        }
        if !seen.insert(at) {
            continue;
        }
        let Some(raw) = volumes.check_one_history(at, generation, csum_type)? else { continue };
        let Ok(view) = NodeView::new(&raw) else { continue };
        for slot in 0..view.nritems() {
            let child = if view.is_leaf() {
                let is_root = view.key(slot).is_some_and(|key| key.item_type == KeyType::ROOT_ITEM);
                let item = view.item(slot).filter(|_| is_root);
                let root = item.and_then(|item| RootItem::decode_any(item).ok());
                root.map(|root| (root.bytenr, root.generation))
            } else {
                view.child(slot)
            };
            nodes.extend(child.filter(|(_, of)| *of == generation));
        }
    }
    Ok(())
}

/// Refuses a device that was written while a newer one was away: its own last commit says so. Commits that it has in common
/// with the newer one cannot say so, because they go to both.
fn check_own_records(volumes: &Volumes, csum_type: CsumType) -> Result<()> {
    let found = volumes.found_roots();
    for &(older, root, generation) in &found {
        // A device that is one commit newer may have got everything, while power failed before the older one had it all.
        for &(newer, ..) in found.iter().filter(|(.., of)| generation.0.saturating_add(1) < of.0) {
            let reader = NodesOfDevice { volumes, devid: older, csum_type };
            let record = reader.record_of(newer, (root, generation));
            let Some(written_to) = record.as_ref().and_then(|record| record.written_to) else { continue };
            let confirmed_at = record.and_then(|record| record.confirmed_at);
            // Linux keeps a record that is not true any more, but does not confirm it.
            if written_to < generation && confirmed_at.is_some_and(|at| at >= generation) {
                return Err(volumes.written_apart(older, newer));
            }
        }
    }
    Ok(())
}

/// Reads the trees of a device's own superblock from its own copies, as far as they are valid.
struct NodesOfDevice<'v> {
    volumes: &'v Volumes,
    devid: DevId,
    csum_type: CsumType,
}

impl NodesOfDevice<'_> {
    /// The record of a device in the device tree.
    fn record_of(&self, devid: DevId, root_tree: (Logical, Generation)) -> Option<DeviceRecord> {
        let key = Key::new(RootId::DEV_TREE.0, KeyType::ROOT_ITEM, 0);
        let root = RootItem::decode_any(&self.item(&key, root_tree)?).ok()?;
        let key = Key::new(objectid::DEV_STATS, KeyType::PERSISTENT_ITEM, devid.0);
        DeviceRecord::decode(&self.item(&key, (root.bytenr, root.generation))?).ok()
    }

    fn item(&self, key: &Key, root: (Logical, Generation)) -> Option<Vec<u8>> {
        let mut next = root;
        for _ in 0..=LEVEL_MAX {
            let raw = self.volumes.node_on(self.devid, next.0, next.1, self.csum_type)?;
            let view = NodeView::new(&raw).ok()?;
            match view.search(key) {
                Ok(slot) if view.is_leaf() => return view.item(slot).map(<[u8]>::to_vec),
                Err(_) if view.is_leaf() => return None,
                Ok(slot) => next = view.child(slot)?,
                Err(slot) => next = view.child(slot.checked_sub(1)?)?,
            }
        }
        None
    }
}

/// Loads the first log that can be read, of those that the superblocks of the newest generation name, and notes it in
/// `superblock`.
fn load_log(volumes: &Volumes, store: &Arc<NodeStore>, superblock: &mut Superblock) -> Result<FoundLog> {
    let mut first_error = None;
    for &(root, level) in volumes.logs() {
        (superblock.log_root, superblock.log_root_level) = (root, level);
        match tree_log::load(store, superblock) {
            Ok(log) => return Ok(log),
            Err(error) => {
                tracing::warn!("the log at {root} cannot be read: {error}");
                first_error.get_or_insert(error);
            }
        }
    }
    Err(first_error.unwrap_or_else(|| Error::Bug { what: "a superblock with a log names none".to_owned() }))
}

fn geometry_of(superblock: &Superblock) -> Result<FilesystemGeometry> {
    let incompat = superblock.incompat();
    let csum_type = superblock.csum_type().ok_or(FormatError::Value {
        what: "Superblock",
        field: "csum_type",
        value: superblock.csum_type.into(),
        expected: "expected 0 to 3",
    })?;
    Ok(FilesystemGeometry {
        sectorsize: superblock.sectorsize,
        nodesize: superblock.nodesize,
        csum_type,
        no_holes: incompat.contains(Incompat::NO_HOLES),
        extended_iref: incompat.contains(Incompat::EXTENDED_IREF),
        skinny: incompat.contains(Incompat::SKINNY_METADATA),
        mixed: incompat.contains(Incompat::MIXED_GROUPS),
    })
}

/// Loads the chunk map and the device items of the last commit into `volumes`, with little memory.
pub(crate) fn load_chunk_map(volumes: &Arc<Volumes>) -> Result<()> {
    let superblock = volumes.superblock();
    let geometry = geometry_of(superblock)?;
    let nodesize = usize::try_from(geometry.nodesize).unwrap_or(usize::MAX);
    let check = CheckContext::new(superblock).with_seeds(&volumes.seed_fsids());
    let store = NodeStore::new(Arc::clone(volumes), check, nodesize, JUDGING_CACHE_BYTES);
    load_chunk_tree(volumes, &store, superblock).map(drop)
}

/// Loads the chunk map and the device items into `volumes`. Returns the chunk tree's UUID.
fn load_chunk_tree(volumes: &Volumes, store: &NodeStore, superblock: &Superblock) -> Result<Uuid> {
    let root = chunk_root(superblock);
    let mut cursor = Cursor::new(store, root);
    let mut next = cursor.seek_ge(&Key::MIN)?;
    while let Some(key) = next {
        let data = cursor.data().unwrap_or_default();
        let corrupt = |error: Error| match cursor.place() {
            Some((node, slot)) => error.in_tree(RootId::CHUNK_TREE).at(node.view().bytenr()).in_slot(slot),
            None => error.in_tree(RootId::CHUNK_TREE),
        };
        match key.item_type {
            KeyType::CHUNK_ITEM => {
                let chunk = ChunkItem::decode(data).map_err(|cause| corrupt(cause.into()))?;
                volumes.add_chunk(Logical(key.offset), chunk)?;
            }
            KeyType::DEV_ITEM => {
                let item = DevItem::decode(data).map_err(|cause| corrupt(cause.into()))?;
                volumes.set_dev_item(&item).map_err(corrupt)?;
            }
            _ => {}
        }
        next = cursor.next()?;
    }
    volumes.settle_members()?;
    Ok(store.read_node(&root.node_ptr())?.view().chunk_tree_uuid())
}

fn chunk_root(superblock: &Superblock) -> RootPtr {
    RootPtr {
        tree: RootId::CHUNK_TREE,
        bytenr: superblock.chunk_root,
        generation: superblock.chunk_root_generation,
        level: superblock.chunk_root_level,
    }
}

/// Loads the root tree, the chunk tree, and the trees that are listed below. Other trees are loaded on first use.
fn load_own_trees(store: &Arc<NodeStore>, superblock: &Superblock) -> Result<HashMap<RootId, Arc<Tree>>> {
    let root_tree = RootPtr {
        tree: RootId::ROOT_TREE,
        bytenr: superblock.root,
        generation: superblock.generation,
        level: superblock.root_level,
    };
    let mut trees = HashMap::new();
    for root in [root_tree, chunk_root(superblock)] {
        trees.insert(root.tree, Arc::new(Tree::new(root, Arc::clone(store), RootState::in_superblock())));
    }
    let roots = Arc::clone(&trees[&RootId::ROOT_TREE]);
    for id in [
        RootId::EXTENT_TREE,
        RootId::DEV_TREE,
        RootId::FS_TREE,
        RootId::CSUM_TREE,
        RootId::FREE_SPACE_TREE,
        RootId::BLOCK_GROUP_TREE,
    ] {
        let start = Key::new(id.0, KeyType::ROOT_ITEM, 0);
        let end = Key::new(id.0, KeyType::ROOT_ITEM, u64::MAX);
        let Some((key, data)) = roots.last_le(&end, &start)? else { continue };
        let item = RootItem::decode_any(&data).map_err(|cause| Error::from(cause).in_tree(RootId::ROOT_TREE))?;
        let root = RootPtr { tree: id, bytenr: item.bytenr, generation: item.generation, level: item.level };
        trees.insert(id, Arc::new(Tree::new(root, Arc::clone(store), RootState::new(key.offset, item))));
    }
    Ok(trees)
}

fn new_space(geometry: FilesystemGeometry) -> Space {
    let FilesystemGeometry { sectorsize, nodesize, mixed, .. } = geometry;
    Space::new(SpaceConfig { sectorsize, nodesize, mixed })
}

/// Block groups for all chunks, without free space.
fn space_in_use(geometry: FilesystemGeometry, volumes: &Volumes) -> Result<Space> {
    let space = new_space(geometry);
    for (start, chunk) in volumes.chunks() {
        let group = BlockGroup { start, len_bytes: chunk.length, flags: chunk.flags, used: chunk.length };
        space.insert_block_group(group, Vec::new(), volumes.reserved_ranges(start))?;
    }
    space.take_dirty_groups();
    Ok(space)
}

fn load_block_groups(
    geometry: FilesystemGeometry,
    volumes: &Volumes,
    store: &NodeStore,
    trees: &HashMap<RootId, Arc<Tree>>,
    superblock: &Superblock,
    writable: bool,
) -> Result<Space> {
    let space = new_space(geometry);
    let compat_ro = superblock.compat_ro();
    let holder =
        if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) { RootId::BLOCK_GROUP_TREE } else { RootId::EXTENT_TREE };
    let groups = trees.get(&holder).ok_or_else(|| missing_tree(holder))?;
    let extents = trees.get(&RootId::EXTENT_TREE).ok_or_else(|| missing_tree(RootId::EXTENT_TREE))?;
    let free_space = trees.get(&RootId::FREE_SPACE_TREE).filter(|_| compat_ro.contains(CompatRo::FREE_SPACE_TREE));
    for (start, chunk) in volumes.chunks() {
        let key = Key::new(start.0, KeyType::BLOCK_GROUP_ITEM, chunk.length);
        let Some(data) = groups.get(&key)? else {
            return Err(Error::from(FormatError::Value {
                what: "ChunkItem",
                field: "logical",
                value: start.0,
                expected: "expected a block group item for every chunk",
            })
            .in_tree(holder));
        };
        let item = BlockGroupItem::decode(&data).map_err(|cause| Error::from(cause).in_tree(holder))?;
        let group = BlockGroup { start, len_bytes: chunk.length, flags: chunk.flags, used: item.used };
        let free = match (writable, free_space) {
            // A read-only filesystem allocates nothing, so it needs no list of free ranges.
            (false, _) => Vec::new(),
            (true, Some(tree)) => {
                free_space_tree::load_free_space(store, &tree.root_ptr(), start, chunk.length, superblock.sectorsize)?
            }
            (true, None) => free_space_tree::free_space_from_extents(
                store,
                &extents.root_ptr(),
                start,
                chunk.length,
                superblock.nodesize,
            )?,
        };
        space.insert_block_group(group, free, volumes.reserved_ranges(start))?;
        if volumes.is_seed_chunk(start) {
            space.set_on_seed(start);
        }
    }
    // The groups were just read, so they all match the disk.
    space.take_dirty_groups();
    Ok(space)
}

/// The highest generation of a filesystem that can be written. No filesystem ever reaches it, and so many generations
/// above it are free that the generation of a new transaction never overflows.
const GENERATION_MAX: Generation = Generation(u64::MAX / 2);
/// Memory for nodes that are read only to judge devices.
pub(crate) const JUDGING_CACHE_BYTES: u64 = 4 << 20;
/// Number of nodes whose copies on several devices are compared at open.
const COMPARED_NODES_MAX: usize = 64;
