//! Applies delayed items without a commit, and compares a map with what readers see of the tree, and with the tree that
//! is on disk after the commit.
//!
//! Needs mkfs.btrfs and btrfs: without them, the tests fail.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, InodeItem, InodeRef};
use ubtrfs_format::{Ino, Key, KeyType, RootId};
use ubtrfs_transaction::{Engine, EngineOptions, Metric, TransHandle, Tree};

use crate::common::{check, inode};

/// Bytes of memory that the engine may use: so few that a few thousand items cause an apply.
const MEMORY: u64 = 4 << 20;
const NR_DIRS: u64 = 5;

struct Bed {
    path: PathBuf,
    engine: Arc<Engine>,
    tree: Arc<Tree>,
    dirs: Vec<u64>,
    next_ino: u64,
    /// All items of the subvolume.
    model: BTreeMap<Key, Vec<u8>>,
    random: u64,
    _dir: tempfile::TempDir,
}

impl Bed {
    fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        let made = Command::new("mkfs.btrfs").args(["-q", "-n", "4096"]).arg(&path).status().unwrap();
        assert!(made.success());
        let engine = open(&path);
        let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
        let (model, dirs) = Default::default();
        let mut bed = Self { path, engine, tree, dirs, next_ino: 257, model, random: seed | 1, _dir: dir };
        bed.model = bed.items();
        for _ in 0..NR_DIRS {
            bed.make_dir();
        }
        bed
    }

    fn make_dir(&mut self) {
        self.dirs.push(self.next_ino);
        self.put_name(256, self.next_ino, true);
        self.next_ino += 1;
    }

    fn make_file(&mut self) {
        let nr = self.random(NR_DIRS) as usize;
        let dir = self.dirs[nr];
        self.put_name(dir, self.next_ino, false);
        self.next_ino += 1;
    }

    /// Removes some files, or replaces a directory and all of its files by a new directory.
    fn remove_some(&mut self) {
        let whole = (self.random(8) == 0).then(|| self.dirs.swap_remove(0));
        let count = if whole.is_some() { usize::MAX } else { 50 };
        let from = 257 + self.random(self.next_ino - 257);
        let refs = self.model.keys().filter(|key| key.item_type == KeyType::INODE_REF && key.offset != 256);
        let chosen = refs.filter(|key| whole.map_or(key.objectid >= from, |dir| key.offset == dir)).take(count);
        for (dir, ino) in chosen.map(|key| (key.offset, key.objectid)).collect::<Vec<_>>() {
            self.remove_name(dir, ino);
        }
        if let Some(dir) = whole {
            self.remove_name(256, dir);
            self.make_dir();
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    fn items(&self) -> BTreeMap<Key, Vec<u8>> {
        let items = self.tree.range(&Key::MIN, &Key::MAX, usize::MAX).unwrap();
        items.into_iter().map(|(key, item)| (key, item.to_vec())).collect()
    }

    /// Puts an inode with a name in a directory, and all related items.
    fn put_name(&mut self, dir: u64, ino: u64, is_dir: bool) {
        let op = self.engine.begin(self.engine.reserve(8).unwrap());
        let (generation, name) = (op.generation(), name_of(ino));
        let mode = if is_dir { 0o040_755 } else { 0o100_644 };
        let entry = DirItem {
            location: Key::new(ino, KeyType::INODE_ITEM, 0),
            transid: generation,
            file_type: if is_dir { 2 } else { 1 },
            name: name.clone().into(),
            data: Vec::new(),
        };
        let mut bytes = Vec::new();
        entry.encode_into(&mut bytes);
        let mut back = Vec::new();
        InodeRef { index: ino, name: name.clone().into() }.encode_into(&mut back);
        let put = |key, value: Vec<u8>| (key, Some(value));
        let changes = [
            put(Key::new(ino, KeyType::INODE_ITEM, 0), inode(generation, mode, 0, 0).encode()),
            put(Key::new(ino, KeyType::INODE_REF, dir), back),
            put(Key::new(dir, KeyType::DIR_ITEM, name_hash(name.as_bytes())), bytes.clone()),
            put(Key::new(dir, KeyType::DIR_INDEX, ino), bytes),
            (self.resized(dir, 2 * name.len() as i64)),
        ];
        change(&op, &self.tree, &mut self.model, changes);
    }

    fn remove_name(&mut self, dir: u64, ino: u64) {
        let op = self.engine.begin(self.engine.reserve(8).unwrap());
        let name = name_of(ino);
        let changes = [
            (Key::new(ino, KeyType::INODE_ITEM, 0), None),
            (Key::new(ino, KeyType::INODE_REF, dir), None),
            (Key::new(dir, KeyType::DIR_ITEM, name_hash(name.as_bytes())), None),
            (Key::new(dir, KeyType::DIR_INDEX, ino), None),
            self.resized(dir, -2 * name.len() as i64),
        ];
        change(&op, &self.tree, &mut self.model, changes);
    }

    fn resized(&self, dir: u64, delta: i64) -> (Key, Option<Vec<u8>>) {
        let key = Key::new(dir, KeyType::INODE_ITEM, 0);
        let mut item = InodeItem::decode(&self.model[&key]).unwrap();
        item.size = item.size.checked_add_signed(delta).unwrap();
        (key, Some(item.encode()))
    }
}

/// Number of applies that applied only rows.
fn nr_applies(engine: &Engine) -> u64 {
    let metrics = engine.metrics();
    let counts = metrics.iter().filter(|metric| metric.name == "phase_seconds" && metric.suffix == "_count");
    let of_rows = |metric: &&Metric| metric.labels.iter().any(|(_, value)| value == "apply_rows");
    counts.filter(of_rows).map(|metric| metric.value as u64).sum()
}

fn name_of(ino: u64) -> String {
    format!("file-{ino:x}")
}

fn change(
    op: &TransHandle<'_>,
    tree: &Tree,
    model: &mut BTreeMap<Key, Vec<u8>>,
    changes: impl IntoIterator<Item = (Key, Option<Vec<u8>>)>,
) {
    for (key, value) in changes {
        match value {
            Some(value) => {
                model.insert(key, value.clone());
                op.put(tree, key, value);
            }
            None => {
                model.remove(&key);
                op.delete(tree, key);
            }
        }
    }
}

fn open(path: &std::path::Path) -> Arc<Engine> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path, Access::ReadWrite).unwrap());
    let options = EngineOptions { memory_bytes: MEMORY, ..EngineOptions::default() };
    Engine::open(vec![device], options).unwrap()
}

