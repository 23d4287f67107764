//! Compares `Diff` with a comparison of all items. Method: makes a random tree, changes it by random batches from a
//! printed seed, and keeps both trees. The walk must report the differences of two `BTreeMap`s, and read few nodes if
//! little changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{Batch, Diff, RootPtr};

use crate::common::{Rng, Store};

type Model = BTreeMap<Key, Vec<u8>>;
/// The differing items: key, old data, new data.
type Differs = Vec<(Key, Option<Vec<u8>>, Option<Vec<u8>>)>;

fn key(number: u64) -> Key {
    Key::new(number / 7, KeyType((number % 7) as u8), number % 3)
}

fn batch(rng: &mut Rng, space: u64, len: u64, delete_percent: u64) -> Batch {
    let start = rng.below(space);
    let is_run = rng.below(2) == 0;
    let number = |rng: &mut Rng, at: u64| if is_run { start + at } else { rng.below(space) };
    let value = |rng: &mut Rng| -> Arc<[u8]> { vec![rng.next() as u8; rng.below(60) as usize].into() };
    let changes: BTreeMap<Key, Option<Arc<[u8]>>> = (0..len)
        .map(|at| (key(number(rng, at)), if rng.below(100) < delete_percent { None } else { Some(value(rng)) }))
        .collect();
    changes.into_iter().collect()
}

/// Finds the differences by comparing all items. Items with objectid `whole` always count as different.
fn slow(old: &Model, new: &Model, whole: Option<u64>) -> Differs {
    let keys: BTreeSet<&Key> = old.keys().chain(new.keys()).collect();
    let differs = |key: &&Key| old.get(*key) != new.get(*key) || whole == Some(key.objectid);
    keys.into_iter().filter(differs).map(|key| (*key, old.get(key).cloned(), new.get(key).cloned())).collect()
}

fn walk(store: &Store, old: Option<RootPtr>, new: RootPtr, whole: Option<u64>) -> Differs {
    let mut diff = Diff::new(store, old, new);
    if let Some(whole) = whole {
        diff.report_all_of(whole);
    }
    let mut found = Vec::new();
    while let Some(change) = diff.next().unwrap() {
        found.push((change.key, change.old.map(|item| item.to_vec()), change.new.map(|item| item.to_vec())));
    }
    found
}

fn check_seed(seed: u64) {
    let mut rng = Rng(seed);
    let (mut store, root) = Store::new([1024, 4096][rng.below(2) as usize]);
    let space = [50, 2000, 20000][rng.below(3) as usize];
    let mut model = Model::new();
    let len = rng.below(space * 2);
    let (old_root, _) = store.apply_checked(&root, &mut model, &batch(&mut rng, space, len, 5));
    store.commit();
    let old_model = model.clone();
    let mut new_root = old_root;
    for _ in 0..rng.below(4) {
        let len = [1, 10, 300][rng.below(3) as usize];
        let (more, percent) = (rng.below(len) + 1, [0, 30, 100][rng.below(3) as usize]);
        (new_root, _) = store.apply_checked(&new_root, &mut model, &batch(&mut rng, space * 2, more, percent));
    }
    assert!(walk(&store, Some(old_root), new_root, None) == slow(&old_model, &model, None), "seed {seed}");
    assert!(walk(&store, Some(new_root), old_root, None) == slow(&model, &old_model, None), "seed {seed}, back");
    assert!(walk(&store, None, new_root, None) == slow(&Model::new(), &model, None), "seed {seed}, from nothing");
    let whole = rng.below(space / 7 + 1);
    let expected = slow(&old_model, &model, Some(whole));
    if new_root != old_root {
        assert!(walk(&store, Some(old_root), new_root, Some(whole)) == expected, "seed {seed}, all of {whole}");
    }
    // `skip_to` omits no difference at or after the key.
    let mut diff = Diff::new(&store, Some(old_root), new_root);
    let expected = slow(&old_model, &model, None);
    if let Some(first) = diff.next().unwrap() {
        let to = key(rng.below(space * 2));
        diff.skip_to(&to).unwrap();
        let mut found = vec![first.key];
        while let Some(change) = diff.next().unwrap() {
            found.push(change.key);
        }
        let wanted: Vec<Key> =
            expected.iter().map(|change| change.0).filter(|key| *key >= to && *key > first.key).collect();
        found.remove(0);
        found.retain(|key| *key >= to);
        assert_eq!(found, wanted, "seed {seed}, skipped to {to}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn the_walk_reports_what_a_comparison_of_all_items_finds(seed: u64) {
        check_seed(seed);
    }
}

#[test]
fn a_small_change_in_a_large_tree_reads_few_nodes() {
    let (mut store, root) = Store::new(4096);
    let value: Arc<[u8]> = vec![7; 40].into();
    let all: Batch = (0..200_000).map(|number| (Key::new(number, KeyType(1), 0), Some(Arc::clone(&value)))).collect();
    let (old_root, _) = store.apply_fast(&root, &all);
    store.commit();
    let other: Arc<[u8]> = vec![8; 40].into();
    let few: Batch =
        [5, 90_000, 199_999].map(|number| (Key::new(number, KeyType(1), 0), Some(Arc::clone(&other)))).into();
    let (new_root, _) = store.apply_fast(&old_root, &few);
    store.reads.store(0, Ordering::Relaxed);
    assert_eq!(walk(&store, Some(old_root), new_root, None).len(), 3);
    let reads = store.reads.load(Ordering::Relaxed);
    assert!(reads <= 2 * 4 * 4, "{reads} nodes read");
    store.reads.store(0, Ordering::Relaxed);
    assert!(walk(&store, Some(new_root), new_root, None).is_empty());
    assert_eq!(store.reads.load(Ordering::Relaxed), 0, "equal roots");
}
