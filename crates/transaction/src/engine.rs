//! [`Engine`]: one open filesystem below the level of inodes.
//!
//! The engine consists of parts, the fields of [`Engine`]. A part owns its locks, and the head of the part's file
//! states the lock order inside the part.
//!
//! Lock order between the parts: inode locks of `fs` -> commit lock -> state of the tree log -> gate -> list of changed
//! trees -> a tree's view -> delayed item shards / data ledger / space. No thread waits for the commit lock while it
//! holds the gate.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use ubtrfs_error::Result;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevStatsItem};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{CsumType, DevId, Generation, Logical, RootId};
use ubtrfs_space::{BlockGroup, Space, SpaceInfo, SpaceKind};
use ubtrfs_tree::CacheStats;
use ubtrfs_volumes::{DeviceSummary, Volumes};
use uuid::Uuid;

use crate::backref::shared::SharedExtents;
use crate::commit_state::CommitState;
use crate::delayed::data_ledger::DataLedger;
use crate::delayed::loaded_trees::LoadedTrees;
use crate::delayed::moved_extents::MovedExtents;
use crate::delayed::tree_view::Tree;
use crate::durable::fsync::Fsyncs;
use crate::extents::block_group_claims::BlockGroupClaims;
use crate::extents::chunk_alloc::PendingChunks;
use crate::extents::conversion::Conversion;
use crate::extents::device_items::DeviceChanges;
use crate::extents::freed_extents::FreedExtents;
use crate::handle::admission::Admission;
use crate::handle::running::RunningTransaction;
use crate::health::abort::AbortState;
use crate::health::metric::Metric;
use crate::health::stats::EngineStats;
use crate::job::Job;
use crate::nodes::leaf_ahead::LeafReadAhead;
use crate::nodes::store::NodeStore;
use crate::nodes::write::NodeWriter;
use crate::qgroup::state::Quotas;
use crate::rescue::Rescue;
use crate::reservation::ticket::Tickets;
use crate::roots::state::SubvolumeRoots;
use crate::tree_log::{FoundLog, TreeLog};

/// Options for opening a filesystem.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Whether to open read-only.
    pub read_only: bool,
    /// Memory for the node cache and delayed items together, in bytes.
    pub memory_bytes: u64,
    /// Whether to write a filesystem without some of its devices, if every chunk tolerates their loss.
    pub degraded: bool,
    /// Whether the space that a commit frees is discarded on the devices.
    pub discard: bool,
    /// Whether freed space is noted for [`Engine::discard_freed`]. Must not be set together with `discard`.
    pub discard_later: bool,
    /// Whether the caller replays a log ([`Engine::take_log`]) before any other work. Without a replay, a filesystem
    /// with a log opens read-only.
    pub replay_log: bool,
    /// What opening a damaged filesystem passes over. All but [`Rescue::use_backup_root`] require `read_only`.
    pub rescue: Rescue,
}

impl EngineOptions {
    pub(crate) fn of_volumes(&self) -> ubtrfs_volumes::DeviceSetOptions {
        ubtrfs_volumes::DeviceSetOptions {
            read_only: self.read_only,
            degraded: self.degraded,
            ignore_super_flags: self.rescue.ignore_super_flags,
        }
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the parts are constants of at most 1, in sixteenths")]
    pub(crate) fn memory_part(&self, (part, of): MemoryPart) -> u64 {
        self.memory_bytes / of * part
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            degraded: false,
            memory_bytes: 256 << 20,
            discard: false,
            discard_later: false,
            replay_log: false,
            rescue: Rescue::default(),
        }
    }
}

/// A part of the engine's memory, as numerator and denominator.
pub(crate) type MemoryPart = (u64, u64);

/// Memory of cached nodes that are also on the devices.
pub(crate) const CACHE_PART: MemoryPart = (6, 16);

