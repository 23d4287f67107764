//! `ubtrfs inspect tree-stats`: how the blocks of the main trees lie on the disk, with the text of btrfs-progs.
//!
//! A tree is read parent before children. Each block but the root is compared with the block before it among the
//! children of its parent, or with the parent if it is the first. A block that does not follow directly is a seek. Blocks
//! that follow each other directly are a cluster, which counts when a seek ends it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ubtrfs_format::node::NodeView;
use ubtrfs_format::{KeyType, RootId};

use super::blocks::{Blocks, InspectedBlock, Order, Pointer};
use super::dump_tree;
use crate::commands::committed::Committed;
use crate::commands::offline::with_members;
use crate::common::{print_out, warn};
use crate::units::Units;

/// Show how the blocks of the root, extent, checksum and top-level trees lie on the disk
#[derive(clap::Args)]
pub(super) struct Args {
    /// Image or device
    #[arg(value_name = "DEVICE")]
    device: PathBuf,
    /// Print bytes as numbers
    #[arg(short = 'b')]
    raw: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let units = Units::or_raw(args.raw);
    let mut devices = Committed::open(&with_members(std::slice::from_ref(&args.device))?)?;
    let (text, damage) = devices.read_consistently(|devices| {
        let blocks = Blocks::open(devices)?;
        let (mut text, mut damage) = (String::new(), Vec::new());
        let roots = dump_tree::roots(&blocks);
        for (id, name) in TREES {
            let Some((_, _, root)) = roots.iter().find(|(found, _, _)| *found == id) else { continue };
            let layout = TreeLayout::of(&blocks, *root, &mut damage);
            write!(text, "Calculating size of {name} tree\n{}", layout.text(&units)?)?;
        }
        let is_damaged = !damage.is_empty();
        Ok(((text, damage), is_damaged))
    })?;
    print_out(&text)?;
    damage.iter().for_each(|damage| warn(damage));
    Ok(if damage.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The trees that are shown, in this order.
const TREES: [(RootId, &str); 4] = [
    (RootId::ROOT_TREE, "root"),
    (RootId::EXTENT_TREE, "extent"),
    (RootId::CSUM_TREE, "csum"),
    (RootId::FS_TREE, "fs"),
];

/// The children of a node that have been read.
#[derive(Clone, Copy, Default)]
struct Siblings {
    last: u64,
    /// Bytes of the cluster at the end, if it has more than one block.
    cluster: u64,
}

/// How the blocks of a tree lie on the disk.
#[derive(Default)]
struct TreeLayout {
    nodesize: u64,
    /// The number of blocks on each level.
    levels: Vec<u64>,
    inline_bytes: u64,
    nr_forward: u64,
    nr_backward: u64,
    /// How often each distance of a seek occurs.
    distances: BTreeMap<u64, u64>,
    clusters: Vec<u64>,
    lowest: u64,
    highest: u64,
    time: Duration,
    /// On each level, the children of the node there that was read last.
    below: Vec<Siblings>,
}

impl TreeLayout {
    fn of(blocks: &Blocks, root: Pointer, damage: &mut Vec<String>) -> Self {
        let mut layout = Self { nodesize: blocks.superblock().nodesize.into(), lowest: u64::MAX, ..Self::default() };
        let began = Instant::now();
        let walked: Result<(), std::convert::Infallible> =
            blocks.walk(root, Order::DepthFirst, &mut |pointer, block| {
                damage.extend(block.damage.clone());
                layout.add(pointer, block);
                Ok(())
            });
        let Ok(()) = walked;
        layout.time = began.elapsed();
        layout
    }

    fn add(&mut self, pointer: &Pointer, block: &InspectedBlock) {
        let Ok(view) = NodeView::new(&block.raw) else { return };
        let (bytenr, level) = (pointer.bytenr.0, usize::from(view.level()));
        let nr_levels = self.levels.len().max(level + 1);
        self.levels.resize(nr_levels, 0);
        self.below.resize(nr_levels, Siblings::default());
        // The root is the only block on the highest level.
        if level + 1 < nr_levels {
            self.follow(level + 1, bytenr);
        }
        self.levels[level] += 1;
        self.below[level] = Siblings { last: bytenr, cluster: 0 };
        (self.lowest, self.highest) = (self.lowest.min(bytenr), self.highest.max(bytenr));
        if view.is_leaf() {
            let is_inline = |slot: &usize| {
                view.key(*slot).is_some_and(|key| key.item_type == KeyType::EXTENT_DATA)
                    && view.item(*slot).is_some_and(|item| item.get(INLINE_TYPE_OFFSET) == Some(&0))
            };
            let len = |slot: usize| view.item(slot).map_or(0, |item| item.len() as u64 - INLINE_DATA_OFFSET);
            self.inline_bytes += (0..view.nritems()).filter(is_inline).map(len).sum::<u64>();
        }
    }

    /// Notes the next child of the node on this level.
    fn follow(&mut self, level: usize, bytenr: u64) {
        let siblings = &mut self.below[level];
        let next = siblings.last.saturating_add(self.nodesize);
        if bytenr == next {
            siblings.cluster = siblings.cluster.max(self.nodesize) + self.nodesize;
        } else {
            match bytenr > next {
                true => self.nr_forward += 1,
                false => self.nr_backward += 1,
            }
            *self.distances.entry(bytenr.abs_diff(next)).or_default() += 1;
            if siblings.cluster > 0 {
                self.clusters.push(std::mem::take(&mut siblings.cluster));
            }
        }
        siblings.last = bytenr;
    }

    fn text(&self, units: &Units) -> Result<String, std::fmt::Error> {
        let size = |bytes| units.format(bytes);
        let nr_blocks: u64 = self.levels.iter().sum();
        let nr_seeks = self.nr_forward + self.nr_backward;
        let sum = |total: u64, (distance, count): (&u64, &u64)| total.saturating_add(distance.saturating_mul(*count));
        let distance = self.distances.iter().fold(0, sum).checked_div(nr_seeks).unwrap_or_default();
        let (nr_clusters, bytes) = (self.clusters.len() as u64, self.clusters.iter().sum::<u64>());
        let mut text = format!("\tTotal size: {}\n", size(nr_blocks * self.nodesize));
        writeln!(text, "\t\tInline data: {}", size(self.inline_bytes))?;
        writeln!(text, "\tTotal seeks: {nr_seeks}")?;
        writeln!(text, "\t\tForward seeks: {}", self.nr_forward)?;
        writeln!(text, "\t\tBackward seeks: {}", self.nr_backward)?;
        writeln!(text, "\t\tAvg seek len: {}", size(distance))?;
        if nr_seeks >= HISTOGRAM_UNITS {
            text += &histogram(&self.distances, nr_seeks / HISTOGRAM_UNITS)?;
        }
        writeln!(text, "\tTotal clusters: {}", nr_clusters.max(1))?;
        writeln!(text, "\t\tAvg cluster size: {}", size(bytes.checked_div(nr_clusters).unwrap_or_default()))?;
        writeln!(text, "\t\tMin cluster size: {}", size(self.clusters.iter().copied().min().unwrap_or_default()))?;
        writeln!(text, "\t\tMax cluster size: {}", size(self.clusters.iter().copied().max().unwrap_or(self.nodesize)))?;
        writeln!(text, "\tTotal disk spread: {}", size(self.highest.saturating_sub(self.lowest)))?;
        writeln!(text, "\tTotal read time: {} s {} us", self.time.as_secs(), self.time.subsec_micros())?;
        writeln!(text, "\tLevels: {}", self.levels.len())?;
        writeln!(text, "\tTotal nodes: {nr_blocks}")?;
        for (level, count) in self.levels.iter().enumerate() {
            write!(text, "\t\tOn level {level}: {count:8}")?;
            if let Some(below) = level.checked_sub(1).and_then(|below| self.levels.get(below)) {
                write!(text, "  (avg fanout {})", below / (*count).max(1))?;
            }
            text.push('\n');
        }
        Ok(text)
    }
}

/// Groups of distances, each with its number of seeks, and a mark for each `unit` of them.
///
/// As in btrfs-progs, a group ends with three units, and the distance behind a group that has ended so is in none. A
/// distance that occurs so often is a group of its own.
fn histogram(distances: &BTreeMap<u64, u64>, unit: u64) -> Result<String, std::fmt::Error> {
    let width = distances.keys().next_back().map_or(0, |distance| distance.to_string().len());
    let line = |(start, end, count): (u64, u64, u64)| {
        let marks = match usize::try_from(count / unit).unwrap_or_default() {
            0 => "|".to_owned(),
            nr_marks => "#".repeat(nr_marks),
        };
        format!("\t\t{start:width$} - {end:width$}: {count:width$} {marks}\n")
    };
    let mut text = String::from("\tSeek histogram\n");
    let mut group: Option<(u64, u64, u64)> = None;
    for (&distance, &count) in distances {
        let is_full = group.is_some_and(|(_, _, count)| count >= 3 * unit);
        if count >= 3 * unit {
            text.extend(group.take().map(line));
            text += &line((distance, distance, count));
        } else if is_full {
            text.extend(group.take().map(line));
        } else {
            let (start, _, before) = group.unwrap_or((distance, distance, 0));
            group = Some((start, distance, before + count));
        }
    }
    text.extend(group.map(line));
    Ok(text)
}

/// The number of units into which the seeks of a histogram are divided.
const HISTOGRAM_UNITS: u64 = 20;
/// The offset of the type in an item of a file extent, where 0 means inline data.
const INLINE_TYPE_OFFSET: usize = 20;
/// The offset of inline data in such an item.
const INLINE_DATA_OFFSET: u64 = 21;
