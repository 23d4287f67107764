//! Tests of both forms of free space items, of the change from one form to the other, and of broken items.

#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use ubtrfs_tree::{Node, NodePtr};

use super::*;
use crate::test_tree::{TestNodes, TestTree};

type Items = BTreeMap<Key, Vec<u8>>;

const SECTOR: u32 = 4096;
const START: Logical = Logical(13631488);

fn tree() -> TestTree {
    TestTree::new(RootId::FREE_SPACE_TREE, 4096)
}

/// The changes after `free` changed in these ranges.
fn changes(tree: &TestTree, len_bytes: u64, free: &[Range<u64>], changed: &[Range<u64>]) -> Batch {
    let nodes = tree.build();
    let view = GroupFreeSpace {
        start: START,
        len_bytes,
        nr_ranges: free.len() as u64,
        touching: &|window| touching(free, window),
    };
    free_space_changes(&nodes, &nodes.root, &view, changed, SECTOR).expect("valid")
}

fn touching(free: &[Range<u64>], window: &Range<u64>) -> Vec<Range<u64>> {
    free.iter().filter(|run| run.start <= window.end && window.start <= run.end).cloned().collect()
}

/// The ranges that are in one list and not in the other.
fn differences(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut bounds = BTreeMap::new();
    for bound in one.iter().chain(other).flat_map(|run| [run.start, run.end]) {
        *bounds.entry(bound).or_insert(0) += 1;
    }
    let bounds: Vec<u64> = bounds.into_iter().filter(|(_, count)| count % 2 == 1).map(|(bound, _)| bound).collect();
    bounds.as_chunks().0.iter().map(|[from, to]| *from..*to).collect()
}

fn set(tree: &mut TestTree, len_bytes: u64, free: &[Range<u64>]) -> Batch {
    let whole = [START.0..START.0 + len_bytes];
    let batch = changes(tree, len_bytes, free, &whole);
    if let Ok(before) = load(tree, len_bytes) {
        assert_eq!(changes(tree, len_bytes, free, &differences(&before, free)), batch, "the changed ranges suffice");
    }
    tree.apply(&batch);
    assert_eq!(load(tree, len_bytes).expect("valid"), free);
    assert!(changes(tree, len_bytes, free, &whole).is_empty(), "nothing is left to do");
    batch
}

fn load(tree: &TestTree, len_bytes: u64) -> Result<Vec<Range<u64>>> {
    let nodes = tree.build();
    load_free_space(&nodes, &nodes.root, START, len_bytes, SECTOR)
}

/// `count` runs of one sector, each after a used sector.
fn comb(count: u64) -> Vec<Range<u64>> {
    let at = |sector: u64| START.0 + sector * u64::from(SECTOR);
    (0..count).map(|index| at(2 * index + 1)..at(2 * index + 2)).collect()
}

fn info(tree: &TestTree) -> FreeSpaceInfo {
    FreeSpaceInfo::decode(tree.items.first_key_value().expect("there").1).expect("valid")
}

#[test]
fn thresholds_are_the_kernels() {
    assert_eq!(Thresholds::new(8 << 20, SECTOR), Thresholds { high: 11, low: 0 });
    assert_eq!(Thresholds::new(1 << 30, SECTOR), Thresholds { high: 1438, low: 1338 });
}

#[test]
fn groups_change_their_form_with_a_gap_between() {
    let len_bytes = 1 << 30;
    let mut tree = tree();
    assert_eq!(set(&mut tree, len_bytes, &[START.0..START.0 + len_bytes]).len(), 2);
    set(&mut tree, len_bytes, &comb(1438));
    assert_eq!((info(&tree), tree.items.len()), (FreeSpaceInfo { extent_count: 1438, flags: 0 }, 1439));
    set(&mut tree, len_bytes, &comb(1439));
    assert_eq!((info(&tree), tree.items.len()), (FreeSpaceInfo { extent_count: 1439, flags: 1 }, 129));
    let batch = set(&mut tree, len_bytes, &comb(1338));
    assert_eq!((info(&tree).flags, batch.len()), (1, 2), "only the touched bitmap is written");
    set(&mut tree, len_bytes, &comb(1337));
    assert_eq!((info(&tree), tree.items.len()), (FreeSpaceInfo { extent_count: 1337, flags: 0 }, 1338));
    set(&mut tree, len_bytes, &[]);
    assert_eq!(tree.items.len(), 1);
    let nodes = tree.build();
    tree.apply(&remove_free_space(&nodes, &nodes.root, START, len_bytes).expect("valid"));
    assert!(tree.items.is_empty());
}

