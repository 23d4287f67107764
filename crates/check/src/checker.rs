//! The state of one check, and the order of its parts.

use std::collections::HashSet;
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::Result;
use ubtrfs_format::check::CheckContext;
use ubtrfs_format::superblock::{CompatRo, Superblock};
use ubtrfs_format::{Corrupt, FormatError, Generation, RootId};

use crate::array::{Array, ChunkSpan};
use crate::block_group::BlockGroups;
use crate::block_table::BlockTable;
use crate::chunk::DeviceExtents;
use crate::csum::CsumRanges;
use crate::extent::DataExtents;
use crate::fingerprint::{Hash, Ledger};
use crate::log::Logged;
use crate::prealloc::Prealloc;
use crate::problem::{Code, Place, Sink};
use crate::quota::Quota;
use crate::root::RootTree;
use crate::segment::Segments;
use crate::walk::{TreeKind, TreeRoot, WalkEvent};
use crate::{CheckProgress, CheckStats, Options, Problem, Report, members, superblock};

/// Number of buckets for references to extents. The buckets take 512 KiB.
const REF_BUCKETS: usize = 1 << 16;
/// Number of buckets for the names of one subvolume.
const NAME_BUCKETS: usize = 1 << 12;

/// Smallest value of [`Checker::again_max`]. Small filesystems get this value.
pub(crate) const REREADS_MIN: u64 = 1 << 21;
/// [`Checker::again_max`] is this number times the number of the filesystem's tree blocks. A limit is needed because
/// subvolumes of a crafted image can share blocks in very many combinations.
pub(crate) const AGAIN_PER_BLOCK: u64 = 64;

/// The state of one check.
pub(crate) struct Checker<'a> {
    pub(crate) array: &'a Array,
    pub(crate) sb: Superblock,
    pub(crate) ctx: CheckContext,
    pub(crate) nodesize: usize,
    pub(crate) sectorsize: u64,
    pub(crate) threads: usize,
    pub(crate) options: Options,
    pub(crate) progress: &'a dyn CheckProgress,
    pub(crate) sink: Sink<'a>,
    pub(crate) spans: Vec<ChunkSpan>,
    pub(crate) buf: Vec<u8>,
    pub(crate) nr_walks: u32,
    /// Whether a tree could not be read completely. Problems that may follow from unread parts are not reported.
    pub(crate) has_gaps: bool,
    pub(crate) blocks: BlockTable,
    pub(crate) log_blocks: HashSet<u64>,
    pub(crate) hash: Hash,
    /// The references to extents. A reference that the extent tree lists has positive weight; the pointer or file
    /// extent item that refers to the extent has negative weight.
    pub(crate) refs: Ledger,
    /// The names in the current subvolume. A name in a directory has positive weight, a name in an inode negative
    /// weight.
    pub(crate) names: Ledger,
    pub(crate) device_extents: DeviceExtents,
    pub(crate) groups: BlockGroups,
    pub(crate) data: DataExtents,
    pub(crate) csums: CsumRanges,
    pub(crate) log: Logged,
    pub(crate) prealloc: Prealloc,
    pub(crate) roots: RootTree,
    pub(crate) quota: Quota,
    pub(crate) segments: Segments,
    /// Number of blocks that were read again.
    pub(crate) nr_rereads: u64,
    /// Maximum number of blocks that may be read again.
    pub(crate) again_max: u64,
    /// The trees walked so far, except for logs. The second walk visits these trees again.
    pub(crate) walked: Vec<TreeRoot>,
    pub(crate) stats: CheckStats,
}

