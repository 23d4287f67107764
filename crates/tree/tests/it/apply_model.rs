//! Compares `apply` with a `BTreeMap`. Method: random batches from a printed seed; the sink checks every rule (see
//! `common`), and the whole tree is compared after each batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ubtrfs_format::node::item_len_max;
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{ApplyStats, Batch, get};

use crate::common::{Rng, Store};

fn key(number: u64) -> Key {
    Key::new(number / 7, KeyType((number % 7) as u8), number % 3)
}

fn value(rng: &mut Rng, max_len: usize) -> Arc<[u8]> {
    let len = match rng.below(10) {
        0 => 0,
        1 => max_len,
        2 | 3 => rng.below(max_len as u64 + 1) as usize,
        _ => rng.below(200.min(max_len as u64) + 1) as usize,
    };
    vec![rng.next() as u8; len].into()
}

fn random_batch(rng: &mut Rng, model: &BTreeMap<Key, Vec<u8>>, space: u64, max_len: usize) -> Batch {
    let len = match rng.below(8) {
        0 => 1,
        1..4 => 1 + rng.below(10),
        4..7 => 1 + rng.below(200),
        _ => 1 + rng.below(3000),
    };
    let delete_percent = [0, 20, 50, 90, 100][rng.below(5) as usize];
    let mut batch = BTreeMap::new();
    let start = rng.below(space);
    let mode = rng.below(5);
    for number in 0..len {
        let number = match mode {
            0 => start + number,
            1 => start + rng.below(len * 2),
            2 => space + number,
            _ => rng.below(space),
        };
        let delete = rng.below(100) < delete_percent;
        batch.insert(key(number), if delete { None } else { Some(value(rng, max_len)) });
    }
    if rng.below(20) == 0 {
        // Delete a range, or all items.
        let end = if rng.below(2) == 0 { Key::MAX } else { key(start + space / 3) };
        let from = if end == Key::MAX && rng.below(2) == 0 { Key::MIN } else { key(start) };
        if from < end {
            batch.extend(model.range(from..end).map(|(key, _)| (*key, None)));
        }
    }
    batch.into_iter().collect()
}

fn run(nodesize: usize, seed: u64, rounds: usize) {
    let mut rng = Rng(seed);
    println!("nodesize {nodesize} seed {seed}");
    let max_len = item_len_max(nodesize);
    let max_len = [max_len, max_len / 4, 300][rng.below(3) as usize];
    let space = [100, 3000, 50_000][rng.below(3) as usize];
    let (mut store, mut root) = Store::new(nodesize);
    let mut model = BTreeMap::new();
    for _ in 0..rounds {
        let batch = random_batch(&mut rng, &model, space, max_len);
        let nr_parts = rng.below(5) as usize;
        root = store.apply_checked_in_parts(&root, &mut model, &batch, nr_parts).0;
        if rng.below(3) == 0 {
            store.commit();
        }
    }
    check_reads(&store, &root, &model, &mut rng, space);
}

fn check_reads(store: &Store, root: &ubtrfs_tree::RootPtr, model: &BTreeMap<Key, Vec<u8>>, rng: &mut Rng, space: u64) {
    let mut cursor = store.cursor(root);
    for _ in 0..50 {
        let at = key(rng.below(space + 10));
        let found = get(store, root, &at).unwrap();
        assert_eq!(found.as_deref(), model.get(&at).map(Vec::as_slice));
        let mut above = model.range(at..);
        assert_eq!(cursor.seek_ge(&at).unwrap(), above.next().map(|(key, _)| *key));
        for _ in 0..20 {
            assert_eq!(cursor.next().unwrap(), above.next().map(|(key, _)| *key));
            let data = cursor.key().map(|key| &model[&key][..]);
            assert_eq!(cursor.data(), data);
        }
        let mut below = model.range(..=at).rev();
        assert_eq!(cursor.seek_le(&at).unwrap(), below.next().map(|(key, _)| *key));
        for _ in 0..20 {
            assert_eq!(cursor.prev().unwrap(), below.next().map(|(key, _)| *key));
        }
    }
    // Walk forwards and backwards over the whole tree.
    let mut count = 0;
    let mut at = cursor.seek_ge(&Key::MIN).unwrap();
    while at.is_some() {
        count += 1;
        at = cursor.next().unwrap();
    }
    assert_eq!(count, model.len());
    let mut at = cursor.seek_le(&Key::MAX).unwrap();
    while at.is_some() {
        count -= 1;
        at = cursor.prev().unwrap();
    }
    assert_eq!(count, 0);
}