#[test]
fn readers_see_all_items_whatever_was_applied() {
    let mut bed = Bed::new(7);
    for step in 0..60_000u64 {
        if bed.random(200) == 0 {
            bed.remove_some();
        } else {
            bed.make_file();
        }
        match bed.random(3_000) {
            0 => bed.engine.commit().unwrap(),
            1..=3 => bed.engine.flush_delayed_items().unwrap(),
            _ => continue,
        }
        assert!(bed.items() == bed.model, "step {step}");
    }
    assert!(nr_applies(&bed.engine) > 20);
    bed.engine.close().unwrap();
    let (path, model) = (bed.path.clone(), std::mem::take(&mut bed.model));
    check(&path);
    drop((bed.engine, bed.tree));
    let engine = open(&path);
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    let items = tree.range(&Key::MIN, &Key::MAX, usize::MAX).unwrap();
    assert!(items.into_iter().map(|(key, item)| (key, item.to_vec())).eq(model));
}

/// The tree log takes the changes since the last commit from delayed items, and the state before them from the nodes of
/// that commit. An apply changes both, so an fsync after an apply must commit.
#[test]
fn fsync_commits_after_rows_were_applied() {
    let mut bed = Bed::new(3);
    let make_many = |bed: &mut Bed| (0..4_000).for_each(|_| bed.make_file());
    make_many(&mut bed);
    bed.engine.flush_delayed_items().unwrap();
    assert_eq!(nr_applies(&bed.engine), 1);
    let before = bed.engine.committed_generation();
    bed.make_file();
    bed.engine.sync_inode(RootId::FS_TREE, Ino(bed.next_ino - 1)).unwrap();
    assert!(bed.engine.committed_generation() > before);
    assert_eq!(bed.engine.log_stats().commits, 1);

    // While fsync is in use, a flush commits instead of applying rows: no log can be written between an apply and the
    // next commit.
    make_many(&mut bed);
    bed.engine.flush_delayed_items().unwrap();
    assert_eq!(nr_applies(&bed.engine), 1);
    assert!(bed.engine.committed_generation().0 > before.0 + 1);
    bed.engine.close().unwrap();
    check(&bed.path);
}

/// Many leaves are read ahead in one request. If one copy of a leaf is bad, the other copy is used.
#[test]
fn a_batch_is_applied_to_leaves_of_which_one_copy_is_bad() {
    let mut bed = Bed::new(5);
    (0..8_000).for_each(|_| bed.make_file());
    bed.engine.close().unwrap();
    let Bed { path, engine, tree, model, next_ino, _dir: dir, .. } = bed;
    drop((engine, tree));
    let nr_spoiled = spoil_a_copy_of_each_leaf(&path);
    assert!(nr_spoiled > 300, "{nr_spoiled} leaves");

    let engine = open(&path);
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    for ino in 257..next_ino {
        let key = Key::new(ino, KeyType::INODE_ITEM, 0);
        let mut item = InodeItem::decode(&model[&key]).unwrap();
        item.mode ^= 0o007;
        engine.begin(engine.reserve(1).unwrap()).put(&tree, key, item.encode());
    }
    engine.flush_delayed_items().unwrap();
    engine.close().unwrap();
    let corrupted: u64 = engine.device_stats().iter().map(|(_, stats)| stats.values[3]).sum();
    assert!(corrupted > 100, "{corrupted} bad copies were met");
    drop((engine, tree));
    check(&path);
    drop(dir);
}

/// Overwrites one copy of each leaf of the subvolume on the device: the first copy of some leaves, the second copy of
/// others.
fn spoil_a_copy_of_each_leaf(path: &std::path::Path) -> u64 {
    const NODESIZE: u64 = 4096;
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut fsid = [0; 16];
    file.read_exact_at(&mut fsid, (64 << 10) + 32).unwrap();
    let mut seen: HashMap<u64, u64> = HashMap::new();
    let mut nr_spoiled = 0;
    let mut block = [0; 101];
    for at in (0..file.metadata().unwrap().len()).step_by(NODESIZE as usize) {
        file.read_exact_at(&mut block, at).unwrap();
        let field = |offset: usize| u64::from_le_bytes(block[offset..offset + 8].try_into().unwrap());
        let (bytenr, owner, level) = (field(48), field(88), block[100]);
        if block[32..48] != fsid || owner != RootId::FS_TREE.0 || level != 0 {
            continue;
        }
        let copy = seen.entry(bytenr).or_default();
        if *copy == bytenr / NODESIZE % 2 {
            file.write_all_at(&[0xa5; 64], at + NODESIZE / 2).unwrap();
            nr_spoiled += 1;
        }
        *copy += 1;
    }
    nr_spoiled
}