/// Sizes and features that never change while a filesystem is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilesystemGeometry {
    /// Bytes of a data sector.
    pub sectorsize: u32,
    /// Bytes of a tree block.
    pub nodesize: u32,
    /// Checksum of blocks and data.
    pub csum_type: CsumType,
    /// Whether holes have no file extent items.
    pub no_holes: bool,
    /// Whether names that do not fit into an `INODE_REF` item go into `INODE_EXTREF` items.
    pub extended_iref: bool,
    /// Whether new tree blocks get `METADATA_ITEM`s instead of `EXTENT_ITEM`s.
    pub skinny: bool,
    /// Whether data and metadata share block groups.
    pub mixed: bool,
}

/// Use of space: by the block groups of each kind, and on the devices.
#[derive(Clone, Debug)]
pub struct BlockGroupUsage {
    /// Data block groups.
    pub data: SpaceInfo,
    /// Metadata block groups.
    pub metadata: SpaceInfo,
    /// System block groups.
    pub system: SpaceInfo,
    /// Type and profile of a new data chunk. During a conversion, the profile is the target of the conversion.
    pub data_flags: BlockGroupFlags,
    /// Type and profile of a new metadata chunk. During a conversion, the profile is the target of the conversion.
    pub metadata_flags: BlockGroupFlags,
    /// Bytes of all devices.
    pub device_bytes: u64,
    /// Bytes of the devices that no chunk uses.
    pub unallocated_bytes: u64,
    /// Bytes of data that new data chunks can hold.
    pub allocatable_data_bytes: u64,
    /// Metadata bytes kept back so that removals and commits work on a full filesystem.
    pub global_reserve: u64,
}

/// How dirty data is divided into ranges. The metadata that the writeback of the data adds is estimated from these
/// numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirtyData {
    /// Upper bound of the number of contiguous dirty ranges. A range that extends over several buffers counts once for
    /// each buffer.
    pub nr_ranges: u64,
    /// Maximum length in bytes of files that are stored inline, in their file extent item.
    pub max_inline_bytes: u64,
}

/// Requests of the engine that the crate above it, `fs`, carries out.
pub trait Flusher: Send + Sync {
    /// Writes back about `target_bytes` of dirty file data, or all dirty file data if `target_bytes` is `None`. Leaves
    /// out files whose locks are held and files whose data could not be written before.
    ///
    /// # Errors
    ///
    /// The failure that stopped the writeback.
    fn flush_delalloc(&self, target_bytes: Option<u64>) -> Result<()>;

    /// How the dirty data is divided. Must not wait for a lock.
    fn dirty_data(&self) -> DirtyData {
        DirtyData::default()
    }

    /// Whether the calling thread may wait for threads that reclaim space, because it holds no lock that they need.
    fn may_wait(&self) -> bool {
        true
    }

    /// Waits until all writes into existing extents that began before this call have ended, and until the item changes
    /// of these writes are recorded as delayed items. Writes that begin after this call ask
    /// [`Engine::extent_is_shared`] anew.
    fn wait_for_writes_in_place(&self) {}

    /// Calls `close`, after which the data of some extents is not overwritten any more: it makes a block group read-only,
    /// or moves shared blocks of subvolumes, whose extents then count as shared. First writes back the dirty data that
    /// was accepted without space, because it goes to extents that its file has; no such data becomes dirty before
    /// `close` returns. The caller must hold no inode lock.
    ///
    /// # Errors
    ///
    /// The error of `close`, or the failure to write that data.
    fn with_space_for_all_data(&self, close: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        close()
    }

    /// Waits, for a short time, until inodes that lost their last name and are not open are deleted.
    fn wait_for_deletions(&self) {}

    /// Waits until every thread that looked up an address of data before this call has finished using that address.
    /// Also drops the cache of data that is kept by address.
    fn wait_for_readers(&self) {}

    /// Calls `moves`, which moves extents to other addresses, while no other thread sends a subvolume, because a send
    /// reads extents by their addresses. Waits for running sends; the wait can be cancelled.
    ///
    /// # Errors
    ///
    /// An error of `moves`; [`Error::Cancelled`](ubtrfs_error::Error::Cancelled).
    fn while_nothing_is_sent(&self, job: &Job, moves: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _ = job;
        moves()
    }

    /// Requests background work, without waiting for it. Returns whether there is a thread for the work.
    fn request_work(&self, work: BackgroundWork) -> bool {
        let _ = work;
        false
    }
}

