//! Checks that what readers see of a tree always equals an ordered map with the same items. During the checks, items
//! move from active to frozen to nodes, and nodes for which readers have hints are changed.
//!
//! A failure prints its seed; `UBTRFS_SEED=n` replays it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::MemoryDevice;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, RegularExtent};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_testkit::Rng;
#[cfg(debug_assertions)]
use ubtrfs_transaction::take_nr_steps;
use ubtrfs_transaction::{Engine, EngineOptions, Tree};

type Model = BTreeMap<Key, Vec<u8>>;

fn engine() -> (Arc<Engine>, Arc<Tree>) {
    let device = Arc::new(MemoryDevice::new(1 << 30));
    let format = ubtrfs_mkfs::MkfsOptions { nodesize: 4096, ..ubtrfs_mkfs::MkfsOptions::default() };
    ubtrfs_mkfs::make(&*device, &format).unwrap();
    // Use so little memory that a few thousand items cause an apply, and that evicted nodes are read again.
    let options = EngineOptions { memory_bytes: 2 << 20, ..EngineOptions::default() };
    let engine = Engine::open(vec![device], options).unwrap();
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    (engine, tree)
}

/// The key with this number. The tree checker does not know the type of the key.
fn key(number: u64) -> Key {
    Key::new(1000 + number / 40, KeyType(TYPES[(number / 20 % 2) as usize]), number % 20)
}

const TYPES: [u8; 2] = [3, 99];
const NR_KEYS: u64 = 8000;

fn change(engine: &Engine, tree: &Tree, model: &mut Model, rng: &mut Rng) {
    let first = rng.below(NR_KEYS);
    // Sometimes change whole runs of keys, as the creation and deletion of inodes do.
    let count = if rng.one_in(4) { rng.below(200) } else { 1 };
    let deletes = rng.one_in(2);
    for number in first..(first + count.max(1)).min(NR_KEYS) {
        let op = engine.begin(engine.reserve(1).unwrap());
        if deletes {
            op.delete(tree, key(number));
            model.remove(&key(number));
        } else {
            let value = rng.bytes(rng_len(number));
            op.put(tree, key(number), &value);
            model.insert(key(number), value);
        }
    }
}

fn rng_len(number: u64) -> usize {
    (number % 97) as usize + 1
}

fn compare(tree: &Tree, model: &Model, rng: &mut Rng) {
    let start = rng.below(NR_KEYS);
    let end = start + [0, 3, 30, 300, NR_KEYS][rng.below(5) as usize];
    let (start, end) = (key(start), key(end));
    let limit = [1, 2, 16, 1000, usize::MAX][rng.below(5) as usize];
    let expected: Vec<_> = model.range(start..=end).map(|(key, value)| (*key, value.clone())).collect();
    let wanted = &expected[..expected.len().min(limit)];
    let found: Vec<_> =
        tree.range(&start, &end, limit).unwrap().into_iter().map(|(key, item)| (key, item.to_vec())).collect();
    assert_eq!(found, wanted, "{start:?} to {end:?}");
    let mut visited = Vec::new();
    let count = tree.visit(&start, &end, limit, |key, item| visited.push((*key, item.to_vec()))).unwrap();
    assert_eq!((count, visited.as_slice()), (wanted.len(), wanted));
    let first = tree.first_ge(&start, &end).unwrap().map(|(key, item)| (key, item.to_vec()));
    assert_eq!(first.as_ref(), expected.first());
    let last = tree.last_le(&end, &start).unwrap().map(|(key, item)| (key, item.to_vec()));
    assert_eq!(last.as_ref(), expected.last());
    // Read items one after the other, as a walk does.
    for number in 0..60 {
        let key = Key::new(start.objectid + number / 20, start.item_type, number % 20);
        assert_eq!(tree.get(&key).unwrap().map(|item| item.to_vec()).as_ref(), model.get(&key), "{key:?}");
    }
}

#[test]
fn reading_agrees_with_an_ordered_map() {
    let seed = std::env::var("UBTRFS_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in seed.map_or(1..5, |seed| seed..seed + 1) {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let (engine, tree) = engine();
        let start = Key::new(1000, KeyType(0), 0);
        assert!(tree.first_ge(&start, &Key::MAX).unwrap().is_none());
        let mut model = Model::new();
        for _ in 0..1500 {
            change(&engine, &tree, &mut model, &mut rng);
            compare(&tree, &model, &mut rng);
            match rng.below(40) {
                0 => engine.commit().unwrap(),
                1 => engine.flush_delayed_items().unwrap(),
                _ => {}
            }
        }
        engine.close().unwrap();
    }
}