/// Counts the nodes that are read.
struct CountedReads<'n>(&'n TestNodes, AtomicU64);

impl NodeSource for CountedReads<'_> {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.read_node(ptr)
    }

    fn nodesize(&self) -> usize {
        self.0.nodesize()
    }
}

#[test]
fn unchanged_free_space_is_neither_read_nor_written() {
    let len_bytes = 1 << 30;
    for (nr_runs, nr_near) in [(1400, 1), (100_000, 1024)] {
        let mut tree = tree();
        let mut free = comb(nr_runs);
        set(&mut tree, len_bytes, &free);
        let nodes = tree.build();
        let changed = [free.remove(nr_runs as usize / 2)];
        let (source, nr_seen) = (CountedReads(&nodes, AtomicU64::new(0)), AtomicU64::new(0));
        let view = GroupFreeSpace {
            start: START,
            len_bytes,
            nr_ranges: free.len() as u64,
            touching: &|window| {
                let runs = touching(&free, window);
                nr_seen.fetch_add(runs.len() as u64, Ordering::Relaxed);
                runs
            },
        };
        let batch = free_space_changes(&source, &nodes.root, &view, &changed, SECTOR).expect("valid");
        assert_eq!(batch.len(), 2, "the info, and one extent or bitmap");
        let nr_read = source.1.into_inner();
        assert!(nr_read <= 2 * (u64::from(nodes.root.level) + 1) + 1, "{nr_read} nodes read");
        assert!(nr_seen.into_inner() <= nr_near, "all free ranges are visited");
    }
}

#[test]
fn the_last_bitmap_covers_what_is_left() {
    let len_bytes = (8 << 20) + 5 * u64::from(SECTOR);
    let mut tree = tree();
    let mut free = comb(500);
    free.push(START.0 + (8 << 20) - 8192..START.0 + len_bytes);
    set(&mut tree, len_bytes, &free);
    let (key, last) = tree.items.last_key_value().expect("there");
    assert_eq!((key.objectid, key.offset, last.as_slice()), (START.0 + (8 << 20), 5 * 4096, &[0b11111][..]));
    assert_eq!(info(&tree).extent_count, 501, "a run over two bitmaps counts once");
}

#[test]
fn neighbours_stay() {
    let mut tree = tree();
    let before = Key::new(START.0 - 4096, KeyType::FREE_SPACE_EXTENT, 4096);
    let behind = Key::new(START.0 + (8 << 20), KeyType::FREE_SPACE_INFO, 1 << 20);
    tree.items.insert(before, Vec::new());
    tree.items.insert(behind, vec![0; 8]);
    for count in [5, 100, 3] {
        set(&mut tree, 8 << 20, &comb(count));
    }
    let nodes = tree.build();
    tree.apply(&remove_free_space(&nodes, &nodes.root, START, 8 << 20).expect("valid"));
    assert_eq!(tree.items.into_keys().collect::<Vec<_>>(), [before, behind]);
}

