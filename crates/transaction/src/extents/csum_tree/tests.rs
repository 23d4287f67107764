//! Compares the csum tree with a map of sectors, under random edits on a tree of small nodes.

#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use proptest::prelude::*;

use super::*;
use crate::test_tree::TestTree;

const SECTOR: u64 = 4096;

type Sectors = BTreeMap<u64, [u8; 4]>;

fn check(tree: &TestTree, sectors: &Sectors, max: usize) {
    let mut found = Sectors::new();
    let mut end = 0;
    for (key, data) in &tree.items {
        assert!(is_csum_key(key) && key.offset >= end && !data.is_empty() && data.len() <= max * 4);
        for (csum, index) in data.as_chunks().0.iter().zip(0..) {
            found.insert(key.offset + index * SECTOR, *csum);
        }
        end = key.offset + data.len() as u64 / 4 * SECTOR;
    }
    assert_eq!(&found, sectors);
}

fn change(tree: &mut TestTree, insert: &BTreeMap<u64, Vec<u8>>, remove: &[Range<u64>]) -> Batch {
    let nodes = tree.build();
    let batch =
        csum_changes(&nodes, &nodes.root, insert, remove, 4, SECTOR as u32, tree.nodesize as u32).expect("valid");
    tree.apply(&batch);
    batch
}

fn run(start: u64, count: u64, seed: u8) -> (u64, Vec<u8>) {
    (start * SECTOR, (0..count).flat_map(|index| [seed, index as u8, (index >> 8) as u8, 7]).collect())
}

#[test]
fn the_limits_are_the_kernels() {
    // The maximum in images that Linux made: 16228 bytes of crc32c in nodes of 16 KiB.
    assert_eq!(max_csums(16384, 4), 4057);
    assert_eq!(max_csums(65536, 4), 4096);
    assert_eq!(max_csums(16384, 32), 506);
}

#[test]
fn a_long_run_is_cut_into_full_items_and_appends_fill_the_last() {
    let mut tree = TestTree::new(RootId::CSUM_TREE, 16384);
    change(&mut tree, &[run(100, 5120, 1)].into(), &[]);
    let sizes = |tree: &TestTree| tree.items.values().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(&tree), [16228, 4252]);
    let batch = change(&mut tree, &[run(5220, 1000, 2), run(7000, 1, 3)].into(), &[]);
    assert_eq!((sizes(&tree), batch.len()), (vec![16228, 8252, 4], 2));
    // Filling the gap between the last two items joins them.
    let batch = change(&mut tree, &[run(6220, 780, 2)].into(), &[]);
    assert_eq!((sizes(&tree), batch.len()), (vec![16228, 11376], 2));
    let batch = change(&mut tree, &BTreeMap::new(), &[6000 * SECTOR..6001 * SECTOR]);
    assert_eq!(batch.len(), 2);
    let batch = change(&mut tree, &BTreeMap::new(), &[0..1 << 40]);
    assert_eq!((tree.items.len(), batch.len()), (0, 3));
    assert!(change(&mut tree, &BTreeMap::new(), &[0..1 << 40]).is_empty());
}

#[test]
fn absent_checksums_differ_from_zero_checksums() {
    let mut tree = TestTree::new(RootId::CSUM_TREE, 4096);
    change(&mut tree, &[(8 * SECTOR, vec![0; 8]), (11 * SECTOR, vec![1; 4])].into(), &[]);
    let nodes = tree.build();
    let csums = lookup_csums(&nodes, &nodes.root, Logical(7 * SECTOR), 6 * SECTOR, 4, SECTOR as u32).expect("valid");
    let found: Vec<_> = (0..csums.len()).map(|index| csums.get(index).map(|csum| csum[0])).collect();
    assert_eq!(found, [None, Some(0), Some(0), None, Some(1), None]);
    assert!(!csums.is_complete() && csums.get(6).is_none());
}

#[test]
fn broken_items_are_errors() {
    for (offset, len) in [(4096, 3), (4096, 0), (4095, 4), (u64::MAX - 4095, 8)] {
        let mut tree = TestTree::new(RootId::CSUM_TREE, 4096);
        tree.items.insert(csum_key(offset), vec![0; len]);
        let nodes = tree.build();
        let start = Logical(offset - offset % 4096);
        assert!(lookup_csums(&nodes, &nodes.root, start, SECTOR, 4, SECTOR as u32).is_err() || offset == 4095);
        let change = csum_changes(&nodes, &nodes.root, &BTreeMap::new(), &[0..u64::MAX], 4, SECTOR as u32, 4096);
        assert!(change.is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn checksums_agree_with_a_map_of_sectors(
        rounds in prop::collection::vec(
            (
                prop::collection::btree_map(1..3000u64, (1..700u64, any::<u8>()), 0..5),
                prop::collection::vec((1..3000u64, 1..400u64), 0..5),
            ),
            1..12,
        ),
    ) {
        // An item has at most 985 checksums; the tree has a few items.
        let mut tree = TestTree::new(RootId::CSUM_TREE, 4096);
        let mut sectors = Sectors::new();
        for (inserts, removes) in rounds {
            let removes: Vec<Range<u64>> =
                removes.into_iter().map(|(start, count)| start * SECTOR..(start + count) * SECTOR).collect();
            let mut insert = BTreeMap::new();
            for range in &removes {
                sectors.retain(|at, _| !range.contains(at));
            }
            let mut end = 0;
            for (start, (count, seed)) in inserts.into_iter().filter(|(start, _)| *start > 0) {
                // Disjoint, sometimes touching.
                let start = start.max(end);
                end = start + count;
                let (at, csums) = run(start, count, seed);
                for (csum, index) in csums.as_chunks().0.iter().zip(0..) {
                    sectors.insert(at + index * SECTOR, *csum);
                }
                insert.insert(at, csums);
            }
            let nodes = tree.build();
            let batch = csum_changes(&nodes, &nodes.root, &insert, &removes, 4, SECTOR as u32, 4096).expect("valid");
            for (key, value) in &batch {
                match value {
                    Some(value) => tree.items.insert(*key, value.to_vec()),
                    None => tree.items.remove(key),
                };
            }
            prop_assert!(batch.windows(2).all(|pair| pair[0].0 < pair[1].0));
            check(&tree, &sectors, max_csums(4096, 4));
            let nodes = tree.build();
            for (start, len) in [(1, 4000), (900, 300), (2999, 1)] {
                let found = lookup_csums(&nodes, &nodes.root, Logical(start * SECTOR), len * SECTOR, 4, SECTOR as u32).expect("valid");
                for index in 0..len {
                    let expected = sectors.get(&((start + index) * SECTOR)).map(|csum| &csum[..]);
                    prop_assert_eq!(found.get(index as usize), expected);
                }
            }
        }
    }
}