/// One thread puts and deletes items, commits and flushes, while other threads read. Half of the keys never change, and
/// every reader must find all of them; the other half are put and deleted at random. Each value is made from its key,
/// so a reader can check each value that it finds.
#[test]
fn readers_see_no_gap_while_items_move() {
    let (engine, tree) = engine();
    let is_stable = |number: u64| number % 40 < 20;
    let value = |number: u64| number.to_le_bytes().repeat(1 + (number % 7) as usize);
    for number in 0..NR_KEYS {
        let op = engine.begin(engine.reserve(1).unwrap());
        op.put(&tree, key(number), value(number));
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..3u64 {
            let (tree, stop) = (&tree, &stop);
            scope.spawn(move || {
                let mut rng = Rng::new(reader);
                while !stop.load(Ordering::Acquire) {
                    let first = rng.below(NR_KEYS / 40) * 40;
                    let mut found = 0;
                    let end = key((first + 400).min(NR_KEYS - 1));
                    let count = |key: &Key, item: &[u8]| {
                        let offset = if key.item_type.0 == TYPES[0] { 0 } else { 20 };
                        let number = (key.objectid - 1000) * 40 + offset + key.offset;
                        assert_eq!(item, value(number));
                        found += u64::from(is_stable(number));
                    };
                    tree.visit(&key(first), &end, usize::MAX, count).unwrap();
                    let expected = (first..=(first + 400).min(NR_KEYS - 1)).filter(|number| is_stable(*number));
                    assert_eq!(found, expected.count() as u64);
                    for number in (first..(first + 400).min(NR_KEYS)).filter(|number| is_stable(*number)) {
                        assert_eq!(&*tree.get(&key(number)).unwrap().unwrap(), value(number));
                    }
                }
            });
        }
        let mut rng = Rng::new(77);
        for round in 0..60 {
            for _ in 0..300 {
                let number = rng.below(NR_KEYS);
                if is_stable(number) {
                    continue;
                }
                let op = engine.begin(engine.reserve(1).unwrap());
                match rng.one_in(2) {
                    true => op.delete(&tree, key(number)),
                    false => op.put(&tree, key(number), value(number)),
                }
            }
            if round % 3 == 0 {
                engine.commit().unwrap()
            } else {
                engine.flush_delayed_items().unwrap()
            };
        }
        stop.store(true, Ordering::Release);
    });
    engine.close().unwrap();
}

const INO: u64 = 300;

fn extent_key(number: u64) -> Key {
    Key::new(INO, KeyType::EXTENT_DATA, number * 8192)
}

fn hole() -> Vec<u8> {
    let regular = RegularExtent { disk_bytenr: Logical(0), disk_num_bytes: 0, offset: 0, num_bytes: 4096 };
    let extent = FileExtent {
        generation: Generation(1),
        ram_bytes: 4096,
        compression: Compression::None,
        encryption: 0,
        other_encoding: 0,
        body: FileExtentBody::Regular(regular),
    };
    extent.encode()
}

fn put_extents(engine: &Engine, tree: &Tree, nr_extents: u64) {
    for number in 0..nr_extents {
        engine.begin(engine.reserve(1).unwrap()).put(tree, extent_key(number), hole());
    }
}

fn delete_extents(engine: &Engine, tree: &Tree, nr_extents: u64) {
    for number in 0..nr_extents {
        engine.begin(engine.reserve(1).unwrap()).delete(tree, extent_key(number));
    }
}

#[cfg(debug_assertions)]
#[test]
fn the_log_of_dropped_extents_is_made_in_one_walk() {
    const NR_EXTENTS: u64 = 3000;
    let (engine, tree) = engine();
    let op = engine.begin(engine.reserve(1).unwrap());
    let item = crate::common::inode(Generation(1), 0o100_644, NR_EXTENTS * 8192, 0);
    op.put(&tree, Key::new(INO, KeyType::INODE_ITEM, 0), item.encode());
    drop(op);
    put_extents(&engine, &tree, NR_EXTENTS);
    engine.sync_inode(RootId::FS_TREE, Ino(INO)).unwrap();
    delete_extents(&engine, &tree, NR_EXTENTS);
    take_nr_steps();
    engine.sync_inode(RootId::FS_TREE, Ino(INO)).unwrap();
    let nr_steps = take_nr_steps();
    assert_eq!(engine.log_stats().written, 2);
    assert!(nr_steps <= NR_EXTENTS + 10, "{nr_steps} steps for {NR_EXTENTS} extents");
}

#[cfg(debug_assertions)]
#[test]
fn a_search_passes_many_deleted_items_in_one_step() {
    const NR_ITEMS: u64 = 10_000;
    let (engine, tree) = engine();
    let key = |number| Key::new(INO, KeyType(TYPES[1]), number);
    let change = |number, value: Option<&[u8]>| {
        let op = engine.begin(engine.reserve(1).unwrap());
        match value {
            Some(value) => op.put(&tree, key(number), value),
            None => op.delete(&tree, key(number)),
        }
    };
    for in_tree in [false, true] {
        (0..NR_ITEMS).for_each(|number| change(number, Some(b"item")));
        if in_tree {
            engine.commit().unwrap();
        }
        assert_eq!(tree.last_le(&Key::MAX, &key(0)).unwrap().unwrap().0, key(NR_ITEMS - 1));
        (1..NR_ITEMS).for_each(|number| change(number, None));
        take_nr_steps();
        assert_eq!(tree.last_le(&key(u64::MAX), &key(0)).unwrap().unwrap().0, key(0));
        let nr_steps = take_nr_steps();
        assert!(nr_steps <= NR_ITEMS / 512 + 6, "{nr_steps} steps");
    }
}

#[test]
fn a_walk_backwards_searches_from_the_root_once_or_twice_for_each_leaf() {
    const NR_ITEMS: u64 = 10_000;
    let (engine, tree) = engine();
    let key = |number| Key::new(INO, KeyType(TYPES[1]), number);
    for number in 0..NR_ITEMS {
        engine.begin(engine.reserve(1).unwrap()).put(&tree, key(number), number.to_le_bytes());
    }
    engine.commit().unwrap();
    let nr_searched = || {
        let of = |name| engine.metrics().into_iter().find(|metric| metric.name == name).unwrap().value as u64;
        of("node_cache_hits_total") + of("node_cache_misses_total")
    };
    let before = nr_searched();
    for number in (0..NR_ITEMS).rev() {
        let (found, item) = tree.last_le(&key(number), &key(0)).unwrap().unwrap();
        assert_eq!((found, &*item), (key(number), &number.to_le_bytes()[..]));
    }
    let nr_searched = nr_searched() - before;
    // A leaf of 4 KiB holds more than 100 of these items.
    assert!(nr_searched <= 6 * NR_ITEMS / 100, "{nr_searched} nodes for {NR_ITEMS} items");
}
