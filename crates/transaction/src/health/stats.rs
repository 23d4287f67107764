//! Statistics of the engine. A counter is updated once for a batch, a node or a phase, never for a single operation. A
//! span measures the duration of a large phase, and is drawn into a [timeline](crate::health::timeline) on request.
//!
//! - T1. Counters only grow. Each counter is read separately, so two values may be from different moments.
//! - T2. `nodes_written` and `leaves_written` count a node when it is written, so a node that a transaction changed ten
//!   times and wrote once counts once. `leaves_made` counts a leaf each time a batch makes it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_format::{KeyType, RootId};
use ubtrfs_tree::{ApplyStats, Node};

use crate::health::metric::Metric;
use crate::health::timeline::Timeline;

/// A timed phase. The phases of a commit come first, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// A whole commit.
    Commit,
    /// The running transaction ends.
    Freeze,
    /// The delayed items of subvolumes are merged into their trees, and subvolumes are made, changed and dropped.
    Apply,
    /// Extent, csum, free space, block group, chunk and root trees are updated until they agree.
    Rounds,
    /// Nodes are checked, checksummed and written.
    WriteNodes,
    /// The devices flush.
    FlushDevices,
    /// The superblock is written and made durable.
    Superblock,
    /// Space that only the old superblock reached is freed.
    Unpin,
    /// A batch of file data is written back.
    WriteData,
    /// A reservation waited for reclaim.
    ReserveWait,
    /// Delayed rows of subvolumes are merged into their trees without a commit.
    ApplyRows,
}

impl Span {
    const ALL: [(Self, &'static str); NR_SPANS] = [
        (Self::Commit, "commit"),
        (Self::Freeze, "freeze"),
        (Self::Apply, "apply"),
        (Self::Rounds, "rounds"),
        (Self::WriteNodes, "write_nodes"),
        (Self::FlushDevices, "flush_devices"),
        (Self::Superblock, "superblock"),
        (Self::Unpin, "unpin"),
        (Self::WriteData, "write_data"),
        (Self::ReserveWait, "reserve_wait"),
        (Self::ApplyRows, "apply_rows"),
    ];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

const NR_SPANS: usize = 11;

/// The reason for writing back dirty data that no caller asked to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimReason {
    /// Dirty data exceeds a share of memory, so background threads write.
    Background,
    /// Dirty data exceeds its limit, so a writer writes it back.
    Writer,
    /// A reservation of space did not fit.
    Reservation,
}

impl ReclaimReason {
    const NAMES: [&'static str; 3] = ["background", "writer", "reservation"];
}

/// Trees by purpose.
const TREE_CLASSES: [&str; 8] = ["subvolume", "extent", "csum", "free_space", "root", "chunk", "device", "other"];

fn class_of(tree: RootId) -> usize {
    match tree {
        tree if tree.is_fs_tree() => 0,
        RootId::EXTENT_TREE | RootId::BLOCK_GROUP_TREE => 1,
        RootId::CSUM_TREE => 2,
        RootId::FREE_SPACE_TREE => 3,
        RootId::ROOT_TREE => 4,
        RootId::CHUNK_TREE => 5,
        RootId::DEV_TREE => 6,
        _ => 7,
    }
}

/// The counters of one engine.
#[derive(Debug)]
pub struct EngineStats {
    spans: [SpanStat; NR_SPANS],
    trees: [TreeStat; TREE_CLASSES.len()],
    reclaim: [ReclaimStat; ReclaimReason::NAMES.len()],
    /// Number of written leaves that hold directory index items of subvolumes (`dir_index_items` counts the items).
    dir_index_leaves: AtomicU64,
    dir_index_items: AtomicU64,
    timeline: Timeline,
}

#[derive(Debug, Default)]
struct SpanStat {
    count: AtomicU64,
    nanos: AtomicU64,
    max_nanos: AtomicU64,
    /// Counts of spans by duration, in powers of four from [`FIRST_BUCKET`] on. The last bucket counts all spans that
    /// are too long for the other buckets.
    buckets: [AtomicU64; NR_BUCKETS],
}

/// The longest duration in the first bucket; the buckets end at 16 us, 64 us, 256 us, ... 17 s.
const FIRST_BUCKET: Duration = Duration::from_micros(16);
const NR_BUCKETS: usize = 12;

#[derive(Debug, Default)]
struct TreeStat {
    batches: AtomicU64,
    items_put: AtomicU64,
    items_deleted: AtomicU64,
    /// Number of leaves that batches made. A leaf counts each time it is made; this can happen several times in a
    /// transaction.
    leaves_made: AtomicU64,
    leaves_written: AtomicU64,
    nodes_written: AtomicU64,
    leaf_bytes_used: AtomicU64,
    leaf_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct ReclaimStat {
    asked_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Default for EngineStats {
    fn default() -> Self {
        Self {
            spans: Default::default(),
            trees: Default::default(),
            reclaim: Default::default(),
            dir_index_leaves: AtomicU64::new(0),
            dir_index_items: AtomicU64::new(0),
            timeline: Timeline::default(),
        }
    }
}

impl EngineStats {
    /// Begins a span, which ends when the returned guard is dropped.
    pub fn span(&self, span: Span) -> SpanGuard<'_> {
        SpanGuard { stats: self, span, started: Instant::now() }
    }

    /// Updates the counters for dirty data that was written back in order to free memory or space.
    pub fn reclaimed(&self, state: ReclaimReason, asked_bytes: u64, written_bytes: u64) {
        let stat = &self.reclaim[state as usize];
        add(&stat.asked_bytes, asked_bytes);
        add(&stat.written_bytes, written_bytes);
    }

    /// Goes on with the timeline of other statistics, which ends there.
    pub fn continue_timeline(&self, of: &Self) {
        self.timeline.take(&of.timeline);
    }

    /// Writes a timeline of all later spans to `file`, in a format that Chrome and Perfetto show.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn start_timeline(&self, file: std::fs::File) -> std::io::Result<()> {
        self.timeline.start(file)
    }

