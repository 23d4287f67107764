//! Tests of both forms of free space items, of the change from one form to the other, and of broken items.

#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use proptest::prelude::*;

use super::*;
use crate::test_tree::TestTree;

type Items = BTreeMap<Key, Vec<u8>>;

const SECTOR: u32 = 4096;
const START: Logical = Logical(13631488);

fn tree() -> TestTree {
    TestTree::new(RootId::FREE_SPACE_TREE, 4096)
}

fn set(tree: &mut TestTree, len_bytes: u64, free: &[Range<u64>]) -> Batch {
    let nodes = tree.build();
    let batch = free_space_changes(&nodes, &nodes.root, START, len_bytes, free, SECTOR).expect("valid");
    tree.apply(&batch);
    assert_eq!(load(tree, len_bytes).expect("valid"), free);
    let nodes = tree.build();
    let again = free_space_changes(&nodes, &nodes.root, START, len_bytes, free, SECTOR).expect("valid");
    assert!(again.is_empty(), "nothing is left to do");
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
        let nodes = tree.build();
        let batch = free_space_changes(&nodes, &nodes.root, START, 8 << 20, &comb(count), SECTOR).expect("valid");
        tree.apply(&batch);
        assert_eq!(load(&tree, 8 << 20).expect("valid"), comb(count));
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
            let nodes = tree.build();
            let batch = free_space_changes(&nodes, &nodes.root, START, len_bytes, &free, SECTOR).expect("valid");
            tree.apply(&batch);
            prop_assert_eq!(load(&tree, len_bytes).expect("valid"), free);
        }
    }
}