#[test]
fn broken_items_are_errors() {
    let len_bytes = 8 << 20;
    let mut good = tree();
    set(&mut good, len_bytes, &comb(4));
    let mut bitmaps = tree();
    set(&mut bitmaps, len_bytes, &comb(100));
    let break_it = |tree: &TestTree, change: &dyn Fn(&mut Items)| {
        let mut tree = tree.clone();
        change(&mut tree.items);
        load(&tree, len_bytes).expect_err("broken").to_string()
    };
    let extent = |at, len| Key::new(START.0 + at, KeyType::FREE_SPACE_EXTENT, len);
    assert!(break_it(&good, &|items| drop(items.pop_first())).contains("FREE_SPACE_INFO"));
    assert!(break_it(&good, &|items| drop(items.pop_last())).contains("extent_count"));
    assert!(break_it(&good, &|items| drop(items.insert(extent(4096, 8192), Vec::new()))).contains("disjoint"));
    assert!(break_it(&good, &|items| drop(items.insert(extent(1 << 20, u64::MAX), Vec::new()))).contains("disjoint"));
    assert!(break_it(&good, &|items| drop(items.insert(extent(1 << 20, 0), Vec::new()))).contains("disjoint"));
    assert!(break_it(&good, &|items| drop(items.insert(extent((1 << 20) + 1, 4096), Vec::new()))).contains("disjoint"));
    assert!(break_it(&bitmaps, &|items| drop(items.insert(extent(1 << 20, 4096), Vec::new()))).contains("bitmaps"));
    assert!(break_it(&bitmaps, &|items| items.last_entry().expect("there").get_mut().truncate(9)).contains("bitmap"));
    assert!(
        break_it(&bitmaps, &|items| *items.first_entry().expect("there").get_mut() = vec![1]).contains("FreeSpaceInfo")
    );
    let nodes = good.build();
    assert!(load_free_space(&nodes, &nodes.root, START, u64::MAX, SECTOR).is_err());
}

#[test]
fn free_space_is_all_space_without_extents() {
    let mut tree = TestTree::new(RootId::EXTENT_TREE, 4096);
    let mut add =
        |at: u64, item_type, offset| tree.items.insert(Key::new(START.0 + at, item_type, offset), vec![0; 24]);
    add(0, KeyType::BLOCK_GROUP_ITEM, 1 << 20);
    add(0, KeyType::METADATA_ITEM, 1);
    add(16384, KeyType::EXTENT_ITEM, 4096);
    add(16384, KeyType::EXTENT_DATA_REF, 99999999);
    add(65536, KeyType::METADATA_ITEM, 0);
    add(1 << 20, KeyType::EXTENT_ITEM, 4096);
    let nodes = tree.build();
    let free = free_space_from_extents(&nodes, &nodes.root, START, 1 << 20, 16384).expect("valid");
    assert_eq!(free, [START.0 + 20480..START.0 + 65536, START.0 + 81920..START.0 + (1 << 20)]);
    let too_long = free_space_from_extents(&nodes, &nodes.root, START, 1 << 20, 32768);
    assert!(too_long.is_err(), "extents overlap");
    assert!(free_space_from_extents(&nodes, &nodes.root, START, 65536 + 4096, 16384).is_err(), "over the end");
    let empty = TestTree::new(RootId::EXTENT_TREE, 4096).build();
    let all = free_space_from_extents(&empty, &empty.root, START, 1 << 20, 16384).expect("valid");
    assert_eq!(all, [START.0..START.0 + (1 << 20)]);
}

proptest! {
    #[test]
    fn any_set_of_sectors_comes_back(rounds in prop::collection::vec((any::<u64>(), 0..120usize), 1..6)) {
        let len_bytes = (16 << 20) + 12288;
        let mut tree = tree();
        for (seed, count) in rounds {
            let sectors = len_bytes / u64::from(SECTOR);
            let mut cuts: Vec<u64> = (0..count as u64)
                .map(|index| seed.wrapping_add(index).wrapping_mul(0x9E37_79B9_7F4A_7C15) % sectors)
                .collect();
            cuts.sort_unstable();
            cuts.dedup();
            let at = |sector: u64| START.0 + sector * u64::from(SECTOR);
            let free: Vec<Range<u64>> = cuts.as_chunks().0.iter().map(|[from, to]| at(*from)..at(*to)).collect();
            set(&mut tree, len_bytes, &free);
        }
    }
}