    /// Updates the counters for a batch that was applied to a tree.
    pub(crate) fn applied(&self, tree: RootId, stats: &ApplyStats) {
        let stat = &self.trees[class_of(tree)];
        add(&stat.batches, stats.batches);
        add(&stat.items_put, stats.items_put);
        add(&stat.items_deleted, stats.items_deleted);
        add(&stat.leaves_made, stats.leaves_written);
    }

    /// Updates the counters for a node that is about to be written.
    pub(crate) fn node_written(&self, node: &Node) {
        let stat = &self.trees[class_of(node.owner())];
        add(&stat.nodes_written, 1);
        if !node.is_leaf() {
            return;
        }
        add(&stat.leaves_written, 1);
        add(&stat.leaf_bytes_used, node.used_bytes() as u64);
        add(&stat.leaf_bytes, leaf_capacity(node));
        if node.owner().is_fs_tree() {
            let is_index = |slot: &usize| node.key(*slot).item_type == KeyType::DIR_INDEX;
            let items = (0..node.nritems()).filter(is_index).count() as u64;
            add(&self.dir_index_leaves, u64::from(items > 0));
            add(&self.dir_index_items, items);
        }
    }

    fn ended(&self, span: Span, started: Instant) {
        let took = started.elapsed();
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let stat = &self.spans[span as usize];
        add(&stat.count, 1);
        add(&stat.nanos, nanos);
        stat.max_nanos.fetch_max(nanos, Ordering::Relaxed);
        add(&stat.buckets[bucket_of(took)], 1);
        self.timeline.note(span.name(), started, took, span == Span::Commit);
    }