#[test]
fn seeks_within_a_leaf_read_no_node() {
    let (store, root) = Store::new(4096);
    let value: Arc<[u8]> = vec![7; 40].into();
    let all: Batch = (0..5000).map(|number| (key(2 * number), Some(Arc::clone(&value)))).collect();
    let (root, _) = store.apply_fast(&root, &all);
    let mut nr_leaves = 0;
    store.walk(&root, &mut |node, _| nr_leaves += u64::from(node.is_leaf()));
    let mut cursor = store.cursor(&root);
    store.reads.store(0, Ordering::Relaxed);
    for number in 0..9999 {
        cursor.seek_ge(&key(number)).unwrap();
        cursor.seek_le(&key(number)).unwrap();
    }
    let reads = store.reads.load(Ordering::Relaxed);
    assert!(reads <= 8 * nr_leaves, "{reads} reads of {nr_leaves} leaves");
}

#[test]
fn random_batches_4k() {
    for seed in 0..60 {
        run(4096, seed, 40);
    }
}

#[test]
fn random_batches_16k() {
    for seed in 100..125 {
        run(16384, seed, 40);
    }
}

#[test]
fn random_batches_64k() {
    for seed in 200..210 {
        run(65536, seed, 40);
    }
}

/// Runs one seed after another, beginning with `UBTRFS_SEED`: `UBTRFS_SEED=n cargo test -p ubtrfs-tree --test
/// apply_model -- --ignored`.
#[test]
#[ignore = "runs until it is stopped"]
fn random_batches_for_ever() {
    let mut seed = std::env::var("UBTRFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1000);
    loop {
        run([4096, 8192, 16384, 32768, 65536][(seed % 5) as usize], seed, 60);
        seed += 1;
    }
}

fn put(number: u64, len: usize) -> (Key, Option<Arc<[u8]>>) {
    (Key::new(number, KeyType(1), 0), Some(vec![0x5a; len].into()))
}

fn fill(store: &Store, root: &ubtrfs_tree::RootPtr) -> f64 {
    let (used, capacity) = store.leaf_fill(root);
    used as f64 / capacity as f64
}

#[test]
fn a_bulk_load_fills_leaves() {
    let (store, root) = Store::new(16384);
    let batch: Batch = (0..20_000).map(|number| put(number, 100)).collect();
    let mut model = BTreeMap::new();
    let (root, stats) = store.apply_checked(&root, &mut model, &batch);
    assert!(fill(&store, &root) > 0.98, "{}", fill(&store, &root));
    assert_eq!(stats.leaf_bytes_used, 20_000 * 125);
}

#[test]
fn appends_one_by_one_fill_leaves_and_leave_full_ones_alone() {
    let (mut store, mut root) = Store::new(4096);
    let mut model = BTreeMap::new();
    let mut leaves = 0;
    for number in 0..2000 {
        let (next, stats) = store.apply_checked(&root, &mut model, &vec![put(number, 100)]);
        root = next;
        leaves += stats.leaves_written;
        store.commit();
    }
    assert!(fill(&store, &root) > 0.95, "{}", fill(&store, &root));
    assert_eq!(leaves, 2000, "each append writes one leaf");
}

#[test]
fn ascending_inserts_in_the_middle_fill_leaves() {
    let (mut store, mut root) = Store::new(4096);
    let mut model = BTreeMap::new();
    let ends: Batch = (0..500).chain(1_000_000..1_000_500).map(|number| put(number, 100)).collect();
    root = store.apply_checked(&root, &mut model, &ends).0;
    for start in 0..200 {
        let batch = (0..20).map(|number| put(1000 + start * 20 + number, 100)).collect();
        root = store.apply_checked(&root, &mut model, &batch).0;
        store.commit();
    }
    assert!(fill(&store, &root) > 0.93, "{}", fill(&store, &root));
}

#[test]
fn random_single_inserts_keep_leaves_well_filled() {
    let (mut store, mut root) = Store::new(4096);
    let (mut rng, mut model) = (Rng(7), BTreeMap::new());
    for round in 0..6000 {
        root = store.apply_checked(&root, &mut model, &vec![put(rng.next() >> 20, 60)]).0;
        if round % 10 == 0 {
            store.commit();
        }
    }
    assert!(fill(&store, &root) > 0.64, "{}", fill(&store, &root));
}

#[test]
fn random_deletes_keep_leaves_merged() {
    let (mut store, mut root) = Store::new(4096);
    let (mut rng, mut model) = (Rng(8), BTreeMap::new());
    let batch: Batch = (0..20_000).map(|number| put(number, 60)).collect();
    root = store.apply_checked(&root, &mut model, &batch).0;
    while model.len() > 500 {
        let mut batch = BTreeMap::new();
        for _ in 0..300 {
            batch.insert(Key::new(rng.below(20_000), KeyType(1), 0), None);
        }
        root = store.apply_checked(&root, &mut model, &batch.into_iter().collect()).0;
        store.commit();
        let (underfull, leaves) = store.nr_underfull(&root);
        assert!(underfull * 20 <= leaves + 20, "{underfull} of {leaves} leaves are small and fit a neighbour");
    }
    assert!(fill(&store, &root) > 0.4, "{}", fill(&store, &root));
}

#[test]
fn a_tree_shrinks_to_an_empty_leaf_and_grows_again() {
    let (mut store, mut root) = Store::new(4096);
    let mut model = BTreeMap::new();
    for _ in 0..3 {
        let batch: Batch = (0..60_000).map(|number| put(number, 30)).collect();
        root = store.apply_checked(&root, &mut model, &batch).0;
        assert_eq!(root.level, 2);
        store.commit();
        let batch: Batch = (0..60_000).map(|number| (put(number, 0).0, None)).collect();
        let half = batch.iter().filter(|(key, _)| key.objectid != 33_333).cloned().collect();
        root = store.apply_checked(&root, &mut model, &half).0;
        assert_eq!(root.level, 0);
        root = store.apply_checked(&root, &mut model, &batch).0;
        assert_eq!(root.level, 0);
        assert!(model.is_empty());
    }
}

#[test]
fn a_tree_of_four_levels_changes_in_all_of_them() {
    let (mut store, mut root) = Store::new(4096);
    let (mut rng, mut model) = (Rng(11), BTreeMap::new());
    let batch: Batch = (0..20_000).map(|number| put(number * 10, 2500)).collect();
    root = store.apply_checked(&root, &mut model, &batch).0;
    assert_eq!(root.level, 3);
    for round in 0..12 {
        store.commit();
        let mut batch = BTreeMap::new();
        let start = rng.below(200_000);
        for _ in 0..1 + rng.below(100) {
            let (key, value) = put(rng.below(200_000), 1500);
            batch.insert(key, value.filter(|_| round % 2 == 0));
        }
        let end = start + rng.below(40_000);
        let range = model.range(put(start, 0).0..put(end, 0).0);
        batch.extend(range.filter(|_| round % 3 == 0).map(|(key, _)| (*key, None)));
        root = store.apply_checked(&root, &mut model, &batch.into_iter().collect()).0;
    }
    let all = model.keys().map(|key| (*key, None)).collect();
    root = store.apply_checked(&root, &mut model, &all).0;
    assert_eq!(root.level, 0);
}

#[test]
fn deletes_of_absent_keys_touch_nothing() {
    let (store, root) = Store::new(4096);
    let mut model = BTreeMap::new();
    let batch: Batch = (0..10_000).map(|number| put(number * 2, 30)).collect();
    let (root, _) = store.apply_checked(&root, &mut model, &batch);
    let absent: Batch = (0..10_000).map(|number| (put(number * 2 + 1, 0).0, None)).collect();
    let (after, stats) = store.apply_checked(&root, &mut model, &absent);
    assert_eq!((after, stats), (root, ApplyStats { batches: 1, ..ApplyStats::default() }));
}

#[test]
fn wrong_batches_are_refused_before_anything_changes() {
    let (store, root) = Store::new(4096);
    let too_large = vec![put(1, item_len_max(4096) + 1)];
    let unsorted = vec![put(2, 1), put(1, 1)];
    let double = vec![put(2, 1), put(2, 1)];
    for batch in [too_large, unsorted, double] {
        let mut sink = store.sink(Some(&root));
        ubtrfs_tree::apply(&store, &mut sink, &root, &batch).unwrap_err();
        assert!(sink.emitted.is_empty() && sink.changes.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn batches_equal_the_model(
        batches in prop::collection::vec(
            (any::<bool>(), prop::collection::btree_map(0u64..800, prop::option::of(0usize..3970), 1..120)),
            1..20,
        )
    ) {
        let (mut store, mut root) = Store::new(4096);
        let mut model = BTreeMap::new();
        for (commit, changes) in batches {
            let batch = changes
                .into_iter()
                .map(|(number, len)| (key(number * 5), len.map(|len| vec![number as u8; len].into())))
                .collect::<BTreeMap<_, Option<Arc<[u8]>>>>();
            root = store.apply_checked(&root, &mut model, &batch.into_iter().collect()).0;
            if commit {
                store.commit();
            }
        }
    }
}