/// Checks the filesystem on `devices`.
pub(crate) fn run(
    devices: Vec<Arc<dyn Device>>,
    options: Options,
    progress: &dyn CheckProgress,
    tell: &mut dyn FnMut(Problem),
) -> Result<Report> {
    let mut sink = Sink::new(options.limits, tell);
    let (sb, members) = members::find(devices, &mut sink)?;
    let array = Array::new(&sb, members.clone());
    for (start, chunk) in superblock::system_chunks(&sb)? {
        array.add_chunk(start, chunk).map_err(|cause| Corrupt::new(cause).at(start))?;
    }
    if array.chunk_at(sb.chunk_root).is_none() {
        let expected = "expected an address in a system chunk";
        let cause = FormatError::Value { what: "superblock", field: "chunk_root", value: sb.chunk_root.0, expected };
        return Err(Corrupt::new(cause).at(sb.chunk_root).into());
    }
    let seeds: Vec<_> =
        members.iter().filter(|member| member.is_seed).map(|seed| seed.superblock.node_fsid()).collect();
    let ctx = CheckContext::new(&sb).with_seeds(&seeds).for_reading_only(true);
    let hash = Hash::random();
    let mut checker = Checker {
        array: &array,
        nodesize: sb.nodesize as usize,
        sectorsize: sb.sectorsize.into(),
        threads: std::thread::available_parallelism().map_or(1, usize::from).min(8),
        options,
        progress,
        sink,
        spans: array.spans(),
        buf: Vec::new(),
        nr_walks: 0,
        has_gaps: false,
        blocks: BlockTable::default(),
        log_blocks: HashSet::new(),
        hash,
        refs: Ledger::new(hash, REF_BUCKETS),
        names: Ledger::new(hash, NAME_BUCKETS),
        device_extents: DeviceExtents::default(),
        groups: BlockGroups::default(),
        data: DataExtents::default(),
        csums: CsumRanges::default(),
        log: Logged::default(),
        prealloc: Prealloc::default(),
        roots: RootTree::default(),
        quota: Quota::default(),
        segments: Segments::default(),
        nr_rereads: 0,
        again_max: REREADS_MIN,
        walked: Vec::new(),
        stats: CheckStats::default(),
        sb,
        ctx,
    };
    for member in members.iter().filter(|member| !member.is_seed) {
        superblock::check_mirrors(member, &checker.sb, &mut checker.sink);
    }
    let complete = checker.all();
    Ok(Report { complete, counts: checker.sink.counts, stats: checker.stats })
}

impl<'a> Checker<'a> {
    /// Runs every part in order. Returns `false` if no leaf of the chunk tree or of the root tree can be read.
    fn all(&mut self) -> bool {
        self.progress.stage("trees", Some(self.metadata_bytes_guess()));
        if !self.chunk_tree() || !self.root_tree() {
            return false;
        }
        superblock::check_backups(self);
        self.extent_tree();
        self.load_extents();
        self.dev_tree();
        self.csum_tree();
        self.free_space_tree();
        self.quota_tree();
        self.uuid_tree();
        self.other_trees();
        self.subvolumes();
        self.log_trees();
        self.progress.stage("cross-checks", None);
        self.compare_chunks();
        self.compare_groups();
        self.compare_blocks();
        self.compare_csums_with_extents();
        self.compare_log();
        self.compare_refs();
        self.compare_prealloc();
        self.compare_roots();
        self.compare_quota();
        if self.options.data_csums {
            self.verify_data();
        }
        if self.has_gaps && !self.sink.has_errors() {
            // The cause of a gap (a part that could not be read) should have been reported already. If no cause was
            // reported, this report prevents the filesystem from counting as clean.
            self.sink.report(Code::BlockRead, Place::default(), "a part of a tree could not be checked");
        }
        true
    }

    /// Estimates the bytes of metadata for the progress bar: a fiftieth of the used bytes.
    fn metadata_bytes_guess(&self) -> u64 {
        self.sb.bytes_used / 50
    }

    pub(crate) fn has_ro(&self, feature: CompatRo) -> bool {
        self.sb.compat_ro().contains(feature)
    }

    /// Returns the root of a tree that the root tree lists.
    pub(crate) fn tree_root(&mut self, id: RootId) -> Option<TreeRoot> {
        let root = self.roots.tree(id)?;
        Some(TreeRoot { kind: TreeKind::Plain, ..root })
    }

    /// Returns the root of a tree that this filesystem must have. Reports a missing tree.
    pub(crate) fn needed_root(&mut self, id: RootId) -> Option<TreeRoot> {
        let root = self.tree_root(id);
        if root.is_none() {
            self.has_gaps = true;
            self.sink.report(Code::TreeMissing, Place::tree(id), "the root tree has no root item of this tree");
        }
        root
    }

    /// Walks a tree. Remembers the tree for the second walk, unless it is a log.
    pub(crate) fn walk_tree(&mut self, root: TreeRoot, on_event: &mut dyn FnMut(&mut Self, WalkEvent<'_, '_>)) -> bool {
        if root.kind != TreeKind::Log {
            self.walked.push(root);
        }
        self.stats.trees = self.stats.trees.saturating_add(1);
        self.walk(&root, on_event)
    }

    /// Returns the root of a tree that the superblock points to: chunk tree, log root tree, root tree.
    pub(crate) fn super_root(&self, id: RootId) -> TreeRoot {
        let sb = &self.sb;
        let (bytenr, level, generation) = match id {
            RootId::CHUNK_TREE => (sb.chunk_root, sb.chunk_root_level, sb.chunk_root_generation),
            RootId::TREE_LOG => (sb.log_root, sb.log_root_level, Generation(sb.generation.0.wrapping_add(1))),
            _ => (sb.root, sb.root_level, sb.generation),
        };
        let kind = if id == RootId::TREE_LOG { TreeKind::Log } else { TreeKind::Plain };
        TreeRoot { id, kind, bytenr: bytenr.0, level, generation: Some(generation), drop: None }
    }
}
