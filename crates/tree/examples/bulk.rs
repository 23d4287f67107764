//! Measures `apply`: a bulk load of 1.6 million items, a rewrite of all items, random inserts, small appends, deletes.
//! Also measures a walk of the tree.

use std::time::Instant;

use ubtrfs_format::{Key, KeyType};
use ubtrfs_tree::{Batch, RootPtr};

#[path = "../tests/it/common/mod.rs"]
mod common;

use common::{Rng, Store};

fn main() {
    let nodesize = 16384;
    let (mut store, mut root) = Store::new(nodesize);
    let item = |number: u64, len: usize| (Key::new(number, KeyType(1), 0), Some(vec![7; len].into()));
    let load: Batch = (0..1_600_000).map(|number| item(number * 16, 80)).collect();
    root = timed("load 1.6 million", &mut store, &root, &load);
    root = timed("replace all", &mut store, &root, &load);
    let mut rng = Rng(1);
    let mut random: Batch = (0..200_000).map(|_| item(rng.below(1_600_000 * 16), 80)).collect();
    random.sort_unstable_by_key(|(key, _)| *key);
    random.dedup_by_key(|(key, _)| *key);
    root = timed("insert 200,000 at random", &mut store, &root, &random);
    let before = Instant::now();
    for chunk in 0..10_000 {
        let batch: Batch = (0..10).map(|number| item(100_000_000 + chunk * 10 + number, 80)).collect();
        root = store.apply_fast(&root, &batch).0;
    }
    println!("{:28} {:>8.1} us each", "append 10,000 times 10", before.elapsed().as_secs_f64() * 100.0);
    let odd: Batch = load.iter().filter(|(key, _)| key.objectid % 32 == 0).map(|(key, _)| (*key, None)).collect();
    root = timed("delete 800,000", &mut store, &root, &odd);
    let all: Batch = load.iter().map(|(key, _)| (*key, None)).collect();
    root = timed("delete 1.6 million", &mut store, &root, &all);
    let mut cursor = store.cursor(&root);
    let before = Instant::now();
    let (mut at, mut count) = (cursor.seek_ge(&Key::MIN).expect("in memory"), 0);
    while at.is_some() {
        count += 1;
        at = cursor.next().expect("in memory");
    }
    println!("walk of {count} items {:?}", before.elapsed());
}

fn timed(what: &str, store: &mut Store, root: &RootPtr, batch: &Batch) -> RootPtr {
    let before = Instant::now();
    let (root, stats) = store.apply_fast(root, batch);
    let elapsed = before.elapsed();
    store.commit();
    let (used, capacity) = store.leaf_fill(&root);
    let fill = used as f64 * 100.0 / capacity as f64;
    println!("{what:28} {elapsed:>12.1?}  fill {fill:.1}%  level {}  {stats:?}", root.level);
    root
}