    /// Returns all counters.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let mut out = Vec::new();
        for (class, stat) in TREE_CLASSES.iter().zip(&self.trees) {
            if get(&stat.batches) == 0 && get(&stat.nodes_written) == 0 {
                continue;
            }
            let mut push = |name, help, counter: &AtomicU64| {
                out.push(Metric::counter(name, help, get(counter) as f64).label("tree", class));
            };
            push("tree_batches_total", "Sorted batches applied to trees", &stat.batches);
            push("tree_items_put_total", "Items that batches inserted or replaced", &stat.items_put);
            push("tree_items_deleted_total", "Items that batches deleted", &stat.items_deleted);
            push("tree_leaves_made_total", "Leaves that batches made in memory", &stat.leaves_made);
            push("tree_leaves_written_total", "Leaves written to the devices", &stat.leaves_written);
            push("tree_nodes_written_total", "Nodes written to the devices, leaves included", &stat.nodes_written);
            let (used, all) = (get(&stat.leaf_bytes_used) as f64, get(&stat.leaf_bytes) as f64);
            if all > 0.0 {
                let help = "Mean fill of the leaves written, from 0 to 1";
                out.push(Metric::gauge("tree_leaf_fill", help, used / all).label("tree", class));
            }
        }
        let (leaves, items) = (get(&self.dir_index_leaves) as f64, get(&self.dir_index_items) as f64);
        out.push(Metric::counter("dir_index_batches_total", "Leaves written with directory index items", leaves));
        out.push(Metric::counter("dir_index_items_total", "Directory index items in these leaves", items));
        for (state, stat) in ReclaimReason::NAMES.iter().zip(&self.reclaim) {
            let mut push = |name, help, counter: &AtomicU64| {
                out.push(Metric::counter(name, help, get(counter) as f64).label("state", state));
            };
            push("reclaim_asked_bytes_total", "File data that reclaim asked to write", &stat.asked_bytes);
            push("reclaim_written_bytes_total", "File data that was written for it", &stat.written_bytes);
        }
        for (span, name) in Span::ALL {
            self.spans[span as usize].push_metrics(name, &mut out);
        }
        out
    }
}

impl SpanStat {
    fn push_metrics(&self, name: &'static str, out: &mut Vec<Metric>) {
        let help = "Time of the engine's phases";
        let mut so_far = 0_u64;
        let mut limit = FIRST_BUCKET;
        for (index, bucket) in self.buckets.iter().enumerate() {
            so_far = so_far.saturating_add(get(bucket));
            let edge = if index.saturating_add(1) < NR_BUCKETS {
                format!("{}", limit.as_secs_f64())
            } else {
                "+Inf".to_owned()
            };
            let metric = Metric::histogram("phase_seconds", "_bucket", help, so_far as f64);
            out.push(metric.label("phase", name).label("le", &edge));
            limit = limit.saturating_mul(4);
        }
        let sum = get(&self.nanos) as f64 / 1e9;
        out.push(Metric::histogram("phase_seconds", "_sum", help, sum).label("phase", name));
        out.push(Metric::histogram("phase_seconds", "_count", help, get(&self.count) as f64).label("phase", name));
        let max = get(&self.max_nanos) as f64 / 1e9;
        out.push(Metric::gauge("phase_seconds_max", "Longest time of each phase", max).label("phase", name));
    }
}

fn bucket_of(took: Duration) -> usize {
    let mut limit = FIRST_BUCKET;
    (0..NR_BUCKETS - 1)
        .find(|_| {
            let fits = took <= limit;
            limit = limit.saturating_mul(4);
            fits
        })
        .unwrap_or(NR_BUCKETS - 1)
}

/// Bytes of a leaf for item headers and item data.
fn leaf_capacity(node: &Node) -> u64 {
    node.raw().len().saturating_sub(ubtrfs_format::node::HEADER_SIZE) as u64
}

/// Ends a span when dropped.
#[must_use = "the span ends when the guard is dropped"]
#[derive(Debug)]
pub struct SpanGuard<'a> {
    stats: &'a EngineStats,
    span: Span,
    started: Instant,
}

impl Drop for SpanGuard<'_> {
    fn drop(&mut self) {
        self.stats.ended(self.span, self.started);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_counted_by_their_length() {
        assert_eq!(bucket_of(Duration::ZERO), 0);
        assert_eq!(bucket_of(Duration::from_micros(17)), 1);
        assert_eq!(bucket_of(Duration::from_secs(3600)), NR_BUCKETS - 1);
        let stats = EngineStats::default();
        drop(stats.span(Span::Unpin));
        let count = |suffix: &str| {
            let named = |metric: &Metric| metric.full_name() == format!("ubtrfs_phase_seconds{suffix}");
            let of_unpin = |metric: &Metric| metric.labels.contains(&("phase", "unpin".to_owned()));
            stats
                .metrics()
                .into_iter()
                .filter(|metric| named(metric) && of_unpin(metric))
                .map(|metric| metric.value)
                .fold(0.0, f64::max)
        };
        assert_eq!((count("_count"), count("_bucket")), (1.0, 1.0));
        for (index, (span, name)) in Span::ALL.iter().enumerate() {
            assert_eq!((*span as usize, span.name()), (index, *name));
        }
    }
}