/// Work that the engine requests from a thread of the crate above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundWork {
    /// [`Engine::commit`].
    Commit,
    /// [`Engine::flush_delayed_items`].
    FlushDelayedItems,
}

/// One open filesystem below the level of inodes.
pub struct Engine {
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) store: Arc<NodeStore>,
    pub(crate) space: Space,
    pub(crate) geometry: FilesystemGeometry,
    pub(crate) options: EngineOptions,
    pub(crate) chunk_tree_uuid: Uuid,
    pub(crate) running: RunningTransaction,
    pub(crate) admission: Admission,
    pub(crate) tickets: Tickets,
    pub(crate) commit_state: CommitState,
    pub(crate) trees: LoadedTrees,
    pub(crate) roots: SubvolumeRoots,
    pub(crate) ledger: DataLedger,
    pub(crate) moved: MovedExtents,
    pub(crate) pending_chunks: PendingChunks,
    pub(crate) claims: BlockGroupClaims,
    pub(crate) conversion: Conversion,
    pub(crate) device_changes: DeviceChanges,
    pub(crate) freed: FreedExtents,
    pub(crate) tree_log: TreeLog,
    pub(crate) fsyncs: Fsyncs,
    pub(crate) quotas: Quotas,
    pub(crate) stats: EngineStats,
    pub(crate) abort_state: Arc<AbortState>,
    /// Which extents are shared. Taken under the commit lock.
    pub(crate) shared_extents: Mutex<SharedExtents>,
    flusher: OnceLock<Weak<dyn Flusher>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

/// The state that [`crate::open`] found on disk, and the options, for [`Engine::assemble`].
pub(crate) struct Parts {
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) store: Arc<NodeStore>,
    pub(crate) space: Space,
    pub(crate) geometry: FilesystemGeometry,
    pub(crate) options: EngineOptions,
    pub(crate) chunk_tree_uuid: Uuid,
    pub(crate) trees: HashMap<RootId, Arc<Tree>>,
    pub(crate) superblock: Superblock,
    pub(crate) refusal: Option<String>,
    pub(crate) found_log: Option<FoundLog>,
}

impl Engine {
    pub(crate) fn assemble(parts: Parts) -> Arc<Self> {
        let reason = match (&parts.refusal, parts.options.read_only) {
            (Some(refusal), _) => Some(refusal.clone()),
            (None, true) => Some("mounted read-only".to_owned()),
            (None, false) => None,
        };
        let engine = Arc::new(Self {
            shared_extents: Mutex::new(SharedExtents::of(&parts.options)),
            volumes: parts.volumes,
            store: parts.store,
            space: parts.space,
            geometry: parts.geometry,
            options: parts.options,
            chunk_tree_uuid: parts.chunk_tree_uuid,
            running: RunningTransaction::after(parts.superblock.generation),
            admission: Admission::default(),
            tickets: Tickets::default(),
            commit_state: CommitState::new(parts.superblock),
            trees: LoadedTrees::new(parts.trees),
            roots: SubvolumeRoots::default(),
            ledger: DataLedger::new(parts.geometry.sectorsize, parts.geometry.csum_type.size()),
            moved: MovedExtents::default(),
            pending_chunks: PendingChunks::default(),
            claims: BlockGroupClaims::default(),
            conversion: Conversion::default(),
            device_changes: DeviceChanges::default(),
            freed: FreedExtents::default(),
            tree_log: TreeLog::new(parts.found_log),
            fsyncs: Fsyncs::default(),
            quotas: Quotas::default(),
            stats: EngineStats::default(),
            abort_state: Arc::new(AbortState::new(reason)),
            flusher: OnceLock::new(),
        });
        engine.abort_state.register();
        engine.update_unallocated();
        engine.note_extent_tree_bytes();
        engine
    }

    /// The context with which the folder `nodes` writes nodes.
    pub(crate) fn node_writer(&self) -> NodeWriter<'_> {
        NodeWriter {
            volumes: &self.volumes,
            store: &self.store,
            stats: &self.stats,
            abort_state: &self.abort_state,
            csum_type: self.geometry.csum_type,
            nodesize: self.geometry.nodesize,
        }
    }

    /// The superblock of the last commit.
    pub fn superblock(&self) -> Superblock {
        self.commit_state.superblock().clone()
    }

    /// The reason why the filesystem is read-only, or `None` if it is writable.
    pub fn read_only(&self) -> Option<String> {
        self.abort_state.read_only()
    }

    /// Declares that this thread works on the filesystem: from now on, a panic of this thread turns the filesystem
    /// read-only.
    pub fn enter(&self) {
        self.abort_state.enter();
    }

    /// Checks that the filesystem is writable.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`](ubtrfs_error::Error::ReadOnly) with the reason.
    pub fn check_writable(&self) -> Result<()> {
        self.abort_state.check_writable()
    }

    /// Makes the filesystem read-only until it is closed: nothing is committed any more. The first reason is kept.
    pub fn abort(&self, reason: String) {
        self.abort_state.abort(reason);
    }

    /// Sizes and features of the filesystem.
    pub fn geometry(&self) -> FilesystemGeometry {
        self.geometry
    }

    /// The generation of the running transaction.
    pub fn generation(&self) -> Generation {
        self.running.transid()
    }

    /// Whether a commit has anything to write.
    pub fn has_changes(&self) -> bool {
        self.running.has_changes()
            || !self.pending_chunks.is_empty()
            || self.nr_dead_roots() > 0
            || self.quotas.have_work()
            || self.claims.have_work()
            || !self.device_changes.is_empty()
            || self.commit_state.has_noted_label()
    }

    /// Whether commits have step-by-step work left: dropping deleted subvolumes, or a rescan of quotas.
    pub fn has_steps_left(&self) -> bool {
        self.nr_dead_roots() > 0 || self.quotas.is_rescanning()
    }

    /// The generation of the last transaction on disk.
    pub fn committed_generation(&self) -> Generation {
        self.commit_state.committed()
    }

    /// Sets the object that writes dirty file data and runs background work for the engine. Must be called only once:
    /// the first object stays.
    pub fn set_flusher(&self, flusher: Weak<dyn Flusher>) {
        let is_first = self.flusher.set(flusher).is_ok();
        debug_assert!(is_first, "an engine has one flusher");
    }

    pub(crate) fn flusher(&self) -> Option<Arc<dyn Flusher>> {
        self.flusher.get().and_then(Weak::upgrade)
    }

    /// The use of space, by kind and on the devices.
    pub fn usage(&self) -> BlockGroupUsage {
        BlockGroupUsage {
            data: self.space.info(SpaceKind::Data),
            metadata: self.space.info(SpaceKind::Metadata),
            system: self.space.info(SpaceKind::System),
            data_flags: self.chunk_flags(SpaceKind::Data),
            metadata_flags: self.chunk_flags(SpaceKind::Metadata),
            device_bytes: self.commit_state.superblock().total_bytes,
            unallocated_bytes: self.volumes.unallocated_bytes(),
            allocatable_data_bytes: self.volumes.allocatable_bytes(self.chunk_flags(SpaceKind::Data)),
            global_reserve: self.global_reserve(&self.space.info(SpaceKind::Metadata)),
        }
    }

    /// The chunk that starts at this address.
    pub fn chunk_at(&self, start: Logical) -> Option<Arc<ChunkItem>> {
        self.volumes.chunk_at(start).filter(|(logical, _)| *logical == start).map(|(_, chunk)| chunk)
    }

    /// All devices, including missing ones.
    pub fn devices(&self) -> Vec<DeviceSummary> {
        self.volumes.devices()
    }

    /// Why given devices are not used, each in a sentence: they were removed from the filesystem.
    pub fn devices_not_used(&self) -> Vec<String> {
        self.volumes.not_used()
    }

    /// Logical bytes that block groups with these flags can hold at most if the devices have nothing else.
    pub fn capacity_bytes(&self, flags: BlockGroupFlags) -> u64 {
        self.volumes.capacity_bytes(flags)
    }

    /// Bytes of device extents, for each device and for each combination of type and profile bits and number of stripes.
    pub fn allocated_by_device(&self) -> BTreeMap<(DevId, u64, usize), u64> {
        let mut bytes = BTreeMap::new();
        for (_, chunk) in self.volumes.chunks() {
            let len = chunk.device_extent_len();
            for stripe in &chunk.stripes {
                let key = (stripe.devid, chunk.flags.bits(), chunk.stripes.len());
                let sum: &mut u64 = bytes.entry(key).or_default();
                *sum = sum.saturating_add(len);
            }
        }
        bytes
    }

    /// The block group that starts at this address.
    pub fn block_group(&self, start: Logical) -> Option<BlockGroup> {
        self.space.block_group_at(start).filter(|group| group.start == start)
    }

    /// Whether the block group that starts at this address lies on a seed device. Such a block group is never written.
    pub fn is_on_seed(&self, start: Logical) -> bool {
        self.space.is_on_seed(start)
    }

    /// Bytes of the data block groups on seed devices that no extent uses.
    pub fn free_on_seeds(&self) -> u64 {
        if !self.volumes.has_seed() {
            return 0;
        }
        let groups = self.space.block_groups().into_iter();
        let on_seed =
            groups.filter(|group| group.flags.contains(BlockGroupFlags::DATA) && self.is_on_seed(group.start));
        on_seed.map(|group| group.len_bytes.saturating_sub(group.used)).fold(0, u64::saturating_add)
    }

    /// All block groups, by ascending address.
    pub fn block_groups(&self) -> Vec<BlockGroup> {
        self.space.block_groups()
    }

    /// The counters, which the crates above use too.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// All counters, and the current sizes of caches and space.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut out = self.stats.metrics();
        let cache = self.cache_stats();
        out.push(Metric::counter("node_cache_hits_total", "Nodes found in the cache", cache.hits as f64));
        out.push(Metric::counter("node_cache_misses_total", "Nodes read from the devices", cache.misses as f64));
        let hit_rate = cache.hits as f64 / cache.hits.saturating_add(cache.misses).max(1) as f64;
        out.push(Metric::gauge("node_cache_hit_rate", "Share of lookups that found their node, from 0 to 1", hit_rate));
        out.push(Metric::gauge("node_cache_bytes", "Nodes in the cache", cache.bytes as f64));
        let unwritten = self.store.most_unwritten_bytes() as f64;
        out.push(Metric::gauge("unwritten_nodes_max_bytes", "Largest size of nodes waiting to be written", unwritten));
        out.extend(self.tickets.metrics());
        out.push(self.admission.metric());
        out.push(Metric::gauge(
            "committed_generation",
            "Generation of the last transaction on disk",
            self.committed_generation().0 as f64,
        ));
        let help = "Block groups, chunks, device extents and trees visited by walks of all of them";
        let walked = [self.space.nr_walked(), self.volumes.nr_walked(), self.trees.nr_walked()];
        let walked = walked.into_iter().fold(0, u64::saturating_add);
        out.push(Metric::counter("walked_total", help, walked as f64));
        let usage = self.usage();
        let kinds = [("data", &usage.data), ("metadata", &usage.metadata), ("system", &usage.system)];
        for (kind, info) in kinds {
            let mut push =
                |name, help, bytes: u64| out.push(Metric::gauge(name, help, bytes as f64).label("kind", kind));
            push("space_total_bytes", "Bytes of block groups", info.total);
            push("space_used_bytes", "Bytes used in block groups", info.used);
            push("space_may_use_bytes", "Bytes reserved but not allocated yet", info.may_use);
        }
        out.push(Metric::gauge("space_unallocated_bytes", "Bytes that no chunk uses", usage.unallocated_bytes as f64));
        out
    }

    /// Error counters of the devices, including errors of earlier mounts.
    pub fn device_stats(&self) -> Vec<(DevId, DevStatsItem)> {
        self.volumes.stats()
    }

    /// Returns the readahead of tree leaves. No leaf is read ahead unless the caller calls [`LeafReadAhead::accept`] and
    /// runs the readahead on a thread.
    /// The readahead keeps the devices open until it is stopped.
    pub fn leaf_read_ahead(&self) -> LeafReadAhead {
        LeafReadAhead::new(Arc::clone(&self.store), self.abort_state.engine_id())
    }

    /// Counts of hits and misses of the node cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.store.cache_stats()
    }
}
